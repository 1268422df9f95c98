#!/usr/bin/env python3
"""A language model of `transformers` with a head of one's own: which of two answers is the better one. Start it with
`python` or with `torchrun`.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import megazero

MICRO_BATCHES, PAIRS, LR = 2, 64, 2e-3
LENGTH, SORTED = 5, 10
"""Digits of a question; the word behind it, which asks to have the digits sorted."""
CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=16,
    pad_token_id=None,
)


class Words(nn.Module):
    """The first unit takes both answers as one batch: [2 * b, s]."""

    def __init__(self, base: LlamaModel) -> None:
        super().__init__()
        self.words = base.embed_tokens

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.words(torch.cat([batch["better"], batch["worse"]]))


class Layer(nn.Module):
    """A layer of the language model gets the angles of its positions. Without a mask it looks back alone."""

    def __init__(self, base: LlamaModel, number: int) -> None:
        super().__init__()
        self.layer, self.angles = base.layers[number], base.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.angles(hidden, places))


class Reward(nn.Module):
    """The last unit: a number for each text, from what the model makes of its last word."""

    def __init__(self, base: LlamaModel) -> None:
        super().__init__()
        self.norm, self.out = base.norm, nn.Linear(CONFIG.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden[:, -1])).squeeze(1)


def units(base: LlamaModel) -> nn.ModuleDict:
    layers = {f"layer-{number}": Layer(base, number) for number in range(CONFIG.num_hidden_layers)}
    return nn.ModuleDict({"words": Words(base), **layers, "reward": Reward(base)})


def loss(rewards: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Of a pair: how unlikely its better answer wins, by the difference of both rewards (Bradley and Terry)."""
    better, worse = rewards.float().chunk(2)
    return -F.logsigmoid(better - worse).sum(), len(better)


def pairs(number: int, seed: int) -> dict[str, Tensor]:
    """Questions with their digits sorted, and with the digits of another question, sorted too: one digit differs."""
    draw = torch.Generator().manual_seed(seed)
    digits = torch.rand(number, 10, generator=draw).argsort(1)
    question = digits[:, :LENGTH].gather(1, torch.rand(number, LENGTH, generator=draw).argsort(1))
    right, wrong = question.sort(1).values, digits[:, 1 : LENGTH + 1].sort(1).values
    asks = torch.full((number, 1), SORTED)
    return {"better": torch.cat([question, asks, right], 1), "worse": torch.cat([question, asks, wrong], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the run, as JSON")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save", default="own-head", help="folder of checkpoints, from which it goes on")
    parser.add_argument("--export", default="own-head.safetensors", help="a new file for the trained weights")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    model = megazero.Model(units(LlamaModel(CONFIG)), loss)  # or LlamaModel.from_pretrained("...")
    run = {"weight_decay": 0.01, **args.settings}
    with megazero.engine(model, optimizer="adamw", lr=LR, run=run) as engine:
        engine.load(args.save)  # where no checkpoint is, it changes nothing
        share = MICRO_BATCHES // engine.data_ranks
        mine = range(engine.data_rank * share, (engine.data_rank + 1) * share)
        while engine.steps < args.steps:
            first = MICRO_BATCHES * engine.steps
            lr = LR * min(1, (engine.steps + 1) / 20, (args.steps - engine.steps) / 50)  # a warm-up and a decay
            result = engine.step([pairs(PAIRS, first + number) for number in mine], lr)
            if engine.steps % 50 == 0 and engine.rank == 0:
                print(f"step {engine.steps}: loss {float(result.loss):.3f}")
        engine.save(args.save)
        held_out = engine.evaluate(pairs(512, seed=-1))
        engine.export(args.export)
        if engine.rank == 0:
            print(f"held out: loss {float(held_out):.3f}")
            judge(args.export)


@torch.no_grad()
def judge(file: str) -> None:
    """Open the weights in plain torch, where the units' parts are a model of `transformers` again."""
    base = LlamaModel(CONFIG)
    opened = units(base)
    opened.load_state_dict(load_file(file))
    batch = pairs(512, seed=-1)
    rewards = []
    for texts in (batch["better"], batch["worse"]):
        hidden = base(texts, use_cache=False).last_hidden_state  # by its own forward, with its own masks
        rewards.append(opened["reward"].out(hidden[:, -1]).squeeze(1))
    right = (rewards[0] > rewards[1]).float().mean()
    print(f"held out: accuracy {float(right):.3f}")


if __name__ == "__main__":
    main()
