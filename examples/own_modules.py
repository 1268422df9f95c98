#!/usr/bin/env python3
"""The training of own_plain.py by megazero. Start it with `python` or with `torchrun`."""

import argparse
import json
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from own_plain import MICRO_BATCHES, samples, spiral_model, spirals
from torch import Tensor

import megazero

RULE = {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.01, "clip_grad": 1.0}


def loss(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the losses, and their number."""
    return F.cross_entropy(scores.float(), batch["arm"], reduction="sum"), len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the run, as JSON")
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--export", help="a new file for the trained weights")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    with torch.device("meta") if args.meta else nullcontext():
        model = megazero.from_sequential(spiral_model(args.width, args.layers), loss, input="points")
    with megazero.engine(model, optimizer="adamw", lr=args.lr, run={**RULE, **args.settings}) as engine:
        share = MICRO_BATCHES // engine.data_ranks
        for step in range(args.steps):
            mine = samples(step)[engine.data_rank * share :][:share]
            result = engine.step(mine)
            if (step + 1) % max(1, args.steps // 4) == 0 and engine.rank == 0:
                print(f"step {step + 1}: loss {float(result.loss):.3f}, gradient norm {float(result.grad_norm):.3f}")
        held_out = engine.evaluate(spirals(256, seed=-1))
        if engine.rank == 0:
            print(f"held out: loss {float(held_out):.3f}")
        if args.export:
            engine.export(args.export)


if __name__ == "__main__":
    main()
