"""What `megazero pretrain` does as one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NoReturn

from megazero.cli.exit_status import read_environment, say
from megazero.config.parse import parse_arguments
from megazero.data.progress import silent, to_stderr
from megazero.launch import Environment, exit_now, exit_status, launch
from megazero.telemetry.watchdog import StopSignals
from megazero.train.dry_run import dry_run_text
from megazero.train.init_from import model_source
from megazero.train.job import build_job
from megazero.train.path_checks import missing_files
from megazero.train.prepare import prepare


def train(arguments: Sequence[str], environment: Environment, signals: StopSignals | None = None) -> None:
    """Parse the flags, prepare, build the job and train. signals: requests to stop; None: there are none."""
    parsed = parse_arguments(arguments, environment.world_size, model_source, missing_files)
    if parsed.command.starts_nothing:
        told = dry_run_text(parsed, environment.world_size)
        if environment.rank == 0:
            say(told)
        return
    report = to_stderr if environment.local_rank == 0 else silent
    prepared = prepare(parsed.run, environment.world_size, report, here=environment.ranks_here)
    with (
        launch(prepared.run.parallel, environment) as grid,
        closing(build_job(prepared, grid, signals, parsed)) as job,
    ):
        job.fit()
        job.report()


def run(arguments: Sequence[str], signals: StopSignals) -> NoReturn:
    """Train as this rank, and end its process."""
    here = read_environment()
    exit_now(exit_status(lambda: train(arguments, here, signals), here))
