"""`megazero pretrain`: training as one rank, or the start of --ranks N on this host."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megazero.cli.exit_status import read_environment, say, working_folder_is_gone
from megazero.cli.parser import pop_flag
from megazero.config.flags import read_command_line
from megazero.config.help import requested_help
from megazero.system.allocator import restart_with_settings
from megazero.system.loopback import interface_variables
from megazero.system.status import FAILED, MISTAKEN
from megazero.telemetry.console import survive_lost_console
from megazero.telemetry.watchdog import STOPPING, StopSignals

if TYPE_CHECKING:
    import torch.distributed as dist

    from megazero.mpu.meeting import Environment

RANKS = "--ranks"
LAUNCHER_VARIABLES = frozenset({"RANK", "WORLD_SIZE"})
RESEND_SECONDS = 1.0
"""After so long a signal is sent to the ranks again, because it may come before they exist. A second has no effect."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900"
"""Seconds that ranks have to end when another one has failed. torch's default of 30 is less than a save may take."""


def main(argv: Sequence[str]) -> int:
    """Print the help, start --ranks, or train as one rank.

    Returns a status in the first two cases. In the third the process ends with the rank's status.
    """
    if working_folder_is_gone():
        return MISTAKEN
    help_text = requested_help(argv)
    if help_text is not None:
        if os.environ.get("RANK", "0") == "0":  # one rank prints it
            say(help_text.rstrip("\n"))
        return 0
    count = ranks_to_start(argv, os.environ)
    if count is not None:
        rank_flags = pop_flag(argv, RANKS)[1]
        if count > 1:
            return start_ranks(count, [*this_command(sys.orig_argv, argv), *rank_flags])
        argv = rank_flags
    # The import of torch in `run` takes seconds, in which a signal may come: handlers are installed before.
    signals = start_process(argv)
    return run(argv, signals)


def start_process(arguments: Sequence[str]) -> StopSignals:
    """Prepare the process: set up the allocator, make the loss of stdout and stderr harmless, handle stop signals.

    arguments: the command line's flags. To be called before any file is opened, and before torch is imported. Until the
    first step, a signal ends the process at once.
    """
    restart_with_settings()
    signals = StopSignals(early=lambda name: _end(name, signals))
    # A check has to tell its result, and an interrupted one has none: a lost output and signals end it as usual.
    if not read_command_line(arguments).command.starts_nothing:
        survive_lost_console()
        signals.__enter__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the launcher blocks them until the handlers are installed
    return signals


def _end(name: str, signals: StopSignals) -> None:
    from megazero.launch import exit_early
    from megazero.mpu.meeting import Environment

    def leave() -> None:
        for action in signals.leaving:
            action()

    exit_early(name, Environment.read(), leave)


def ranks_to_start(argv: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The value of --ranks, if ranks are to be started; else None. The check of all flags reports a wrong value."""
    command = read_command_line(argv).command
    if command.ranks is None or command.ranks < 1 or LAUNCHER_VARIABLES & environment.keys():
        return None
    return None if command.help or command.help_all or command.starts_nothing else command.ranks


def this_command(started: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command that started this program, without its flags. It starts each rank from the same installation.

    started: the words of this process, the interpreter's options included. argv: the flags, which should end them.
    """
    first_flag = len(started) - len(argv)
    if first_flag > 0 and [*started[first_flag:]] == [*argv]:
        return [sys.executable, *started[1:first_flag]]
    return [sys.executable, "-m", "megazero", "pretrain"]


def start_ranks(count: int, command: Sequence[str]) -> int:
    """Run a command as `count` ranks through torch's launcher, and return their status.

    torch's launcher ends with status 1 and a traceback when it gets a signal, even if all ranks have saved and ended
    with status 0. After a rank's error it writes forty more lines. Here only the ranks get the signals, and the command
    ends with their status and prints their messages only.

    Must run on the main thread, before torch is imported, so that all threads inherit the blocked signals.
    """
    # Below nohup a hangup is ignored, and stays so.
    kinds = [kind for kind in STOPPING if kind is not signal.SIGHUP or signal.getsignal(kind) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, kinds)  # threads and ranks inherit it; see `start_process`
    ranks_ended = threading.Event()
    threading.Thread(target=_pass_on, args=(kinds, ranks_ended), name="signals", daemon=True).start()
    os.environ.setdefault(*SHUTDOWN)
    for name, interface in interface_variables().items():
        os.environ.setdefault(name, interface)
    try:
        return _launched(count, command)
    finally:
        ranks_ended.set()


def _launched(count: int, command: Sequence[str]) -> int:
    """Launch the ranks and return their status. The rendezvous is a file that only this user can read, not a port."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's own log; this process does nothing else
    with tempfile.TemporaryDirectory(prefix="megazero-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=os.urandom(16).hex(),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            for rank, failure in sorted(error.failures.items()):
                if failure.exitcode < 0:  # a signal ended it, so it could print nothing itself
                    print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr, flush=True)
            return MISTAKEN if error.get_first_failure()[1].exitcode == MISTAKEN else FAILED
        except SignalException as error:
            print(f"ended by {error.sigval.name}: nothing was saved", file=sys.stderr, flush=True)
            return FAILED
    return 0


def _pass_on(kinds: Sequence[signal.Signals], ranks_ended: threading.Event) -> None:
    """On a thread: wait for the first of these signals, and send it to the ranks repeatedly until they have ended."""
    kind = signal.sigwait(kinds)
    while not ranks_ended.is_set():
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, kind)
        ranks_ended.wait(RESEND_SECONDS)


def _children() -> list[int]:
    """The ids of the processes that the main thread has started."""
    import subprocess

    process = os.getpid()
    try:
        ids = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:  # another system, or a kernel without this file
        ids = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout
    return [int(child) for child in ids.split()]


def run(arguments: Sequence[str], signals: StopSignals) -> NoReturn:
    """Train as this rank, and end its process."""
    from megazero.launch import exit_now, exit_status

    environment = read_environment()
    exit_now(exit_status(lambda: train(arguments, environment, signals), environment))


def train(arguments: Sequence[str], environment: Environment, signals: StopSignals | None = None) -> None:
    """Parse the flags, prepare, build the job and train. signals: requests to stop; None: nothing asks for a stop."""
    from megazero.config.parse import parse_arguments
    from megazero.data.progress import silent, to_stderr
    from megazero.launch import launch
    from megazero.train.checked import dry_run_text
    from megazero.train.embedded import Rendezvous
    from megazero.train.init_from import model_source
    from megazero.train.job import build_job
    from megazero.train.path_checks import missing_files
    from megazero.train.prepare import prepare
    from megazero.train.same_run import require_same_run

    parsed = parse_arguments(arguments, environment.world_size, model_source, missing_files)
    parsed = replace(parsed, notes=(*parsed.notes, *alone_among_tasks(os.environ)))
    if parsed.command.starts_nothing:
        result = dry_run_text(parsed, environment.world_size)
        if environment.rank == 0:
            say(result)
        return
    report = to_stderr if environment.local_rank == 0 else silent
    prepared = prepare(parsed.run, environment.world_size, report, local_ranks=environment.ranks_here)

    def agree(store: dist.Store) -> None:
        require_same_run(prepared, Rendezvous(environment, store, guest=False))

    with (
        launch(prepared.run, environment, agree) as grid,
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
