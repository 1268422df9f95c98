"""Models with plans of tensor parallelism, as people write them in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.own.models import Batch, Case

WORDS, WIDTH, HEADS, INNER, LENGTH = 53, 24, 6, 36, 5


class Table(nn.Module):
    tp_plan: Mapping[str, str] = {"table": "vocabulary"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=41)

    def forward(self, batch: Batch) -> Tensor:
        return self.table(batch["words"])


class Attention(nn.Module):
    """Queries, keys and values of one product, a norm of a head's queries, and a temperature for each head."""

    tp_plan: Mapping[str, str] = {
        "qkv": "column 3",
        "query_norm": "partial",
        "temperature": "cut 0",
        "dry": "cut 1",
        "out": "row",
        "heads": "divided",
    }

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query_norm, self.temperature = nn.LayerNorm(WIDTH // HEADS), nn.Parameter(torch.rand(HEADS) + 0.5)
        self.dry = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        queries, keys, values = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(hidden).chunk(3, -1)
        )
        scores = self.query_norm(queries) @ keys.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        kept = self.dry((scores * self.temperature[:, None, None]).softmax(-1))
        return self.out((kept @ values).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    tp_plan: Mapping[str, str] = {"gate_up": "column 2", "down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.gated, self.dry = Attention(dropout), Gated(), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dry(self.attention(self.norms[0](hidden)))
        return hidden + self.dry(self.gated(self.norms[1](hidden)))


class Experts(nn.Module):
    """Two matrices of three experts, of which each word takes a mixture."""

    tp_plan: Mapping[str, str] = {"within": "summed", "within.up": "column", "within.down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.router, self.within = nn.Linear(WIDTH, 3), Mixture()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.within(hidden, weights=self.router(hidden).softmax(-1))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, INNER, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(3, WIDTH, INNER) * 0.2)

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        inner = torch.einsum("bsw,eiw->bsei", hidden, self.up).tanh() * weights[..., None]
        return torch.einsum("bsei,ewi->bsw", inner, self.down)


class Scores(nn.Module):
    """A head whose rows are those of a table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = table.table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def entropy(scores: Tensor, batch: Batch) -> tuple[Tensor, int]:
    answers = batch["answers"]
    return F.cross_entropy(scores.flatten(0, 1), answers.flatten(), reduction="sum"), answers.numel()


def of_words(draw: torch.Generator) -> Batch:
    words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=draw)
    return {"words": words[:, :-1], "answers": words[:, 1:]}


def tied(dropout: float = 0.0) -> list[nn.Module]:
    table = Table()
    return [table, Block(dropout), Experts(), Block(dropout), Scores(table)]


def partly_frozen() -> list[nn.Module]:
    units = tied()
    for parameter in (*units[1].parameters(), *units[2].parameters()):
        parameter.requires_grad_(False)
    return units


def dry_and_again() -> list[nn.Module]:
    """With dropout, and a block that is used twice."""
    units = tied(0.2)
    return [*units[:2], units[2], units[1], *units[4:]]


CASES: Mapping[str, Case] = {
    "tied": Case(tied, entropy, of_words, steps=6),
    "partly frozen": Case(partly_frozen, entropy, of_words, steps=6),
    "dropout": Case(dry_and_again, entropy, of_words, steps=6),
}
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp": 2}),
    "tp 2, recompute": (2, {"tp": 2, "recompute_granularity": "full", "zero_stage": 1, "bucket_size": 500}),
    "tp 2, host": (2, {"tp": 2, "zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
    "tp 3": (3, {"tp": 3, "late_update": True}),
    "tp 2 x pp 2": (4, {"tp": 2, "pp": 2, "late_update": True}),
    "tp 2 x zb-v": (4, {"tp": 2, "pp": 2, "virtual_stages": 2, "pipeline_schedule": "zb-v"}),
    "tp 2 x zero-1": (4, {"tp": 2, "zero_stage": 1}),
    "tp 2 x zero-2": (4, {"tp": 2, "zero_stage": 2, "offload_gradients": "cpu"}),
    "tp 2 x zero-3": (4, {"tp": 2, "zero_stage": 3, "late_update": True}),
    "tp 2 x disks": (4, {"tp": 2, "pp": 2, "offload_optimizer": "nvme", "offload_params": "nvme", "zero_stage": 3}),
}
