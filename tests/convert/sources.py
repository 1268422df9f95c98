"""A source without files, whose values are random numbers keyed by name. The tests of converters use it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.window import TensorInfo
from megazero.config.schema import ModelConfig, OptimizerConfig, Run
from megazero.convert.source import MOMENTS, WEIGHT, Source, SourcePosition, parameter_specs
from tests.numbers import bell

BLOOM = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=3, vocab_size=97, seq_length=16, embedding_layernorm=True
)

AS_LLAMA: dict[str, Any] = {"position_embedding": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
AS_LLAMA |= {"disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "num_query_groups": 2}
"""Of a model with four heads."""


def entries_of(model: ModelConfig, columns: Mapping[str, torch.dtype]) -> dict[str, TensorInfo]:
    """Entries for a format whose tensors are all stored alike."""
    return {name: TensorInfo(spec.shape, dict(columns)) for name, spec in parameter_specs(model).items()}


class Made(Source):
    """Random values, the same for the same name and column; norms near one, second moments positive."""

    def read(self, name: str, column: str = WEIGHT) -> torch.Tensor:
        entry = self.entries[name]
        random = torch.Generator().manual_seed(zlib.crc32(f"{name} {column}".encode()))
        values = 0.1 * bell(entry.shape, random)
        values = values.square() if column == "exp_avg_sq" else values + ("norm.weight" in name and column == WEIGHT)
        return values.to(entry.columns[column])


def made(
    model: ModelConfig = BLOOM,
    *,
    precision: str = "fp32",
    moments: bool = False,
    dtype: torch.dtype = torch.float32,
    **facts: Any,
) -> Made:
    """moments: fp32 masters and moments, as a training run has them."""
    columns = {WEIGHT: torch.float32 if moments else dtype} | (dict.fromkeys(MOMENTS, torch.float32) if moments else {})
    run = Run(model=model, optimizer=OptimizerConfig(precision=precision))
    position = SourcePosition(7, 84, 1344, 7.0)
    return Made("made", Path("nowhere"), run, entries_of(model, columns), position, **facts)
