"""What a terminal is shown of a model's words: text, and nothing that moves its cursor or has it answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest

from megazero.config.schema import ModelConfig
from megazero.data.tokenizer import build_tokenizer
from megazero.inference.sampling import Sampling
from megazero.inference.text_generator import GenerationOptions, TextGenerator

SAID = "title \x1b]0;owned\x07, report \x9bc, back \r\x08\x7f\x00; Zürich, 你好\ttab\nline"
SHOWN = "title \\x1b]0;owned\\x07, report \\x9bc, back \\x0d\\x08\\x7f\\x00; Zürich, 你好\ttab\nline"


class Output(io.StringIO):
    """A standard output, of a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def says(
    unused: Any, prompts: Sequence[Any], *more: Any, ends: Callable[[int, int], bool], **words: Any
) -> list[list[int]]:
    """A model that answers every prompt with the same bytes."""
    for row in range(len(prompts)):
        for token in SAID.encode():
            ends(row, token)
    return [list(SAID.encode())] * len(prompts)


def answered(monkeypatch: pytest.MonkeyPatch, terminal: bool, **options: Any) -> tuple[str, list[str]]:
    """(what the standard output got, what the caller did)."""
    monkeypatch.setattr("megazero.inference.text_generator.generate", says)
    pipeline: Any = None  # nobody computes
    generator = TextGenerator(
        ModelConfig(),
        pipeline,
        build_tokenizer("byte", None),
        GenerationOptions(Sampling(), 100, **options),
        True,
        lambda text: None,
    )
    with redirect_stdout(Output(terminal)) as out:
        texts = generator.answer([("x", [120])])
    return out.getvalue(), texts


@pytest.mark.parametrize("samples", [1, 2], ids=["streamed", "numbered"])
def test_control_characters_reach_no_terminal(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads the output, and a conversation that remembers it, have the text as it is."""
    for terminal, wanted in ((True, SHOWN), (False, SAID)):
        shown, texts = answered(monkeypatch, terminal, samples=samples)
        assert shown.count(wanted) == samples
        assert texts == [SAID] * samples


def test_json_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        shown, _ = answered(monkeypatch, terminal, as_json=True)
        assert json.loads(shown)["text"] == SAID and shown.rstrip("\n").isprintable()
