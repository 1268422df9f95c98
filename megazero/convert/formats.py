"""`Format`: how the folders of a format are recognised, read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.convert.source import Source


@dataclass(frozen=True)
class TargetOptions:
    """How a target is written. `convert` refuses tp, pp and dp for a format without a layout.

    tp, pp  the number of ranks that the files are written for, by axis
    dp      the number of ranks that the optimizer's files are written for
    dtype   the dtype of the model's weights; None: the one that the model computes in. Master weights and moments keep
            their dtype
    quantized  the type of matrices in blocks of integers (q8_0), for a format that has it; None: none
    without_tokenizer  write a model whose tokenizer is not there, for a format that has tokenizers
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: torch.dtype | None = None
    quantized: str | None = None
    without_tokenizer: bool = False


Advance = Callable[[int], None]
"""A function that a writer calls with the number of bytes that it has read from the source since its last call."""


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    recognises      whether a folder holds this format, judged by names of files alone
    open            opens a checkpoint; raises ConversionError
    write           writes into an existing empty folder; None where the format is only read
    has_layout      `write` uses tp and pp, and dp for the optimizer's files
    has_optimizer   `write` writes moments where the source has them
    quantizes       the types of blocks of integers that `write` knows
    has_companions  `write` puts the companions where `open` finds them; others keep them in a folder of their own
    part            the part of a source that `write` takes, where that is not the model; raises ConversionError
    """

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Source]
    write: Callable[[Source, Path, TargetOptions, Advance], None] | None = None
    has_layout: bool = False
    has_optimizer: bool = False
    has_companions: bool = False
    quantizes: tuple[str, ...] = ()
    part: Callable[[Source], Source] | None = None
