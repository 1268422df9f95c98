"""The ranks of a calibration on this machine: they are started, and what they say is collected."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from megazero.calibrate.effort import Effort, RankMeasurements
from megazero.system.loopback import ADDRESS, free_port, interface_variables

MOST_SECONDS = 600
"""For which one process of each rank may measure."""


class NotMeasured(RuntimeError):
    """A rank has ended without a result, or has not ended."""


def measured(ranks: int, folder: Path, effort: Effort) -> RankMeasurements:
    """What so many ranks measure on this machine. folder: for the trial of a disk. Raises NotMeasured."""
    first, *others = (_process(number, ranks, folder, effort) for number in range(len(effort.runs)))
    return replace(first, runs=(*first.runs, *(run for other in others for run in other.runs)))


def _process(number: int, ranks: int, folder: Path, effort: Effort) -> RankMeasurements:
    """What the ranks of one process each measure."""
    with tempfile.TemporaryDirectory(prefix="megazero-calibration-") as own:
        result, told = Path(own) / "result.json", [Path(own) / f"errors-{rank}" for rank in range(ranks)]
        words = [sys.executable, "-m", "megazero.calibrate.rank", str(result), str(number), str(folder), effort.text()]
        children = list[subprocess.Popen[bytes]]()
        try:
            port = free_port()
            for rank in range(ranks):
                environment = {**os.environ, **_variables(rank, ranks, port)}
                with told[rank].open("w") as errors:  # a pipe that nobody reads would hold up a rank that says much
                    children.append(subprocess.Popen(words, env=environment, stderr=errors))
            for child in children:
                child.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"{ranks} ranks on this machine: not done after {MOST_SECONDS} seconds") from None
        finally:
            for child in children:
                child.kill()
                child.wait()
        failed = next((path.read_text() for child, path in zip(children, told, strict=True) if child.returncode), None)
        if failed is not None or not result.exists():
            reason = (failed or "").strip().splitlines()
            raise NotMeasured(f"{ranks} ranks on this machine: {reason[-1] if reason else 'a rank ended by itself'}")
        return RankMeasurements.read(result.read_text())


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher says to a rank of one host."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    said = {name: str(number) for name, number in places.items()}
    return said | {"MASTER_PORT": str(port), "MASTER_ADDR": ADDRESS} | interface_variables()
