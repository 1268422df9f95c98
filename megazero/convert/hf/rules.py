"""Tables of Hugging Face's names: which of their tensors make one of ours, and how.

In a rule `{i}` is the block's number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.config.schema import ModelConfig
from megazero.convert.hf.rearrange import SAME, SEPARATE, Rearrangement

EMBEDDING, HEAD = "embedding.word.weight", "lm_head.weight"


@dataclass(frozen=True)
class Rule:
    """One of our parameters, and the tensors of theirs that it is made of.

    joined: all our parameters that make the one tensor of theirs together, in its order; empty where this one does.
    """

    ours: str
    theirs: tuple[str, ...]
    how: Rearrangement = SAME
    joined: tuple[str, ...] = ()

    def of_block(self, number: str) -> Rule:
        """The rule with a block's number filled in."""
        theirs, joined = (tuple(key.replace("{i}", number) for key in keys) for keys in (self.theirs, self.joined))
        return Rule(self.ours.replace("{i}", number), theirs, self.how, joined)


def pair(ours: str, theirs: str, weight: Rearrangement = SAME, bias: Rearrangement = SAME) -> tuple[Rule, Rule]:
    """The rules of a layer with weight and bias."""
    return Rule(f"{ours}.weight", (f"{theirs}.weight",), weight), Rule(f"{ours}.bias", (f"{theirs}.bias",), bias)


def separate(attention: str) -> tuple[Rule, Rule]:
    """The rules of query, key and value where a family has three layers for them."""
    weight, bias = (
        Rule(f"blocks.{{i}}.attention.qkv.{kind}", tuple(f"{attention}.{x}_proj.{kind}" for x in "qkv"), SEPARATE)
        for kind in ("weight", "bias")
    )
    return weight, bias


@dataclass(frozen=True)
class Names:
    """The tensors of a family.

    prefix  of all keys but the head's; files may lack it
    rules   one for each of our parameters
    head    the key of the head's weight
    """

    prefix: str
    rules: tuple[Rule, ...]
    head: str = HEAD

    def rule(self, name: str) -> Rule:
        """The rule for one of our parameters. Raises ValueError for a name that the family has no tensor for."""
        parts = name.split(".")
        pattern, number = (".".join(["blocks", "{i}", *parts[2:]]), parts[1]) if parts[0] == "blocks" else (name, "")
        for rule in self.rules:
            if rule.ours == pattern:
                return rule.of_block(number)
        raise ValueError(f"there is no tensor for {name}")

    def written(self, rule: Rule) -> tuple[str, ...]:
        """The keys that `save_pretrained` writes for a rule."""
        return tuple(key if key == self.head else self.prefix + key for key in rule.theirs)


def their_shapes(rule: Rule, model: ModelConfig, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of a rule's tensors over there, from the shape of our tensor. Takes no memory."""
    return [tuple(tensor.shape) for tensor in rule.how.theirs(model, torch.empty(shape, device="meta"))]
