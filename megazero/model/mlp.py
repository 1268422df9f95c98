"""The feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.activation import ACTIVATIONS
from fused_ops.swiglu import swiglu
from megazero.config.inventory import DOWN, GATE, UP
from megazero.model.layout import ModelLayout
from megazero.mpu.layers import column_parallel_pair


class Mlp(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu. [s(/t), b, h] -> the same."""

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        self.activation = layout.model.activation
        self.gate = layout.column(number, GATE) if self.activation == "swiglu" else None
        self.up = layout.column(number, UP)
        self.down = layout.row(number, DOWN)

    def forward(self, hidden: Tensor, samples: Tensor | None = None) -> Tensor:
        """samples: int64 [b], numbers of the samples, for the dropout of adapters."""
        if self.gate is not None:
            return self.down(swiglu(*column_parallel_pair(self.gate, self.up, hidden, samples)), samples)
        return self.down(ACTIVATIONS[self.activation](self.up(hidden, samples)), samples)
