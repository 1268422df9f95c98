"""All ranks launch in one order: faults that are planted are found, nothing is launched unseen, and whole runs with
saves and a resume have none (`tests.parity.training.train` looks at every run that it makes).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.p2p import Channels, Tag
from megazero.program.instruction import Instruction, Op
from megazero.program.step import Lists
from megazero.train.trainer import Trainer
from tests.launches import COLLECTIVES, RULES, Launch, Line, Trace, check, deadlock, differences, recorded_launches
from tests.parity.training import data_flags, job_on_rank, recorded_on_rank, small_model
from tests.parity.ways import Way
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
AB, ALL = Line((0, 1), "ab"), Line((0, 1, 2), "all")
X, Y, Z = Line((0, 1), "x"), Line((1, 2), "y"), Line((2, 0), "z")
THERE, BACK = Line((0, 1), "hidden states"), Line((1, 0), "gradients")


def trace(*events: Line | int) -> Trace:
    return {"MainThread": [event if isinstance(event, int) else Launch(event, "x") for event in events]}


# --- on a toy --------------------------------------------------------------------------------------------------------


def toy(rank: int, fault: str) -> Trace:
    """Three all-reduces and two messages, one rank of which is wrong."""
    grid = build_grid(Axes(tp=3), shared_memory=False)
    counts = [4, 5, 6]
    if rank == 1:
        counts = {"swapped": [5, 4, 6], "count": [4, 5, 7], "left out": [4, 6]}.get(fault, counts)
    with recorded_launches(carried=False) as found:
        for count in counts:
            collectives.all_reduce(torch.ones(count), grid.tp).wait()
        collectives.all_reduce(torch.ones(4), grid.tp, "max" if (rank, fault) == (2, "op") else "sum").wait()
        collectives.broadcast(torch.ones(2, dtype=torch.int64), grid.tp, int((rank, fault) == (2, "source"))).wait()
        collectives.all_gather(torch.ones(6), torch.ones(2), grid.tp).wait()
    return found


FAULTS = {
    "none": None,
    "swapped": (0, "all_reduce, 4 float32, op sum", 1, "all_reduce, 5 float32, op sum"),
    "count": (2, "all_reduce, 6 float32, op sum", 1, "all_reduce, 7 float32, op sum"),
    "left out": (1, "all_reduce, 5 float32, op sum", 1, "all_reduce, 6 float32, op sum"),
    "op": (3, "all_reduce, 4 float32, op sum", 2, "all_reduce, 4 float32, op max"),
    "source": (4, "broadcast, 2 int64, source_index 0", 2, "broadcast, 2 int64, source_index 1"),
}


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_names_rank_group_position_and_both_launches(fault: str) -> None:
    found, wanted = differences(run_ranks(3, toy, fault)), FAULTS[fault]
    if wanted is None:
        assert found == []
        return
    number, ours, rank, theirs = wanted
    assert found == [f"group 0 of ranks [0, 1, 2]: launch {number} is {ours} on rank 0, and {theirs} on rank {rank}"]


def messages(rank: int, axes: Axes, swapped: bool) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "is_on_host", False)
        grid = build_grid(axes)
        channels = Channels(grid)
        with recorded_launches() as found:
            order = [1, 0] if swapped and grid.at.pp else [0, 1]
            for number in order:
                tensor = torch.full((3,), float(number))
                if grid.at.pp:
                    channels.receive(tensor, 0, Tag(False, 0, number)).wait()
                else:
                    channels.send(tensor, 1, Tag(False, 0, number))
            channels.flush()
    return found


def test_messages_are_matched_by_order() -> None:
    """NCCL takes the second message for the first; gloo does too where it has no tags, and nobody notices."""
    check(run_ranks(4, messages, Axes(pp=2, dp=2), False))
    assert differences(run_ranks(2, messages, Axes(pp=2), True)) == [
        "hidden states from rank 0 to rank 1: launch 0 is the hidden states of micro-batch 0 at boundary 0, 3 float32 "
        "on rank 0, and the hidden states of micro-batch 1 at boundary 0, 3 float32 on rank 1"
    ]


@pytest.mark.parametrize(
    ("traces", "stopped"),
    [
        pytest.param([trace(AB, 0, ALL, 2), trace(AB, 0, ALL, 2), trace(ALL, 0)], [], id="one order"),
        pytest.param([trace(AB, 0, ALL, 2), trace(ALL, 0, AB, 2), trace(ALL, 0)], ["streams"], id="waits at once"),
        pytest.param([trace(AB, ALL, 0, 1), trace(ALL, AB, 0, 1), trace(ALL, 0)], ["one at a time"], id="waits later"),
        pytest.param([trace(X, Z), trace(Y, X), trace(Z, Y)], ["one at a time"], id="three groups in a circle"),
        pytest.param([trace(THERE, BACK, 1), trace(BACK, THERE, 1)], [], id="two messages that cross"),
        pytest.param(
            [trace(THERE, THERE, BACK, BACK), trace(BACK, BACK, THERE, THERE)], ["one queue"], id="two each way, behind"
        ),
        pytest.param([trace(THERE, 0, BACK), trace(BACK, 0, THERE)], ["streams"], id="waits before it receives"),
    ],
)
def test_orders_across_groups(traces: list[Trace], stopped: list[str]) -> None:
    """What stops with streams stops under every rule; the others stop where launches wait for each other."""
    found = {rule for rule in RULES if deadlock(traces, rule)}
    assert found == (set(RULES) if stopped == ["streams"] else set(stopped))
    if stopped == []:
        return
    with pytest.raises(AssertionError, match=r"rank \d waits for launch \d of .*, which ranks \[\d\] have not begun"):
        check(traces)


# --- in the program --------------------------------------------------------------------------------------------------

FLAGS = [
    *small_model(4, heads=4),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--precision", "fp32", "--bucket-size", "2000"),
    *("--train-iters", "2", "--eval-iters", "1", "--lr-decay-iters", "4"),
]


def upside_down(
    lists: Lists, micro_batches: int, *, owed: bool = False, early: bool = False
) -> tuple[Instruction, ...]:
    """The list with the reductions after all computations, in the opposite order."""
    listed = TRAINING(lists, micro_batches, owed=owed, early=early)
    norm = next(at for at, i in enumerate(listed) if i.op is Op.NORM)
    reductions = [i for i in listed if i.op is Op.REDUCE]
    return (*(i for i in listed[:norm] if i.op is not Op.REDUCE), *reductions[::-1], *listed[norm:])


def alone(trainer: Trainer, *values: Tensor | float) -> list[Tensor]:
    return [torch.as_tensor(value, dtype=torch.float64) for value in values]


TRAINING = Lists.training
PLANTS: dict[str, tuple[type, str, Callable[..., object], str]] = {
    "a rank reduces its first bucket first": (
        Lists,
        "training",
        upside_down,
        r"ranks \[0, 1\]: launch \d+ is all_reduce, \d+ float32, op sum on rank 0, and all_reduce, \d+ float32, op sum",
    ),
    "a rank sums no norm": (
        Trainer,
        "reduce",
        alone,
        r"ranks \[0, 1\]: launch \d+ is all_reduce, 4 float64, op sum on rank 0, and all_reduce, 1 float64, op max",
    ),
}


def planted(rank: int, flags: list[str], name: str) -> Trace:
    """The launches of a step that communicates nothing; rank 1 has the fault."""
    job, _ = job_on_rank(rank, 2, flags)
    with pytest.MonkeyPatch.context() as patch, recorded_launches(carried=False) as found:
        if rank == 1 and name:
            target, method, replacement, _ = PLANTS[name]
            patch.setattr(target, method, replacement)
        job.trainer.train_step(stop=False)
    return found


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("name", ["", *PLANTS])
def test_a_fault_of_the_program_is_found(name: str, corpus: Path, tmp_path: Path) -> None:
    traces = run_ranks(2, planted, [*FLAGS, *data_flags(corpus, tmp_path)], name)
    if not name:
        check(traces)
        return
    with pytest.raises(AssertionError, match=PLANTS[name][3]):
        check(traces)


@pytest.mark.slow
def test_a_run_with_saves_and_its_resume_launch_in_one_order(corpus: Path, tmp_path: Path) -> None:
    """With NCCL's ways of the program; the second run resumes with another schedule and saves in the background."""
    flags = [*FLAGS, "--pp", "2", "--tp", "2", "--save", str(tmp_path / "saved"), *data_flags(corpus, tmp_path)]
    flags += ["--save-interval", "1", "--eval-interval", "1", "--sequence-parallel"]
    more = ["--load", str(tmp_path / "saved"), "--train-iters", "3", "--async-save", "--pipeline-schedule", "zb-h1"]
    for words in (flags, [*flags, *more]):
        traces = [found for _, found in run_ranks(4, recorded_on_rank, 4, words, "auto", Way(as_nccl=True))]
        check(traces)
        kinds = {event.what.partition(",")[0] for event in traces[0]["MainThread"] if isinstance(event, Launch)}
        assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
        assert any("the gradient of micro-batch 1" in kind for kind in {e.what for e in launches(traces[0])})
    assert len(traces[0]) == 2, "the background's launches are in a list of their own"


