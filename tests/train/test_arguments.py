"""What a program hands to `megazero.pretrain` and cannot be used: told by the argument's name, all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megazero
from megazero.config.flags import fields_for_flags
from megazero.config.source import ConfigError
from tests.train.test_api import RUN, Letters, changed, rows_of

ROWS = rows_of(5)
NEEDED = "a data set has a length and items by number (__len__ and __getitem__)"


class WithoutLength:
    def __getitem__(self, index: int) -> Any:
        return ROWS[index]


class HalfATokenizer:
    vocab_size = "many"

    def encode(self, text: str) -> list[int]:
        return []


async def awaited(record: object) -> None: ...


def generated() -> Iterator[Any]:
    yield from ROWS


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "number": ({"train_data": 5}, [f"train_data is int 5: {NEEDED}; it lacks __len__ and __getitem__"]),
    "name": ({"train_data": "x"}, [f"train_data is str 'x': {NEEDED}; the run names files, by data.data_path"]),
    "sets": ({"train_data": {"a": ROWS}}, [f"train_data is dict, whose items have names: {NEEDED}"]),
    "no length": ({"train_data": WithoutLength()}, [f"train_data is WithoutLength: {NEEDED}; it lacks __len__"]),
    "stream": ({"train_data": generated()}, [f"train_data is generator: {NEEDED}; it lacks __len__ and __getitem__"]),
    "class": ({"train_data": list}, [f"train_data is the class list: {NEEDED}; its length: "]),
    "no dimension": ({"train_data": np.array(3)}, [f"train_data is ndarray: {NEEDED}; its length: len() of unsized"]),
    "lengths": ({"train_data": [[[1, 2], [3]]]}, ["train_data[0] is list, and no array: "]),
    "bfloat16": ({"train_data": [torch.ones(9).bfloat16()]}, ["train_data[0] is Tensor, and no array: "]),
    "row": ({"train_data": [[1, 2]]}, ["train_data[0] is int64 of shape [2], not 9 integers: model.seq_length 8 and"]),
    "valid": (
        {"train_data": ROWS, "valid_data": {3: ROWS, "a": None, "b": 4}},
        [
            "valid_data has the key 3: the name of a validation set is a word",
            f"valid_data['a'] is NoneType: {NEEDED}; it lacks __len__ and __getitem__",
            f"valid_data['b'] is int 4: {NEEDED}; it lacks __len__ and __getitem__",
        ],
    ),
    "no valid": (
        {"train_data": ROWS, "valid_data": {}},
        ["valid_data is an empty mapping, which names no validation set: None stands for none"],
    ),
    "tokenizer's name": (
        {"train_data": ROWS, "tokenizer": "gpt2"},
        ["tokenizer is str 'gpt2': an object is needed; the run names one, by data.tokenizer"],
    ),
    "half a tokenizer": (
        {"train_data": ROWS, "tokenizer": HalfATokenizer()},
        [
            "tokenizer is HalfATokenizer, which lacks vocab_size (a number from 1 on, not str 'many'), eod_id (a "
            "number, or None where no token ends a document), decode (a method: list of ids -> text)"
        ],
    ),
    "tokenizer's class": (
        {"train_data": ROWS, "tokenizer": Letters},
        ["tokenizer is the class Letters: an object of it is needed"],
    ),
    "callbacks": (
        {"on_step": 3, "on_evaluation": lambda losses: None, "on_checkpoint": awaited, "handle_signals": "no"},
        [
            "on_step: a function of record is needed; this is int",
            "on_evaluation: a function of iteration and losses is needed; this cannot be called so (too many",
            "on_checkpoint: a function of folder and iteration is needed; this is a coroutine function, which nobody",
            "handle_signals is str 'no': it is True or False",
        ],
    ),
}


def refused(run: Any, **given: Any) -> tuple[str, ...]:
    with pytest.raises(megazero.ConfigError) as caught:
        megazero.pretrain(run, **given)
    assert not re.search(r"(^|\s)--[a-z]", str(caught.value)), "nobody has given a flag"
    return caught.value.problems


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_told_by_its_name(case: str) -> None:
    given, told = CASES[case]
    problems = refused(RUN, **given)
    assert len(problems) == len(told) and all(map(str.startswith, problems, told)), problems


def test_arguments_and_configuration_are_told_together() -> None:
    problems = refused(changed(schedule={"lr": -1.0}), train_data=5, on_step="x")
    assert [problem.split(":")[0] for problem in problems] == ["train_data is int 5", "on_step", "schedule.lr -1.0"]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (None, "run is NoneType, not a Run, a mapping or the path of a YAML file"),
        ("{folder}/none.yaml", "run {folder}/none.yaml is missing"),
        ("{folder}", "run {folder} cannot be read: Is a directory"),
        ("{folder}/words", "run {folder}/words: holds no settings (key: value), but a string"),
        (megazero.Run(model={"a": 1}), "the run: model is {'a': 1}, not a ModelConfig"),
        ({"parallel": {"tp": 3}}, "parallel.tp 3 x parallel.pp 1 = 3 does not divide the world size 1"),
        ({"train_iters": np.int64(0)}, "schedule.train_iters 0: must be at least 1"),
        ({"checkpoint": {"load": Path("/dev/null/x")}}, "checkpoint.load /dev/null/x"),
    ],
)
def test_a_configuration_is_told_by_its_fields(run: Any, told: str, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("only words")
    problems = refused(run.format(folder=tmp_path) if isinstance(run, str) else run)
    assert len(problems) == 1 and problems[0].startswith(told.replace("{folder}", str(tmp_path))), problems


def test_values_of_a_program_are_values(tmp_path: Path) -> None:
    """numpy's numbers, paths, and mappings of another kind than dict."""
    model = megazero.Run().model
    settings = {**RUN, "schedule": {**RUN["schedule"], "train_iters": np.int64(1), "lr": np.float32(0.25)}}
    settings |= {"checkpoint": {"save": tmp_path / "s"}, "trainer": {"eval_iters": 0}}
    with megazero.training(settings, train_data=ROWS) as training:
        assert training.run.checkpoint.save == str(tmp_path / "s") and training.run.schedule.lr == 0.25
        assert len([*training.steps()]) == 1 and training.run.model != model


