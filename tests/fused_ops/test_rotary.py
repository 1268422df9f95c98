"""Rotary positions of parts of heads, of neighbours and of scaled frequencies: against transformers, against complex
numbers, and every body against float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fused_ops.rotary import apply_rotary, rotary_tables, rotate_mixed
from fused_ops.rotary_frequencies import length_that_counts, rotary_frequencies
from megazero.config.rotary import RotaryScaling, RotarySettings
from tests.fused_ops.levels import DTYPES, assert_close, drawn, level, the_same_for_any_threads

__all__ = ["level"]


class InFloat64(TorchFunctionMode):
    """Who asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide: list[Any] = [torch.float64 if value is torch.float32 else value for value in args]
        named: dict[str, Any] = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


HEAD, TRAINED = 16, 4096
SHORT, LONG = "1,1.1,1.3,1.35,1.5,2,2.5,3", "1.5,2,3.25,4,6,9,20,40.5"
SCALINGS = [
    "linear factor=2.5",
    "dynamic factor=4",
    "llama3 factor=8 low_freq_factor=1 high_freq_factor=4 original_max_position_embeddings=8192",
    "llama3 factor=32 low_freq_factor=1.5 high_freq_factor=3 original_max_position_embeddings=200",
    "yarn factor=4 original_max_position_embeddings=1024",
    "yarn factor=40 original_max_position_embeddings=512 beta_fast=16 beta_slow=2 mscale=0.707 mscale_all_dim=0.5",
    "yarn factor=40 original_max_position_embeddings=512 mscale=0.707",
    "yarn factor=8 original_max_position_embeddings=300 attention_factor=1.25 truncate=0",
    "yarn factor=0.5 original_max_position_embeddings=64",
    f"longrope short_factor={SHORT} long_factor={LONG} original_max_position_embeddings=1024",
    f"longrope short_factor={SHORT} long_factor={LONG} original_max_position_embeddings=1024 factor=16",
    f"longrope short_factor={SHORT} long_factor={LONG} original_max_position_embeddings=512 attention_factor=1.19",
]


def of_transformers(scaling: RotaryScaling, base: float, head_dim: int, length: int | None) -> tuple[Tensor, float]:
    """What transformers computes, with its requests for float32 answered in float64."""
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    values: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in scaling.values}
    if "truncate" in values:
        values["truncate"] = bool(values["truncate"])
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": scaling.kind, "rope_theta": base, **values},
    )
    with InFloat64():
        frequencies, factor = rope.ROPE_INIT_FUNCTIONS[scaling.kind](config, device="cpu", seq_len=length)
    assert frequencies.dtype == torch.float64
    return frequencies, factor


@pytest.mark.parametrize("length", [0, 300, 1024, 1025, 6000])
@pytest.mark.parametrize("base", [10000.0, 5e5, 37.0])
@pytest.mark.parametrize("text", SCALINGS)
def test_frequencies_are_those_of_transformers(text: str, base: float, length: int) -> None:
    scaling = RotaryScaling.parsed(text)
    ours, factor = rotary_frequencies(HEAD, RotarySettings(base, scaling=scaling), length, TRAINED)
    theirs, their_factor = of_transformers(scaling, base, HEAD, length or None)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    assert factor == pytest.approx(their_factor, rel=1e-14)


def test_the_length_matters_to_two_kinds() -> None:
    """Otherwise every length would agree with transformers because none is looked at."""
    for text in SCALINGS:
        settings = RotarySettings(scaling=RotaryScaling.parsed(text))
        short, long = (rotary_frequencies(HEAD, settings, length, TRAINED)[0] for length in (500, 9000))
        assert torch.equal(short, long) == (not text.startswith(("dynamic", "longrope")))
        for length in (0, 5, 1024, 1025, TRAINED, TRAINED + 1, 9000):
            counts = length_that_counts(settings, length, TRAINED)
            same = rotary_frequencies(HEAD, settings, counts, TRAINED)[0]
            assert torch.equal(same, rotary_frequencies(HEAD, settings, length, TRAINED)[0])
    dynamic, longrope = (RotarySettings(scaling=RotaryScaling.parsed(SCALINGS[i])) for i in (1, 9))
    assert [length_that_counts(dynamic, x, 4096) for x in (5, 4096, 4097)] == [0, 0, 4097]
    assert [length_that_counts(longrope, x) for x in (1024, 1025, 7000)] == [0, 1025, 1025]


def test_known_frequencies() -> None:
    linear = rotary_frequencies(4, RotarySettings(100.0, scaling=RotaryScaling.parsed("linear factor=2")))
    torch.testing.assert_close(linear[0], torch.tensor([0.5, 0.05], dtype=torch.float64), rtol=1e-15, atol=0)
    # 2 L of 4: the base grows to 100 (4 * 2 - 3)^(4/2), so that the second pair turns by 1/50.
    dynamic = RotarySettings(100.0, scaling=RotaryScaling.parsed("dynamic factor=4 original_max_position_embeddings=8"))
    torch.testing.assert_close(
        rotary_frequencies(4, dynamic, 16)[0], torch.tensor([1.0, 0.02], dtype=torch.float64), rtol=1e-15, atol=0
    )
    share = rotary_frequencies(16, RotarySettings(81.0, share=0.25))
    torch.testing.assert_close(share[0], torch.tensor([1.0, 1 / 9], dtype=torch.float64), rtol=1e-15, atol=0)


