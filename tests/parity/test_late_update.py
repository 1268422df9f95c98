"""--late-update changes no bit of a run: losses, norms, evaluations, weights, moments and saved tensors are those of
updates on time, with clipping at every step and overflows among them.

Layouts against one process: tests/parity/test_layouts.py and test_zero3.py have late updates as an axis.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.parameter import Parameter
from megazero.train.job import Job
from megazero.train.probe import probe_loss
from megazero.zero.owed import OwedUpdates
from megazero.zero.placement import Column
from tests.parameters import held_fragments, values_of
from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.ranks import run_ranks

STEPS, CLIP = 12, 0.001
NUMBERS = [
    *("--global-batch-size", "8", "--rampup-batch-size", "4", "4", "16", "--lr", "1e-2", "--lr-warmup-iters", "5"),
    *("--clip-grad", str(CLIP), "--bucket-size", "4000", "--eval-interval", "5", "--log-interval", "1"),
]
"""Each step is clipped, adapters' too. The rate, the batch and with it the number of micro-batches change
from step to step.
"""
FP16 = "--precision fp16 --hysteresis 1 --loss-scale-window 2 --initial-loss-scale 1048576"
"""The scale doubles after two steps, and then it overflows."""
LATE = ["--late-update"]


class InfAt:
    """The gradient target of a parameter that makes some steps' gradients infinite."""

    def __init__(self, job: Job, target: GradientTarget, steps: set[int]) -> None:
        self.job, self.target, self.steps = job, target, steps

    def add(self, write: Write) -> None:
        """What `mpu.gradient.GradientTarget.add` does, and then perhaps the fault."""

        def write_and_spoil(into: Tensor, add: bool) -> None:
            write(into, add)
            if self.job.trainer.position.iteration + 1 in self.steps:
                into.fill_(float("inf"))

        self.target.add(write_and_spoil)


def spoil(job: Job, steps: set[int]) -> None:
    """Have the last matrix of this rank make these steps infinite."""
    matrices = [p for p in nn.ModuleList(job.stages).parameters() if isinstance(p, Parameter) and p.dim() == 2]
    trained = [matrix for matrix in matrices if matrix.gradient_target is not None]
    trained[-1].gradient_target = InfAt(job, trained[-1].gradient_target, steps)


def digest(tensors: Iterator[Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.detach().double().numpy().tobytes()).hexdigest() for tensor in tensors]


class Told(NamedTuple):
    """The numbers of a step or of an evaluation as text (NaN is NaN). clipped, skipped: whether a step was."""

    numbers: str
    iteration: int
    clipped: bool = False
    skipped: bool = False


