"""The text of a rotary scaling: read, printed, and refused."""

from __future__ import annotations

import pytest

from megazero.config.rotary import KINDS, RotaryScaling, RotarySettings

TEXTS = [
    "linear factor=2.5",
    "dynamic factor=4",
    "dynamic factor=4 original_max_position_embeddings=2048",
    "llama3 factor=8 low_freq_factor=1 high_freq_factor=4 original_max_position_embeddings=8192",
    "yarn factor=40 original_max_position_embeddings=4096 beta_fast=16 beta_slow=2 mscale=0.707 mscale_all_dim=0.5 "
    "truncate=0",
    "yarn factor=1e+16 original_max_position_embeddings=4096 attention_factor=1.1",
    "longrope short_factor=1,1.1,1.3 long_factor=2,3.25,1e-05 original_max_position_embeddings=4096 factor=32",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_what_is_printed_of_it(text: str) -> None:
    scaling = RotaryScaling.parsed(text)
    assert str(scaling) == text and RotaryScaling.parsed(str(scaling)) == scaling
    assert {hash(scaling): 1}[hash(RotaryScaling(scaling.kind, scaling.values))] == 1


def test_every_kind_has_a_text() -> None:
    assert {text.split()[0] for text in TEXTS} == set(KINDS)


def test_the_order_of_keys_makes_no_difference() -> None:
    ours = RotaryScaling.parsed(
        "  llama3   original_max_position_embeddings=8192 high_freq_factor=4.0 factor=8 low_freq_factor=1e0"
    )
    assert ours == RotaryScaling.parsed(TEXTS[3]) and str(ours) == TEXTS[3]
    assert ours.number("high_freq_factor", 0.0) == 4.0 and ours.number("beta_fast", 32.0) == 32.0
    assert ours.original(5) == 8192 and RotaryScaling.parsed("dynamic factor=3").original(5) == 5


LLAMA3 = "llama3 factor=8 low_freq_factor={} high_freq_factor=4 original_max_position_embeddings=8192"
REFUSED = {
    "": "rotary scaling '' is unknown: linear, dynamic, llama3, yarn or longrope",
    "lama3 factor=8": r"'lama3' is unknown \(did you mean llama3\?\)",
    "linear": "linear needs factor too",
    "llama3 factor=8": "needs low_freq_factor, high_freq_factor, original_max_position_embeddings too",
    "linear factr=8": r"linear has no key 'factr' \(did you mean factor\?\): it has factor",
    "linear factor=8 beta_fast=3": "linear has no key 'beta_fast'",
    "linear factor": "'factor' is no key=value, such as factor=8",
    "linear factor=2 factor=3": "factor is given 2 times",
    "linear factor=eight": "factor=eight is not a number above 0",
    "linear factor=0": "factor=0 is not a number above 0",
    "linear factor=nan": "factor=nan is not a number above 0",
    "linear factor=inf": "factor=inf is not a number above 0",
    "linear factor=1,2": "factor=1,2 is not a number above 0",
    "dynamic factor=2 original_max_position_embeddings=20.5": "20.5 is not a whole number above 0",
    "yarn factor=2 original_max_position_embeddings=20 truncate=2": "truncate=2 is not 0 or 1",
    "yarn factor=2 original_max_position_embeddings=20 mscale=-1": "mscale=-1 is not a number, 0 or more",
    "longrope short_factor=1,x long_factor=1,2 original_max_position_embeddings=9": "short_factor=1,x is not numbers",
    "longrope short_factor=1 long_factor=1,2 original_max_position_embeddings=9": "1 numbers and long_factor 2",
    LLAMA3.format(4): "low_freq_factor=4 has to be less than high_freq_factor=4",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_wrong_is_said_with_the_nearest_name(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        RotaryScaling.parsed(text)


def test_settings_are_values() -> None:
    ours = RotarySettings(5e5, 0.25, True, RotaryScaling.parsed(TEXTS[0]))
    assert ours == RotarySettings(5e5, 0.25, True, RotaryScaling("linear", (("factor", 2.5),)))
    assert len({ours, RotarySettings(), RotarySettings(base=10000.0)}) == 2
    assert ours.turned(96) == 24 and RotarySettings().turned(96) == 96 and RotarySettings(share=0.7).turned(12) == 8
    for base, share, message in ((0.0, 1.0, "base"), (1e4, 0.0, "share"), (1e4, 1.5, "at most 1, not 1.5")):
        with pytest.raises(ValueError, match=message):
            RotarySettings(base, share)
    with pytest.raises(TypeError, match="scaling 'linear factor=2' is a str"):
        RotarySettings(scaling="linear factor=2")  # type: ignore[arg-type]
    for head_dim, part, message in (
        (7, 1.0, "an even head dimension, not 7"),
        (12, 0.75, "a share of 0.75 of a head of 12 is 9 elements"),
        (4, 0.2, "a share of 0.2 of a head of 4 is 0 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            RotarySettings(share=part).turned(head_dim)
