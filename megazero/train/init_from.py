"""Weights of another checkpoint, of any format and on any layout: those that a run starts with (--init-from), and the
frozen base of adapters (--lora-rank).

The checkpoint's model shape and tokenizer are defaults that the user's own settings override (`model_source`). Each
rank copies the weights of the parts that it owns (`load_weights`, `load_base`). Optimizer moments, position and
everything else start anew. Checkpoints with adapters get them in PEFT's format too (`peft_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text
from megazero.checkpoint.format import range_of
from megazero.checkpoint.manager import CheckpointedState, FoundCheckpoint
from megazero.checkpoint.narrowing import OutOfRange, require_range
from megazero.checkpoint.reader import read_manifest
from megazero.checkpoint.reshard import sub_boxes
from megazero.config.inventory import TABLES
from megazero.config.model_shape import shape_settings
from megazero.config.schema import Run
from megazero.config.source import ConfigError, ConfigSource, problem_of
from megazero.convert.lora.peft import names_for, write_adapters
from megazero.convert.native import NativeSource
from megazero.convert.registry import open_source
from megazero.convert.report import ConversionReport
from megazero.convert.source import ConversionError, Source
from megazero.convert.tokenizers import tokenizer_files, tokenizer_of
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Box, ParameterSpec, spec_of
from megazero.system.hub import hub_name, pinned
from megazero.system.reading import path_error
from megazero.zero.frozen import FrozenParameters
from megazero.zero.layout import Fragment

PEFT = "peft"
"""The subfolder of a checkpoint that PEFT opens."""
FOUND_IN_FOLDER = ("hf", "gpt2")
"""Kinds of tokenizers whose files have names of their own in a model's folder."""
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
            fields = shape_settings(source.model) | _tokenizer(source, path)
            settings.disputed |= _two_separators(source)
    except (ConversionError, OSError) as error:
        settings.problems.append(problem_of(error, f"--init-from {path_error(path, error)}"))
        settings.unread = True
        return settings
    for name, value in fields.items():
        settings.put(name, value, settings.name)
    return settings


def _tokenizer(source: Source, named: str) -> dict[str, str | int | None]:
    """Settings of the model's tokenizer and separator, if the checkpoint has them. named: the checkpoint by the user's
    word; a name of the Hub stands for its tokenizer too, since another host may have its cache elsewhere.
    """
    kind_and_path, eod_id = tokenizer_files(source), source.run.data.eod_id
    fields: dict[str, str | int | None] = {}
    if kind_and_path is not None:
        kind, path = kind_and_path
        own = path is not None and kind in FOUND_IN_FOLDER and Path(path).parent == source.path
        fields |= {"tokenizer": kind, "tokenizer_path": pinned(named) if own and hub_name(named) is not None else path}
    return fields if eod_id is None else fields | {"eod_id": eod_id}


def _two_separators(source: Source) -> dict[str, str]:
    """The problem on --eod-id, if config.json and the tokenizer name different tokens as the end of a document."""
    named, tokenizer = source.run.data.eod_id, tokenizer_of(source) if source.format == "hf" else None
    if named is None or tokenizer is None or tokenizer.eod_id in (None, named):
        return {}
    pieces = {number: piece for piece, number in tokenizer.pieces().items() if number in (named, tokenizer.eod_id)}
    first, second = (
        f"{number} ({pieces.get(number, 'no token of the tokenizer')!r})" for number in (named, tokenizer.eod_id)
    )
    return {
        "eod_id": f"--eod-id: of {source.path}, config.json names {first} as eos_token_id, and the tokenizer ends a "
        f"document with {second}; say which with --eod-id {named} or --eod-id {tokenizer.eod_id}"
    }


@dataclass(frozen=True)
class AdapterBase:
    """The checkpoint that adapters belong to.

    path  its absolute path, or its name on the Hub with the commit
    qkv   how its matrices of query, key and value are encoded with --lora-base-bits: one or three
    """

    path: str
    qkv: str


