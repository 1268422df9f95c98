"""Whether this Python can compute on an NVIDIA GPU, and facts about that GPU, found out before anything slow starts."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

OLDEST_TORCH = 2, 11


def why_not() -> str | None:
    """One sentence about what is missing; None if nothing is. Imports torch, but starts nothing on the GPU."""
    try:
        import torch
    except ImportError as error:
        return (
            f"{sys.executable} cannot import torch ({error}); name a Python that has it: make "
            "PYTHON=/path/to/python ..."
        )
    if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < OLDEST_TORCH:
        return f"torch {torch.__version__} of {sys.executable} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    from megazero.system.device import cuda_available

    return None if cuda_available() else f"torch {torch.__version__} finds no NVIDIA GPU on this machine"


def facts() -> dict[str, str | int | float]:
    """The GPU, its driver and the versions that determine its speed. Only if `why_not` is None."""
    from megazero.system import device as devices

    libraries = {name: version(f"nvidia-{name}") for name in ("cublas", "cudnn", "nccl")}
    found = {
        "driver": driver(),
        **{f"nvidia-{name}": text for name, text in libraries.items() if text},
        "triton": version("triton"),
    }
    return devices.card_facts(devices.resolve("cuda", 0)) | found


def driver() -> str:
    """The version of NVIDIA's kernel driver."""
    path = Path("/proc/driver/nvidia/version")
    numbers = re.findall(r"\b\d{3}\.\d+(?:\.\d+)*\b", path.read_text()) if path.exists() else []
    return numbers[0] if numbers else smi("driver_version")


def smi(what: str) -> str:
    """The answer of nvidia-smi about the first GPU; "unknown" if it cannot run."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def version(package: str) -> str:
    """The version of an installed package, whose name may end in the version of CUDA; "" if it is not installed."""
    for name in (package, f"{package}-cu13", f"{package}-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
