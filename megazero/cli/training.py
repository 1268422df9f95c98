"""What `megazero pretrain` does as one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megazero.config.parse import ask
from megazero.data.progress import silent, to_stderr
from megazero.launch import Environment, exit_status, launch, leave
from megazero.telemetry.watchdog import StopSignals
from megazero.train.dry_run import answer
from megazero.train.init_from import model_level
from megazero.train.job import build_job
from megazero.train.path_checks import absences
from megazero.train.prepare import prepare


def train(arguments: Sequence[str], environment: Environment, signals: StopSignals | None = None) -> None:
    """Parse, build, run. signals: what asks the run to stop; None: nothing does."""
    asked = ask(arguments, environment.world_size, model_level, absences)
    if asked.command.starts_nothing:
        told = answer(asked, environment.world_size)
        if environment.rank == 0:
            print(told)
        return
    prepared = prepare(asked.run, environment.world_size, to_stderr if environment.local_rank == 0 else silent)
    with launch(prepared.run.parallel, environment) as grid:
        job = build_job(prepared, grid, signals, asked)
        job.fit()
        job.report()


def run(arguments: Sequence[str], signals: StopSignals) -> NoReturn:
    """Train as this rank, and end its process."""
    here = Environment.read()
    leave(exit_status(lambda: train(arguments, here, signals), here))
