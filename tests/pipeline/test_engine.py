"""The engine on 1 to 4 ranks against plain autograd over the same model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megazero.model.batch import MicroBatch
from megazero.mpu.axes import Axes
from megazero.mpu.bundle import MessageSpec
from megazero.mpu.grid import Group, ProcessGrid, build_grid
from megazero.mpu.p2p import Channels
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.partition import partition
from megazero.pipeline.schedule import CHUNKS, chunk_map, forward_only, make_schedule, stage_schedule
from megazero.program.instruction import ComputationKey, Instruction, Kind, Op
from megazero.program.passes.kept_graphs import peak_activations
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.program.step import Lists, StepOptions
from tests.pipeline.toy import HIDDEN, LAYERS, SEQUENCE, ToyStage, gradients, micro_batch, sequential, split_batch
from tests.ranks import run_ranks

FACTOR = 0.37
SCHEDULES = tuple(CHUNKS)


Call = tuple[str, int | tuple[int, ...]]
"""What the engine asks for: ("backward", chunk), ("reduce", bucket), ("norm", 0), ("update", buckets)."""


class Recorder:
    """A model state and a step's end that write down their calls, and check that gradients grow in the backward of
    their units. Every unit is a bucket.
    """

    def __init__(self, stages: list[ToyStage]) -> None:
        self.stages = stages
        self.units = [(chunk, set(names)) for chunk, stage in enumerate(stages) for names in stage.names()]
        """By bucket."""
        self.calls: list[Call] = []
        self.announced: list[int] = []
        self.open: int | None = None
        self.deferred: dict[ComputationKey, list] = {}
        self.holding: list | None = None
        for stage in stages:
            for weight in stage.weights.values():
                weight.target = partial(self.take, weight)

    def take(self, weight: torch.Tensor, make) -> None:
        if self.holding is None:
            weight.grad = make() if weight.grad is None else weight.grad + make()
        else:
            self.holding.append((weight, make))

    def settle(self) -> None: ...

    def ready(self, buckets: Sequence[int]) -> None:
        self.announced += buckets

    def run_deferred(self, key: ComputationKey) -> None:
        assert self.open is None
        self.calls.append(("backward", key[1]))
        for weight, make in self.deferred.pop(key):
            self.take(weight, make)

    def before_backward(self, defer: ComputationKey | None) -> None:
        assert self.open is None
        self.open = self.units[self.announced[-1]][0]
        if defer is None:
            self.calls.append(("backward", self.open))
        else:
            assert defer not in self.deferred and defer[1] == self.open
            self.holding = self.deferred[defer] = []
        self.before = {i: gradients([stage]) for i, stage in enumerate(self.stages)}
        self.before = {i: {k: v.clone() for k, v in found.items()} for i, found in self.before.items()}

    def after_backward(self) -> None:
        chunk, last = self.open, self.units[self.announced[-1]][1]
        self.open = None
        for i, stage in enumerate(self.stages):
            changed = {
                name for name, value in gradients([stage]).items() if not torch.equal(value, self.before[i][name])
            }
            assert not changed or i == chunk, "gradients belong to the announced chunk"
            if self.holding is not None:
                assert not any(name.endswith("_weight") for name in changed), "weights wait"
            elif i == chunk:
                assert changed & last or not stage.weights
        self.holding = None

    @property
    def gradients(self) -> Recorder:
        return self

    @property
    def by_kind(self) -> dict[Kind, Callable[[Instruction], None]]:
        """No parameter is gathered, no sum is partial, and all state is on the device."""
        return {Op.REDUCE: self.reduce}

    def reduce(self, i: Instruction) -> None:
        (bucket,) = i.buckets
        self.calls.append(("reduce", bucket))

    def norm(self, loss_sum: torch.Tensor) -> None:
        self.calls.append(("norm", 0))

    def update(self, i: Instruction) -> None:
        self.calls.append(("update", i.buckets))


def shape_of(stages: Sequence[ToyStage], *, cut: bool, every: bool) -> RankShape:
    """Every unit has a bucket of its own, which travels where chunks are to be cut. every: gradients are sharded, so
    that every backward can reduce them.
    """
    counts = [len(stage.names()) for stage in stages]
    buckets = [
        BucketShape(chunk, 8, 8, sharded_gradient=every, shards=1 + cut)
        for chunk, count in enumerate(counts)
        for _ in range(count)
    ]
    numbers = iter(range(len(buckets)))
    units = tuple(tuple(UnitShape((n,), (n,), (n,)) for n in islice(numbers, count)) for count in counts)
    return RankShape(units, tuple(buckets))


def build_stages(
    stage: int, pp: int, virtual: int, tied: bool = False, jitter: np.random.Generator | None = None, name: str = "1f1b"
) -> list[ToyStage]:
    sizes = partition([1] * LAYERS, 1, 1, pp * virtual)
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    ranges = [range(a, b) for a, b in pairwise(bounds)]
    mine = chunk_map(name, pp, virtual).of(stage)
    return [ToyStage(ranges[k], k == 0, k == pp * virtual - 1, tied, jitter) for k in mine]


def build_engine(
    grid: ProcessGrid,
    state: Recorder,
    channels: Channels | None,
    name: str,
    every: bool = False,
    size: int = 2,
    cut: bool = False,
) -> PipelineEngine:
    pp, at, stages = grid.axes.pp, grid.at.pp, state.stages

    def schedule(m: int) -> tuple[Instruction, ...]:
        return stage_schedule(name, pp, m, len(stages), at)

    shape, options = shape_of(stages, cut=cut, every=every), StepOptions(reduce_every=every)
    lists = Lists(schedule, lambda m: forward_only(schedule(m)), shape, options, pp * len(stages))
    hidden = MessageSpec.single((SEQUENCE, size, HIDDEN), torch.float64)
    return PipelineEngine(stages, grid, lists, (hidden,) * (pp * len(stages) - 1), channels, state)


def run_case(
    grid: ProcessGrid,
    channels: Channels | None,
    name: str,
    virtual: int,
    batches: list[MicroBatch],
    every: bool,
    tied: bool,
    jitter: bool,
    cut: bool = False,
) -> tuple[float, float, dict[str, torch.Tensor], list[Call]]:
    """Training loss, evaluation loss before it, gradients and the engine's calls on this rank."""
    random = np.random.default_rng(grid.rank) if jitter else None
    stages = build_stages(grid.at.pp, grid.axes.pp, virtual, tied, random, name)
    state = Recorder(stages)
    engine = build_engine(grid, state, channels, name, every, batches[0].tokens.shape[0], cut)
    valid = engine.evaluate(batches)
    assert all(stage.training for stage in stages) and not any(
        gradient.any() for gradient in gradients(stages).values()
    )
    loss = engine.train(batches, torch.tensor(FACTOR, dtype=torch.float64), state)
    assert loss.dtype == valid.dtype == torch.float64 and loss.dim() == 0
    return loss.item(), valid.item(), gradients(stages), state.calls


