"""Copying a source into the parameters of a rank's stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.checkpoint.narrowing import OutOfRange, require_range
from megazero.convert.source import ConversionError, Source
from megazero.model.stage import Stage
from megazero.mpu.parameter import ParameterSpec, own_box, spec_of


@torch.no_grad()
def fill_stages(stages: Sequence[Stage], source: Source) -> None:
    """Fill every parameter of a rank's stages with its part of the source's weights, on any layout.

    Communicates nothing: every rank reads for itself. Raises ConversionError if a tensor is missing or has another
    shape, and if a number of it is too large for the stages' dtype.
    """
    for stage in stages:
        for parameter in stage.parameters():
            spec = spec_of(parameter)
            if spec.name not in source.entries:
                raise ConversionError(f"{source.path} has no {spec.name}, which the model has")
            try:
                copy_box(parameter, spec, source.read(spec.name))
            except OutOfRange as error:
                raise ConversionError(f"{source.path}: {error.nearest('--precision')}") from error


def copy_box(local: Tensor, spec: ParameterSpec, whole: Tensor) -> None:
    """Copy this rank's box of the global tensor. Padding rows become zero.

    Raises ConversionError where the global shape differs, OutOfRange for a number that the local dtype does not hold.
    """
    if tuple(whole.shape) != spec.shape:
        raise ConversionError(f"{spec.name} has shape {spec.shape}, not {tuple(whole.shape)}")
    piece = require_range(own_box(whole, spec), local.dtype, spec.name)
    if piece.shape != local.shape:
        local.zero_()
    local[: piece.shape[0]].copy_(piece)
