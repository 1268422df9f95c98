"""No writer of a checkpoint turns a finite number into an infinite one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.checkpoint.narrowing import OutOfRange, narrowed, require_range
from megazero.checkpoint.save_plan import values_to_write
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.loading import model_of
from megazero.convert.lora.merged import merge_adapter
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import WEIGHT, ConversionError
from megazero.data.progress import silent
from megazero.mpu.parameter import ParameterKind, shard, spec_of
from megazero.zero.layout import Fragment, StoredFragment
from tests.convert.sources import BLOOM, Made, made

LARGE, NAME = 7e4, "blocks.1.mlp.up.weight"
HALF = torch.float16
KEEP_FP32 = {"universal"}
"""Formats whose weights are fp32 whatever the model computes in."""
WRITTEN = [name for name, known in format_table().items() if known.write is not None and known.part is None]


class Large(Made):
    """One of its weights is above what fp16 holds, beside an infinity and a NaN."""

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        values = super().read(name, column)
        if (name, column) == (NAME, WEIGHT):
            values[5, 3], values[0, 0], values[1, 1] = -LARGE, math.inf, math.nan
        return values


def large(moments: bool) -> Large:
    source = made(
        replace(BLOOM, embedding_layernorm=False, position_embedding="learned"), precision="bf16", moments=moments
    )
    return Large(source.format, source.path, source.run, source.entries, source.position)


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_no_format_gets_an_infinity_for_a_number(name: str, moments: bool, tmp_path: Path) -> None:
    source, output = large(moments), tmp_path / "out"
    if name in KEEP_FP32:
        convert(source, format_table()[name], output, TargetOptions(dtype=HALF), silent)
        with open_source(output) as written:
            assert written.read(NAME)[5, 3] == -LARGE
        return
    ends = r"weight holds 70000, and torch\.float16 ends at 65504; nearest: --dtype bf16 or fp32 or fp64$"
    with pytest.raises(ConversionError, match=ends):
        convert(source, format_table()[name], output, TargetOptions(dtype=HALF), silent)
    assert not any(tmp_path.iterdir())


def test_a_model_that_is_opened_gets_none_either() -> None:
    """Weights that `load`, `generate` and `evaluate` compute with are rounded too."""
    ends = rf"nowhere: {NAME} holds 70000, and torch\.float16 ends at 65504; nearest: --precision bf16 or fp32 or fp64$"
    with pytest.raises(ConversionError, match=ends):
        model_of(large(False), precision="fp16")
    opened = dict(model_of(large(False), precision="bf16").stage.named_parameters())
    (weight,) = (value for value in opened.values() if spec_of(value).name == NAME)
    assert weight[0, 0] == math.inf and weight[1, 1].isnan() and weight[5, 3] < -6.9e4


def test_a_sum_with_adapters_is_a_number() -> None:
    weight, a, b = torch.full((3, 4), 6e4, dtype=HALF), torch.ones(2, 4), torch.tensor([[0.0, 0], [1, 2], [3e3, 3e3]])
    assert merge_adapter(weight[:2], a, b[:2], 2.0, NAME).isfinite().all()
    with pytest.raises(OutOfRange, match=f"{NAME} holds 72000, and torch.float16 ends at 65504"):
        merge_adapter(weight, a, b, 2.0, NAME)


def test_every_format_that_is_written_is_here() -> None:
    assert len(WRITTEN) >= 6


def test_a_save_of_weights_alone() -> None:
    """A run in fp16 saves no infinity for a master weight that is a number."""
    spec = shard(NAME, (4,), ParameterKind.NORM)
    held = Fragment(spec, 0, 4, {WEIGHT: torch.tensor([1.0, 65519.0, math.inf, LARGE])})
    with pytest.raises(OutOfRange, match=f"{NAME} holds 70000"):
        list(values_to_write([[held]], [StoredFragment(spec, 0, 4, {WEIGHT: HALF})]))
    ((part,),) = values_to_write([[held]], [StoredFragment(spec, 0, 3, {WEIGHT: HALF})])
    assert part.weight.tolist() == [1.0, 65504.0, math.inf]


ROWS = (
    (torch.float32, torch.float16, 65519.9, 65504.0),
    (torch.float32, torch.float16, 65520.0, None),
    (torch.bfloat16, torch.float16, -1e5, None),
    (torch.float64, torch.float32, 1e39, None),
    (torch.float32, torch.bfloat16, 3.402e38, None),
    (torch.float16, torch.bfloat16, 65504.0, 65536.0),
)


@pytest.mark.parametrize(("stored", "dtype", "number", "rounded"), ROWS)
@pytest.mark.parametrize("beside", [0.5, math.nan, math.inf])
def test_a_number_rounds_or_is_refused(
    stored: torch.dtype, dtype: torch.dtype, number: float, rounded: float | None, beside: float
) -> None:
    values = torch.tensor([[beside, number]], dtype=stored)
    if rounded is not None:
        assert require_range(values, dtype, "it") is values
        assert narrowed(values, dtype, "it")[0, 1] == rounded
        return
    with pytest.raises(OutOfRange) as said:
        narrowed(values, dtype, "it")
    with pytest.raises(OutOfRange, match=re.escape(str(said.value))):
        require_range(values, dtype, "it")
    assert all(torch.finfo(fits).max >= abs(number) for fits in said.value.fits)
    assert torch.float64 in said.value.fits and dtype not in said.value.fits
