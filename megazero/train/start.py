"""What a training process does before it imports torch, because that import takes seconds."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from megazero.system.allocator import restart_with_settings
from megazero.telemetry.console import survive_lost_console
from megazero.telemetry.watchdog import STOPPING, StopSignals

CHECKS = frozenset({"--validate-only", "--print-config"})
"""Flags of a check, which trains nothing. A check has to tell its result, and an interrupted one has none. So a lost
output and signals have their default effect.
"""


def start_process(arguments: Sequence[str]) -> StopSignals:
    """Prepare the process: set up the allocator, make the loss of stdout and stderr harmless, handle stop signals.

    arguments: the command line's flags. To be called before any file is opened. Until the first step, a signal ends the
    process at once.
    """
    restart_with_settings()
    signals = StopSignals(early=lambda name: _end(name, signals))
    if not CHECKS & {*arguments}:
        survive_lost_console()
        signals.__enter__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the launcher blocks them until the handlers are installed
    return signals


def _end(name: str, signals: StopSignals) -> None:
    from megazero.launch import Environment, exit_early

    def leave() -> None:
        for action in signals.leaving:
            action()

    exit_early(name, Environment.read(), leave)
