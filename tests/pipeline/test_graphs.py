"""Replayed micro-batches give the bits of the eager engine: what is written, what is added, what is told to the
reducer.

In place of a CUDA graph stands a closure that runs again over the same tensors. As with a graph, what it computes while
it is captured has no effect, and what its Python does while it is replayed has none either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero.model.batch import MicroBatch
from megazero.mpu.fp8 import Fp8Layer
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import WARM_UP, GraphedEngine, replayed
from megazero.system.streams import GraphCapture
from megazero.telemetry.record import StepRecord
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from tests.parameters import Piece, values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

MODEL = [*small_model(2, heads=4), "--micro-batch-size", "1", "--lr", "1e-2"]


class Replays(GraphCapture):
    """Captures of a model state without a card. log: what was done, in order."""

    def __init__(
        self, state: ModelState, loss_sum: Callable[[], Tensor | None], layers: Sequence[Fp8Layer] = ()
    ) -> None:
        self.state, self.loss_sum, self.layers = state, loss_sum, layers
        self.log: list[str] = []

    def on_side_stream(self, work: Callable[[], Any]) -> Any:
        self.log.append("side stream")
        return work()

    def _memory(self) -> list[Tensor]:
        column = self.state.columns[Column.GRADIENT]
        held = [column.held(index) for index in range(len(self.state.buckets))]
        loss = self.loss_sum()
        return held if loss is None else [*held, loss]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        name = f"graph {sum(line.startswith('capture') for line in self.log)}"
        self.log.append(f"capture {name}")
        before, arrived = [tensor.clone() for tensor in self._memory()], self.state.reducer.arrived()
        casts = [layer._cast_in == layer.fp8.step for layer in self.layers]
        work()
        for tensor, old in zip(self._memory(), before, strict=True):
            tensor.copy_(old)

        def replay() -> None:
            assert not self.state.mover._updated, "nothing in a graph waits for the updates in host memory"
            self.log.append(name)
            reducer = self.state.reducer
            own = {key: value for key, value in vars(reducer).items() if key.startswith("_") and key != "_partials"}
            kept = {key: copy.copy(value) for key, value in own.items()}
            reducer.say_arrived(arrived)
            cast_in = [layer._cast_in for layer in self.layers]
            for layer, was_cast in zip(self.layers, casts, strict=True):  # what was cast then is cast by no replay
                layer._cast_in = layer.fp8.step if was_cast else None
            work()
            vars(reducer).update(kept)
            for layer, number in zip(self.layers, cast_in, strict=True):
                layer._cast_in = number

        return replay


def train(rank: int, size: int, flags: list[str], graphs: bool) -> tuple[list[StepRecord], list[Piece], list[str]]:
    job, recorder = job_on_rank(rank, size, flags)
    log = []
    if graphs:
        engine = job.trainer.engine
        assert isinstance(engine, PipelineEngine)
        held = [getattr(module, "fp8", None) for stage in job.stages for module in stage.modules()]
        layers = [layer for layer in held if isinstance(layer, Fp8Layer)]
        assert bool(layers) == ("--fp8" in flags)
        replays = Replays(job.state.model, lambda: graphed._loss_sum, layers)
        graphed = GraphedEngine(engine, job.state.model.reducer, replays, travels=size > 1)
        job.trainer.engine = graphed
        log = replays.log
    job.fit()
    job.state.model.wait_parameters()
    job.close()
    assert not graphs or not graphed._graphs, "graphs outlive the job"
    return recorder.records, values_of(nn.ModuleList(job.stages)), log


def equal(a: tuple, b: tuple) -> None:
    """Losses, norms, scales and weights, to the bit."""
    for key in ("iteration", "loss", "grad_norm", "loss_scale", "skipped", "consumed_samples"):
        assert [repr(getattr(record, key)) for record in a[0]] == [repr(getattr(record, key)) for record in b[0]], (
            key
        )  # NaN too
    assert len(a[1]) == len(b[1]) > 0
    for one, other in zip(a[1], b[1], strict=True):
        assert one.spec == other.spec and torch.equal(one.values, other.values), one.spec.name


CASES = {
    "one micro-batch": (1, ""),
    "two": (2, "--precision fp32"),
    "two, offloaded": (2, "--offload-optimizer cpu:0.7 --nvme-buffer-bytes 200KB"),
    "two, offloaded, late updates": (2, "--offload-optimizer cpu --late-update --clip-grad 0.1"),
    "two, late updates": (2, "--late-update --clip-grad 0.1"),
    "four, late updates, ZeRO-1": (4, "--late-update --zero-stage 1 --bucket-size 3000"),
    "seven, ZeRO-1, narrow reduction": (7, "--zero-stage 1 --grad-reduce-dtype bf16"),
    "dropout, recompute": (3, "--hidden-dropout 0.1 --attention-dropout 0.1 --recompute-granularity full"),
    "masks, untied, small buckets": (
        2,
        "--eod-mask-loss --document-mask --eod-id 0 --untie-embeddings-and-output-weights --bucket-size 3000",
    ),
    "FP8, delayed, gradients of weights in 16 bits": (3, "--fp8 delayed --hidden-size 64"),
    "FP8, delayed, recompute": (3, "--hidden-size 32 --seq-length 16 --fp8 delayed --recompute-granularity full"),
    "FP8": (1, "--hidden-size 32 --seq-length 16 --fp8"),
    # The first scale overflows and halves for some steps, others are applied.
    "fp16 overflows": (2, "--precision fp16 --initial-loss-scale 8e6 --hysteresis 1 --loss-scale-window 2"),
}


def flags_of(words: str, corpus: Path, folder: Path) -> list[str]:
    return [*MODEL, *words.split(), *data_flags(corpus, folder / "cache")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_replays_are_the_eager_engine(name: str, corpus: Path, tmp_path: Path) -> None:
    count, more = CASES[name]
    flags = flags_of(f"{more} --train-iters 7 --global-batch-size {count}", corpus, tmp_path)
    eager, graphed = train(0, 1, flags, False), train(0, 1, flags, True)
    equal(graphed, eager)
    if name == "fp16 overflows":
        assert {record.skipped for record in eager[0]} == {True, False}
    later = ["graph 0"] + ["graph 1"] * (count - 1)
    first = ["capture graph 0", "graph 0"] + (["capture graph 1"] + ["graph 1"] * (count - 1) if count > 1 else [])
    assert graphed[2] == ["side stream"] * WARM_UP + first + later * (7 - WARM_UP - 1)


def test_a_growing_batch_captures_what_it_comes_to_need(corpus: Path, tmp_path: Path) -> None:
    flags = flags_of("--rampup-batch-size 1 1 6 --global-batch-size 3 --train-iters 9", corpus, tmp_path)
    eager, graphed = train(0, 1, flags, False), train(0, 1, flags, True)
    equal(graphed, eager)
    assert len({record.global_batch_size for record in eager[0]}) == 3
    # Two micro-batches come with the fourth step; the second of them runs once as ever before it is captured.
    grown = ["capture graph 0", "graph 0", "graph 0", "side stream", "graph 0", "capture graph 1", "graph 1"]
    assert graphed[2][: WARM_UP + len(grown)] == ["side stream"] * WARM_UP + grown


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--zero-stage 1", "--zero-stage 0 --no-overlap"])
@pytest.mark.parametrize("count", [2, 5])
def test_where_gradients_travel_the_first_and_the_last_run_as_ever(
    count: int, layout: str, corpus: Path, tmp_path: Path
) -> None:
    flags = flags_of(f"{layout} --train-iters 6 --global-batch-size {2 * count}", corpus, tmp_path)
    eager, graphed = (run_ranks(2, train, 2, flags, graphs) for graphs in (False, True))
    for rank in range(2):
        equal(graphed[rank], eager[rank])
        replays = ["graph 0"] * (count - 2)
        captured = ["capture graph 0"] * (count > 2) + replays
        assert graphed[rank][2] == ["side stream"] * WARM_UP + captured + replays * (6 - WARM_UP - 1)


def test_evaluation_between_steps_is_the_engines_own(corpus: Path, tmp_path: Path) -> None:
    words = "--train-iters 6 --eval-interval 2 --global-batch-size 2 --hidden-dropout 0.2"
    flags = flags_of(words, corpus, tmp_path)
    equal(train(0, 1, flags, True), train(0, 1, flags, False))


def test_which_micro_batches_are_replayed() -> None:
    assert [list(replayed(n, False)) for n in (1, 2, 4)] == [[0], [0, 1], [0, 1, 2, 3]]
    assert [list(replayed(n, True)) for n in (1, 2, 3, 5)] == [[], [], [1], [1, 2, 3]]


def test_micro_batches_of_one_run_have_the_same_tensors(corpus: Path, tmp_path: Path) -> None:
    """A mask that comes and goes would be left out of the graph without a word."""
    flags = flags_of("--train-iters 7 --global-batch-size 1", corpus, tmp_path)
    job, _ = job_on_rank(0, 1, flags)
    replays = Replays(job.state.model, lambda: engine._loss_sum)
    assert isinstance(job.trainer.engine, PipelineEngine)
    engine = GraphedEngine(job.trainer.engine, job.state.model.reducer, replays, travels=False)
    (batch,) = job.trainer.batches.train.micro_batches(0, 1)
    engine._prepare(batch, torch.ones((), dtype=torch.float64))
    masked = MicroBatch(batch.tokens, batch.labels, torch.ones_like(batch.labels, dtype=torch.bool), batch.samples)
    with pytest.raises(AssertionError, match="loss_mask"):
        engine._replay(masked, adds=False)
