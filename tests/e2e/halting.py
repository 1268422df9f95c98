"""The program with named points at which one rank stops, so that a test can kill it there, or let it continue after a
change.

A test chooses the point (`Halt`). The rank that reaches it writes its process id into a pipe and does nothing more; the
others continue until they need it. The points wrap the program's own functions in the process of the rank, so the
program contains no code for them.

    torchrun ... tests/e2e/halting.py HALT FLAGS...     # a run as users start it
    forked(ranks, flags, output, [halt])                # without Python's and torch's start, most of a tiny run
    on_nodes(folders, flags)                            # the same without a launcher, one rank in each folder
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megazero.checkpoint import folder, save_phases
from megazero.checkpoint.blocks import BlockWriter
from megazero.cli.pretrain import start_process, train
from megazero.disk import swap, transports
from megazero.disk.swap import SwapRecord
from megazero.disk.swap_file import SwapFile
from megazero.launch import exit_now, exit_status
from megazero.mpu import collectives
from megazero.mpu.meeting import Environment
from megazero.system import allocator
from megazero.system.loopback import free_port
from megazero.train.save_policy import SavePolicy
from megazero.train.trainer import Trainer
from megazero.zero.optimizer import ShardedOptimizer
from tests.disk.test_backend import forbid_io_uring
from tests.disk.test_faults import interrupted


@dataclass(frozen=True)
class Halt:
    """The point and the iteration at which a rank stops. The named pipe gets its process id."""

    point: str
    iteration: int
    rank: int
    pipe: str

    def word(self) -> str:
        return f"{self.point}:{self.iteration}:{self.rank}:{self.pipe}"

    @classmethod
    def read(cls, word: str) -> Halt:
        point, iteration, rank, pipe = word.split(":", 3)
        return cls(point, int(iteration), int(rank), pipe)

    def stand(self) -> None:
        """Write the process id, and stop. If two threads come, the first one writes."""
        Path(self.pipe).write_text(f"{os.getpid()}\n")
        threading.Event().wait()


@dataclass(frozen=True)
class Pause(Halt):
    """A halt after which the rank continues once it can read a byte from the named pipe `answer`."""

    @property
    def answer(self) -> str:
        return f"{self.pipe}.answer"

    def stand(self) -> None:
        Path(self.pipe).write_text(f"{os.getpid()}\n")
        with open(self.answer, "rb", buffering=0) as answer:
            answer.read(1)


@dataclass(frozen=True)
class Jump(Halt):
    """A point at which the rank does not stop. From here on the time of day that it reads is wrong by some hours."""

    hours: int = 0

    def stand(self) -> None:
        seconds, nanoseconds, wrong = time.time, time.time_ns, 3600 * self.hours
        time.time = lambda: seconds() + wrong
        time.time_ns = lambda: nanoseconds() + wrong * 10**9


@dataclass(frozen=True)
class Launch(Halt):
    """The point before a collective of a step: the one with this number, from 1, of the ones that the rank launches. Or
    before a change on disks.

    With number 0 the rank does not stop: the file `pipe` gets how many there are in the iteration.
    """

    number: int = 0


def before(owner: Any, name: str, is_here: Callable[..., bool], halt: Halt) -> None:
    """Stand before a call of `owner.name` whose arguments are those of the point."""
    original = getattr(owner, name)

    def halting(*args: Any, **options: Any) -> Any:
        if is_here(*args, **options):
            halt.stand()
        return original(*args, **options)

    setattr(owner, name, halting)


def in_step(halt: Halt) -> None:
    """Gradients are reduced and the norm is known; no weight has changed."""
    train_step, now = Trainer.train_step, [0]

    def counted(trainer: Trainer, **options: Any) -> None:
        now[0] = trainer.position.iteration + 1
        train_step(trainer, **options)

    Trainer.train_step = counted  # type: ignore[assignment, method-assign]

    def first(*_: object) -> bool:
        is_here, now[0] = now[0] == halt.iteration, 0
        return is_here

    before(ShardedOptimizer, "update", first, halt)


def in_launch(halt: Halt) -> None:
    """Gathers and reductions of the step are under way, as many as the number says."""
    assert isinstance(halt, Launch)
    train_step, launched = Trainer.train_step, [-1]

    def counted(trainer: Trainer, **options: Any) -> None:
        here = trainer.position.iteration + 1 == halt.iteration
        launched[0] = 0 if here else -1
        train_step(trainer, **options)
        if here and not halt.number:
            Path(halt.pipe).write_text(f"{launched[0]}\n")
        launched[0] = -1

    def is_here(*_: Any, **options: Any) -> bool:
        launched[0] += launched[0] >= 0
        return launched[0] == halt.number > 0

    Trainer.train_step = counted  # type: ignore[assignment, method-assign]
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        before(collectives, name, is_here, halt)


def without_io_uring(halt: Halt) -> None:
    """No point: from the start on the kernel forbids the rank io_uring, as it does in a container."""
    forbid_io_uring()


def short_reads(halt: Halt) -> None:
    """No point: the rank's disks are read and written a page or two at a time, by threads."""
    counts: list[int] = []
    forbid_io_uring()
    transports.read_at = interrupted(transports.read_at, counts)
    os.pwrite = interrupted(os.pwrite, counts)


