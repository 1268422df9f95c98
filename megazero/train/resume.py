"""The start of a run: from a checkpoint of its own, from the weights of another model, or from the seed."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.manager import Checkpoints
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.engine import PipelineEngine
from megazero.telemetry.units import transfer
from megazero.train.adapters import load_base
from megazero.train.init_from import load_weights
from megazero.train.probe import check_probe
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.swap_start import SwapStart, saying_way_out
from megazero.zero.initial import initialise_state
from megazero.zero.portions import gather_parameters, round_weights


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts, after its state has been filled.

    position  iteration and consumed samples and tokens
    text      what it starts from, for the banner
    """

    position: TrainingPosition
    text: str


def resume(
    run: Run,
    state: TrainState,
    checkpoints: Checkpoints,
    probe_engine: PipelineEngine,
    grid: ProcessGrid,
    swapped: SwapStart | None = None,
) -> StartPoint:
    """Fill the state from the checkpoint of `--load`, or from swap files that lead to a later step (`swapped`); without
    both, from `--init-from` or the seed.

    A collective of all ranks. Raises Damaged or ValueError for a checkpoint that cannot be loaded, DiskError or
    CheckpointError for damaged swap files, ConversionError for weights of `--init-from`, RuntimeError if the
    probe's loss has changed.
    """
    load, init_from = run.checkpoint.load, run.checkpoint.init_from
    found = checkpoints.find()
    beneath = _load_base(run, state, grid)
    if swapped is not None and swapped.step is not None:
        _fill_from_swap(run, state, swapped, grid)
        words = [swapped.words(run.offload.nvme_path, found), *beneath]
        return StartPoint(swapped.position, "; ".join(words))
    if found is None:
        text = _begin(run, state, grid)
        return StartPoint(TrainingPosition(), text + (f" (no complete checkpoint in {load})" if load else ""))
    loaded = checkpoints.load(found)
    read = f"{transfer(loaded.bytes, loaded.seconds)} read"
    probed = check_probe(found.progress.get("probe"), run, probe_engine, grid)
    if run.checkpoint.finetune:
        words = [f"weights of {found.path} (--finetune: everything else anew)", read, *beneath]
        return StartPoint(TrainingPosition(), "; ".join(words))
    position = TrainingPosition.read(found.progress)
    if not run.checkpoint.no_load_optim:
        state.restore(found.progress)
    unused = beneath or ([f"--init-from {init_from} is not used"] if init_from else [])
    words = [f"{found.path}, iteration {position.iteration}", read, *([probed] if probed else []), *unused]
    return StartPoint(position, "; ".join(words))


def _fill_from_swap(run: Run, state: TrainState, swapped: SwapStart, grid: ProcessGrid) -> None:
    """Fill the parameters from the master weights in swap files, and restore what was kept with their step."""

    def fill() -> None:
        with saying_way_out(run.offload.nvme_path):
            state.model.host.read_residents()
            round_weights(state.model)

    attempt_on_all_ranks(grid.world, grid.device, fill)
    gather_parameters(state.model)
    state.restore(swapped.progress)


def _load_base(run: Run, state: TrainState, grid: ProcessGrid) -> list[str]:
    """Fill the frozen base weights of adapters, which the run's checkpoints do not hold; return a text about them."""
    base = run.checkpoint.init_from
    if run.lora.lora_rank is None or base is None:
        return []
    return [f"adapters on the weights of {base} ({load_base(base, state.model.frozen, grid)})"]


def _begin(run: Run, state: TrainState, grid: ProcessGrid) -> str:
    """Fill the weights from `--init-from` or the seed; return a text about them."""
    init_from = run.checkpoint.init_from
    if init_from is not None and run.lora.lora_rank is None:
        return load_weights(init_from, state.optimizer, grid)
    initialise_state(state.model, run.data.seed)
    return "from scratch" if run.lora.lora_rank is None else f"new adapters on the weights of {init_from}"
