"""`megazero pretrain`: what happens before torch is imported; `training` is the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megazero.cli.exit_status import say, working_folder_is_gone
from megazero.cli.parser import pop_flag
from megazero.config.flags import read_command_line
from megazero.config.help import requested_help
from megazero.system.status import MISTAKEN
from megazero.train.start import start_process

RANKS = "--ranks"
BY_A_LAUNCHER = frozenset({"RANK", "WORLD_SIZE"})


def main(argv: Sequence[str]) -> int:
    """Print the help, start --ranks, or train as one rank.

    Returns a status in the first two cases. In the third the process ends with the rank's status.
    """
    if working_folder_is_gone():
        return MISTAKEN
    told = requested_help(argv)
    if told is not None:
        if os.environ.get("RANK", "0") == "0":  # one rank prints it
            say(told.rstrip("\n"))
        return 0
    count = ranks_to_start(argv, os.environ)
    if count is not None:
        argv, given = pop_flag(argv, RANKS)[1], argv
        if count > 1:
            from megazero.cli.ranks import start_ranks

            return start_ranks(count, [*this_command(sys.orig_argv, given), *argv])
    signals = start_process(argv)
    from megazero.cli.training import run

    return run(argv, signals)


def ranks_to_start(argv: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The value of --ranks, if ranks are to be started; else None. Its problems are reported later, with all others."""
    command = read_command_line(argv).command
    if command.ranks is None or command.ranks < 1 or BY_A_LAUNCHER & environment.keys():
        return None
    return None if command.help or command.help_all or command.starts_nothing else command.ranks


def this_command(started: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command that started this program, without its flags. It starts each rank from the same installation."""
    at = len(started) - len(argv)
    if at > 0 and [*started[at:]] == [*argv]:
        return [sys.executable, *started[1:at]]
    return [sys.executable, "-m", "megazero", "pretrain"]
