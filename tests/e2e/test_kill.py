"""kill -9 of a rank that has come to a known point: what the next run starts from is what it must be, and nobody can
tell from the numbers.
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megazero.checkpoint.manager import find
from megazero.checkpoint.verify import verify
from tests.e2e.command import TINY, Running, by_iteration, children, command, metrics, same, start, wait_until
from tests.e2e.halting import Halt, Launch, forked, whole
from tests.parity.layouts import GEMMA, MIXED, OLMO

EVERY = 4
SECONDS = 240
HOME = ["--pp", 2, "--zero-stage", 1, "--micro-batch-size", 2]
AWAY = (
    ("--pp", 1, "--tp", 2, "--zero-stage", 2, "--micro-batch-size", 1),
    ("--pp", 1, "--tp", 4, "--zero-stage", 0, "--micro-batch-size", 4, "--sequence-parallel"),
)


KINDS = {
    "gemma": (
        *("--num-layers", 3, *GEMMA, "--position-embedding", "rotary", "--no-embedding-layernorm", "--norm", "rmsnorm"),
        *("--activation", "geglu-tanh", "--disable-bias-linear", "--residual-multiplier", 0.5, "--ffn-hidden-size", 48),
    ),
    "olmo": (*OLMO, "--position-embedding", "rotary", "--norm", "rmsnorm", "--activation", "swiglu"),
    "mixed": ("--num-layers", 5, *MIXED, "--position-embedding", "none", "--norm", "rmsnorm", "--activation", "relu2"),
}
"""Models whose layers are of several kinds."""


@dataclass(frozen=True)
class Kill:
    """A run that is killed.

    begins   iteration of the checkpoint that it must have started from; 0: from scratch
    point    where a rank is killed (`halting.POINTS`), in which iteration
    number   at "launch": of the collective before which the rank stands. At "disk": of the change
    saved    iteration of the newest checkpoint that is complete afterwards, as `latest` says
    whom     "rank": the one that stands there. "launcher": the launcher, and its ranks must go with it
    started  "forked", or "torchrun" as users start it
    """

    begins: int
    point: str
    iteration: int
    rank: int
    saved: int
    whom: str = "rank"
    flags: tuple[object, ...] = ()
    started: str = "forked"
    number: int = 0

    def halt(self, pipe: Path) -> Halt:
        where = self.point, self.iteration, self.rank, str(pipe)
        return Launch(*where, self.number) if self.point in ("launch", "disk") else Halt(*where)


def flags_of(folder: Path, corpus: Path, precision: str, steps: int) -> list[object]:
    folder.mkdir()
    data = ["--data-path", corpus, "--data-cache-path", folder.parent / "cache"]
    numbers = f"--split 90,10,0 --hidden-dropout 0.1 --precision {precision} --global-batch-size 8 --eval-iters 0"
    more = f"--train-iters {steps} --lr-warmup-iters 5 --save-interval {EVERY}"
    saves = ["--save", folder / "saved", "--load", folder / "saved", "--metrics-file", folder / "m"]
    return [*TINY, *data, *numbers.split(), *more.split(), *saves]


def started_from(told: str, folder: Path) -> int:
    """The iteration of the checkpoint that the run of this output says it started from."""
    found = re.search(
        r"\bstart (from scratch|\S+/iter_\d+, iteration (\d+))", " ".join(told.split())
    )  # the banner breaks long lines
    assert found is not None and (found[2] is None or str(folder / "saved") in found[1]), told
    return int(found[2] or 0)


def ended(process: int, seconds: float = SECONDS) -> bool:
    """Whether the process of this descriptor ends in time."""
    return bool(select.select([process], [], [], seconds)[0])


def newest(folder: Path) -> int:
    """The iteration of the last line in the metrics file; 0 without one."""
    lines = metrics(folder / "m")
    return int(lines[-1]["iteration"]) if lines else 0


def check_place(kill: Kill, folder: Path, process: Running) -> None:
    """That the run is where it should be, by what it has left on disk so far."""
    if kill.point == "launch" and kill.iteration > kill.begins + 1:
        # Rank 0 writes the line of a step behind the step's last collective. The rank that stands may be in the next
        # step by then, and rank 0 needs nothing of that rank for the line. A run before may have come further.
        wait_until(lambda: newest(folder) == kill.iteration - 1, process)
    found = by_iteration(folder / "m")
    if kill.point == "step":
        assert max(found, default=0) == kill.iteration - 1, "the step before is the last"
    elif kill.point != "launch":
        assert kill.iteration in found
    building = list((folder / "saved").glob(f".tmp-iter_{kill.iteration:07d}-*"))
    assert len(building) == (kill.point in ("write", "manifest", "rename"))
    assert (folder / "saved" / f"iter_{kill.iteration:07d}").exists() == (kill.point in ("latest", "prune", "saved"))
    if kill.point == "write":
        (part,) = building[0].glob(f"fragments-{kill.rank + 1:05d}-of-*.safetensors")
        assert b"0" * 64 in part.read_bytes()[:4096], "the hashes come last"
    if building:
        assert (building[0] / "manifest.json").exists() == (kill.point == "rename")


def kill(
    kill: Kill,
    ranks: int,
    flags: Sequence[object],
    folder: Path,
    check: Callable[[Kill, Path, Running], None] = check_place,
) -> str:
    """Have it run to the point and killed there; what it printed. check: that it is where it should be."""
    pipe, output = folder / "pipe", folder / f"{kill.point}{kill.iteration}"
    output.unlink(missing_ok=True)
    os.mkfifo(pipe)
    reached = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    halt = kill.halt(pipe)
    process: Running
    if kill.started == "forked":
        process = forked(ranks, [*flags, *kill.flags], output, [halt])
    else:
        program = [halt.word(), *flags, *kill.flags]
        process = start(command(ranks, program, launcher=True, script="tests/e2e/halting.py"), output)
    assert process.pid is not None
    launcher = os.pidfd_open(process.pid)
    assert select.select([reached, launcher], [], [], SECONDS)[0] == [reached], (
        f"it did not come to {kill}:\n{output.read_text()[-4000:]}"
    )
    victim = int(os.read(reached, 64))
    members = children(process.pid)
    assert victim in members and len(members) == ranks
    living = [os.pidfd_open(member) for member in members]
    assert not any(ended(member, 0) for member in living), "all ranks run"
    check(kill, folder, process)
    os.kill(victim if kill.whom == "rank" else process.pid, signal.SIGKILL)
    for file in (*living, launcher):
        assert ended(file), f"after the {kill.whom} was killed, others go on for ever:\n{output.read_text()[-4000:]}"
        os.close(file)
    os.close(reached)
    pipe.unlink()
    assert _status(process) == (1 if kill.whom == "rank" else -signal.SIGKILL)
    return output.read_text()


def _status(process: Running) -> int | None:
    if isinstance(process, subprocess.Popen):
        return process.wait()
    process.join()
    return process.exitcode


def check_folder(folder: Path, saved: int) -> None:
    """What is named a checkpoint is one, to the last hash, and `latest` names the one that must be the newest."""
    found = find(folder / "saved")
    assert (0 if found is None else found.progress["iteration"]) == saved
    for path in (folder / "saved").glob("iter_*"):
        opened = find(path)
        assert opened is not None and verify(path, opened.manifest, 1, lambda _: None) == []


def carry_out(kills: Sequence[Kill], ranks: int, flags: Sequence[object], folder: Path) -> None:
    """One after the other; each starts from what the one before has left."""
    for each in kills:
        told = kill(each, ranks, flags, folder)
        assert started_from(told, folder) == each.begins, each
        check_folder(folder, each.saved)


def lines_of(folder: Path, steps: int) -> dict[int, list[dict[str, float]]]:
    found = by_iteration(folder / "m")
    assert sorted(found) == list(range(1, steps + 1))
    return found


def check_bitwise(folder: Path, reference: Path, steps: int) -> None:
    expected = lines_of(reference, steps)
    for iteration, lines in lines_of(folder, steps).items():
        assert all(same(line) == same(expected[iteration][0]) for line in lines), iteration


@pytest.mark.slow
def test_killed_on_one_layout_is_bitwise(tmp_path: Path, corpus: Path) -> None:
    steps, reference, folder = 14, tmp_path / "reference", tmp_path / "killed"
    whole(4, [*flags_of(reference, corpus, "bf16", steps), *HOME], reference)
    flags = flags_of(folder, corpus, "bf16", steps)
    kills = [
        Kill(0, "step", 2, rank=3, saved=0),
        Kill(0, "step", 6, rank=1, saved=4, whom="launcher"),
        Kill(4, "write", 8, rank=2, saved=4, whom="launcher"),
        Kill(4, "rename", 8, rank=0, saved=4),
        Kill(4, "latest", 8, rank=0, saved=4),
        Kill(4, "saved", 8, rank=3, saved=8),
        Kill(8, "write", 12, rank=1, saved=8, flags=("--async-save",)),
    ]
    carry_out(kills, 4, [*flags, *HOME], folder)
    assert started_from(whole(4, [*flags, *HOME], folder), folder) == 8
    again = whole(4, [*flags, *HOME], folder)
    assert started_from(again, folder) == steps and "nothing left to train" in again
    check_bitwise(folder, reference, steps)


def kills_in_steps(count: int, steps: int, launches: Sequence[int], seed: int) -> list[Kill]:
    """Each in a step that the run before has not saved, before any collective of any rank, or of the launcher there.

    launches: by rank, the collectives of a step.
    """
    draw, saved, found = random.Random(seed), 0, []
    for _ in range(count):
        iteration, rank = draw.randint(saved + 1, min(saved + EVERY + 2, steps)), draw.randrange(len(launches))
        number, whom = draw.randint(1, launches[rank]), draw.choice(("rank", "rank", "launcher"))
        begins, saved = saved, max(saved, (iteration - 1) // EVERY * EVERY)
        found.append(Kill(begins, "launch", iteration, rank, saved, whom, number=number))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in range(3)), 3])
def test_killed_ten_times_in_the_midst_of_a_step_is_bitwise(
    stage: int, seed: int, tmp_path: Path, corpus: Path
) -> None:
    """While parameters are gathered and gradients reduced: what a step has done so far leaves no trace."""
    steps, reference, folder = 14, tmp_path / "reference", tmp_path / "killed"
    layout = ["--pp", 2, "--zero-stage", stage, "--micro-batch-size", 2, "--bucket-size", 800]
    files = [tmp_path / f"launches-{rank}" for rank in range(4)]
    tallies = [Launch("launch", 2, rank, str(file)) for rank, file in enumerate(files)]
    whole(4, [*flags_of(reference, corpus, "bf16", steps), *layout], reference, tallies)
    launches = [int(file.read_text()) for file in files]
    assert min(launches) > 4, "gathers, reductions, the norm"
    flags = [*flags_of(folder, corpus, "bf16", steps), *layout]
    kills = kills_in_steps(10, steps, launches, seed)
    carry_out(kills, 4, flags, folder)
    assert started_from(whole(4, flags, folder), folder) == kills[-1].saved
    check_bitwise(folder, reference, steps)


def check_to_rounding(folder: Path, reference: Path, steps: int) -> None:
    """For runs in float64 on several layouts."""
    expected = lines_of(reference, steps)
    for iteration, lines in lines_of(folder, steps).items():
        for line in lines:
            assert same(line) == pytest.approx(same(expected[iteration][0]), rel=1e-9, abs=0), iteration


@pytest.mark.slow
def test_killed_on_other_layouts(tmp_path: Path, corpus: Path) -> None:
    steps, reference, folder = 10, tmp_path / "reference", tmp_path / "killed"
    whole(4, [*flags_of(reference, corpus, "fp64", steps), *HOME], reference)
    flags = flags_of(folder, corpus, "fp64", steps)
    kills = [
        Kill(0, "step", 6, rank=2, saved=4),
        Kill(4, "write", 8, rank=3, saved=4, flags=AWAY[0], whom="launcher"),
        Kill(4, "saved", 8, rank=1, saved=8, flags=AWAY[1]),
    ]
    carry_out(kills, 4, [*flags, *HOME], folder)
    assert started_from(whole(4, [*flags, *HOME], folder), folder) == 8
    check_to_rounding(folder, reference, steps)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("kinds", KINDS)
def test_layers_of_several_kinds_killed_on_other_layouts(kinds: str, tmp_path: Path, corpus: Path) -> None:
    """In the midst of a step and of a save; tp, pp and the ZeRO stage differ at each resume."""
    steps, reference, folder = 10, tmp_path / "reference", tmp_path / "killed"
    whole(4, [*flags_of(reference, corpus, "fp64", steps), *KINDS[kinds], *HOME], reference)
    flags = [*flags_of(folder, corpus, "fp64", steps), *KINDS[kinds]]
    kills = [
        Kill(0, "launch", 6, rank=2, saved=4, flags=tuple(HOME), number=3),
        Kill(4, "write", 8, rank=3, saved=4, flags=AWAY[0]),
        Kill(4, "rename", 8, rank=0, saved=4, flags=AWAY[1]),
    ]
    carry_out(kills, 4, flags, folder)
    assert started_from(whole(4, [*flags, "--tp", 2, "--pp", 2, "--zero-stage", 3], folder), folder) == 4
    check_to_rounding(folder, reference, steps)


@pytest.mark.slow
def test_killed_at_every_point_of_a_save_beside_the_run(tmp_path: Path, corpus: Path) -> None:
    """The writing thread stands at the point while training goes on; one process, so that the thread does every part
    itself.
    """
    steps, reference, folder = 14, tmp_path / "reference", tmp_path / "killed"
    whole(1, flags_of(reference, corpus, "bf16", steps), reference)
    flags = [*flags_of(folder, corpus, "bf16", steps), "--async-save", "--keep-last-k", 1]
    kills = [
        Kill(0, "write", 4, rank=0, saved=0),
        Kill(0, "manifest", 4, rank=0, saved=0, whom="launcher", started="torchrun"),
        Kill(0, "rename", 4, rank=0, saved=0),
        Kill(0, "write", 8, rank=0, saved=4),
        Kill(4, "latest", 8, rank=0, saved=4),
        Kill(4, "prune", 8, rank=0, saved=8),
        Kill(8, "write", 12, rank=0, saved=8),
    ]
    carry_out(kills, 1, flags, folder)
    assert started_from(whole(1, flags, folder), folder) == 8
    left = sorted(path.name for path in (folder / "saved").iterdir())
    assert left == ["iter_0000014", "latest", "run.yaml", "run_token"]
    check_bitwise(folder, reference, steps)