class Evaluations:
    """A sink that keeps every step and every evaluation."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def step(self, record: Any) -> None:
        numbers = repr((record.loss, record.grad_norm, record.lr, record.loss_scale))
        self.told.append(Told(numbers, record.iteration, not record.grad_norm <= CLIP, record.skipped))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self.told.append(Told(repr(losses), iteration))

    def note(self, text: str) -> None: ...
    def flush(self, durable: bool) -> None: ...
    def close(self) -> None: ...


class Bits(NamedTuple):
    """What a run leaves on a rank. made: how many updates were made in the next step, and how many alone."""

    told: list[Told]
    state: list[str]
    steps: float
    made: tuple[int, int]


@contextmanager
def counted(owed: OwedUpdates) -> Iterator[list[int]]:
    """Count the steps whose updates are made in the next one, and those that are settled."""
    found, take, settle = [0, 0], owed.take, owed.settle

    def taken() -> Any:
        found[0] += owed._left is not None
        return take()

    def settled() -> None:
        found[1] += owed._left is not None
        settle()

    owed.take, owed.settle = taken, settled  # type: ignore[method-assign]
    yield found
    del owed.take, owed.settle


def bits_on_rank(rank: int, size: int, flags: list[str], infinite: set[int]) -> Bits:
    job, _ = job_on_rank(rank, size, flags)
    told = Evaluations()
    job.trainer.log._sinks = (told,)
    if rank == size - 1:
        spoil(job, infinite)
    with counted(job.state.model.owed) as made:
        job.fit()
    state = digest(  # one portion after the other: state on disks is there for one at a time
        tensor
        for portion in job.state.optimizer.portions()
        for fragment in portion
        for tensor in (fragment.weight, fragment.exp_avg, fragment.exp_avg_sq)
        if tensor is not None
    )
    with job.state.model.reading():
        state += digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))
    job.close()
    return Bits(told.told, state, float(job.state.optimizer.step_count), (made[0], made[1]))


def saved(folder: Path) -> dict[str, bytes]:
    """The tensors of all checkpoints, by name of the file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def equal(ranks: int, flags: list[str], infinite: set[int], folder: Path) -> list[Bits]:
    """The bits of a run on time, on all ranks; those of one with late updates must be the same, and what both save."""
    on_time, late = (
        run_ranks(ranks, bits_on_rank, ranks, [*flags, *words, "--save", str(folder / name)], infinite)
        for name, words in (("on time", []), ("late", LATE))
    )
    for own, other in zip(on_time, late, strict=True):
        assert own[:3] == other[:3]
        assert own.made == (0, 0) and other.made[0] > 0 < other.made[1]
    assert saved(folder / "on time") == saved(folder / "late") != {}
    return on_time


class Case(NamedTuple):
    """A layout. infinite: steps in which a gradient is infinite. lora: whether adapters are trained."""

    ranks: int
    words: str
    infinite: tuple[int, ...] = ()
    lora: bool = False


UNTIED = "--untie-embeddings-and-output-weights"
CASES = {
    "one rank": Case(1, FP16),
    "tp, sequence parallel": Case(2, "--tp 2 --sequence-parallel --precision bf16", (3, 4, 9)),
    "ZeRO-1, tied over two stages": Case(4, f"--pp 2 --zero-stage 1 {FP16}"),
    "ZeRO-1, no overlap": Case(2, "--zero-stage 1 --no-overlap --precision fp64", (2, 7)),
    "ZeRO-2, zb-h1, tied": Case(4, f"--pp 2 --zero-stage 2 --pipeline-schedule zb-h1 {FP16}"),
    "ZeRO-1, zb-v, tied": Case(4, f"--pp 2 --virtual-stages 2 --pipeline-schedule zb-v --zero-stage 1 {FP16}"),
    "ZeRO-2, zb-v, untied, recompute": Case(
        4,
        "--pp 2 --virtual-stages 2 --pipeline-schedule zb-v --zero-stage 2 --precision bf16 "
        f"--recompute-granularity full {UNTIED}",
        (2, 6),
    ),
    "ZeRO-3, interleaved": Case(4, f"--pp 2 --virtual-stages 2 --zero-stage 3 {FP16}"),
    "ZeRO-3, hybrid, tp": Case(8, f"--tp 2 --zero-stage 3 --zero-shard-size 2 {FP16}"),
    "ZeRO-3, everything kept": Case(
        2,
        "--zero-stage 3 --zero3-regather step --zero3-gathered-bytes 1GB --zero3-persist-below 100 --precision bf16",
        (1, 2, 8),
    ),
    "ZeRO-0, hybrid, three stages": Case(6, f"--pp 3 --zero-shard-size 1 {FP16}"),
    "blocks of int8, error feedback": Case(
        2,
        "--zero-stage 1 --zero-quantized-weights --zero-quantized-gradients int8 --zero-gradient-error-feedback "
        f"{FP16}",
    ),
    "ZeRO-3, blocks of int8": Case(
        2, f"--zero-stage 3 --zero-quantized-weights --zero-quantized-gradients int4 {FP16}"
    ),
    "FP8, delayed": Case(2, "--hidden-size 32 --seq-length 16 --fp8 delayed --zero-stage 2 --precision bf16", (5,)),
    "SGD, dropout": Case(2, f"--optimizer sgd --zero-stage 1 --hidden-dropout 0.1 --attention-dropout 0.1 {FP16}"),
    "Adam with L2 decay, gpipe": Case(
        2, f"--optimizer adam --pp 2 --virtual-stages 2 --pipeline-schedule gpipe {FP16}"
    ),
    "LoRA, ZeRO-3, two stages": Case(4, f"--pp 2 --zero-stage 3 --lora-rank 3 {FP16}", lora=True),
    "LoRA, ZeRO-1": Case(2, f"--zero-stage 1 --lora-rank 3 {FP16}", lora=True),
}


