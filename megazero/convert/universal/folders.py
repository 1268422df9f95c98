"""Where a universal checkpoint is, and the files in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megazero.convert.source import EXP_AVG, EXP_AVG_SQ, WEIGHT, ConversionError
from megazero.convert.tracker import named_folder

LATEST = "latest_universal"
ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
STATES: Mapping[str, str] = {WEIGHT: "fp32.pt", EXP_AVG: "exp_avg.pt", EXP_AVG_SQ: "exp_avg_sq.pt"}
STEP = "step.pt"
MODEL_STATES = "mp_rank_00_model_states.pt"


def checkpoint_folder(path: Path) -> Path:
    """The folder of the checkpoint: `path`, or the one in it that `latest_universal` names. Raises ConversionError."""
    if _is_one(path):
        return path
    if not (path / LATEST).is_file():
        raise ConversionError(f"{path} holds no universal checkpoint: neither {ZERO}/<parameter>/fp32.pt nor {LATEST}")
    named = named_folder(path / LATEST)
    if not _is_one(named):
        raise ConversionError(f"{path / LATEST} names {named.name!r}, which holds no {ZERO}/<parameter>/fp32.pt")
    return named


def recognises(path: Path) -> bool:
    """Whether a folder is a universal checkpoint, or has a `latest_universal` that names one."""
    return (path / LATEST).is_file() or _is_one(path)


def _is_one(folder: Path) -> bool:
    return any(True for _ in (folder / ZERO).glob(f"*/{STATES[WEIGHT]}"))


def parameters(folder: Path) -> Mapping[str, Path]:
    """Name -> folder of each parameter."""
    return {inside.name: inside for inside in sorted((folder / ZERO).iterdir()) if (inside / STATES[WEIGHT]).is_file()}


def model_states(folder: Path) -> Path | None:
    """A file with the run's arguments, if there is one."""
    found = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    return found[0] if found else None
