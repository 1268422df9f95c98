"""What a training process does before torch is imported: that import is what takes time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from megazero.config.help import requested_help
from megazero.system.allocator import restart_with_settings
from megazero.telemetry.console import outlive_the_console
from megazero.telemetry.watchdog import STOPPING, StopSignals

CHECKS = frozenset({"--validate-only", "--print-config"})
"""With one of these nothing is trained; a check that was broken off has found nothing right, so signals do what they do
to any program.
"""


def start_process(arguments: Sequence[str]) -> StopSignals:
    """To be called with the flags before anything is opened: the help where it is asked for, settings of the
    allocator, stdout and stderr that may be lost, and the signals that stop a run.

    Until the first step signals end the process at once.
    """
    _answer(requested_help(arguments))
    restart_with_settings()
    outlive_the_console()
    signals = StopSignals(early=_end)
    if not CHECKS & {*arguments}:
        signals.__enter__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # who started us may have blocked them until they are heard
    return signals


def _answer(told: str | None) -> None:
    """Print the help and end the process, where there is something to tell. One rank tells it."""
    if told is None:
        return
    outlive_the_console()
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(told)
        sys.stdout.flush()
    raise SystemExit(0)


def _end(name: str) -> None:
    from megazero.launch import Environment, stop_early

    stop_early(name, Environment.read())
