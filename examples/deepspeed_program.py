#!/usr/bin/env python3
"""A program for DeepSpeed: five layers whose parameters and optimizer state rest on a disk. One import differs."""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import deepspeed  # in place of: import deepspeed


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, width)
        self.fc4, self.fc5 = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4):
            points = F.relu(layer(points))
        return self.fc5(points)


def config(disk: str) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": disk},
            "offload_param": {"device": "nvme", "nvme_path": disk},
        },
    }


def samples(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points, and the product of two of their numbers."""
    points = torch.randn(16, 16, generator=draw)
    return points, points[:, :1] * points[:, 1:2]


def main() -> None:
    with tempfile.TemporaryDirectory() as disk:
        file = Path(disk) / "ds.json"
        file.write_text(json.dumps(config(disk)))
        torch.manual_seed(1)  # all ranks begin with the same values
        model = Layers(64)
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(file))
        draw = torch.Generator().manual_seed(engine.global_rank)
        mean = 0.0
        for number in range(1, 401):
            points, target = samples(draw)
            loss = F.mse_loss(engine(points), target)
            engine.backward(loss)
            engine.step()
            mean += loss.item() / 200
            if number % 200 == 0:
                if engine.global_rank == 0:
                    print(f"step {engine.global_steps}: loss {mean:.3f}, learning rate {engine.get_lr()[0]:g}")
                mean = 0.0
        engine.destroy()


if __name__ == "__main__":
    main()
