"""Prompts from the command line, files and the standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.config.derive import max_positions
from megazero.config.schema import ModelConfig
from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer
from megazero.system.file_kinds import fault_of_text
from megazero.system.reading import BOUNDS, Unreadable, parse_json, path_error, raised_as, read_text

STANDARD_INPUT = "-"
BYTE_ORDER_MARK = "\ufeff"


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """The given prompts, then those of the file: one for each line that is not empty.

    A line of .jsonl is a string, or an object with a "prompt". Raises DataError if the file cannot be read.
    """
    return [*given, *(_lines(file) if file is not None else [])]


def _lines(file: str) -> list[str]:
    try:
        text = (
            _standard_input().removeprefix(BYTE_ORDER_MARK)
            if file == STANDARD_INPUT
            else read_text(Path(file).expanduser(), BOUNDS.index, piped=True)
        )
    except (OSError, Unreadable) as error:
        raise DataError(f"--prompt-file {path_error(file, error)}") from error
    # Split at line feeds only: splitlines also splits at characters that may occur in a JSON string.
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_of_json(file, *line) for line in lines] if file.endswith(".jsonl") else [line for _, line in lines]


def _standard_input() -> str:
    """All of the standard input. Raises Unreadable for bytes that are no text, as of UTF-16."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is no text: {fault_of_text(error.object)}") from error
    if "\0" in text:  # bytes that are no UTF-8 may be in it, escaped; `encoded` refuses them where there is no NUL
        raise Unreadable(f"it is no text: {fault_of_text(text.encode('utf-8', errors='surrogateescape'))}")
    return text


def _of_json(file: str, number: int, line: str) -> str:
    with raised_as(DataError):
        value = parse_json(line, f"--prompt-file {file}, line {number}")
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise DataError(f'--prompt-file {file}, line {number}: neither a string nor an object with a string "prompt"')
    return prompt


def encoded(
    prompts: Sequence[str], tokenizer: Tokenizer, model: ModelConfig, *, first: Sequence[int] = (), eod_id: int | None
) -> list[list[int]]:
    """The ids of every prompt, after the ids `first`. Raises DataError for a prompt that the model cannot
    take.

    An empty prompt becomes `eod_id`, the token that ends documents, so the model generates the beginning of a document.
    """
    rows = []
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise DataError(
                f"the prompt {prompt[:37]!a} is no text: it holds bytes that are not UTF-8, or half a surrogate pair"
            )
        ids = [*first, *tokenizer.encode(prompt)] or ([] if eod_id is None else [eod_id])
        if not ids:
            raise DataError(
                f"the prompt {shorten(prompt)} has no tokens, and the model no token that ends documents to begin "
                "with; --prefix-id names one"
            )
        rows.append(check_ids(f"the prompt {shorten(prompt)}", ids, model))
    return rows


def check_ids(what: str, ids: list[int], model: ModelConfig) -> list[int]:
    """The ids, if the model can take them as a prompt. what: names them in the message. Raises DataError."""
    assert model.vocab_size is not None
    wrong = next((number for number in ids if number >= model.vocab_size), None)
    if wrong is not None:
        raise DataError(
            f"{what} holds id {wrong}, but the model's vocabulary has {model.vocab_size}: is it the model's tokenizer?"
        )
    if model.position_embedding == "learned" and len(ids) > max_positions(model):
        raise DataError(
            f"{what} has {len(ids)} tokens, more than the {max_positions(model)} positions that the model has learned"
        )
    return ids


def shorten(text: str) -> str:
    """A text for a message: quoted, at most 40 characters."""
    return repr(text if len(text) < 40 else text[:37] + "...")
