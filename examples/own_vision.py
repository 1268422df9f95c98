#!/usr/bin/env python3
"""A vision transformer that tells shapes in noisy pictures. Start it with `python` or with `torchrun`."""

import argparse
import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero

MICRO_BATCHES, PICTURES, LR = 4, 32, 3e-3
KINDS = ("disc", "square", "ring", "cross")
SIZE, PATCH, WIDTH = 16, 4, 32


class Patches(nn.Module):
    """The first unit: pieces of a picture as vectors [b, pieces, width], each with its place."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(0.1 * torch.randn((SIZE // PATCH) ** 2, WIDTH))

    def forward(self, pixels: Tensor) -> Tensor:
        pieces = self.cut(pixels.to(self.place.dtype))  # weights may be of 16 bits
        return pieces.flatten(2).transpose(1, 2) + self.place


class Kinds(nn.Module):
    """The last unit: a score for each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(KINDS))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden).mean(1))


def vision_transformer() -> nn.ModuleDict:
    """Units by name. The layers are torch's own."""
    layers = {
        f"layer-{number}": nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.05, batch_first=True, norm_first=True)
        for number in range(2)
    }
    return nn.ModuleDict({"patches": Patches(), **layers, "kinds": Kinds()})


def loss(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """What a step lowers. `evaluate` returns the mean of the same function: a micro-batch with `count_right` asks for
    the share of right answers in place of the loss.
    """
    if "count_right" in batch:
        return (scores.argmax(1) == batch["kind"]).float().sum(), len(scores)
    return F.cross_entropy(scores.float(), batch["kind"], reduction="sum"), len(scores)


def pictures(number: int, seed: int) -> dict[str, Tensor]:
    """Shapes of random size, place and brightness, in noise."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, len(KINDS), (number,), generator=draw)
    radius = 4 + 2 * torch.rand(number, 1, 1, generator=draw)
    x, y = torch.arange(SIZE).expand(number, 1, SIZE), torch.arange(SIZE)[:, None].expand(number, SIZE, 1)
    x, y = (axis - radius - (SIZE - 1 - 2 * radius) * torch.rand(number, 1, 1, generator=draw) for axis in (x, y))
    far, side = (x.square() + y.square()).sqrt(), torch.maximum(x.abs(), y.abs())
    near_axis = torch.minimum(x.abs(), y.abs()) < 1
    drawn = torch.stack([far < radius, side < radius, (far - radius).abs() < 1, (side < radius) & near_axis], 1)
    shape = drawn[torch.arange(number), kind].float() * (0.7 + 0.6 * torch.rand(number, 1, 1, generator=draw))
    return {"pixels": (shape + 0.15 * torch.randn(number, SIZE, SIZE, generator=draw))[:, None], "kind": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the run, as JSON")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save", default="own-vision", help="folder of checkpoints, from which it goes on")
    parser.add_argument("--export", default="own-vision.safetensors", help="a new file for the trained weights")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    model = megazero.Model(vision_transformer(), loss, input="pixels")
    run = {"weight_decay": 0.01, **args.settings}
    with megazero.engine(model, optimizer="adamw", lr=LR, run=run) as engine:
        engine.load(args.save)  # where no checkpoint is, it changes nothing
        share = MICRO_BATCHES // engine.data_ranks
        mine = range(engine.data_rank * share, (engine.data_rank + 1) * share)
        while engine.steps < args.steps:
            first = MICRO_BATCHES * engine.steps
            lr = LR * min(1, (engine.steps + 1) / 20, (args.steps - engine.steps) / 60)  # a warm-up and a decay
            result = engine.step([pictures(PICTURES, first + number) for number in mine], lr)
            if engine.steps % 40 == 0 and engine.rank == 0:
                print(f"step {engine.steps}: loss {float(result.loss):.3f}")
        engine.save(args.save)
        held_out = pictures(512, seed=-1)
        lost, right = engine.evaluate(held_out), engine.evaluate({**held_out, "count_right": torch.ones(())})
        engine.export(args.export)
        if engine.rank == 0:
            print(f"held out: loss {float(lost):.3f}, accuracy {float(right):.3f}")
            look_again(args.export)


def look_again(file: str) -> None:
    """Tell what a picture shows in plain torch, on one process and without the engine."""
    model = vision_transformer().eval()
    model.load_state_dict(load_file(file))
    picture = pictures(1, seed=-2)
    hidden = picture["pixels"]
    for unit in model.values():
        hidden = unit(hidden)
    print(f"a picture of a {KINDS[int(picture['kind'])]}: {KINDS[int(hidden.argmax())]}")


if __name__ == "__main__":
    main()
