"""Whether a run that resumes has the tokenizer and the data of the checkpoint, by what they hold and not by their
paths.

A tokenizer is known by its tokens (`data.tokenizer_record`), data by `data.contents`. So files may move, be named in
another way, or lie in the newest checkpoint of the model that a run began with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import run_from
from megazero.config.schema import DataConfig, Run
from megazero.convert.companions import FOLDER
from megazero.data.build import parse_data_path
from megazero.data.contents import NUMBERS, Contents, contents_of
from megazero.data.indexed import DataError
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_record import tokenizer_record


def recorded_contents(resumed: FoundCheckpoint) -> Contents | None:
    """What the data held when the checkpoint was written; None in one of an earlier version or of a program's data."""
    recorded = resumed.progress.get("data_contents")
    if not recorded or any(len(numbers) != len(NUMBERS) for numbers in recorded):
        return None
    return tuple(tuple(numbers) for numbers in recorded)


def saved_run(resumed: FoundCheckpoint, run: Run, contents: Contents | None = None) -> Run:
    """The run of a checkpoint. A tokenizer or data that the present run names in another way have its name for them.

    contents: of the present run's data; None: they are read where the names differ
    """
    kept = Path(resumed.path) / FOLDER
    return with_present_names(run_from(resumed.run), run, kept, recorded_contents(resumed), contents)


def with_present_names(
    saved: Run, run: Run, kept: Path | None = None, recorded: Contents | None = None, contents: Contents | None = None
) -> Run:
    """As `saved_run`, of a run without its checkpoint. kept: a folder with the files of its tokenizer, if they are
    there. recorded: what its data held; None: what its paths hold now.
    """
    then, now = saved.data, run.data
    if _same_tokenizer(then, now, kept):
        then = replace(then, tokenizer=now.tokenizer, tokenizer_path=now.tokenizer_path)
    if _same_data(then, now, recorded, contents):
        then = replace(then, data_path=now.data_path, instruction_data=now.instruction_data)
    return replace(saved, data=then)


def _place(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _same_tokenizer(then: DataConfig, now: DataConfig, kept: Path | None) -> bool:
    if (then.tokenizer, then.tokenizer_path) == (now.tokenizer, now.tokenizer_path):
        return True
    if then.tokenizer is None or now.tokenizer is None:
        return False
    paths = then.tokenizer_path, now.tokenizer_path
    if then.tokenizer == now.tokenizer and len({path and _place(path) for path in paths}) == 1:
        return True
    today = _hash(now.tokenizer, now.tokenizer_path)
    before = [None if kept is None else str(kept), then.tokenizer_path]
    return today is not None and any(_hash(then.tokenizer, path) == today for path in before)


def _hash(kind: str, path: str | None) -> str | None:
    """The hash of a tokenizer; None if it cannot be opened."""
    try:
        return tokenizer_record(build_tokenizer(kind, path), kind).hash
    except (DataError, ImportError, ValueError, OSError):
        return None


def _same_data(then: DataConfig, now: DataConfig, recorded: Contents | None, contents: Contents | None) -> bool:
    if (then.data_path, then.instruction_data) == (now.data_path, now.instruction_data):
        return True
    try:
        if _kind(then) != _kind(now):
            return False
        if _places(then) == _places(now):
            return True
        return (recorded or contents_of(then)) == (contents or contents_of(now))
    except (DataError, OSError):
        return False


def _kind(cfg: DataConfig) -> tuple[bool, bool, Sequence[float] | None]:
    """Which data a run names, and the weights of a blend."""
    shares = parse_data_path(cfg.data_path).shares if cfg.data_path else None
    return bool(cfg.data_path), bool(cfg.instruction_data), None if shares is None else shares.tolist()


def _places(cfg: DataConfig) -> list[str]:
    pairs = parse_data_path(cfg.data_path).prefixes if cfg.data_path else ()
    return [_place(name) for name in (*pairs, *cfg.instruction_data)]
