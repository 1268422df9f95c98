"""`Source`: a checkpoint of any format as global tensors under megazero's names.

A reader of a format is a `Source`; a writer is a function that takes one. Formats are independent of each other: n
formats need n readers and n writers. A tensor is read on request only, so the largest tensor determines the memory of a
conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.schema import LoraConfig, ModelConfig, Run
from megazero.convert.report import ConversionReport
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import Group
from megazero.mpu.lora import low_rank
from megazero.mpu.parameter import Box, ParameterSpec, spec_of
from megazero.system.status import FAILED

WEIGHT, EXP_AVG, EXP_AVG_SQ = "weight", "exp_avg", "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class ConversionError(ValueError):
    """A checkpoint cannot be read or written as asked. The message says what is wrong, where, and what would help."""


class DamagedCheckpoint(ConversionError):
    """Files of a checkpoint are not what was written."""

    status = FAILED


class NoCheckpoint(ConversionError):
    """There is nothing at this path, or nothing of a known format."""


@dataclass(frozen=True)
class SourcePosition:
    """How far the training was when the checkpoint was written. A number that the format does not store is 0.

    optimizer_steps  steps that were not skipped, which Adam's bias correction counts
    loss_scale       state of the dynamic loss scale as in `optim.loss_scale.LossScaler.state_dict`, if any
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    optimizer_steps: float = 0.0
    loss_scale: Mapping[str, Any] | None = None


@dataclass
class Source:
    """A checkpoint open for reading; a context manager that closes its files. Subclasses implement `read`.

    format      the format's name: "hf", "megazero", ...
    path        the folder of this one checkpoint
    run         the configuration of the run that wrote it; what is not known has its default. `run.model.vocab_size`
                is set, and `run.optimizer.precision` is that of the computation
    entries     exactly the tensors of the model, by global name, in the model's order (`parameter_specs`)
    position    how far the training was
    companions  files of the model that are not tensors, by file name: config.json, tokenizer.json, ...
    report      what became of the format's own keys; complete once everything has been read
    closing     closes the files
    """

    format: str
    path: Path
    run: Run
    entries: Mapping[str, TensorInfo]
    position: SourcePosition = SourcePosition()
    companions: Mapping[str, Path] = field(default_factory=dict)
    report: ConversionReport = field(default_factory=ConversionReport)
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def separates_qkv(self) -> bool:
        """Whether the checkpoint has query, key and value of a layer as three matrices."""
        return False

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        """The whole global tensor on the CPU, in its stored dtype and the shape of its entry.

        It may be a view of a mapped file: do not write into it. Raises ConversionError if the files are damaged.
        """
        raise NotImplementedError

    def read_box(self, name: str, box: Box, column: str = WEIGHT) -> Tensor:
        """A box of the tensor, otherwise as `read`. A reader that can read less than the whole tensor overrides it."""
        return self.read(name, column)[tuple(slice(start, stop) for start, stop in box)]

    @property
    def model(self) -> ModelConfig:
        return self.run.model

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that every tensor has: weights alone, or the optimizer's moments too."""
        return tuple(c for c in (WEIGHT, *MOMENTS) if all(c in entry.columns for entry in self.entries.values()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes(column) for entry in self.entries.values() for column in self.columns)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()


def parameter_specs(
    model: ModelConfig, tp: int = 1, tp_index: int = 0, *, adapters: LoraConfig | None = None
) -> dict[str, ParameterSpec]:
    """The specs of a model's parameters by global name, in forward order, for one tp rank that holds all layers.

    adapters: return the specs of these low-rank adapters instead. Allocates no parameters.
    """
    group = Group(tuple(range(tp)), tp_index, None)
    lora = None if adapters is None else low_rank(adapters, model)
    stage = Stage(ModelLayout(model, group, torch.float32, lora=lora, device=torch.device("meta")), whole_model(model))
    found = (spec_of(parameter) for unit in stage.units() for parameter in unit.parameters() if parameter.requires_grad)
    return {spec.name: spec for spec in found}