def on_disk(halt: Halt) -> None:
    """Before a change on disks: pieces of the model state that are written, what is made durable, a record that is
    replaced. The numbers count from the begin of the iteration, whose first changes belong to the step before.
    """
    assert isinstance(halt, Launch)
    train_step, seen, lock = Trainer.train_step, [-1], threading.Lock()

    def counted(trainer: Trainer, **options: Any) -> None:
        here = trainer.position.iteration + 1 == halt.iteration
        if here:
            seen[0] = 0
        train_step(trainer, **options)
        if here and not halt.number:
            Path(halt.pipe).write_text(f"{seen[0]}\n")
        if not halt.number:
            seen[0] = -1  # else what the lanes still do for this step counts on

    def is_here(*_: Any) -> bool:
        with lock:
            seen[0] += seen[0] >= 0
            return seen[0] == halt.number > 0

    Trainer.train_step = counted  # type: ignore[assignment, method-assign]
    before(swap, "run_moves", lambda transport, write, *_: write and is_here(), halt)
    before(SwapFile, "sync", is_here, halt)
    before(SwapRecord, "write", is_here, halt)
    before(swap, "replace_file", is_here, halt)


def in_write(halt: Halt) -> None:
    """The rank's file is on disk in part: the header and two tensors."""
    write, begins, calls = BlockWriter.write, f".tmp-{folder.folder_name(halt.iteration)}-", [0]

    def half(writer: BlockWriter, *rest: Any) -> None:
        calls[0] += begins in str(writer.path)
        if calls[0] == 3:
            writer._file.flush()
            halt.stand()
        write(writer, *rest)

    BlockWriter.write = half  # type: ignore[assignment, method-assign]


def is_saved(halt: Halt) -> None:
    """The iteration is saved, or, beside the run, its save begun, and training would go on."""
    save = SavePolicy.save

    def saved(saves: SavePolicy, position: Any) -> None:
        save(saves, position)
        if position.iteration == halt.iteration:
            halt.stand()

    SavePolicy.save = saved  # type: ignore[assignment, method-assign]


POINTS: dict[str, Callable[[Halt], None]] = {
    # signals have their handlers, and nothing else has begun
    "start": lambda halt: halt.stand(),
    # no point: the kernel lets no file grow beyond 150 kB, less than a checkpoint and more than all else
    "no large file": lambda halt: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)),
    "step": in_step,
    "launch": in_launch,
    "disk": on_disk,
    "no io_uring": without_io_uring,
    "short reads": short_reads,
    "write": in_write,
    # every file is whole, and there is no manifest yet
    "manifest": lambda halt: before(
        save_phases, "put_manifest", lambda path, _: folder.folder_name(halt.iteration) in path.name, halt
    ),
    # all is written, under the temporary name
    "rename": lambda halt: before(
        folder, "publish", lambda root, temporary, iteration, _: iteration == halt.iteration, halt
    ),
    # it has its name, and `latest` names the one before
    "latest": lambda halt: before(
        folder,
        "replace_file",
        lambda path, content, _: content.decode().strip() == folder.folder_name(halt.iteration),
        halt,
    ),
    # `latest` names it, and what is too old is still there
    "prune": lambda halt: before(folder, "prune", lambda root, iteration, *_: iteration == halt.iteration, halt),
    "saved": is_saved,
}


