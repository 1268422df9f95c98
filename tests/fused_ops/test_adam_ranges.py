"""One call of Adam for many ranges: the same numbers as one for each, and on a GPU one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.adam import AdamRange, adam_step, adam_steps
from fused_ops.native import library
from tests.fused_ops.levels import adam_settings, cuda_level, drawn, level

pytestmark = pytest.mark.sampled

__all__ = ["cuda_level", "level"]

LENGTHS = [1, 5001, 0, 3, 2048, 2049, 40, *[17] * 40]
"""Of one pack, of several blocks, of none; more of them than one launch takes."""


def numbers(**changes: Any) -> dict[str, Any]:
    """For ranges, each of which has a decay of its own."""
    found = adam_settings(**changes)
    del found["weight_decay"]
    return found


def ranges(dtype: torch.dtype, offset: int) -> list[AdamRange]:
    """Each a part of larger tensors with a decay of its own; `offset` elements lie between them."""
    total = sum(LENGTHS) + offset * len(LENGTHS)
    out, grad = torch.full((total,), 7.0, dtype=dtype), drawn(total, seed=4, dtype=dtype)
    master, first, second = (drawn(total, seed=seed, dtype=torch.float32).abs() for seed in (1, 2, 3))
    found, start = [], 0
    for number, length in enumerate(LENGTHS):
        at = slice(start, start + length)
        found.append(AdamRange(out[at], master[at], grad[at], first[at], second[at], 0.1 * (number % 3)))
        start += length + offset
    return found


def wide(own: AdamRange) -> list[Tensor]:
    return [tensor.double() for tensor in (own.master, own.grad, own.exp_avg, own.exp_avg_sq)]


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_ranges_equal_float64(level, dtype, decoupled, offset):
    settings = numbers(decoupled=decoupled)
    ours = ranges(dtype, offset)
    exact = [wide(own) for own in ours]
    adam_steps(ours, **settings)
    for own, (w, g, m, v) in zip(ours, exact, strict=True):
        adam_step(None, w, g, m, v, weight_decay=own.weight_decay, **settings)
        for found, expected in ((own.master, w), (own.exp_avg, m), (own.exp_avg_sq, v)):
            torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-7)
        assert own.param_out is not None and torch.equal(own.param_out, own.master.to(dtype))
    if offset:  # nothing between the ranges is written
        whole, rest = ours[0].param_out, 0
        assert whole is not None
        whole = torch.empty(0, dtype=dtype).set_(whole.untyped_storage())
        for length in LENGTHS:
            assert (whole[rest + length : rest + length + offset] == 7.0).all()
            rest += length + offset


def test_ranges_of_the_same_dtypes_are_one_launch(cuda_level, monkeypatch):
    """Of two dtypes two; and a skipped step leaves every bit of all of them."""
    found = library.kernels(drawn(1, dtype=torch.float32))
    assert found is not None
    launched, call = list[str](), found.call

    def counted(name: str, *arguments: Any) -> None:
        launched.append(name)
        call(name, *arguments)

    monkeypatch.setattr(found, "call", counted)
    ours = [*ranges(torch.bfloat16, 0), *ranges(torch.float16, 0)]
    before = [[tensor.clone() for tensor in own[:5] if tensor is not None] for own in ours]
    adam_steps(ours, **numbers(skip=torch.tensor(True)))
    assert sorted(launched) == ["adam_on_device_bf16_bf16", "adam_on_device_fp16_fp16"]
    for own, old in zip(ours, before, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(own[:5], old, strict=True) if now is not None)
