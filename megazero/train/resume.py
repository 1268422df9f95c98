"""The start of a run: from a checkpoint of its own, from the weights of another model, or from the seed.

A checkpoint has a probe: the loss of a fixed batch, which is computed again after loading. The probe detects a
resharding mistake that leaves plausible values in every tensor, before the first step. Without a probe, such a mistake
only makes the loss a little worse (BLOOM's loss grew with the number of pipeline stages after a resharding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.manager import Checkpoints
from megazero.config.schema import Run
from megazero.model.batch import MicroBatch
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.engine import PipelineEngine
from megazero.train.init_from import load_base, load_weights
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.whole_steps import SwapStart, saying_way_out
from megazero.zero.portions import gather_parameters, initialise_state, read_residents, round_weights


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts, after its state has been filled.

    position  iteration and consumed samples and tokens
    text      what it starts from, for the banner
    is_read   whether its weights were read from files
    """

    position: TrainingPosition
    text: str
    is_read: bool = True


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
    resumed = checkpoints.find()
    beneath = _load_base(run, state, grid)  # which neither checkpoints nor swap files hold
    if swapped is not None and swapped.step is not None:
        fill_from_swap(run, state, swapped, grid)
        words = [swapped.words(run.offload.nvme_path, resumed), *beneath]
        return StartPoint(swapped.position, "; ".join(words))
    if resumed is None:
        text = _begin(run, state, grid)
        text += f" (no complete checkpoint in {load})" if load else ""
        return StartPoint(TrainingPosition(), text, is_read=init_from is not None)
    loaded = checkpoints.load(resumed).words
    probed = check_probe(resumed.progress.get("probe"), run, probe_engine, grid)
    if run.checkpoint.finetune:
        words = [f"weights of {resumed.path} (--finetune: everything else anew)", *loaded, *beneath]
        return StartPoint(TrainingPosition(), "; ".join(words))
    position = TrainingPosition.read(resumed.progress)
    if not run.checkpoint.no_load_optim:
        state.restore(resumed.progress)
    unused = beneath or ([f"--init-from {init_from} is not used"] if init_from else [])
    words = [f"{resumed.path}, iteration {position.iteration}", *loaded, *([probed] if probed else []), *unused]
    return StartPoint(position, "; ".join(words))


def fill_from_swap(run: Run, state: TrainState, swapped: SwapStart, grid: ProcessGrid) -> None:
    """Fill the parameters from the master weights in swap files, and restore what was kept with their step."""

    def fill() -> None:
        with saying_way_out(run.offload.nvme_path):
            read_residents(state.model)
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


SAMPLES, SAMPLES_ASYNC = 2, 1
"""Samples of a probe. With --async-save there are fewer, because the probe is most of what a step waits for."""
TOLERANCE = {"fp64": 1e-8, "fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""The largest allowed relative difference of the loss, by precision; the larger tolerance of the precisions that saved
and loaded counts. It covers the rounding of different layouts.
"""


def probe_batches(run: Run, device: torch.device, samples: int = SAMPLES) -> list[MicroBatch]:
    """Micro-batches of one sample, int64 [1, s] on `device`; the same for every layout and data set.

    The token at position x is floor(((1103515245 x + 12345) mod 2^31) / 2^8) mod the vocabulary. The constants are
    those of the example of rand() in the C standard.
    """
    length, vocabulary = run.model.seq_length, run.model.vocab_size
    assert vocabulary is not None
    batches = []
    for sample in range(samples):
        positions = torch.arange(length + 1, dtype=torch.int64) + sample * (length + 1)
        text = (
            (positions * 1_103_515_245 + 12_345)
            .remainder(1 << 31)
            .div(1 << 8, rounding_mode="floor")
            .remainder(vocabulary)
        )
        text = text.unsqueeze(0).to(device)
        number = torch.tensor([sample], dtype=torch.int64).to(device)
        batches.append(MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), None, number))
    return batches


def probe_loss(run: Run, engine: PipelineEngine, grid: ProcessGrid, samples: int = SAMPLES) -> float:
    """Mean loss per token of the probe, the same on every rank. Every replica computes it, and the mean is returned.

    engine: one for micro-batches of one sample. A collective of the world: forward passes over all stages, and an
    all-reduce of one float64.
    """
    loss = engine.evaluate(probe_batches(run, grid.device, samples))
    packed = torch.zeros(1, dtype=torch.float64, device=grid.device)
    if engine.has_loss and grid.at.tp == 0:  # the tp ranks of the last stage all have the whole loss
        packed += loss
    collectives.all_reduce(packed, grid.world).wait()
    return float(packed.item()) / (grid.dp.size * samples * run.model.seq_length)


def check_probe(stored: dict[str, Any] | None, run: Run, engine: PipelineEngine, grid: ProcessGrid) -> str:
    """Compute the probe and compare with the stored one; return a sentence for the banner. A collective of the world.

    Returns "" without a stored probe, with --no-ckpt-probe, or at another sequence length. Raises RuntimeError with
    both losses if they differ by more than the tolerance.
    """
    if not stored or not run.checkpoint.ckpt_probe or stored["seq_length"] != run.model.seq_length:
        return ""
    now, then = probe_loss(run, engine, grid, stored.get("samples", SAMPLES)), float(stored["loss"])
    allowed = max(TOLERANCE[run.optimizer.precision], TOLERANCE[stored["precision"]])
    difference = abs(now - then) / max(abs(then), 1e-12)
    if not difference <= allowed:  # not `>`: a loss that is not a number differs, too
        raise RuntimeError(
            f"the model loaded is not the model saved: the probe's loss was {then:.10g}, is {now:.10g} (relative "
            f"difference {difference:.2g},"
            f" allowed {allowed:.0e} at {run.optimizer.precision}); --no-ckpt-probe loads it all the same"
        )
    return f"probe loss {now:.6f}, {then:.6f} when saved"


def stored_probe(run: Run, engine: PipelineEngine, grid: ProcessGrid) -> dict[str, Any] | None:
    """The probe as a checkpoint stores it; None with --no-ckpt-probe. A collective of the world."""
    if not run.checkpoint.ckpt_probe:
        return None
    samples = SAMPLES_ASYNC if run.checkpoint.async_save else SAMPLES
    return {
        "loss": probe_loss(run, engine, grid, samples),
        "samples": samples,
        "precision": run.optimizer.precision,
        "seq_length": run.model.seq_length,
    }