def body(rank: int, pp: int, cases: list[tuple], jitter: bool = False, and_back: bool = False) -> list[tuple]:
    grid = build_grid(Axes(pp=pp))
    channels = Channels(grid, and_back) if pp > 1 else None
    return [
        run_case(grid, channels, name, virtual, [micro_batch(i) for i in range(m)], every, tied, jitter, cut)
        for name, virtual, m, every, tied, cut in cases
    ]


def body_matched_by_order(rank: int, pp: int, cases: list[tuple]) -> list[tuple]:
    """As on NCCL: a group per channel, no tags, so that a message in the wrong place would be taken for another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "is_on_host", False)
        groups = [[case for case in cases if (case[0] == "zb-v") == and_back] for and_back in (False, True)]
        return [
            result
            for and_back, group in enumerate(groups)
            for result in body(rank, pp, group, jitter=True, and_back=bool(and_back))
        ]


def merge(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gradients of all ranks; a tied weight's two copies added."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13, msg=lambda text: f"{what}: {text}")


def compare(results: list[list[tuple]], cases: list[tuple], pp: int) -> None:
    for number, (name, virtual, m, every, tied, cut) in enumerate(cases):
        ranks = [result[number] for result in results]
        loss, wanted = sequential([micro_batch(i) for i in range(m)], FACTOR, tied)
        for which in (0, 1):
            assert sum(r[which] for r in ranks) == pytest.approx(loss, rel=1e-13), cases[number]
            head = chunk_map(name, pp, virtual).last_stage
            assert all(r[which] == 0.0 for stage, r in enumerate(ranks) if stage != head), (
                "only the head's rank has a loss"
            )
        found = merge([r[2] for r in ranks])
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            assert_equal(found[key], gradient, f"{cases[number]} {key}")
        for stage, (*_, calls) in enumerate(ranks):
            assert calls == wanted_calls(name, pp, virtual, m, stage, every=every, cut=cut), cases[number]


def wanted_calls(name: str, pp: int, virtual: int, m: int, stage: int, *, every: bool, cut: bool) -> list[Call]:
    """Each bucket is reduced in its chunk's last backward or in every one, the last first, and all are updated.

    cut: of the micro-batches that reduce each unit has a backward of its own, after which its bucket is reduced.
    """
    counts = [len(toy.names()) for toy in build_stages(stage, pp, virtual, name=name)]
    numbers = [range(sum(counts[:chunk]), sum(counts[: chunk + 1])) for chunk in range(virtual)]
    passes = [(i.micro_batch, i.chunk) for i in make_schedule(name, pp, m, virtual)[stage] if i.ends_backward]
    reducing = passes if every else [max(p for p in passes if p[1] == chunk) for chunk in range(virtual)]
    calls: list[Call] = []
    for micro_batch_number, chunk in passes:
        if (micro_batch_number, chunk) not in reducing:
            calls.append(("backward", chunk))
        elif cut:
            calls += [call for n in reversed(numbers[chunk]) for call in (("backward", chunk), ("reduce", n))]
        else:
            calls += [("backward", chunk), *(("reduce", n) for n in reversed(numbers[chunk]))]
    return [*calls, ("norm", 0), ("update", tuple(range(sum(counts))))]


def virtuals(name: str, *wanted: int) -> list[int]:
    """Those of these numbers of chunks that a schedule can have."""
    return [number for number in wanted if CHUNKS[name] in (None, number)]


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_schedule_gives_the_gradients_of_plain_autograd(pp):
    cases = [
        (name, virtual, m, False, False, cut)
        for name in SCHEDULES
        for virtual in virtuals(name, 1, 2, 3)
        for m, cut in ((1, False), (2, True), (4, False), (7, True))
    ]
    compare(run_ranks(pp, body, pp, cases), cases, pp)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_tied_weights_and_reduction_at_every_micro_batch(pp):
    chunks = [(name, virtual) for name in SCHEDULES for virtual in virtuals(name, 1, 2)]
    cases = [(*chunk, 3, True, True, cut) for chunk in chunks for cut in (False, True)]
    compare(run_ranks(pp, body, pp, cases), cases, pp)


@pytest.mark.slow
def test_results_do_not_depend_on_who_gets_ahead():
    orders = [("1f1b", 1, 7), ("interleaved", 2, 7), ("gpipe", 3, 5), ("zb-h1", 1, 7), ("zb-v", 2, 7)]
    cases = [(*order, False, False, order[0] == "zb-v") for order in orders]
    compare(run_ranks(3, body, 3, cases, True), cases, 3)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_messages_matched_by_order_alone(pp):
    cases = [
        (name, virtual, m, False, False, m == pp)
        for name, virtual in (("1f1b", 1), ("interleaved", 2), ("gpipe", 2), ("zb-h1", 1), ("zb-v", 2))
        for m in (1, pp, 2 * pp + 1)
    ]
    compare(run_ranks(pp, body_matched_by_order, pp, cases), cases, pp)


def scale_body(rank: int, pp: int, counts: list[int]) -> list[tuple]:
    grid = build_grid(Axes(pp=pp))
    channels = Channels(grid) if pp > 1 else None
    return [run_case(grid, channels, "1f1b", 1, split_batch(16, m), False, False, False) for m in counts]


@pytest.mark.slow
def test_fault_09_gradients_do_not_depend_on_stages_or_accumulation():
    """The same 16 samples in 1, 4 or 16 micro-batches over 1, 2 or 4 stages."""
    loss, wanted = sequential(split_batch(16, 1), FACTOR)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 0.1
    for pp in (1, 2, 4):
        results = run_ranks(pp, scale_body, pp, [1, 4, 16])
        for case in range(3):
            assert sum(result[case][0] for result in results) == pytest.approx(loss, rel=1e-13)
            found = merge([result[case][2] for result in results])
            for key, gradient in wanted.items():
                torch.testing.assert_close(found[key], gradient, rtol=1e-12, atol=1e-13)


def label_body(rank: int, pp: int, virtual: int, swap: bool) -> dict[str, float]:
    """The loss of every schedule as every rank knows it after one sum over the pipeline."""
    grid = build_grid(Axes(pp=pp))
    channels = Channels(grid)
    batches = [micro_batch(i) for i in range(5)]
    if swap:
        batches[1], batches[3] = (
            MicroBatch(batches[a].tokens, batches[b].labels, batches[a].loss_mask, batches[a].samples)
            for a, b in ((1, 3), (3, 1))
        )
    losses = {}
    for name in (name for name in SCHEDULES if virtuals(name, virtual)):
        stages = build_stages(rank, pp, virtual, name=name)
        state = Recorder(stages)
        loss = build_engine(grid, state, channels, name).train(batches, torch.tensor(1.0, dtype=torch.float64), state)
        dist.all_reduce(loss, group=grid.pp.handle)
        losses[name] = loss.item()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "virtual"), [(2, 2), (3, 1)])
def test_fault_20_every_output_meets_its_own_labels_and_every_rank_knows_the_loss(pp, virtual):
    right, _ = sequential([micro_batch(i) for i in range(5)], 1.0)
    for losses in run_ranks(pp, label_body, pp, virtual, False):
        assert losses == {name: pytest.approx(right, rel=1e-13) for name in SCHEDULES if virtuals(name, virtual)}
    for losses in run_ranks(pp, label_body, pp, virtual, True):
        assert all(abs(loss - right) > 1e-3 for loss in losses.values()), "swapped labels are noticed"


class Watcher(Recorder):
    """Looks at what is alive at each backward. handed_over: chunks whose outputs are another's input here, and not
    sent.
    """

    def __init__(self, stages: list[ToyStage], handed_over: set[int]) -> None:
        super().__init__(stages)
        self.handed_over = handed_over
        self.begun = [0] * len(stages)
        self.ended = [0] * len(stages)
        self.most_inputs = 0

    def look(self) -> None:
        """What a first layer's weights wait for is the stage's input: it lives until both parts of a
        backward are over.
        """
        self.most_inputs = max(self.most_inputs, sum(ref() is not None for s in self.stages for ref in s.inputs))
        for stage, ended in zip(self.stages, self.ended, strict=True):
            assert all(ref() is None for ref in stage.inputs[:ended]), "an input outlives its backward"

    def before_backward(self, defer: ComputationKey | None) -> None:
        self.look()
        chunk = self.open = self.units[self.announced[-1]][0]
        self.begun[chunk] += 1
        sent = [] if chunk in self.handed_over else self.stages[chunk].outputs[: self.begun[chunk]]
        alive = [i for i, output in enumerate(sent) if not _soon_gone(output)]
        assert not alive, f"outputs {alive} are alive although their gradient has arrived"
        self.holding = None if defer is None else self.deferred.setdefault(defer, [])

    def after_backward(self) -> None:
        assert self.open is not None
        self.ended[self.open] += self.holding is None
        self.holding = self.open = None

    def run_deferred(self, key: ComputationKey) -> None:
        self.look()
        super().run_deferred(key)
        self.ended[key[1]] += 1


def _soon_gone(reference) -> bool:
    """A send's tensor is dropped by another thread once it is received: a moment later."""
    end = time.monotonic() + 5
    while reference() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return reference() is None


