"""The weights of a saved model of modules as a plain `state_dict`, of the files alone: without ranks, without modules.

A checkpoint has each trained parameter once, as its optimizer has it: in float32 where modules compute in 16 bits. What
is not trained is in a file beside. The names under which modules have a parameter besides are in the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.api import Checkpoint
from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.checkpoint.narrowing import narrowed
from megazero.convert.files.safetensors_file import DTYPES, TensorHeader, write_safetensors
from megazero.own.saved import BESIDE, MODEL


class SavedModel:
    """The tensors of a checkpoint of a user's model, by the names that `engine.state_dict` has.

    folder  a checkpoint, or one of them, of which the newest complete one is taken
    dtype   of parameters and buffers of floats; None: as they are in the checkpoint
    frozen  whether frozen parameters are among them

    Raises FileNotFoundError if there is no complete checkpoint, Damaged (a CheckpointError) if a file differs from what
    was written, and CheckpointError for a checkpoint of one of megazero's own families.
    """

    def __init__(
        self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None, *, frozen: bool = True
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: one of floats is needed")
        self._checkpoint, self._dtype = Checkpoint(Path(folder)), dtype
        self.path = self._checkpoint.path
        if "model" in self._checkpoint.run:
            raise CheckpointError(
                f"{self.path} is a checkpoint of one of megazero's own families, and not of a program's modules: "
                f"megazero convert --input {self.path} --to hf --output FOLDER exports it"
            )
        about: Mapping[str, Any] = self._checkpoint.progress.get(MODEL, {})
        self._shapes: Mapping[str, Sequence[int]] = about.get("shapes", {})
        self._sources = {name: name for name in self._checkpoint.tensors} | about.get("names", {})
        left_out = set[str]() if frozen else {*about.get("frozen", ())}
        self._beside = {name: header for name, header in self._headers_beside().items() if name not in left_out}

    @property
    def headers(self) -> list[TensorHeader]:
        """Name, dtype and shape of each tensor, in the order of `tensors`."""
        trained = (
            TensorHeader(name, self._wanted(self._stored(source)), self._shape(source))
            for name, source in self._sources.items()
        )
        return [*trained, *(each._replace(dtype=self._wanted(each.dtype)) for each in self._beside.values())]

    def tensors(self) -> Iterator[Tensor]:
        """Each tensor in host memory, one after the other. Raises Damaged, and OutOfRange for a number beyond dtype."""
        for name, source in self._sources.items():
            values = self._checkpoint.read(source).view(self._shape(source))
            yield narrowed(values, self._wanted(values.dtype), name)
        with self._opened_beside() as file:
            for name, header in self._beside.items():
                yield narrowed(file.get_tensor(name), self._wanted(header.dtype), name)

    def _wanted(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def _stored(self, name: str) -> torch.dtype:
        return self._checkpoint.tensors[name].columns["weight"]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes.get(name, self._checkpoint.tensors[name].shape))

    def _opened_beside(self) -> Any:
        try:
            return safe_open(self.path / BESIDE, "pt")
        except (OSError, SafetensorError) as error:
            raise Damaged(f"checkpoint {self.path} is damaged: {BESIDE}: {error}") from error

    def _headers_beside(self) -> dict[str, TensorHeader]:
        """Of what is not trained, by name."""
        headers = dict[str, TensorHeader]()
        with self._opened_beside() as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                stored = file.get_slice(name)
                headers[name] = TensorHeader(name, DTYPES[stored.get_dtype()], tuple(stored.get_shape()))
        return headers


def saved_state_dict(
    folder: str | os.PathLike[str], dtype: torch.dtype | None = None, *, frozen: bool = True
) -> dict[str, Tensor]:
    """What `load_state_dict` of the modules takes, of a checkpoint of `megazero.engine`, of `megazero.training(model=)`
    or of `megazero.deepspeed`: all parameters and buffers in host memory.

        model.load_state_dict(megazero.saved_state_dict("out/checkpoints"))

    Arguments and errors are those of `own.exported.SavedModel`. Of a parameter that modules have under several names
    each name has a copy. Communicates nothing: one process calls it, without a process group.
    """
    saved = SavedModel(folder, dtype, frozen=frozen)
    return {header.key: tensor for header, tensor in zip(saved.headers, saved.tensors(), strict=True)}


def export_saved(folder: str | os.PathLike[str], path: Path, dtype: torch.dtype | None = None) -> SavedModel:
    """Write what `saved_state_dict` returns to a new file of safetensors, with a tensor at a time in memory. Raises
    OSError besides, FileExistsError among them.
    """
    saved = SavedModel(folder, dtype)
    write_safetensors(path, saved.headers, saved.tensors())
    return saved
