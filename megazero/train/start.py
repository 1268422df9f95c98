"""What a training process does before torch is imported: that import is what takes time."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.system.allocator import restart_with_settings
from megazero.telemetry.console import outlive_the_console
from megazero.telemetry.watchdog import StopSignals

CHECKS = frozenset({"--validate-only", "--print-config", "--help", "-h"})
"""With one of these nothing is trained; a check that was broken off has found nothing right, so signals do what they do
to any program.
"""


def start_process(arguments: Sequence[str]) -> StopSignals:
    """To be called before anything is opened: settings of the allocator, stdout and stderr that may be lost, and the
    signals that stop a run.

    Until the first step they end the process at once.
    """
    restart_with_settings()
    outlive_the_console()
    signals = StopSignals(early=_end)
    return signals if CHECKS & {*arguments} else signals.__enter__()


def _end(name: str) -> None:
    from megazero.launch import Environment, stop_early

    stop_early(name, Environment.read())