def base_of(run: Run, resumed: FoundCheckpoint | None) -> AdapterBase | None:
    """The base of the adapters that a run trains; None without adapters. Opens the base checkpoint.

    The base is --init-from, or else the base that the checkpoint of --load records. If --init-from is the folder of
    checkpoints that holds the recorded one, the recorded one stays the base, even if a newer one exists now. Encoded
    matrices stay as the checkpoint of --load has them, or are as the base has its matrices. Raises ConfigError if
    neither names a base, if the base cannot be opened, or if --save would overwrite it.
    """
    if run.lora.lora_rank is None or (run.checkpoint.init_from is None and run.checkpoint.load is None):
        return None  # adapters without either are refused by the configuration's checks
    recorded = None if resumed is None else resumed.run.get("checkpoint", {}).get("init_from")
    base = run.checkpoint.init_from or recorded
    if base is None:
        lacks = "has no complete checkpoint" if resumed is None else "does not say it"
        question = f"--lora-rank {run.lora.lora_rank}: on which model?"
        raise ConfigError([f"{question} --load {run.checkpoint.load} {lacks}; name it: --init-from DIR"])
    place = _place_of(base, recorded)
    try:
        with open_source(Path(place)) as source:
            checkpoint, qkv = source.path, "three" if source.separates_qkv else "one"
    except (ConversionError, OSError) as error:
        problem = f"the adapters belong to the model in {place}: {error}; where it is now: --init-from DIR"
        raise ConfigError([problem_of(error, problem)]) from error
    save = run.checkpoint.save
    if save is not None and Path(save).expanduser().resolve() in (checkpoint.resolve(), checkpoint.resolve().parent):
        holds = f"--save {save} holds the model that the adapters belong to, {checkpoint}"
        raise ConfigError([f"{holds}, and would lose it: name another folder"])
    encoded = None if resumed is None else resumed.run.get("lora", {}).get("lora_base_qkv")
    return AdapterBase(str(checkpoint) if hub_name(place) is None else place, encoded or qkv)


def _place_of(base: str, recorded: str | None) -> str:
    """The absolute path, or the name of the Hub, of the base that is named; the recorded one if that is in the folder
    of checkpoints that is named, or a commit of the same repository.
    """
    name, before = hub_name(base), None if recorded is None else hub_name(recorded)
    if name is not None:
        same = before is not None and before.repository == name.repository
        return str(recorded) if same else pinned(base)
    path = Path(base).expanduser().absolute()
    newest = recorded is not None and Path(recorded).parent.resolve() == path.resolve()
    return str(recorded) if newest else str(path)


def peft_files(run: Run) -> Callable[[Path], None] | None:
    """A function that adds the adapters of a complete checkpoint to its folder, in PEFT's format.

    None without adapters. None also if no model family of Hugging Face fits this model; a line on stdout says so. Opens
    the base checkpoint. Called by one rank; communicates nothing.
    """
    base = run.checkpoint.init_from
    if run.lora.lora_rank is None or base is None or run.checkpoint.save is None:
        return None
    with open_source(Path(base)) as source:
        try:
            names = names_for(run.model, source)
        except ConversionError as error:
            print(f"megazero: checkpoints hold no {PEFT}/, PEFT's form of the adapters: {error}", flush=True)
            return None

    def write(folder: Path) -> None:
        (folder / PEFT).mkdir()
        with NativeSource(folder, read_manifest(folder)) as adapters:
            write_adapters(adapters, names, base, folder / PEFT)

    return write


def open_on_all_ranks(path: str, grid: ProcessGrid) -> Source:
    """Open the checkpoint at `path`, the same one on all ranks.

    Each rank opens the newest checkpoint of a folder; a newer one may appear before the last rank looks. So rank 0's
    name counts (`of_that_name`). A collective of the world: a broadcast of the name, and two `attempt_on_all_ranks`.
    Raises as `raise_on_all_ranks`.
    """
    opened: Source = attempt_on_all_ranks(grid.world, grid.device, lambda: open_source(Path(path).expanduser()))
    name = broadcast_text(grid.world, grid.device, opened.path.name)
    other = of_that_name(path, opened.path, name)

    def reopened() -> Source:
        if other == opened.path:
            return opened
        opened.closing.close()
        return open_source(other)

    source: Source = attempt_on_all_ranks(grid.world, grid.device, reopened)
    return source


def of_that_name(named: str, opened: Path, name: str | None) -> Path:
    """Of a folder of checkpoints the one that rank 0 has opened, if it is there; else what this rank has opened.

    named: what this rank's user has named, a folder of checkpoints or a checkpoint. name: of the one of rank 0.
    """
    # Beside a checkpoint that the user has named stand others, which nobody has asked for.
    is_chosen = opened.resolve() == Path(named).expanduser().resolve()
    if is_chosen or not name or not opened.name:
        return opened
    other = opened.with_name(name)
    return other if other.exists() else opened


