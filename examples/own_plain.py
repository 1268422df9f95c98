#!/usr/bin/env python3
"""A training loop in plain torch: a model learns on which of three spirals a point lies."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MICRO_BATCHES = 4


class Points(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(2, width)

    def forward(self, points: Tensor) -> Tensor:
        return self.into(points.to(self.into.weight.dtype))  # weights may be of 16 bits


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def spiral_model(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(Points(width), *(Residual(width) for _ in range(layers)), nn.Linear(width, 3))


def spirals(number: int, seed: int) -> dict[str, Tensor]:
    """Points of three spirals, and on which one each lies."""
    draw = torch.Generator().manual_seed(seed)
    arm, far = torch.randint(0, 3, (number,), generator=draw), torch.rand(number, generator=draw)
    angle = 4 * far + arm * (2 * math.pi / 3)
    points = torch.stack([far * angle.cos(), far * angle.sin()], 1)
    return {"points": points + 0.06 * torch.randn(number, 2, generator=draw), "arm": arm}


def samples(step: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a step."""
    return [spirals(32, MICRO_BATCHES * step + number) for number in range(MICRO_BATCHES)]


def main() -> None:
    torch.manual_seed(1)
    model = spiral_model(width=32, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(100):
        total = 0.0
        for batch in samples(step):
            loss = F.cross_entropy(model(batch["points"]), batch["arm"]) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}: loss {total:.3f}, gradient norm {float(norm):.3f}")
    held_out = spirals(256, seed=-1)
    with torch.no_grad():
        print(f"held out: loss {float(F.cross_entropy(model(held_out['points']), held_out['arm'])):.3f}")


if __name__ == "__main__":
    main()