def test_what_is_missing_is_said() -> None:
    for text, message in (
        ("dynamic factor=2", "original_max_position_embeddings, or a model with a trained length"),
        (SCALINGS[9], "longrope needs factor, or a model"),
        (SCALINGS[9].replace("1,1.1,", "1,").replace("1.5,2,3", "1.5,3"), "short_factor has 7 numbers for 8 pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary_frequencies(HEAD, RotarySettings(scaling=RotaryScaling.parsed(text)), 5)
    with pytest.raises(ValueError, match="more than one pair"):
        rotary_frequencies(2, RotarySettings(scaling=RotaryScaling.parsed("dynamic factor=2")), 5, 4)


YARN = RotaryScaling.parsed(SCALINGS[4])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_turn_is_a_product_with_a_complex_number(share: float, interleaved: bool) -> None:
    s, d = 6, 16
    settings, x = RotarySettings(100.0, share, interleaved, YARN), drawn(s, 2, 3, d)
    cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(s), d, settings, torch.float64))
    size = int(d * share)
    theta, factor = rotary_frequencies(d, settings)
    assert factor == 0.1 * math.log(4) + 1
    turn = torch.polar(torch.tensor(factor, dtype=torch.float64), torch.arange(s)[:, None] * theta)
    part = x[..., :size]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn[:, None, None])
    turned = turned if interleaved else turned.transpose(-1, -2)
    exact = torch.cat([turned.flatten(-2), x[..., size:]], dim=-1)
    torch.testing.assert_close(apply_rotary(x, cos, sin, interleaved=interleaved), exact, rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin, interleaved=interleaved), x.requires_grad_())
    # Of other shapes there is a body of its own.
    row = x[:, 0, 0].detach().requires_grad_()
    turned_row = apply_rotary(row, cos[:, 0, 0], sin[:, 0, 0], interleaved=interleaved)
    torch.testing.assert_close(turned_row, exact[:, 0, 0], rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos[:, 0, 0], sin[:, 0, 0], interleaved=interleaved), row)


def test_turns_are_those_of_transformers_families() -> None:
    """LLaMA turns halves of whole heads, GPT-NeoX halves of a part, Cohere neighbours."""
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    s, b, n, d = 5, 2, 3, 16
    x = drawn(s, b, n, d)
    theirs = x.permute(1, 2, 0, 3)
    for family, share, interleaved in ((llama, 1.0, False), (neox, 0.25, False), (cohere, 1.0, True)):
        settings = RotarySettings(100.0, share, interleaved)
        cos, sin = rotary_tables(torch.arange(s), d, settings, torch.float64)
        wide: list[Any] = [
            (table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1))[None]
            for table in (cos, sin)
        ]
        expected = family.apply_rotary_pos_emb(theirs, theirs, *wide)[0].permute(2, 0, 1, 3)
        tables = cos[:, None, None], sin[:, None, None]
        # Cohere computes in float32, whatever it is given.
        tolerance = 1e-6 if family is cohere else 1e-13
        ours = apply_rotary(x, *tables, interleaved=interleaved)
        torch.testing.assert_close(ours, expected.double(), rtol=tolerance, atol=tolerance)


def run(function: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    y.backward(grad.to(y.dtype))
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


SIZES = [(1, 1, 1, 1, 2, 2), (5, 2, 3, 1, 6, 4), (4, 3, 2, 4, 34, 34), (3, 2, 1, 2, 128, 64), (2, 2, 2, 1, 80, 80)]
SIZES += [(3, 1, 2, 2, 96, 38), (2, 1, 1, 1, 72, 48)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("s", "b", "groups", "repeats", "d", "size"), SIZES)
def test_every_body_equals_float64(level, s, b, groups, repeats, d, size, interleaved, dtype) -> None:
    x, grad = (drawn(s, b, groups * (repeats + 2) * d, seed=i, dtype=dtype) for i in (1, 2))
    settings = RotarySettings(100.0, size / d, interleaved, YARN)

    def turned(x: Tensor) -> Tensor:
        tables = rotary_tables(torch.arange(s) + 3, d, settings, x.dtype)
        assert tables[0].shape == (s, size // 2)
        return rotate_mixed(x, groups, repeats, *tables, interleaved=interleaved)

    def of_each_row(x: Tensor) -> Tensor:
        tables = rotary_tables((torch.arange(s) + 3).repeat_interleave(b), d, settings, x.dtype)
        cos, sin = (table.view(s, b, 1, 1, size // 2) for table in tables)
        return rotate_mixed(x, groups, repeats, cos, sin, interleaved=interleaved)

    exact = run(turned, x.double(), grad)
    for ours, also, theirs in zip(run(turned, x, grad), run(of_each_row, x, grad), exact, strict=True):
        assert_close(ours, theirs)
        assert torch.equal(ours, also)
    values, heads = run(turned, x, grad)[0].view(s, b, groups, repeats + 2, d), x.view(s, b, groups, repeats + 2, d)
    assert torch.equal(values[..., -1, :], heads[..., -1, :]) and torch.equal(values[..., size:], heads[..., size:])
    if level == "avx512":
        the_same_for_any_threads(lambda: run(turned, x, grad))


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tensors_that_begin_anywhere(level, interleaved, offset) -> None:
    """Packs of a GPU need aligned memory; where there is none, elements go one by one."""
    memory = torch.full((3 * 2 * 64 + 16,), 7.0, dtype=torch.bfloat16)
    x = memory[offset : offset + 3 * 2 * 64].view(3, 2, 1, 64).copy_(drawn(3, 2, 1, 64))
    settings = RotarySettings(100.0, 0.5, interleaved)
    cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(3) + 5, 64, settings, x.dtype))
    exact = apply_rotary(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    assert_close(apply_rotary(x, cos, sin, interleaved=interleaved), exact)
