"""`--init-from`: a run that starts with the weights of a checkpoint, whatever program wrote it, on any layout.

What the checkpoint's model is, is settings beneath the user's own (`model_source`). Its weights are copied by each rank
into what that rank owns (`load_weights`); moments, position and all else start anew.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text, raise_on_all_ranks
from megazero.checkpoint.format import range_of
from megazero.checkpoint.reshard import sub_boxes
from megazero.config.inventory import TABLES
from megazero.config.shape import shape_settings
from megazero.config.source import ConfigSource
from megazero.convert.registry import open_source
from megazero.convert.report import ConversionReport
from megazero.convert.source import ConversionError, Source
from megazero.convert.tokenizers import tokenizer_files, tokenizer_of
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Box, ParameterSpec
from megazero.system.reading import about
from megazero.zero.fragment import Fragment
from megazero.zero.optimizer import ShardedOptimizer

"""What has a row per token."""
SHOWN = 3
"""Keys that the banner names."""
ROWS = 4096
"""Rows that are widened to float64 at once."""


def model_source(path: str) -> ConfigSource:
    """What a checkpoint says of a run that starts from it: the model's shape and the tokenizer.

    What is wrong is in the source's problems.
    """
    settings = ConfigSource(f"--init-from {path}")
    try:
        with open_source(Path(path).expanduser()) as source:
            fields = shape_settings(source.model) | _tokenizer(source)
            settings.disputed |= _two_separators(source)
    except (ConversionError, OSError) as error:
        settings.problems.append(f"--init-from {about(path, error)}")
        settings.unread = True
        return settings
    for name, value in fields.items():
        settings.put(name, value, settings.name)
    return settings


def _tokenizer(source: Source) -> dict[str, str | int | None]:
    """Settings of the model's tokenizer, as far as there is one."""
    found, eod_id = tokenizer_files(source), source.run.data.eod_id
    fields: dict[str, str | int | None] = {} if found is None else {"tokenizer": found[0], "tokenizer_path": found[1]}
    return fields if eod_id is None else fields | {"eod_id": eod_id}


def _two_separators(source: Source) -> dict[str, str]:
    """Where config.json names one token as the end of a document and the tokenizer beside it another, both words on
    --eod-id.
    """
    named, tokenizer = source.run.data.eod_id, tokenizer_of(source) if source.format == "hf" else None
    if named is None or tokenizer is None or tokenizer.eod_id in (None, named):
        return {}
    pieces = {number: piece for piece, number in tokenizer.pieces().items() if number in (named, tokenizer.eod_id)}
    words = [f"{number} ({pieces.get(number, 'no token of the tokenizer')!r})" for number in (named, tokenizer.eod_id)]
    return {
        "eod_id": f"--eod-id: of {source.path}, config.json names {words[0]} as eos_token_id, and the tokenizer ends a "
        f"document with {words[1]}; "
        f"say which with --eod-id {named} or --eod-id {tokenizer.eod_id}"
    }


def opened_alike(path: str, grid: ProcessGrid) -> Source:
    """The checkpoint at `path`, the same one on all ranks; called by all.

    Each rank looks for itself, and in a folder of checkpoints another may become the newest meanwhile. Then it is that
    of rank 0's name for all who have one of this name beside their own. Travels: the name, and whether all could open
    it. Raises as `raise_on_all_ranks` does.
    """
    found: list[Source] = []
    attempt_on_all_ranks(grid.world, grid.device, lambda: found.append(open_source(Path(path).expanduser())))
    mine = found[0].path
    name = broadcast_text(grid.world, grid.device, mine.name)
    assert name is not None
    other = mine.with_name(name) if name and mine.name else mine

    def reopen() -> None:
        if other != mine and other.exists():
            found[0].closing.close()
            found[0] = open_source(other)

    attempt_on_all_ranks(grid.world, grid.device, reopen)
    return found[0]


