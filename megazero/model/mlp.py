"""The feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.activation import ACTIVATIONS
from fused_ops.gated import GATED
from megazero.config.inventory import DOWN, GATE, UP
from megazero.model.layout import ModelLayout
from megazero.mpu.layers import column_parallel_pair


class Mlp(nn.Module):
    """down(act(up(x))), or with a gate down(act(gate(x)) * up(x)): [s(/t), b, h] -> the same.

    (SwiGLU: Shazeer 2020, arXiv:2002.05202.) Communicates what its parallel linear layers do.
    """

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        mlp = layout.layer(number).mlp
        self.activation = mlp.activation
        self.gate = layout.column(number, GATE) if mlp.gated else None
        self.up = layout.column(number, UP)
        self.down = layout.row(number, DOWN)

    def forward(self, hidden: Tensor, samples: Tensor | None = None) -> Tensor:
        """samples: int64 [b], numbers of the samples in the run's order, which key the adapters' dropout."""
        if self.gate is not None:
            act = GATED[self.activation]
            # in one expression: under a name, gate and up would live until `down` is through
            return self.down(act(*column_parallel_pair(self.gate, self.up, hidden, samples)), samples)
        return self.down(ACTIVATIONS[self.activation](self.up(hidden, samples)), samples)
