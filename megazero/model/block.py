"""A transformer block: attention and a feed-forward layer, each of which adds to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.compiled import compiled_bodies
from megazero.config.inventory import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    block,
    block_norms,
)
from megazero.config.layers.kinds import IN_TURN
from megazero.model.attention import Attention
from megazero.model.batch import MicroBatch
from megazero.model.dropout import DropoutSite, HiddenDropout
from megazero.model.layout import ModelLayout
from megazero.model.mlp import Mlp
from megazero.mpu.norm import LayerNorm, RMSNorm


class Block(nn.Module):
    """The transformer block with this global number: [s(/t), b, h] -> the same.

    Its layer (`config.layers.kinds.Layer`) says which norms there are, before its parts and after them, and whether its
    two parts work one after the other or side by side. Absent norms are None.
    """

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        layer = layout.layer(number)
        self.number, self.compile_ops = number, layout.compile
        self.in_turn, self.residual = layer.parallel == IN_TURN, layer.residual
        present = block_norms(layer)

        def norm(name: str) -> LayerNorm | RMSNorm | None:
            return layout.norm(f"{block(number)}.{name}") if name in present else None

        self.attention_norm = norm(ATTENTION_NORM)
        self.attention = Attention(number, layout)
        self.attention_output_norm = norm(ATTENTION_OUTPUT_NORM)
        self.attention_dropout = HiddenDropout(number, DropoutSite.ATTENTION_OUTPUT, layout)
        self.mlp_norm = norm(MLP_NORM)
        self.mlp = Mlp(number, layout)
        self.mlp_output_norm = norm(MLP_OUTPUT_NORM)
        self.mlp_dropout = HiddenDropout(number, DropoutSite.MLP_OUTPUT, layout)

    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        with compiled_bodies(self.compile_ops):
            if not self.in_turn:
                return self._side_by_side(hidden, batch)
            attended = self._attended(_normalised(self.attention_norm, hidden), batch)
            if self.mlp_norm is None:
                hidden = normalised = hidden + attended
            else:
                hidden, normalised = self.mlp_norm.of_sum(attended, hidden)
            return self._fed(normalised, hidden, batch)

    def _side_by_side(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Both parts work on the block's input, through one norm or a norm each."""
        normalised = _normalised(self.attention_norm, hidden)
        attended = self._attended(normalised, batch)
        normalised = normalised if self.mlp_norm is None else self.mlp_norm(hidden)
        return self._fed(normalised, hidden + attended, batch)

    def _attended(self, normalised: Tensor, batch: MicroBatch) -> Tensor:
        """What attention adds to the residual stream."""
        attended = self._scaled(self.attention_output_norm, self.attention(normalised, batch))
        return self.attention_dropout(attended, batch.samples)

    def _fed(self, normalised: Tensor, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """The residual stream `hidden` and what the feed-forward layer adds to it."""
        fed = self._scaled(self.mlp_output_norm, self.mlp(normalised, batch.samples))
        return self.mlp_dropout.add(fed, hidden, batch.samples)

    def _scaled(self, norm: LayerNorm | RMSNorm | None, x: Tensor) -> Tensor:
        """What a part adds to the residual stream."""
        x = _normalised(norm, x)
        return x if self.residual == 1.0 else x * self.residual


def _normalised(norm: LayerNorm | RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
