"""Where Megatron-LM puts a checkpoint: a folder per iteration, with a file per rank or a checkpoint of
torch.distributed in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megazero.convert.source import ConversionError
from megazero.convert.tracker import read_word

TRACKER = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
"""The name of a rank's file; it is the second if a distributed optimizer wrote its state into another file."""
METADATA = ".metadata"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


def iteration_folder(name: str) -> str:
    """The name of the folder that the tracker's word stands for."""
    return name if name == "release" else f"iter_{int(name):07d}"


def checkpoint_folder(path: Path) -> Path:
    """The folder of the checkpoint: `path` itself, the one that its tracker names, or the newest where there is no
    tracker.

    Raises ConversionError.
    """
    if not (path / TRACKER).is_file():
        newest = [inside for inside in path.glob("iter_*") if inside.name[5:].isdecimal() and _is_one(inside)]
        return path if _is_one(path) else max(newest, key=lambda inside: int(inside.name[5:]), default=path)
    word = read_word(path / TRACKER)
    if word != "release" and not (word.isdecimal() and len(word) < 20):
        raise ConversionError(f"{path / TRACKER} holds {word!r}, neither a number nor 'release'")
    return path / iteration_folder(word)


def is_torch_dist(folder: Path) -> bool:
    """Whether the tensors are in a checkpoint of torch.distributed."""
    return (folder / METADATA).is_file() and ((folder / "metadata.json").is_file() or (folder / "common.pt").is_file())


def recognises(path: Path) -> bool:
    """Whether a folder is a checkpoint, or leads to one.

    Megatron-DeepSpeed writes the same tracker, but also a `latest`.
    """
    try:
        if _is_one(checkpoint_folder(path)):
            return True
    except ConversionError:
        pass
    return (path / TRACKER).is_file() and not any((path / other).is_file() for other in ("latest", "latest_universal"))


def _is_one(folder: Path) -> bool:
    return is_torch_dist(folder) or any(True for name in FILES for _ in folder.glob(f"mp_rank_*/{name}"))


def rank_files(folder: Path) -> Mapping[tuple[int, int], Path]:
    """(tp rank, pipeline stage) -> its file.

    Raises ConversionError with everything that is missing, where ranks of the grid have no file.
    """
    found: dict[tuple[int, int], Path] = {}
    problems = []
    for inside in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(inside.name)
        path = next((inside / name for name in FILES if (inside / name).is_file()), None)
        if match is None or path is None:
            problems.append(f"{inside.name} holds no {FILES[0]}")
        elif match[3] is not None:
            problems.append(f"{inside.name} is of an expert-parallel rank: models with experts are not supported")
        else:
            found[int(match[1]), int(match[2] or 0)] = path
    if not found and not problems:
        problems.append(f"there are no files mp_rank_*/{FILES[0]}")
    tp, pp = (1 + max((rank[axis] for rank in found), default=-1) for axis in (0, 1))
    missing = [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
        for p in range(pp)
        for t in range(tp)
        if (t, p) not in found
    ]
    if missing:
        problems.append(
            f"of {tp} tensor-parallel ranks x {pp} stages {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing"
        )
    if problems:
        raise ConversionError(f"{folder}: " + "; ".join(problems))
    return found


def rank_folder(tp_index: int, stage: int, stages: int) -> str:
    """The folder of a rank's file."""
    return f"mp_rank_{tp_index:02d}" + (f"_{stage:03d}" if stages > 1 else "")
