"""Messages of what reads text: every flag that they name is one of the command that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from megazero.cli import evaluate
from megazero.cli.data_commands import prepare_parser, train_parser
from megazero.convert.loading import LoadedModel
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.preprocess import PreprocessJob, preprocess, texts
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer

FLAG = r"--[a-z][a-z-]+"
BAD = {
    "latin.txt": b"caf\xe9",
    "wide.txt": "wide".encode("utf-16"),
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "array.json": b'["a", "b"]\n',
    "key.jsonl": b'{"content": "a"}\n',
    "number.jsonl": b'{"text": 3}\n',
    "broken.jsonl": b'{"text": \n',
    "cut.txt.gz": b"\x1f\x8b\x08",
    "empty.txt": b"",
}
"""Files that are refused, but for the empty one by evaluate, by their name."""


def _prepare(path: Path) -> None:
    preprocess([path], path.with_suffix(".out"), PreprocessJob("byte", None), workers=1, report=silent)


def _train(path: Path) -> None:
    list(texts([path], ReaderOptions(), silent, "reading"))


def _evaluate(path: Path) -> None:
    args = evaluate.parser().parse_args(["x", "--input", str(path)])
    list(evaluate.documents(args, cast(LoadedModel, None), ByteTokenizer(), None))


COMMANDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "prepare-data": (_prepare, prepare_parser().format_help()),
    "train-tokenizer": (_train, train_parser().format_help()),
    "evaluate": (_evaluate, evaluate.parser().format_help()),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_message_names_flags_of_its_own_command(command: str, name: str, tmp_path: Path) -> None:
    reads, shown = COMMANDS[command]
    (tmp_path / name).write_bytes(BAD[name])
    said = ""
    try:
        reads(tmp_path / name)
    except DataError as error:
        said = str(error)
    assert said or name == "empty.txt", (command, name)
    said = re.sub("`.*?`|: iconv .*? makes", "", said)  # commands of others
    assert set(re.findall(FLAG, said)) <= set(re.findall(FLAG, shown)), said
