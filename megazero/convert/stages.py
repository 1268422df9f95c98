"""Copying a source into the parameters of a rank's stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.convert.source import ConversionError, Source, boxed
from megazero.model.stage import Stage
from megazero.mpu.place import Place, place_of


@torch.no_grad()
def fill_stages(stages: Sequence[Stage], source: Source) -> None:
    """Fill every parameter of a rank's stages with its part of the source's weights, on any layout.

    Communicates nothing: every rank reads its own part. Raises ConversionError where a tensor is missing or has another
    shape.
    """
    for stage in stages:
        for parameter in stage.parameters():
            place = place_of(parameter)
            if place.name not in source.entries:
                raise ConversionError(f"{source.path} has no {place.name}, which the model has")
            fill(parameter, place, source.read(place.name))


def fill(local: Tensor, place: Place, whole: Tensor) -> None:
    """Copy this rank's box of the global tensor. Padding rows become zero.

    Raises ConversionError where the global shape differs.
    """
    if tuple(whole.shape) != place.shape:
        raise ConversionError(f"{place.name} has shape {place.shape}, not {tuple(whole.shape)}")
    piece = boxed(whole, place)
    if piece.shape != local.shape:
        local.zero_()
    local[: piece.shape[0]].copy_(piece)
