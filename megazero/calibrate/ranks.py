"""The ranks of a calibration on this machine: they are started, and what they say is collected."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from megazero.calibrate.effort import Effort, RankMeasurements

LOOPBACK = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
MOST_SECONDS = 600
"""For which one process of each rank may measure."""


class NotMeasured(RuntimeError):
    """A rank has ended without a result."""


def measured(ranks: int, folder: Path, effort: Effort) -> RankMeasurements:
    """What so many ranks measure on this machine. folder: for the trial of a disk. Raises NotMeasured."""
    first, *others = (_process(number, ranks, folder, effort) for number in range(len(effort.runs)))
    return replace(first, runs=(*first.runs, *(run for other in others for run in other.runs)))


def _process(number: int, ranks: int, folder: Path, effort: Effort) -> RankMeasurements:
    """What the ranks of one process each measure."""
    with tempfile.TemporaryDirectory(prefix="megazero-calibration-") as own:
        result = Path(own) / "result.json"
        words = [sys.executable, "-m", "megazero.calibrate.rank", str(result), str(number), str(folder), effort.text()]
        children = list[subprocess.Popen[str]]()
        try:
            port = _free_port()
            for rank in range(ranks):
                environment = {**os.environ, **_variables(rank, ranks, port)}
                children.append(subprocess.Popen(words, env=environment, text=True, stderr=subprocess.PIPE))
            errors = [child.communicate(timeout=MOST_SECONDS)[1] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        failed = next((error for child, error in zip(children, errors, strict=True) if child.returncode), None)
        if failed is not None or not result.exists():
            reason = (failed or "").strip().splitlines()
            raise NotMeasured(f"{ranks} ranks on this machine: {reason[-1] if reason else 'a rank ended by itself'}")
        return RankMeasurements.read(result.read_text())


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher says to a rank of one host."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    said = {name: str(number) for name, number in places.items()} | {"MASTER_PORT": str(port)}
    said["MASTER_ADDR"] = "127.0.0.1"
    if Path("/sys/class/net/lo").is_dir():
        said |= dict.fromkeys(LOOPBACK, "lo")
    return said


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number
