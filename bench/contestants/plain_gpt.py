"""A GPT in a page of plain torch, as a user would write it: learned positions, pre-norm, tied head.

s sequence, b micro-batch, h hidden, n heads, d head dim, v vocabulary. Query, key and value rows are stored head by
head, so that a tensor-parallel shard of the projection is a range of heads. `Trunk` may have a part of the layers (a
pipeline stage).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.contestants.common import Step, in_one_process
from bench.workload import Workload

PRECISIONS = ("bf16", "fp32")


class Attention(nn.Module):
    """Causal self-attention; eager: scores are written out, which a compiler turns into fewer passes."""

    def __init__(self, work: Workload, attention: str) -> None:
        super().__init__()
        self.size, self.eager = work.hidden // work.heads, attention == "eager"
        self.mixed = nn.Linear(work.hidden, 3 * work.hidden)
        self.output = nn.Linear(work.hidden, work.hidden)
        if self.eager:
            future = torch.full((work.sequence, work.sequence), -math.inf).triu(1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        query, key, value = self.mixed(x).view(b, s, -1, 3, self.size).permute(3, 0, 2, 1, 4).unbind(0)
        if self.eager:
            scores = (query @ key.transpose(-1, -2)) * (1 / math.sqrt(self.size)) + self.get_buffer("future").to(
                query.dtype
            )
            context = torch.softmax(scores, dim=-1).to(query.dtype) @ value
        else:
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(context.transpose(1, 2).reshape(b, s, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.up = nn.Linear(work.hidden, 4 * work.hidden)
        self.down = nn.Linear(4 * work.hidden, work.hidden)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


class Block(nn.Module):
    def __init__(self, work: Workload, attention: str) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(work.hidden), Attention(work, attention)
        self.norm_2, self.feed_forward = nn.LayerNorm(work.hidden), FeedForward(work)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.feed_forward(self.norm_2(x))
        return result


class Embedding(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.word = nn.Embedding(work.vocabulary, work.hidden)
        self.position = nn.Embedding(work.sequence, work.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return result


class Trunk(nn.Module):
    """tokens [b, s] (or hidden states [b, s, h], without the embedding) -> logits (or hidden states,
    without the head).
    """

    def __init__(
        self,
        work: Workload,
        attention: str = "sdpa",
        *,
        layers: int | None = None,
        first: bool = True,
        last: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(work) if first else None
        self.blocks = nn.ModuleList(Block(work, attention) for _ in range(work.layers if layers is None else layers))
        self.norm = nn.LayerNorm(work.hidden) if last else None
        self.head = nn.Linear(work.hidden, work.vocabulary, bias=False) if last else None
        self.apply(_initialise)
        if tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.word.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build(work: Workload, attention: str = "sdpa", compile: bool = True, precision: str = "autocast") -> Step:
    torch.manual_seed(1234)
    return in_one_process(Trunk(work, attention), lambda model, tokens: model(tokens), work, compile, precision)
