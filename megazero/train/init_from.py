"""`--init-from`: a run that starts with the weights of a checkpoint of any format, on any layout.

The checkpoint's model shape and tokenizer are defaults that the user's own settings override (`model_source`). Each
rank copies the weights of the parts that it owns (`load_weights`). Optimizer moments, position and everything else
start anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text, raise_on_all_ranks, text_of_lowest
from megazero.checkpoint.format import range_of
from megazero.checkpoint.manager import CheckpointedState
from megazero.checkpoint.narrowing import OutOfRange, require_range
from megazero.checkpoint.reshard import sub_boxes
from megazero.config.inventory import TABLES
from megazero.config.model_shape import shape_settings
from megazero.config.source import ConfigError, ConfigSource, problem_of
from megazero.convert.registry import open_source
from megazero.convert.report import ConversionReport
from megazero.convert.source import ConversionError, Source
from megazero.convert.tokenizers import tokenizer_files, tokenizer_of
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Box, ParameterSpec
from megazero.system.reading import path_error
from megazero.zero.fragment import Fragment, FragmentSpec

SHOWN = 3
"""The most keys of a kind that the banner names."""
ROWS = 4096
"""Rows that are converted to float64 at once."""


def model_source(path: str) -> ConfigSource:
    """The settings that a checkpoint gives to a run that starts from it: the model's shape and the tokenizer.

    Raises nothing: if the checkpoint cannot be read, the source's `problems` say so.
    """
    settings = ConfigSource(f"--init-from {path}")
    try:
        with open_source(Path(path).expanduser()) as source:
            fields = shape_settings(source.model) | _tokenizer(source)
            settings.disputed |= _two_separators(source)
    except (ConversionError, OSError) as error:
        settings.problems.append(problem_of(error, f"--init-from {path_error(path, error)}"))
        settings.unread = True
        return settings
    for name, value in fields.items():
        settings.put(name, value, settings.name)
    return settings


def _tokenizer(source: Source) -> dict[str, str | int | None]:
    """Settings of the model's tokenizer and separator, if the checkpoint has them."""
    found, eod_id = tokenizer_files(source), source.run.data.eod_id
    fields: dict[str, str | int | None] = {} if found is None else {"tokenizer": found[0], "tokenizer_path": found[1]}
    return fields if eod_id is None else fields | {"eod_id": eod_id}


def _two_separators(source: Source) -> dict[str, str]:
    """The problem on --eod-id, if config.json and the tokenizer name different tokens as the end of a document."""
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


def open_on_all_ranks(path: str, grid: ProcessGrid) -> Source:
    """Open the checkpoint at `path`, the same one on all ranks.

    Each rank opens the newest checkpoint of a folder; a newer one may appear before the last rank looks. So rank 0's
    name counts: a rank that opened another one opens the one of that name in the same folder instead, if it is there. A
    collective of the world: a broadcast of the name, and two `attempt_on_all_ranks`. Raises as `raise_on_all_ranks`.
    """
    opened: list[Source] = []
    attempt_on_all_ranks(grid.world, grid.device, lambda: opened.append(open_source(Path(path).expanduser())))
    mine = opened[0].path
    name = broadcast_text(grid.world, grid.device, mine.name)
    assert name is not None
    other = mine.with_name(name) if name and mine.name else mine

    def reopen() -> None:
        if other != mine and other.exists():
            opened[0].closing.close()
            opened[0] = open_source(other)

    attempt_on_all_ranks(grid.world, grid.device, reopen)
    return opened[0]


def load_weights(path: str, state: CheckpointedState, grid: ProcessGrid) -> str:
    """Fill this rank's weights from the checkpoint at `path`; return a text for the banner.

    The text names what was read, and keys that were not used or were filled. If the model has more tokens than the
    checkpoint, the new rows start as the mean of the others. A collective of the world: `open_on_all_ranks`,
    `refuse_on_all_ranks`, `raise_on_all_ranks` and the gathers of `after_load`. Raises ConversionError (on the other
    ranks a CheckpointError with its text) if the checkpoint cannot be read or does not fit the model, and ConfigError
    for a weight that the precision does not hold.
    """
    failure: Exception | None = None
    beyond: OutOfRange | None = None
    told = ""
    opened = open_on_all_ranks(path, grid)
    portions = state.portions(["weight"])
    try:
        with opened as source, closing(portions):
            _fill(source, state.stored(), portions)
            told = "; ".join([f"weights of {source.path} ({source.format})", *_out_of_the_ordinary(source.report)])
    except OutOfRange as error:
        beyond = error
    except Exception as error:
        failure = error
    refuse_on_all_ranks(path, grid, beyond)
    raise_on_all_ranks(grid.world, grid.device, failure)
    state.after_load()
    return told


def refuse_on_all_ranks(path: str, grid: ProcessGrid, error: OutOfRange | None) -> None:
    """Raise ConfigError on all ranks if one has a weight that its precision does not hold.

    A collective of the world, as `text_of_lowest`.
    """
    own = None if error is None else f"--init-from {path}: {error.nearest('--precision')}"
    told = text_of_lowest(grid.world, grid.device, own)
    if told is not None:
        raise ConfigError([told[1]]) from error


def _out_of_the_ordinary(report: ConversionReport) -> list[str]:
    """Sentences about keys that were not used, filled or averaged; at most `SHOWN` keys are named for each kind."""
    kinds = {"not used": report.unused, "filled": report.filled}
    unusual = [
        f"{len(keys)} {kind}: {', '.join(f'{key} ({why})' for key, why in islice(keys.items(), SHOWN))}"
        for kind, keys in kinds.items()
        if keys
    ]
    return [
        *unusual,
        *(f"{r.key}: {r.copies} copies that differed were averaged" for r in report.replicas[:SHOWN]),
        *report.apart,
        *report.notes,
    ]


def _fill(source: Source, held: Sequence[Sequence[FragmentSpec]], portions: Iterable[Sequence[Fragment]]) -> None:
    """Copy the weights into the portions, one after the other. held: their fragments without values."""
    specs = {one.spec.name: one.spec for one in chain.from_iterable(held)}
    problems = [problem for spec in specs.values() if (problem := _misfit(source, spec))]
    if problems:
        raise ConversionError(f"{source.path} does not fit the model: {'; '.join(problems)}")
    for portion in portions:
        _copy_all(source, portion)
        del portion  # or its memory would be held while the next one comes


def _copy_all(source: Source, portion: Sequence[Fragment]) -> None:
    for fragment in portion:
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
    """Copy the weights into one fragment; the rows that it overlaps are read at once."""
    parts, (_, *columns) = sub_boxes(range_of(fragment)), fragment.spec.box
    first, last = min(part.box[0][0] for part in parts), max(part.box[0][1] for part in parts)
    name = fragment.spec.name
    rows = require_range(_rows(source, name, ((first, last), *columns)), fragment.weight.dtype, name)
    origins = (first, *(start for start, _ in columns))
    for part in parts:
        into = fragment.weight[part.offset : part.offset + part.numel].view(part.shape)
        into.copy_(rows[tuple(slice(i - origin, j - origin) for (i, j), origin in zip(part.box, origins, strict=True))])


def _rows(source: Source, name: str, box: Box) -> Tensor:
    """A box of a tensor that may have fewer rows in the checkpoint than in the model.

    A missing row is the mean of all rows of the checkpoint's tensor.
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
    """The mean row in float64, summed over blocks of rows, because an embedding table may be large."""
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    for rows in values.split(ROWS):
        total += rows.double().sum(0)
    return total / values.shape[0]
