"""A run that trains adapters (--lora-rank): the frozen base weights, and adapter files for PEFT in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.agreement import raise_on_all_ranks
from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.narrowing import OutOfRange, require_range
from megazero.checkpoint.reader import read_manifest
from megazero.config.schema import Run
from megazero.config.source import ConfigError, problem_of
from megazero.convert.lora.peft import names_for, write_adapters
from megazero.convert.native import NativeSource
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError, Source
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import ParameterSpec, spec_of
from megazero.train.init_from import open_on_all_ranks, refuse_on_all_ranks
from megazero.zero.frozen import FrozenParameters

PEFT = "peft"
"""The subfolder of a checkpoint that PEFT opens."""


@dataclass(frozen=True)
class AdapterBase:
    """The checkpoint that adapters belong to.

    path  its absolute path
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
        nothing = f"--load {run.checkpoint.load} " + (
            "has no complete checkpoint" if resumed is None else "does not say it"
        )
        raise ConfigError([f"--lora-rank {run.lora.lora_rank}: on which model? {nothing}; name it: --init-from DIR"])
    path = Path(base).expanduser().absolute()
    if recorded is not None and Path(recorded).parent.resolve() == path.resolve():
        path = Path(recorded)
    try:
        with open_source(path) as source:
            itself, three = source.path, source.separates_qkv
    except (ConversionError, OSError) as error:
        told = f"the adapters belong to the model in {path}: {error}; where it is now: --init-from DIR"
        raise ConfigError([problem_of(error, told)]) from error
    save = run.checkpoint.save
    if save is not None and Path(save).expanduser().resolve() in (itself.resolve(), itself.resolve().parent):
        raise ConfigError(
            [
                f"--save {save} holds the model that the adapters belong to, {itself}, and would lose it: name another "
                "folder"
            ]
        )
    encoded = None if resumed is None else resumed.run.get("lora", {}).get("lora_base_qkv")
    return AdapterBase(str(itself), encoded or ("three" if three else "one"))


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


def load_base(path: str, frozen: FrozenParameters, grid: ProcessGrid) -> str:
    """Fill this rank's frozen parameters from the checkpoint at `path`; return the name of its format.

    A collective of the world: `open_on_all_ranks`, `refuse_on_all_ranks` and `raise_on_all_ranks`. Raises as
    `init_from.load_weights` does.
    """
    failure: Exception | None = None
    beyond: OutOfRange | None = None
    name = ""
    opened = open_on_all_ranks(path, grid)
    try:
        with opened as source:
            name = source.format
            problems = [problem for p in frozen.by_name.values() if (problem := _misfit(source, spec_of(p)))]
            if problems:
                raise ConversionError(f"{source.path} does not fit the model: {'; '.join(problems[:20])}")
            frozen.fill(lambda spec: require_range(source.read(spec.name), frozen.by_name[spec.name].dtype, spec.name))
    except OutOfRange as error:
        beyond = error
    except Exception as error:
        failure = error
    refuse_on_all_ranks(path, grid, beyond)
    raise_on_all_ranks(grid.world, grid.device, failure)
    return name


def _misfit(source: Source, spec: ParameterSpec) -> str | None:
    """A sentence if the source does not have this parameter."""
    entry = source.entries.get(spec.name)
    if entry is None:
        return f"it has no {spec.name}"
    return None if entry.shape == spec.shape else f"{spec.name} is {list(entry.shape)}, not {list(spec.shape)}"
