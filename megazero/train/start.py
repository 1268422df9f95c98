"""What a training process does before torch is imported: that import is what takes time."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from megazero.system.allocator import restart_with_settings
from megazero.telemetry.console import outlive_the_console
from megazero.telemetry.watchdog import STOPPING, StopSignals

CHECKS = frozenset({"--validate-only", "--print-config"})
"""With one of these nothing is trained. A check is there for what it says, and one that was broken off has found
nothing right: a lost output and signals do what they do to any program.
"""


def start_process(arguments: Sequence[str]) -> StopSignals:
    """To be called with the flags before anything is opened: settings of the allocator, stdout and stderr that may be
    lost, and the signals that stop a run.

    Until the first step signals end the process at once.
    """
    restart_with_settings()
    signals = StopSignals(early=_end)
    if not CHECKS & {*arguments}:
        outlive_the_console()
        signals.__enter__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # who started us may have blocked them until they are heard
    return signals


def _end(name: str) -> None:
    from megazero.launch import Environment, stop_early

    stop_early(name, Environment.read())