def load_weights(path: str, optimizer: ShardedOptimizer, grid: ProcessGrid) -> str:
    """Fill this rank's weights from the checkpoint at `path`; called by all ranks.

    Returns for the banner what was read, and what became of keys that were not used. Rows of tokens that the checkpoint
    lacks start as the mean of the others. Travels: what `opened_alike` sends, whether all could read, then what
    `after_load` gathers. Raises ConversionError (on the other ranks CheckpointError with its text) when the checkpoint
    cannot be read or is not of this model.
    """
    failure: Exception | None = None
    told = ""
    opened = opened_alike(path, grid)
    try:
        with opened as source:
            _fill(source, list(optimizer.fragments()))
            told = "; ".join([f"weights of {source.path} ({source.format})", *_out_of_the_ordinary(source.report)])
    except Exception as error:
        failure = error
    raise_on_all_ranks(grid.world, grid.device, failure)
    optimizer.after_load()
    return told


def _out_of_the_ordinary(report: ConversionReport) -> list[str]:
    """What a user should know of the keys, few of them by name; those that are used as they are need no words."""
    kinds = {"not used": report.unused, "filled": report.filled}
    found = [
        f"{len(keys)} {kind}: {', '.join(f'{key} ({why})' for key, why in islice(keys.items(), SHOWN))}"
        for kind, keys in kinds.items()
        if keys
    ]
    return [
        *found,
        *(f"{r.key}: {r.copies} copies that differed were averaged" for r in report.replicas[:SHOWN]),
        *report.apart,
        *report.notes,
    ]


def _fill(source: Source, fragments: list[Fragment]) -> None:
    """Copy what these fragments cover. A tensor is one bucket's, so it is read once."""
    problems = [problem for fragment in fragments if (problem := _misfit(source, fragment.spec))]
    if problems:
        raise ConversionError(f"{source.path} does not fit the model: {'; '.join(problems)}")
    for fragment in fragments:
        _copy(source, fragment)


def _misfit(source: Source, spec: ParameterSpec) -> str | None:
    entry = source.entries.get(spec.name)
    if entry is None:
        return f"{spec.name} is missing"
    longer = spec.name in TABLES and entry.shape[0] < spec.shape[0] and entry.shape[1:] == spec.shape[1:]
    return (
        None if entry.shape == spec.shape or longer else f"{spec.name} is {list(entry.shape)}, not {list(spec.shape)}"
    )


@torch.no_grad()
def _copy(source: Source, fragment: Fragment) -> None:
    """What the fragment covers, by one read of the rows that it reaches into."""
    parts, (_, *columns) = sub_boxes(range_of(fragment)), fragment.spec.box
    first, last = min(part.box[0][0] for part in parts), max(part.box[0][1] for part in parts)
    rows = _rows(source, fragment.spec.name, ((first, last), *columns))
    origins = (first, *(start for start, _ in columns))
    for part in parts:
        into = fragment.weight[part.offset : part.offset + part.numel].view(part.shape)
        into.copy_(rows[tuple(slice(i - origin, j - origin) for (i, j), origin in zip(part.box, origins, strict=True))])


def _rows(source: Source, name: str, box: Box) -> Tensor:
    """This box of a tensor that may have fewer rows than ours; those missing are the mean of the rows
    that are there.
    """
    (first, last), *columns = box
    known = max(first, min(last, source.entries[name].shape[0]))
    if known == last:
        return source.read_box(name, box)
    there = source.read(name)
    inside = tuple(slice(*bounds) for bounds in columns)
    mean = _mean_row(there)[inside].to(there.dtype)
    return torch.cat([there[(slice(first, known), *inside)], mean.expand(last - known, *mean.shape)])


def _mean_row(values: Tensor) -> Tensor:
    """float64, in blocks of rows: a vocabulary's table may be large."""
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    for rows in values.split(ROWS):
        total += rows.double().sum(0)
    return total / values.shape[0]
