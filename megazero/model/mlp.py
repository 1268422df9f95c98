"""The feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.activation import ACTIVATIONS
from fused_ops.swiglu import swiglu
from megazero.config.derive import ffn_width, mlp_bias
from megazero.model.layout import ModelLayout
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_pair


class Mlp(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu. [s(/t), b, h] -> the same."""

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        model, name = layout.model, f"blocks.{number}.mlp"
        width, bias = ffn_width(model), mlp_bias(model)

        def entrance(which: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(f"{name}.{which}", model.hidden_size, width, layout.tp, bias=bias, std=layout.std, **layout.linear)

        self.gate = entrance("gate") if model.activation == "swiglu" else None
        self.up = entrance("up")
        self.down = RowParallelLinear(
            f"{name}.down", width, model.hidden_size, layout.tp, bias=bias, std=layout.output_std, **layout.linear
        )
        self.activation = model.activation

    def forward(self, hidden: Tensor, samples: Tensor | None = None) -> Tensor:
        """samples: int64 [b], numbers of the samples, for the dropout of adapters."""
        if self.gate is not None:
            return self.down(swiglu(*column_parallel_pair(self.gate, self.up, hidden, samples)), samples)
        return self.down(ACTIVATIONS[self.activation](self.up(hidden, samples)), samples)
