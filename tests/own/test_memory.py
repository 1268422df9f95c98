"""A user's model larger than the memory that its process may take: built, trained, exported, opened by plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WIDE, LAYERS, ROWS = 1024, 56, 4
BOUND = 144 << 20
"""Bytes of anonymous memory beyond those of a process that has trained something small."""


class Scaled(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden)) + (hidden if hidden.shape[1] == WIDE else 0)


def units(layers: int = LAYERS, wide: int = WIDE) -> list[nn.Module]:
    return [nn.Linear(8, wide), *(Scaled(wide, wide) for _ in range(layers)), nn.Linear(wide, 1)]


def loss(made: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (made.squeeze(1) - batch["y"]).square().sum(), len(made)


def batch(seed: int) -> dict[str, Tensor]:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(1).sin()}


TRAINED = """
import json, resource, sys
import torch, megazero
from tests.own.test_memory import BOUND, batch, loss, units

def train(layers, wide, folder, target):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = megazero.Model(units(layers, wide), loss, input="x")
    tiers = ("offload_optimizer", "offload_params", "offload_gradients")
    run = {"zero_stage": 3, "bucket_size": wide * wide, "nvme_path": [folder], "nvme_buffer_bytes": 24 << 20}
    run |= dict.fromkeys(tiers, "nvme") | {"recompute_granularity": "full", "zero3_persist_below": 0}
    with megazero.engine(model, "adamw", 1e-4, run) as engine:
        losses = [float(engine.step(batch(number)).loss) for number in range(2)]
        losses.append(float(engine.evaluate(batch(2))))
        engine.export(target)
        return losses

folder, target = sys.argv[1:]
train(2, 8, folder, target + ".small")
held = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + BOUND, held + BOUND))
print(json.dumps(train({layers}, {wide}, folder, target)))
"""


@pytest.mark.slow
def test_a_model_larger_than_memory(tmp_path: Path) -> None:
    program = TRAINED.replace("{layers}", str(LAYERS)).replace("{wide}", str(WIDE))
    target = tmp_path / "model.safetensors"
    (tmp_path / "swap").mkdir()
    arguments = [sys.executable, "-c", program, str(tmp_path / "swap"), str(target)]
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # as docs/how-to/own-model.md says
    ended = subprocess.run(arguments, env={**os.environ, **settings}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    losses = json.loads(ended.stdout)
    opened = nn.ModuleList(units())
    opened.load_state_dict(load_file(target))
    size = sum(parameter.numel() * parameter.element_size() for parameter in opened.parameters())
    assert size > 1.5 * BOUND
    with torch.no_grad():
        hidden = batch(2)["x"]
        for unit in opened:
            hidden = unit(hidden)
        total, number = loss(hidden, batch(2))
    assert abs(losses[2] - float(total) / number) < 1e-5 * losses[2]
    assert losses[0] != losses[1]
