"""The weight files of a Hugging Face folder, one or many, safetensors or torch's own, and the keys in each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.convert.files.mapping import is_refusal, not_mapped
from megazero.convert.files.safetensors_file import CODES, DTYPES
from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.hf.config import CONFIG, read_json
from megazero.convert.source import ConversionError, DamagedCheckpoint
from megazero.data.utf8 import is_utf8
from megazero.system.names import is_plain_file_name
from megazero.system.reading import BOUNDS, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TORCH_SINGLE, _TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_NAMES = (SINGLE, INDEX, _TORCH_SINGLE, _TORCH_INDEX)
"""Names of a model's weights, in transformers' order. The first one that is there counts."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that has not been read yet: its shape, its dtype, and a function that reads it as a view of the mapped
    file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    code: str
    read: Callable[[], Tensor]


def weight_files(folder: Path, named: object = None) -> list[Path]:
    """The files that hold the model, found as transformers does: safetensors before torch's, one file before many.

    named: config.json's transformers_weights, which goes before all. Empty where there are none. Raises
    ConversionError for a name that transformers does not take.
    """
    path = _first_file(folder, named)
    return [] if path is None else _listed(path)


def listed_places(folder: Path, named: object = None) -> Mapping[str, str]:
    """Key -> the file that holds it by the index, in words. Empty where the model is one file."""
    path = _first_file(folder, named)
    if path is None or path.suffix != ".json":
        return {}
    return {key: f"{path.name} has it in {name}" for key, name in _weight_map(path).items()}


def _first_file(folder: Path, named: object) -> Path | None:
    """The one file of the weights, or the index of several."""
    if named is None:
        return next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    plain = isinstance(named, str) and is_plain_file_name(named)
    if not plain or not str(named).endswith((".safetensors", ".safetensors.index.json")):
        raise ConversionError(
            f"{folder / CONFIG}: transformers_weights {shown(named)} is no safetensors file of its folder, and no "
            "index of several"
        )
    return folder / str(named)


def unread_weights(folder: Path, named: object = None) -> list[str]:
    """The names of further weight files, which transformers leaves aside."""
    read = {named} if named is not None else {next((name for name in _NAMES if (folder / name).is_file()), None)}
    return [name for name in _NAMES if name not in read and (folder / name).is_file()]


def _listed(path: Path) -> list[Path]:
    """This file, or those that an index lists."""
    if path.suffix != ".json":
        return [path]
    return [path.with_name(name) for name in dict.fromkeys(_weight_map(path).values())]


def _weight_map(path: Path) -> Mapping[str, str]:
    found = read_json(path, BOUNDS.index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ConversionError(f"{path} has no weight_map of keys and files")
    outside = next((name for name in found.values() if not is_plain_file_name(name)), None)
    if outside is not None:
        raise ConversionError(f"{path} names {outside[:80]!r}, which is no file of its folder")
    return found


def stored_tensors(folder: Path, closing: ExitStack, named: object = None) -> dict[str, LazyTensor]:
    """Every tensor of the folder by its key. Files stay open until `closing` closes. named: as in `weight_files`.

    Raises ConversionError, naming what is missing or damaged.
    """
    files = weight_files(folder, named)
    if not files:
        raise ConversionError(f"{folder} has neither {SINGLE}, {_TORCH_SINGLE} nor an index of several")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConversionError(f"{folder} lacks {len(missing)} of its {len(files)} files: {', '.join(missing)}")
    found: dict[str, LazyTensor] = {}
    for file in files:
        for key, stored in tensors_of(file, closing):
            if key in found:
                raise ConversionError(f"{file}: {key} is in another file too")
            found[key] = stored
    return found


def tensors_of(path: Path, closing: ExitStack) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of one file by key. It stays open until `closing` closes. Raises ConversionError."""
    return _of_safetensors(path, closing) if path.suffix == ".safetensors" else _of_torch(path)


def _of_safetensors(path: Path, closing: ExitStack) -> Iterator[tuple[str, LazyTensor]]:
    if not is_utf8(BytesIO(os.fsencode(path))):
        raise ConversionError(f"{path}: the library safetensors opens no path that is not UTF-8; rename its folder")
    try:
        file: Any = closing.enter_context(safe_open(path, "pt"))
        for key in file.keys():  # noqa: SIM118 - no mapping
            header = file.get_slice(key)
            code = header.get_dtype()
            yield key, LazyTensor(tuple(header.get_shape()), DTYPES.get(code), code, partial(file.get_tensor, key))
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        if is_refusal(error):
            raise not_mapped(path, error) from error
        if isinstance(error, RuntimeError):
            raise
        raise DamagedCheckpoint(f"{path} is no whole safetensors file: {error}") from error


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _of_torch(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    state = read_torch_file(path)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ConversionError(f"{path} holds {type(state).__name__}, not a dictionary of tensors")
    for key, value in state.items():
        if isinstance(value, Tensor):
            dtype = value.dtype if value.dtype in CODES else None
            yield (
                str(key),
                LazyTensor(
                    tuple(value.shape), dtype, str(value.dtype).removeprefix("torch."), partial(_itself, value.detach())
                ),
            )