@pytest.fixture(scope="module")
def flags_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[str]]:
    """The flags of a model, whole or with adapters on a trained one."""
    folder = tmp_path_factory.mktemp("late")
    model, data = small_model(4, heads=4), data_flags(corpus, folder / "cache")

    def flags(lora: bool) -> list[str]:
        if not lora:
            return [*model, *NUMBERS, *data, "--micro-batch-size", "1", "--train-iters", str(STEPS)]
        base = folder / "base"
        if not base.exists():
            train(1, [*model, *data, "--global-batch-size", "4", "--train-iters", "1", "--save", str(base)])
        numbers = [*NUMBERS, "--micro-batch-size", "1", "--train-iters", str(STEPS)]
        return [*numbers, *data, "--init-from", str(base), "--seq-length", "12"]

    return flags


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_late_update_changes_no_bit(case: Case, flags_of: Callable[[bool], list[str]], tmp_path: Path) -> None:
    """With evaluations, saves and overflows in the midst of it. Each step is clipped, and some are skipped."""
    flags = [*flags_of(case.lora), *case.words.split(), "--save-interval", "8", *["--async-save"] * (case.ranks == 2)]
    on_time = equal(case.ranks, flags, {*case.infinite}, tmp_path)
    check_steps(on_time[0], STEPS, {*case.infinite})


def check_steps(found: Bits, count: int, infinite: set[int]) -> None:
    """Each step was clipped, those with an infinity and perhaps others were skipped, and most were not."""
    skipped = {told.iteration for told in found.told if told.skipped}
    assert {told.iteration for told in found.told if told.clipped} == {*range(1, count + 1)}
    assert infinite <= skipped and 0 < len(skipped) < 0.7 * count
    assert found.steps == count - len(skipped)


