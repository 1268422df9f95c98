"""Whether a run that resumes has its checkpoint's tokenizer and data, by what they hold and not by their paths.

A tokenizer is known by its tokens (`data.tokenizer_record`), data by `data.contents` and the order of samples. So files
may move, be named in another way, or lie in the newest checkpoint of the model that a run began with.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import run_from
from megazero.config.schema import DataConfig, Run
from megazero.convert.companions import FOLDER
from megazero.data.build import Datasets, parse_data_path
from megazero.data.contents import NUMBERS, Contents, contents_of
from megazero.data.indexed import DataError
from megazero.data.own import OwnSamples
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_record import tokenizer_record
from megazero.system.words import counted


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
        (kind_then, places_then), (kind_now, places_now) = _named(then), _named(now)
        if kind_then != kind_now:
            return False
        return places_then == places_now or (recorded or contents_of(then)) == (contents or contents_of(now))
    except (DataError, OSError):
        return False


def _named(cfg: DataConfig) -> tuple[tuple[object, ...], list[str]]:
    """Which data a run names, with the weights of a blend; and the places where they lie."""
    blend = parse_data_path(cfg.data_path) if cfg.data_path else None
    shares = None if blend is None or blend.shares is None else blend.shares.tolist()
    kind = bool(cfg.data_path), bool(cfg.instruction_data), shares
    prefixes = () if blend is None else blend.prefixes
    return kind, [_place(path) for path in (*prefixes, *cfg.instruction_data)]


def data_problems(
    run: Run, saved: Run, resumed: FoundCheckpoint, datasets: Datasets, contents: Contents, samples: int
) -> list[str]:
    """A problem if data of the same name are not those of the checkpoint, or are read in another order.

    saved: the run of the checkpoint. contents: of the present data. samples: that the datasets are built for.
    """
    names = (run.data.data_path, run.data.instruction_data), (saved.data.data_path, saved.data.instruction_data)
    if run.checkpoint.finetune or run.checkpoint.override_data or names[0] != names[1]:
        return []  # `compare` reports other names
    why = _other_documents(run, resumed, contents) or _other_order(run, resumed, datasets, samples)
    repeated = "so samples would be repeated and left out; to go on all the same: --override-data"
    return [f"{why}, {repeated}"] if why else []


def same_order(resumed: FoundCheckpoint, datasets: Datasets) -> bool:
    """Whether the order of samples is the checkpoint's. True if the checkpoint does not record one, as those of earlier
    versions for instruction data.
    """
    then = resumed.progress.get("data_plans")
    return not then or then == [list(plan) for plan in datasets.train.plans]


def _other_documents(run: Run, resumed: FoundCheckpoint, contents: Contents) -> str | None:
    """Which pair holds other documents than then. Their order may be the same by its numbers."""
    then = recorded_contents(resumed)
    if run.data.instruction_data or then is None or len(then) != len(contents) or then == contents:
        return None
    prefixes = parse_data_path(run.data.data_path).prefixes
    return "; ".join(
        f"--data-path {prefix} holds other documents than when the checkpoint was written ({before[0]:,} with "
        f"{before[1]:,} tokens then, {now[0]:,} with {now[1]:,} now"
        + ", as their checksum says" * (before[:2] == now[:2])
        + ")"
        for prefix, before, now in zip(prefixes, then, contents, strict=True)
        if before != now
    )


def _other_order(run: Run, resumed: FoundCheckpoint, datasets: Datasets, samples: int) -> str | None:
    """In which way the order of samples is not the checkpoint's.

    A run of another length may need another number of epochs. Epochs are shuffled together, so all of the order
    changes. The order of conversations changes if the files have changed.
    """
    if same_order(resumed, datasets):
        return None
    then, now = resumed.progress["data_plans"], datasets.train.plans
    if run.data.instruction_data:
        return (
            f"--instruction-data {' '.join(run.data.instruction_data)} holds other conversations than when the "
            f"checkpoint was written ({then[0][0]:,} samples an epoch then, {now[0][0]:,} now)"
        )
    if isinstance(datasets.train, OwnSamples):
        return (
            f"train_data holds other samples than when the checkpoint was written ({then[0][0]:,} then, {now[0][0]:,} "
            "now, by number and checksum)"
        )
    before, epochs = (" ".join(str(plan[0]) for plan in plans) for plans in (then, now))
    return (
        f"--train-iters, --train-samples or other batches: "
        f"{counted(samples, 'sample takes', 'samples take')} {epochs} "
        f"epoch{'' if epochs == '1' else 's'} of the data in another order than the checkpoint's {before}"
    )
