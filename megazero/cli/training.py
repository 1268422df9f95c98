"""What `megazero pretrain` does as one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
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
    parsed = replace(parsed, notes=(*parsed.notes, *alone_among_tasks(os.environ)))
    if parsed.command.starts_nothing:
        told = dry_run_text(parsed, environment.world_size)
        if environment.rank == 0:
            say(told)
        return
    report = to_stderr if environment.local_rank == 0 else silent
    prepared = prepare(parsed.run, environment.world_size, report, here=environment.ranks_here)
    with (
        launch(prepared.run, environment) as grid,
        closing(build_job(prepared, grid, signals, parsed)) as job,
    ):
        job.fit()
        job.report()


def alone_among_tasks(variables: Mapping[str, str]) -> list[str]:
    """A sentence for a process that Slurm may have started several times, each of which would be a run of its own."""
    tasks = variables.get("SLURM_NTASKS", "1")
    if "RANK" in variables or tasks in ("", "0", "1"):
        return []
    return [
        f"SLURM_NTASKS is {tasks}, and no launcher says which rank this is (RANK): it is a run of one rank, and so "
        "would each task of srun be; have srun start one torchrun on each node, as examples/slurm.sh does"
    ]


def run(arguments: Sequence[str], signals: StopSignals) -> NoReturn:
    """Train as this rank, and end its process."""
    here = read_environment()
    exit_now(exit_status(lambda: train(arguments, here, signals), here))
