"""One pre-norm transformer block: hidden + attention(norm(hidden)), then hidden + mlp(norm(hidden))."""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.compiled import compiled_bodies
from megazero.config.inventory import ATTENTION_NORM, MLP_NORM, block
from megazero.model.attention import Attention
from megazero.model.batch import MicroBatch
from megazero.model.dropout import DropoutSite, HiddenDropout
from megazero.model.layout import ModelLayout
from megazero.model.mlp import Mlp


class Block(nn.Module):
    """The transformer block with this global number: [s(/t), b, h] -> the same."""

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        self.number, self.compile_ops = number, layout.compile
        self.attention_norm = layout.norm(f"{block(number)}.{ATTENTION_NORM}")
        self.attention = Attention(number, layout)
        self.attention_dropout = HiddenDropout(number, DropoutSite.ATTENTION_OUTPUT, layout)
        self.mlp_norm = layout.norm(f"{block(number)}.{MLP_NORM}")
        self.mlp = Mlp(number, layout)
        self.mlp_dropout = HiddenDropout(number, DropoutSite.MLP_OUTPUT, layout)

    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        with compiled_bodies(self.compile_ops):
            attended = self.attention_dropout(self.attention(self.attention_norm(hidden), batch), batch.samples)
            hidden, normalised = self.mlp_norm.of_sum(attended, hidden)
            return self.mlp_dropout.add(self.mlp(normalised, batch.samples), hidden, batch.samples)
