"""What a format is: how a folder of it is recognised, read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.convert.source import Source


@dataclass(frozen=True)
class TargetOptions:
    """How a target is to be written. Formats without a layout have no tp, pp and dp; `formats.convert` refuses them
    there.

    tp, pp   ranks that the files are for
    dp       ranks that the optimizer's files are for
    dtype    of the model's weights; None: what the model computes in. Master weights and moments stay as they are
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: torch.dtype | None = None


Advance = Callable[[int], None]
"""Told the bytes of source that have been read since the last call."""


@dataclass(frozen=True)
class Format:
    """recognises: whether a folder holds this format, by names of files alone. open: raises ConversionError. write:
    into an existing empty folder; None where the format is only read. has_layout: whether tp, pp (and for the
    optimizer's files dp) mean something to `write`.
    has_optimizer: whether moments are written where the source has them. has_companions: whether `write` puts the
    source's companions where `open` finds them; elsewhere they lie in a folder of their own. part: what of a source is
    written, where that is not the model; raises ConversionError.
    """

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Source]
    write: Callable[[Source, Path, TargetOptions, Advance], None] | None = None
    has_layout: bool = False
    has_optimizer: bool = False
    has_companions: bool = False
    part: Callable[[Source], Source] | None = None
