"""Contestants as child processes that take turns: A runs k steps while B sleeps, then B while A sleeps.

Drifts of a shared machine (clock, other programs, page cache) then affect both equally, so the ratio of consecutive
turns is more reliable than that of two separate runs. A contestant's processes stay alive, so a turn costs no imports.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.workload import Entry, Workload, to_json
from megazero.system.loopback import ADDRESS, free_port

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600
"""Seconds to wait for a contestant's answer. DeepSpeed's ops take some minutes to compile for the first time. If that
is cut off, its cache stays locked, and the next run waits in vain.
"""


class Unavailable(Exception):
    """A contestant cannot run here; the message says why."""


class Contestant:
    """The processes of one entry, one per rank, from the checkout at `root`.

    Raises Unavailable if a process fails or does not answer.
    """

    def __init__(self, work: Workload, entry: Entry, patience: float = PATIENCE, root: Path = ROOT) -> None:
        self.work, self.entry, self.patience, self.root = work, entry, patience, root
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in stop
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        environment = os.environ | {
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(work.ranks),
        }
        environment |= {
            "OMP_NUM_THREADS": str(work.threads),
            "LOCAL_WORLD_SIZE": str(work.ranks),
            "BENCH_FOLDER": self.folder.name,
        }
        environment |= {name: value for name, value in entry.environment.items() if value}
        self.ranks = [
            self._start(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(work.ranks)
        ]
        self.versions: dict[str, str] = {}
        self.pace = 1.0
        """Seconds of the last step of the warm-up."""

    def _start(self, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Any, Any]:
        commands_in, commands_out = os.pipe()
        replies_in, replies_out = os.pipe()
        arguments = [str(commands_in), str(replies_out), to_json(self.work), to_json(self.entry)]
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", *arguments],
            cwd=self.root,  # comes first on the import path, before the installed packages
            env=environment,
            pass_fds=(commands_in, replies_out),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        os.close(commands_in)
        os.close(replies_out)
        return process, os.fdopen(commands_out, "w"), os.fdopen(replies_in)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """The reply of every rank."""
        self.tell(do, **arguments)
        return self.hear(do)

    def tell(self, do: str, **arguments: Any) -> None:
        """Give every rank a command; `hear` its replies before the next one."""
        try:
            for _, commands, _ in self.ranks:
                print(json.dumps({"do": do, **arguments}), file=commands, flush=True)
        except BrokenPipeError as error:
            raise Unavailable(f"{do}: its process died; {self.last_words()}") from error

    def hear(self, do: str) -> list[dict[str, Any]]:
        """The reply of every rank to `do`, within `patience` seconds."""
        found = []
        for _, _, replies in self.ranks:
            if not select.select([replies], [], [], self.patience)[0]:
                raise Unavailable(f"{do}: no answer in {self.patience:.0f} s; {self.last_words()}")
            line = replies.readline()
            if not line:
                raise Unavailable(f"{do}: its process died; {self.last_words()}")
            found.append(json.loads(line))
            if "error" in found[-1]:
                raise Unavailable(
                    f"{do}: {found[-1]['error']}" + ("" if found[-1]["missing"] else f"\n{self.last_words(12)}")
                )
        return found

    def prepare(self, warm_up: int) -> None:
        """Import, build, and run the steps that compile and touch memory for the first time."""
        self.versions = self.ask("load")[0]["versions"]
        self.ask("build")
        self.pace = self.steps(warm_up)[-1]
        self.ask("forget_peak")

    def turn(self, seconds: float) -> list[float]:
        """Seconds of each step of one turn: as many steps as fill `seconds`, at least one."""
        return self.steps(max(1, round(seconds / self.pace)))

    def steps(self, count: int) -> list[float]:
        """Seconds of each step on the slowest rank."""
        replies = self.ask("steps", count=count)
        return [max(times) for times in zip(*(reply["seconds"] for reply in replies), strict=True)]

    def memory(self) -> float:
        """The peak of the resident set above the imports since the warm-up, in MiB, of the rank with the largest."""
        return max(float(reply["peak"]) for reply in self.ask("memory"))

    def last_words(self, lines: int = 1) -> str:
        self.log.flush()
        self.log.seek(0)
        return "\n".join(self.log.read().strip().splitlines()[-lines:])

    def stop(self) -> None:
        for process, commands, replies in self.ranks:
            process.kill()
            process.wait()
            for pipe in (commands, replies):
                with suppress(BrokenPipeError):
                    pipe.close()
        self.log.close()
        self.folder.cleanup()


@dataclass
class Samples:
    """Seconds of steps by turn."""

    turns: list[list[float]] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn]

    @property
    def median(self) -> float:
        return statistics.median(self.all)


@dataclass
class Match:
    """Two contestants that took turns. ratio: median over the turns of (their seconds per token / ours)."""

    ours: Samples
    theirs: Samples
    tokens: tuple[int, int]
    memory: tuple[float, float]
    versions: dict[str, str]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours.turns, self.theirs.turns, strict=True)
        our_tokens, their_tokens = self.tokens
        return [(statistics.median(b) / their_tokens) / (statistics.median(a) / our_tokens) for a, b in pairs]


@dataclass(frozen=True)
class Plan:
    """How long to measure: rounds of one turn each, seconds of a turn, and steps before the timed ones."""

    rounds: int = 4
    seconds: float = 1.5
    warm_up: int = 2


def play(ours: Contestant, theirs: Contestant, plan: Plan, say: Callable[[str], None]) -> Match:
    """Time two prepared contestants in alternating turns."""
    match = Match(
        Samples(),
        Samples(),
        (ours.entry.tokens(ours.work), theirs.entry.tokens(theirs.work)),
        (0.0, 0.0),
        theirs.versions,
    )
    for number in range(plan.rounds):
        for contestant, samples in ((ours, match.ours), (theirs, match.theirs)):
            samples.turns.append(contestant.turn(plan.seconds))
        shown = [statistics.median(samples.turns[-1]) * 1e3 for samples in (match.ours, match.theirs)]
        say(f"    round {number + 1}/{plan.rounds}: {shown[0]:.0f} ms, {shown[1]:.0f} ms")
    match.memory = ours.memory(), theirs.memory()
    return match
