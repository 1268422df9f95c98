"""Where Megatron-DeepSpeed puts a checkpoint, and the names of its files.

Numbers in names are compared as numbers, with or without zeros in front.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.hf.files import weight_files
from megazero.convert.source import ConversionError
from megazero.convert.tracker import named_folder, read_word

LATEST = "latest"
KNOWN = ("deepspeed.*", "megatron.*", "apex.*", "transformers.*", "enum.*", "signal.*", "torch.nn.*", "torch.optim.*")
"""Classes whose objects are in these files besides tensors (arguments, slice addresses, loss scalers); they are
read as records.
"""
STEP = re.compile(r"global_step(\d+)")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_RANK = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def layer_file(layer: int, tp_index: int) -> str:
    return f"layer_{layer:02d}-model_{tp_index:02d}-model_states.pt"


def rank_file(rank: int) -> str:
    """rank: pipeline stage x tp + tp rank."""
    return f"mp_rank_{rank:02d}_model_states.pt"


def zero_file(partition: int, rank: int, prefix: str) -> str:
    """partition: the data-parallel rank. DeepSpeed calls it pp_rank."""
    return f"{prefix}zero_pp_rank_{partition}_mp_rank_{rank:02d}_optim_states.pt"


@dataclass(frozen=True)
class Listing:
    """The files of one checkpoint.

    layers  layer -> its files in tp order
    ranks   pipeline stage x tp + tp rank -> file with arguments and shapes; may be empty
    zero    (that rank, dp partition) -> optimizer file; empty where only weights were kept
    """

    folder: Path
    layers: Mapping[int, tuple[Path, ...]]
    ranks: Mapping[int, Path]
    zero: Mapping[tuple[int, int], Path]

    @property
    def tp(self) -> int:
        return len(next(iter(self.layers.values())))

    @property
    def iteration(self) -> int:
        """From the folder's name; 0 where the name has no number."""
        match = STEP.fullmatch(self.folder.name)
        return int(match[1]) if match else 0


def checkpoint_folder(path: Path) -> Path:
    """The folder of the checkpoint: `path` itself, the one that its `latest` names, or its global_step folder with the
    highest number.

    Raises ConversionError.
    """
    if _has_layers(path):
        return path
    if (path / LATEST).is_file():
        named = named_folder(path / LATEST)
        if not _has_layers(named):
            raise ConversionError(
                f"{path / LATEST} names {named.name!r}, in which there are no layer files "
                "(layer_NN-model_NN-model_states.pt)"
            )
        return named
    steps = {
        int(match[1]): inside
        for inside in path.glob("global_step*")
        if (match := STEP.fullmatch(inside.name)) and _has_layers(inside)
    }
    if not steps:
        raise ConversionError(
            f"{path} holds no layer files (layer_NN-model_NN-model_states.pt) and no folder with them"
        )
    return steps[max(steps)]


def recognises(path: Path) -> bool:
    """Whether a folder has layer files or global_step folders, or a `latest` that names such a folder, even one that is
    missing. Beside a model's weights `latest` says nothing: DeepSpeed writes it for models without layer files too.
    """
    if _has_layers(path) or any(_has_layers(inside) for inside in path.glob("global_step*")):
        return True
    latest = path / LATEST
    named = latest.is_file() and STEP.fullmatch(read_word(latest)) is not None
    return named and not weight_files(path)


def _has_layers(folder: Path) -> bool:
    return any(_LAYER.fullmatch(file.name) for file in folder.glob("layer_*")) if folder.is_dir() else False


def listing(folder: Path) -> Listing:
    """All files of a checkpoint. Raises one ConversionError that lists every rank without its files."""
    layers: dict[int, dict[int, Path]] = {}
    ranks: dict[int, Path] = {}
    zero: dict[tuple[int, int], Path] = {}
    problems = []
    for file in sorted(folder.iterdir()):
        if match := _LAYER.fullmatch(file.name):
            layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = file
        elif match := _RANK.fullmatch(file.name):
            ranks[int(match[1])] = file
        elif match := _ZERO.fullmatch(file.name):
            key = (int(match[2]), int(match[1]))
            if key in zero:
                problems.append(f"{file.name} and {zero[key].name} are of the same rank")
            zero[key] = file
    tp = 1 + max(t for files in layers.values() for t in files)
    for layer, files in sorted(layers.items()):
        missing = [t for t in range(tp) if t not in files]
        if missing:
            problems.append(
                f"of layer {layer} the files of tp ranks {', '.join(map(str, missing))} of {tp} are missing"
            )
    problems += _rank_problems(ranks, zero, tp)
    if problems:
        raise ConversionError(f"{folder} is not whole: " + "; ".join(problems))
    return Listing(folder, {n: tuple(layers[n][t] for t in range(tp)) for n in sorted(layers)}, ranks, zero)


def _rank_problems(ranks: Mapping[int, Path], zero: Mapping[tuple[int, int], Path], tp: int) -> list[str]:
    """The model-parallel ranks without a file."""
    problems = []
    for what, there in (("mp_rank", set(ranks)), ("optimizer", {rank for rank, _ in zero})):
        missing = [rank for rank in range(max(there, default=-1) + 1) if rank not in there]
        if missing:
            problems.append(f"{what} files of ranks {', '.join(map(str, missing))} are missing")
        elif len(there) % tp:
            problems.append(
                f"there are {what} files of {len(there)} ranks, which is no multiple of the {tp} tensor-parallel ranks "
                "of the layer files"
            )
    if ranks and zero and not problems and len(ranks) != 1 + max(rank for rank, _ in zero):
        problems.append(
            f"there are {len(ranks)} mp_rank files, but optimizer files of {1 + max(rank for rank, _ in zero)} ranks"
        )
    return problems


class Files:
    """Files of one checkpoint, read when they are needed. Only the last ones stay open, because each mapping takes a
    file descriptor.
    """

    def __init__(self, kept: int = 96) -> None:
        self._kept, self._lock = kept, Lock()
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def __getitem__(self, path: Path) -> Any:
        with self._lock:
            if path not in self._open:
                self._open[path] = read_torch_file(path, KNOWN)
                if len(self._open) > self._kept:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def close(self) -> None:
        self._open.clear()