def memory_body(rank: int, pp: int, virtual: int, m: int) -> dict[str, int]:
    grid = build_grid(Axes(pp=pp))
    channels = Channels(grid)
    found = {}
    for name in (name for name in SCHEDULES if virtuals(name, virtual)):
        stages = build_stages(rank, pp, virtual, name=name)
        numbers = chunk_map(name, pp, virtual).of(rank)
        watcher = Watcher(stages, {chunk for chunk, number in enumerate(numbers) if number + 1 in numbers})
        engine = build_engine(grid, watcher, channels, name)
        engine.train([micro_batch(i) for i in range(m)], torch.tensor(1.0, dtype=torch.float64), watcher)
        assert all(_soon_gone(ref) for stage in stages for ref in stage.outputs)
        assert all(ref() is None for stage in stages for ref in stage.inputs)
        found[name] = watcher.most_inputs
    return found


@pytest.mark.few(cases=1)
@pytest.mark.parametrize(("pp", "virtual", "m"), [(3, 1, 6), (2, 2, 4), (2, 3, 5)])
def test_outputs_go_after_the_send_and_inputs_after_the_backward(pp, virtual, m):
    found = run_ranks(pp, memory_body, pp, virtual, m)
    for name in found[0]:
        for stage, instructions in enumerate(make_schedule(name, pp, m, virtual)):
            weights = [float(chunk > 0 or stage > 0) for chunk in range(virtual)]  # the embedding has no hidden input
            assert found[stage][name] == peak_activations(instructions, weights), (name, stage)
