#!/usr/bin/env python3
"""The model of own_plain.py in megazero's own loop. Start it with `python` or with `torchrun`."""

import argparse
import json

import torch
from own_modules import RULE, loss
from own_plain import spiral_model, spirals
from torch import Tensor

import megazero

LOOP = {
    "micro_batch_size": 32,
    "global_batch_size": 128,
    "train_iters": 100,
    "lr": 1e-3,
    "lr_warmup_iters": 10,
    "eval_interval": 50,
    "eval_iters": 2,
    "log_interval": 25,
    "save_interval": 50,
}


class Points:
    """Points of spirals as samples: item i is a mapping from names to tensors."""

    def __init__(self, number: int, seed: int) -> None:
        self.points = spirals(number, seed)

    def __len__(self) -> int:
        return len(self.points["arm"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.points.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the run, as JSON")
    parser.add_argument("--export", help="a new file for the trained weights")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    with megazero.training(
        {**RULE, **LOOP, **args.settings},
        model=megazero.from_sequential(spiral_model(width=32, layers=4), loss, input="points"),
        data=Points(4096, seed=1),
        valid_data=Points(256, seed=2),
        shuffle=True,
    ) as run:
        for step in run.steps():
            if step.iteration % 25 == 0 and float(step.loss) < 0.05:
                run.stop("the loss is low enough")
        if args.export:
            run.engine.export(args.export)
    if run.rank == 0:
        print(run.result)


if __name__ == "__main__":
    main()
