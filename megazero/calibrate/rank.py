"""One of the ranks that a calibration starts: `python -m megazero.calibrate.rank RESULT.json PROCESS FOLDER EFFORT`.

Rank 0 writes what all of them have measured.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from megazero.calibrate.effort import Effort
from megazero.system.allocator import restart_with_settings


def main(argv: Sequence[str]) -> None:
    """Measure as the rank that the environment says, and end the process with its status."""
    restart_with_settings()  # as a run does, and so before torch is imported
    from megazero.calibrate.measuring import measurements
    from megazero.launch import exit_early, exit_now, exit_status
    from megazero.mpu.meeting import Environment
    from megazero.telemetry.watchdog import StopSignals

    result, process, folder, effort = Path(argv[0]), int(argv[1]), Path(argv[2]), Effort.read(argv[3])
    environment = Environment.read()

    def work() -> None:
        # the banners of the runs are for nobody; signals have a thread as in a run, with a part of the heap
        with redirect_stdout(io.StringIO()), StopSignals(lambda signal: exit_early(signal, environment)):
            measured = measurements(environment, process, folder, effort)
        if environment.rank == 0:
            result.write_text(measured.text())

    exit_now(exit_status(work, environment))


if __name__ == "__main__":
    main(sys.argv[1:])
