"""Models of `transformers` with other heads, cut into units below a loss of the program's own, beside plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import megazero
from tests.own.models import Batch, Case, Trained, plainly_trained
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import run_ranks

WORDS, LENGTH, CLASSES = 31, 7, 4
SIZES = {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
HEADS = {**SIZES, "num_attention_heads": 3, "num_labels": CLASSES, "max_position_embeddings": 32}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**HEADS, "num_key_value_heads": 1, "pad_token_id": 0}
KINDS: Mapping[str, tuple[str, dict[str, Any], bool]] = {
    "BertForSequenceClassification": ("BertConfig", {**HEADS, **DRY}, False),
    "BertForMaskedLM": ("BertConfig", {**HEADS, **DRY}, True),
    "RobertaForTokenClassification": ("RobertaConfig", {**HEADS, **DRY}, True),
    "LlamaForSequenceClassification": ("LlamaConfig", GROUPED, False),
    "Qwen3ForTokenClassification": ("Qwen3Config", {**GROUPED, "head_dim": 8, "classifier_dropout": 0.0}, True),
}
"""The configuration of each, and whether it has an answer for each token."""
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "recompute": (1, {"recompute_granularity": "full"}),
    "stages": (2, {"pp": 2, "zero_stage": 2}),
    "sharded": (2, {"zero_stage": 3, "offload_params": "cpu"}),
}


def built(kind: str) -> nn.Module:
    config, settings, _ = KINDS[kind]
    torch.manual_seed(5)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings)).double()
    return model.train()


def entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    answers = batch["answers"]
    return F.cross_entropy(logits.flatten(0, -2), answers.flatten(), reduction="sum"), answers.numel()


class WithLoss(nn.Module):
    """A model as its authors call it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        made = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return entropy(made.logits, batch)


def case_of(kind: str) -> Case:
    def batch(draw: torch.Generator) -> Batch:
        """The second sample is padded. `answers` is nothing that the model's forward takes."""
        tokens = torch.randint(3, WORDS, (2, LENGTH), generator=draw)
        mask = torch.tensor([[1] * LENGTH, [1] * 4 + [0] * (LENGTH - 4)])
        classes = WORDS if kind == "BertForMaskedLM" else CLASSES
        answers = torch.randint(0, classes, (2, LENGTH) if KINDS[kind][2] else (2,), generator=draw)
        return {"input_ids": tokens * mask, "attention_mask": mask, "answers": answers}

    return Case(lambda: [WithLoss(built(kind))], None, batch, unused=True)


@cache
def plain(kind: str) -> Trained:
    made = plainly_trained(case_of(kind))
    return replace(made, values={name.removeprefix("0.model."): value for name, value in made.values.items()})


def trained(rank: int, kind: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    def units() -> megazero.Model:
        return megazero.from_transformers(built(kind), loss=entropy, unused=True)

    return [trained_with(case_of(kind), {**RULE, **layout}, model=units()) for layout in layouts]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_train_as_in_plain_torch(kind: str) -> None:
    for size in (1, 2):
        layouts = {name: layout for name, (ranks, layout) in LAYOUTS.items() if ranks == size}
        for rank, made in enumerate(run_ranks(size, trained, kind, [*layouts.values()])):
            for name, own in zip(layouts, made, strict=True):
                require_equal(own, plain(kind), f"{kind}, {name}, rank {rank}")


def test_a_model_without_a_loss_of_its_own_needs_one() -> None:
    for kind in ("BertForSequenceClassification", "RobertaForTokenClassification"):
        with pytest.raises(ValueError, match="say loss="):
            megazero.from_transformers(built(kind))


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    config = transformers.OPTConfig(**{**HEADS, "ffn_dim": 20, "num_labels": CLASSES, "layerdrop": 0.1})
    with pytest.raises(ValueError, match=r"leaves out layers at random \(layerdrop 0.1\)"):
        megazero.from_transformers(transformers.OPTForSequenceClassification(config), loss=entropy)


def test_a_loss_gets_what_the_model_does_not_take() -> None:
    """And a name that neither takes is no error: the program's own loss reads what it likes."""
    seen = list[Batch]()

    def loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
        seen.append(batch)
        return entropy(logits, batch)

    kind = "BertForSequenceClassification"
    batch = {**case_of(kind).micro_batch(0, 0), "weight of the sample": torch.ones(2)}
    with megazero.engine(megazero.from_transformers(built(kind), loss=loss), run=RULE) as engine:
        engine.step(batch)
    assert seen[0].keys() == batch.keys()