def test_a_flat_key_may_be_the_name_of_a_section() -> None:
    """Keys may be without their section, but where a section has a field of its own name."""
    with pytest.raises(ConfigError) as told:
        megazero.pretrain({"optimizer": "adam", "lr": 1e-3})
    assert told.value.problems == (
        "the run: optimizer holds no fields, but 'adam'; optimizer is a key of the section optimizer: "
        "{optimizer: {optimizer: ...}}",
    )


def test_a_run_begins_with_its_block() -> None:
    made = megazero.training({"train_iters": 1})
    for name in ("steps", "run", "result", "evaluate"):
        with pytest.raises(AttributeError, match=f"has no {name}: `with megazero.training"):
            getattr(made, name)


def test_a_path_that_is_none() -> None:
    with pytest.raises(ConfigError, match="run is empty: a Run, a mapping or the path"):
        megazero.pretrain("")
    with pytest.raises(ConfigError, match=r"run 'a\\x00b' holds a NUL byte"):
        megazero.pretrain("a\0b")
    with pytest.raises(ConfigError, match=r"checkpoint.save: 'a\\x00b' holds a NUL byte"):
        megazero.pretrain({"checkpoint": {"save": Path("a\0b")}})
    for wrong, error in ((None, TypeError), (3, TypeError), (["runs/a"], TypeError), ("", ValueError)):
        with pytest.raises(error, match=r"^path is .*a path is needed"):
            megazero.load(wrong)
    with pytest.raises(ValueError, match=r"^path is 'a\\x00b', which holds a NUL byte"):
        megazero.load("a\0b")


def test_fields_stand_for_flags() -> None:
    text = "--tensor-model-parallel-size 3, --no-overlap, --bf16; --world-size 3 and --what-is-this stay, as does a--tp"
    assert fields_for_flags(text) == (
        "parallel.tp 3, parallel.overlap false, optimizer.precision bf16; --world-size 3 and --what-is-this stay, as "
        "does a--tp"
    )