def load_weights(path: str, state: CheckpointedState, grid: ProcessGrid) -> str:
    """Fill this rank's weights from the checkpoint at `path`; return a text for the banner.

    The text names what was read, and keys that were not used or were filled. If the model has more tokens than the
    checkpoint, the new rows start as the mean of the others. A collective of the world: `_filled_on_all_ranks`, which
    says what is raised, and the gathers of `after_load`.
    """

    portions = state.portions(["weight"])  # before any rank can fail: this may be a collective

    def fill(source: Source) -> str:
        with closing(portions):
            specs = {fragment.spec.name: fragment.spec for fragment in chain.from_iterable(state.stored())}
            problems = [problem for spec in specs.values() if (problem := _misfit(source, spec))]
            if problems:
                raise ConversionError(f"{source.path} does not fit the model: {'; '.join(problems)}")
            for portion in portions:
                _copy_all(source, portion)
                del portion  # or its memory would be held while the next one comes
        return "; ".join([f"weights of {source.path} ({source.format})", *_out_of_the_ordinary(source.report)])

    text = _filled_on_all_ranks(path, grid, fill)
    state.after_load()
    return text


def load_base(path: str, frozen: FrozenParameters, grid: ProcessGrid) -> str:
    """Fill this rank's frozen parameters from the checkpoint at `path`; return the name of its format.

    A collective of the world: `_filled_on_all_ranks`, which says what is raised.
    """

    def fill(source: Source) -> str:
        specs = map(spec_of, frozen.by_name.values())
        problems = [problem for spec in specs if (problem := _misfit_of_base(source, spec))]
        if problems:
            raise ConversionError(f"{source.path} does not fit the model: {'; '.join(problems[:20])}")
        frozen.fill(lambda spec: require_range(source.read(spec.name), frozen.by_name[spec.name].dtype, spec.name))
        return source.format

    return _filled_on_all_ranks(path, grid, fill)


def _filled_on_all_ranks(path: str, grid: ProcessGrid, fill: Callable[[Source], str]) -> str:
    """Open the checkpoint on all ranks, and return what `fill` says of it on this rank.

    A collective of the world: `open_on_all_ranks` and `attempt_on_all_ranks`. Raises ConversionError (on the other
    ranks a CheckpointError with its text) if the checkpoint cannot be read or does not fit the model, and ConfigError
    on all ranks for a weight that its precision does not hold.
    """
    opened = open_on_all_ranks(path, grid)

    def act() -> str:
        with opened as source:
            try:
                return fill(source)
            except OutOfRange as error:  # the user chose the precision, so this is a mistake in the flags
                raise ConfigError([f"--init-from {path}: {error.nearest('--precision')}"]) from error

    return str(attempt_on_all_ranks(grid.world, grid.device, act))


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
        *(f"{one.key}: {one.copies} copies that differed were averaged" for one in report.replicas[:SHOWN]),
        *report.apart,
        *report.notes,
    ]


def _copy_all(source: Source, portion: Sequence[Fragment]) -> None:
    """A function, so that no name holds the last fragment while the next portion comes."""
    for fragment in portion:
        _copy(source, fragment)


def _misfit(source: Source, spec: ParameterSpec) -> str | None:
    """A sentence if the source does not have this parameter."""
    entry = source.entries.get(spec.name)
    if entry is None:
        return f"{spec.name} is missing"
    gets_rows = spec.name in TABLES and entry.shape[0] < spec.shape[0] and entry.shape[1:] == spec.shape[1:]
    if entry.shape == spec.shape or gets_rows:
        return None
    return f"{spec.name} is {list(entry.shape)}, not {list(spec.shape)}"


def _misfit_of_base(source: Source, spec: ParameterSpec) -> str | None:
    """As `_misfit`, for frozen parameters, which get no new rows."""
    entry = source.entries.get(spec.name)
    if entry is None:
        return f"it has no {spec.name}"
    return None if entry.shape == spec.shape else f"{spec.name} is {list(entry.shape)}, not {list(spec.shape)}"


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
    tensor = source.read(name)
    inside = tuple(slice(*bounds) for bounds in columns)
    mean = _mean_row(tensor)[inside].to(tensor.dtype)
    return torch.cat([tensor[(slice(first, known), *inside)], mean.expand(last - known, *mean.shape)])


def _mean_row(values: Tensor) -> Tensor:
    """The mean row in float64, summed over blocks of rows, because an embedding table may be large."""
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    for rows in values.split(ROWS):
        total += rows.double().sum(0)
    return total / values.shape[0]