def launches(trace: Trace) -> list[Launch]:
    return [event for events in trace.values() for event in events if isinstance(event, Launch)]


# --- nothing is launched unseen --------------------------------------------------------------------------------------

LAUNCHES = {
    *(*COLLECTIVES, "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("reduce", "gather", "scatter", "all_gather_object", "broadcast_object_list", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single", "monitored_barrier"),
}
OUTSIDE = {
    # What is recorded; before the functions are the names that older versions of torch have for two of them.
    "megazero/mpu/collectives.py": ["", "", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"],
    # What is recorded, and the first message of a channel.
    "megazero/mpu/p2p.py": ["Channels"] * 4,
    # When a group of gloo is made.
    "megazero/mpu/shared_memory.py": ["_gathered"],
    # After training.
    "megazero/launch.py": ["launch"],
    # No run: what messages take is measured.
    "megazero/calibrate/measuring.py": ["_stages", "_stages"],
    # Ahead of every group: the values of parameters that no engine has.
    "megazero/deepspeed/zero.py": ["_written"],
}


def launches_named(source: str) -> Iterator[str]:
    """The function around each launch of torch.distributed that a file names, and each launch that it imports."""
    for outer in ast.parse(source).body:
        for node in ast.walk(outer):
            if isinstance(node, ast.Attribute) and node.attr in LAUNCHES:
                if ast.unparse(node.value) in ("dist", "torch.distributed"):
                    yield getattr(outer, "name", "")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                yield from (f"import {each.name}" for each in node.names if each.name in LAUNCHES)
            elif isinstance(node, ast.Import):
                yield from (
                    f"import as {each.asname}"
                    for each in node.names
                    if each.name.startswith("torch.distributed") and each.asname not in (None, "dist")
                )


@pytest.mark.slow
def test_nothing_is_launched_past_the_recorder() -> None:
    found = {}
    for path in sorted((ROOT / "megazero").rglob("*.py")):
        if names := sorted(launches_named(path.read_text())):
            found[str(path.relative_to(ROOT))] = names
    assert found == OUTSIDE


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(x):\n    dist.all_reduce(x)", ["f"]),
        ("class A:\n    def f(self):\n        torch.distributed.send(1, 2)", ["A"]),
        ("from torch.distributed import all_reduce", ["import all_reduce"]),
        ("import torch.distributed as other", ["import as other"]),
        ("import torch.distributed as dist\nfrom torch.distributed import ProcessGroup", []),
    ],
)
def test_a_launch_under_any_name_is_seen(source: str, names: list[str]) -> None:
    assert list(launches_named(source)) == names
