"""The configuration of a run: frozen dataclasses with a sentence under each field, which `--help` shows.

A field's flag is its name with dashes. `config.fields.option` has the field's metadata for the command line. The
default None means that the value is derived, and `derived` says how. The sentence is the string literal under the
field; `megazero.config.options` reads it from the source. Measurements belong in docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megazero.config.schema.checkpoint import CheckpointConfig
from megazero.config.schema.data import DataConfig
from megazero.config.schema.lora import LoraConfig
from megazero.config.schema.model import ModelConfig
from megazero.config.schema.offload import OffloadConfig
from megazero.config.schema.optimizer import OptimizerConfig
from megazero.config.schema.parallel import ParallelConfig
from megazero.config.schema.schedule import ScheduleConfig
from megazero.config.schema.trainer import TrainerConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoraConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Run",
    "ScheduleConfig",
    "TrainerConfig",
]


@dataclass(frozen=True)
class Run:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
