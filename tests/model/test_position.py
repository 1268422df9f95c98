"""Angles of rotary positions that depend on the length of a sequence, and what is kept of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops.rotary_frequencies import rotary_frequencies
from megazero.config.rotary import RotaryScaling, RotarySettings
from megazero.model.batch import PastKeyValues
from megazero.model.position import RotaryAngles

LONGROPE = "longrope short_factor=1,1.5,2 long_factor=3,4,5.5 original_max_position_embeddings=8 factor=4"


def of_sequence(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(length, 2, 5, dtype=dtype)


@pytest.mark.parametrize("text", ["dynamic factor=2", "dynamic factor=3 original_max_position_embeddings=8", LONGROPE])
def test_frequencies_are_those_of_the_pass(text: str) -> None:
    """In any order of lengths: what a longer sequence has left behind is no shorter one's."""
    settings = RotarySettings(100.0, 0.75, scaling=RotaryScaling.parsed(text))
    angles = RotaryAngles(8, settings, 8)
    for length in (12, 5, 8, 9, 30, 12, 7):
        theta, factor = rotary_frequencies(8, settings, length, 8)
        turned = torch.arange(length, dtype=torch.float64)[:, None] * theta
        cos, sin = angles(of_sequence(length))
        assert cos.shape == (length, 1, 1, 3)
        torch.testing.assert_close(cos[:, 0, 0], turned.cos() * factor, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(sin[:, 0, 0], turned.sin() * factor, rtol=1e-14, atol=1e-15)
    assert len(angles.tables) == 2


def test_generation_counts_its_reach() -> None:
    settings = RotarySettings(100.0, scaling=RotaryScaling.parsed(LONGROPE))
    angles = RotaryAngles(6, settings)
    positions = torch.tensor([[3, 8], [4, 9]])
    for reach in (10, 8):  # the last positions that have short factors are below 8
        past = PastKeyValues({}, torch.arange(2), positions.clamp(max=reach - 1), reach)
        theta, factor = rotary_frequencies(6, settings, reach)
        cos, _ = angles(of_sequence(2), past)
        assert cos.shape == (2, 2, 1, 1, 3)
        exact = (positions.clamp(max=reach - 1)[..., None] * theta).cos() * factor
        torch.testing.assert_close(cos[:, :, 0, 0], exact, rtol=1e-14, atol=1e-15)


def test_tables_are_kept() -> None:
    angles = RotaryAngles(6, RotarySettings(500.0))
    longest, _ = angles(of_sequence(9))
    again, _ = angles(of_sequence(4))
    assert again.data_ptr() == longest.data_ptr() and again.shape == (4, 1, 1, 3)
    assert angles(of_sequence(4, torch.bfloat16))[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"a share of 0\.5 of a head of 10 is 5 elements"):
        RotaryAngles(10, RotarySettings(share=0.5))
