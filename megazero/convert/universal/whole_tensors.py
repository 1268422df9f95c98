"""A model of megazero from whole tensors under Megatron-DeepSpeed's names, in a folder for each or in one state
dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.dtypes import PRECISION_OF
from megazero.config.inventory import TABLES
from megazero.config.schema import ModelConfig, Run
from megazero.convert.megatron_deepspeed.names import PipelineTensor, why_ignored
from megazero.convert.megatron_deepspeed.shapes import args_from_shapes
from megazero.convert.megatron_deepspeed.weights import LayerTensor
from megazero.convert.report import ConversionReport
from megazero.convert.source import WEIGHT, ConversionError, Source, SourcePosition, parameter_specs
from megazero.convert.universal.names import classify_names

PARTS, SUBSHAPE, VOCABULARY = "param_n_sub_params", "sub_param_shape", "vocab_tensor"
WORD_KEY = "word_embeddings.weight"


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor before it is read. flags: other entries of its file in a universal checkpoint. read: returns the
    value of a column.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    flags: Mapping[str, Any] = field(default_factory=dict)


class WholeTensors:
    """The parameters of a checkpoint by (layer, key) of Megatron-DeepSpeed's pipeline, and those of them that make each
    tensor of our model.
    """

    def __init__(self, where: str, parameters: Mapping[str, WholeTensor], report: ConversionReport) -> None:
        self.where, self.report = where, report
        self.named, others = classify_names(parameters, where)
        report.unused |= {
            name: why_ignored(name) or "no parameter of a GPT or BLOOM goes by this name" for name in others
        }
        self.parameters = {spec: parameters[name] for spec, name in self.named.names.items()}
        self.theirs: Mapping[str, PipelineTensor] = {}
        self.ranks = 1

    def completed(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments, completed by the tensors' shapes.

        Where padding was cut off, the rows that are left are the true vocabulary.
        """
        word = self.parameters[self.named.layers.embedding, WORD_KEY]
        if word.flags.get(VOCABULARY):
            said = {**said, "padded_vocab_size": None, "vocab_size": word.shape[0], "tokenizer_type": None}
        stored: dict[int, dict[str, LayerTensor]] = {}
        for (layer, key), parameter in self.parameters.items():
            stored.setdefault(layer, {})[key] = LayerTensor(parameter.shape, parameter.dtype)
        whole = {layer: (keys,) for layer, keys in stored.items()}
        return args_from_shapes(said, whole, self.named.layers, self.where, self.report)

    def take(self, model: ModelConfig, ranks: int) -> None:
        """Find every tensor of a model. ranks: tp of the run that wrote it.

        Raises ConversionError with all that does not fit.
        """
        self.theirs, self.ranks = self.named.theirs(model), ranks
        problems = [
            *self._account(),
            *(problem for name, spec in parameter_specs(model).items() for problem in self._misfit(name, spec.shape)),
        ]
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConversionError(
                f"{self.where} does not hold the model that its arguments describe: " + "; ".join(problems[:20] + more)
            )

    def parameter(self, name: str) -> WholeTensor:
        """The stored tensor that one of our tensors is made of."""
        where = self.theirs[name]
        return self.parameters[where.layer, where.key]

    def tensor(self, name: str, shape: tuple[int, ...], column: str) -> Tensor:
        """One of our global tensors, vocabulary padding cut off: [shape]."""
        where, parameter = self.theirs[name], self.parameter(name)
        value = parameter.read(column)
        if tuple(value.shape) != parameter.shape:
            raise ConversionError(
                f"{self.where}: {column} of {name} has shape {list(value.shape)}, its weight {list(parameter.shape)}"
            )
        if where.half is None:
            return value[: shape[0]]
        ranks = 1 if parameter.flags.get(PARTS, 1) == 2 or SUBSHAPE in parameter.flags else self.ranks
        return value.unflatten(0, (ranks, 2, -1))[:, where.half].flatten(0, 1)

    def _account(self) -> Iterator[str]:
        used = {(where.layer, where.key) for where in self.theirs.values()}
        for spec, name in self.named.names.items():
            if spec in used:
                self.report.mapped.append(name)
            elif (why := why_ignored(spec[1])) is not None:
                self.report.unused[name] = why
            else:
                yield f"{name} is a parameter that such a model does not have"

    def _misfit(self, name: str, wanted: tuple[int, ...]) -> Iterator[str]:
        where = self.theirs[name]
        found = self.parameters.get((where.layer, where.key))
        if found is None:
            yield f"{name} is missing (layer {where.layer}, {where.key})"
            return
        shape = list(found.shape)
        if where.half is not None:
            shape[0] //= 2
        padded = name in TABLES and shape[1:] == list(wanted[1:]) and shape[0] >= wanted[0]
        if shape != list(wanted) and not padded:
            yield f"{self.named.names[where.layer, where.key]} has shape {list(found.shape)}, {name} is {list(wanted)}"


def precision_of(args: Mapping[str, Any]) -> str:
    """The precision of the model's computation, by its arguments."""
    dtype = args.get("params_dtype")
    if isinstance(dtype, torch.dtype):
        return PRECISION_OF.get(dtype, "fp32")
    return "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"


class WholeTensorSource(Source):
    """A checkpoint whose tensors are read through `WholeTensors`."""

    def __init__(
        self,
        format: str,
        path: Path,
        run: Run,
        position: SourcePosition,
        held: WholeTensors,
        entries: Mapping[str, TensorInfo],
    ) -> None:
        super().__init__(format, path, run, entries, position, report=held.report)
        self._held = held

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self._held.tensor(name, self.entries[name].shape, column)