LONG = {
    "two stages, ZeRO-3": (4, "--pp 2 --zero-stage 3"),
    "two stages, ZeRO-1, zb-h1": (4, "--pp 2 --zero-stage 1 --pipeline-schedule zb-h1"),
    "tp, ZeRO-2": (4, "--tp 2 --zero-stage 2"),
    "ZeRO-0": (2, "--zero-stage 0"),
    "ZeRO-3, optimizer on disks": (2, "--zero-stage 3 --offload-optimizer nvme --nvme-buffer-bytes 300KB --nvme-path"),
}


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", LONG)
def test_many_steps_with_an_infinity_in_every_tenth(
    name: str, flags_of: Callable[[bool], list[str]], seed: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """500 steps in `make test-all`, else 50. The window is large, so the scale overflows at its own steps only now and
    then.
    """
    (ranks, words), steps = LONG[name], 500 if pytestconfig.option.depth == "all" else 50
    infinite = {*random.Random(seed).sample(range(1, steps + 1), steps // 10)}
    flags = [*flags_of(False), *FP16.split(), "--loss-scale-window", "20", "--train-iters", str(steps)]
    flags += ["--num-layers", "2", "--rampup-batch-size", "none", "--global-batch-size", "4"]
    flags += ["--eval-interval", str(steps // 4 + 5), *words.split()]
    if words.endswith("--nvme-path"):
        flags.append(str(tmp_path))
    on_time = equal(ranks, flags, infinite, tmp_path)
    check_steps(on_time[0], steps, infinite)


def visits(rank: int, size: int, flags: list[str]) -> list[Any]:
    """What stands between the steps of a run, and what it sees: parameters, tensors that a save writes, losses of
    evaluation, a warm-up.
    """
    job, _ = job_on_rank(rank, size, flags)
    trainer, model = job.trainer, job.state.model
    engine: Any = trainer.engine

    def parameters() -> list[str]:
        with model.reading():
            return digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))

    def whole() -> list[str]:
        model.wait_parameters()
        return digest(model.columns[Column.PARAMETER].held(number) for number in range(len(model.buckets)))

    def weights() -> list[str]:
        return digest(fragment.weight for fragment in held_fragments(job.state.optimizer))

    def warm_up() -> None:
        engine.is_warm[True] = False

    looks: list[Callable[[], object] | None] = [
        None,
        parameters,
        None,
        whole,
        weights if job.state.optimizer.resident else parameters,
        None,
        None,
        trainer.evaluate,
        lambda: probe_loss(job.run, job.probe_engine, job.grid),
        warm_up,
        None,
        lambda: job.state.record(trainer.position),
        parameters,
    ]
    seen: list[Any] = []
    for look in looks:
        values = trainer.train_step(stop=False)
        left = model.owed._left is not None
        assert left == job.run.parallel.late_update
        seen += [float(values.loss), float(values.grad_norm), None if look is None else look()]
        if look not in (None, warm_up, looks[-2]):
            assert model.owed._left is None, "the updates have been made"
    return seen


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize(("zero_stage", "tier"), [("0", "none"), ("1", "none"), ("3", "none"), ("1", "nvme")])
def test_whoever_reads_parameters_sees_updated_ones(
    zero_stage: str, tier: str, flags_of: Callable[[bool], list[str]], tmp_path: Path
) -> None:
    """And a warm-up between two steps, whose gradients are thrown away, loses nothing."""
    flags = [*flags_of(False), "--precision", "bf16", "--zero-stage", zero_stage, "--train-iters", "50"]
    flags += ["--offload-optimizer", tier, *(("--nvme-path", str(tmp_path)) if tier == "nvme" else ())]
    on_time, late = (run_ranks(2, visits, 2, words) for words in (flags, [*flags, *LATE]))
    assert on_time == late
    states = [seen for seen in on_time[0] if isinstance(seen, list)]
    assert len(states) == 4 and all(one != other for one, other in pairwise(states))


@pytest.mark.slow
def test_a_run_goes_on_late_or_on_time(flags_of: Callable[[bool], list[str]], tmp_path: Path) -> None:
    """Late, on time, late, from one checkpoint to the next, beside a run on time that never stops. What it has saved on
    its way has the same bytes.
    """
    flags = [*flags_of(False), *FP16.split(), "--zero-stage", "2", "--save-interval", "4"]
    whole = run_ranks(2, bits_on_rank, 2, [*flags, "--save", str(tmp_path / "whole")], set())
    told: list[Told] = []
    for words in (LATE, [], LATE):
        save = str(tmp_path / "parts")
        more = ["--save", save, "--load", save, "--exit-interval", "4", *words]
        parts = run_ranks(2, bits_on_rank, 2, [*flags, *more], set())
        told += parts[0].told
    assert told == whole[0].told
    assert [part[1:3] for part in parts] == [own[1:3] for own in whole]
    assert saved(tmp_path / "whole") == saved(tmp_path / "parts") and len(saved(tmp_path / "whole")) >= 3


def test_updates_are_made_once() -> None:
    owed, made = OwedUpdates(), list[Any]()
    owed.settle()
    assert owed.take() is None and not made
    first, second = object(), object()
    owed.leave(first, made.append)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="have not been made"):
        owed.leave(second, made.append)  # type: ignore[arg-type]
    assert owed.take() is first and owed.take() is None and not made
    owed.leave(second, made.append)  # type: ignore[arg-type]
    owed.settle()
    owed.settle()
    assert made == [second] and owed.take() is None
