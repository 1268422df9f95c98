#!/usr/bin/env python3
"""A program that trains modules of its own. Start it with `python` or with `torchrun`."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero


class Points(nn.Module):
    """The first unit takes the micro-batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(2, width)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.into(batch["points"])


class Residual(nn.Module):
    """A unit takes what the one before it returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def loss(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the losses, and their number."""
    return F.cross_entropy(scores, batch["arm"], reduction="sum"), len(scores)


def spirals(number: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Points of three spirals, and on which one each lies."""
    arm, far = torch.randint(0, 3, (number,), generator=draw), torch.rand(number, generator=draw)
    angle = 4 * far + arm * (2 * math.pi / 3)
    return {"points": torch.stack([far * angle.cos(), far * angle.sin()], 1), "arm": arm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--zero-stage", type=int, default=0, help="what replicas share out")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    units = [Points(32), *(Residual(32) for _ in range(4)), nn.Linear(32, 3)]
    run = {"pp": args.pp, "zero_stage": args.zero_stage, "weight_decay": 0.01}
    with megazero.engine(megazero.Model(units, loss), optimizer="adamw", lr=1e-3, run=run) as engine:
        draw = torch.Generator().manual_seed(100 + engine.data_rank)  # each replica has samples of its own
        for number in range(1, 201):
            step = engine.step([spirals(32, draw) for _ in range(4 // engine.data_ranks)])
            if number % 50 == 0 and engine.rank == 0:
                print(f"step {number}: loss {float(step.loss):.3f}, gradient norm {float(step.grad_norm):.3f}")
        held_out = engine.evaluate(spirals(256, torch.Generator().manual_seed(7)))
        values = engine.state_dict()  # what nn.ModuleList(units) takes in plain torch
        if engine.rank == 0:
            print(f"held out: loss {float(held_out):.3f}; {len(values)} tensors")


if __name__ == "__main__":
    main()