def program(halts: Sequence[Halt], flags: Sequence[str]) -> NoReturn:
    """The program in this process, which it ends. The rank that a point is for comes to it."""
    here = Environment.read()
    os.environ[allocator.CHOICE] = "system"  # else the process would start anew, without the points
    signals = start_process(flags)
    for halt in halts:
        if halt.rank == here.rank:
            POINTS[halt.point](halt)
    exit_now(exit_status(lambda: train(flags, here, signals), here))


def _forked(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A function's process, forked off a server that has imported this file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.halting"])
    process = context.Process(target=target, args=args, daemon=True)  # else a test that fails waits for it for ever
    process.start()
    return process


def forked(ranks: int, flags: Sequence[object], output: Path, halts: Sequence[Halt] = ()) -> BaseProcess:
    """A launcher and its ranks. What they print goes to `output`."""
    return _forked(launcher, ranks, [str(flag) for flag in flags], str(output), halts)


def whole(
    ranks: int, flags: Sequence[object], folder: Path, halts: Sequence[Halt] = (), *, status: int | None = 0
) -> str:
    """Have a run come to its end, which must have this status; what it printed."""
    output = folder / "whole"
    output.unlink(missing_ok=True)
    process = forked(ranks, flags, output, halts)
    process.join()
    assert process.exitcode == status, output.read_text()[-4000:]
    return output.read_text()


def on_nodes(nodes: Sequence[Path], flags: Sequence[object]) -> list[tuple[int | None, str]]:
    """Status and output of one rank per node, each started as a node's launcher starts it: in a working directory of
    its own.
    """
    port = free_port()
    words, outputs = [str(flag) for flag in flags], [node / "output" for node in nodes]
    processes = []
    for rank, (node, output) in enumerate(zip(nodes, outputs, strict=True)):
        output.unlink(missing_ok=True)
        world = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(nodes), "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        processes.append(_forked(on_node, world, words, str(node), str(output)))
    for process in processes:
        process.join()
    return [(process.exitcode, output.read_text()) for process, output in zip(processes, outputs, strict=True)]


def on_node(world: dict[str, object], flags: list[str], node: str, output: str) -> NoReturn:
    """The rank of a node."""
    _print_into(output)
    os.chdir(node)
    _be_rank(world, (), flags)


def launcher(ranks: int, flags: list[str], output: str, halts: Sequence[Halt]) -> NoReturn:
    """A replacement of torchrun: start the ranks, serve their store, and end them all when one has failed."""
    _print_into(output)
    pipes = [os.pipe() for _ in range(ranks)]
    left = {}
    for rank, (ends, _) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            elastic = {"TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": 0}
            elastic |= {"TORCHELASTIC_USE_AGENT_STORE": True, "MASTER_PORT": os.read(ends, 16).decode()}
            _be_rank(world | elastic, halts, flags)
        left[pid] = rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, end in pipes:
        os.write(end, str(store.port).encode())
    while left:
        pid, status = os.wait()
        del left[pid]
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)


def _print_into(output: str) -> None:
    sink = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def _be_rank(world: dict[str, object], halts: Sequence[Halt], flags: list[str]) -> NoReturn:
    """Be the rank that these variables say."""
    torch.set_num_threads(1)
    world = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1} | world
    os.environ.update({name: str(value) for name, value in world.items()})
    try:
        program(halts, flags)
    finally:
        os._exit(1)


if __name__ == "__main__":
    program([Halt.read(sys.argv[1])], sys.argv[2:])
