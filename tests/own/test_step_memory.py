"""The memory of a step of a user's model by arithmetic, beside what an engine allocates as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

import megazero
from bench.contestants.megazero_meter import in_host_memory
from megazero.mpu import p2p
from megazero.own.planned_state import OwnChunks, own_axes
from megazero.own.planned_step import OwnPlannedModel
from megazero.own.settings import run_of, with_batches
from megazero.own.unit_bytes import unit_bytes
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import TierPeaks, stage_memories
from tests.own.models import Batch
from tests.plan.meter import allocations
from tests.ranks import run_ranks

EXACT = 0.02
"""What a step takes on the device may differ by so much of it from what is planned."""


class Tanh(nn.Module):
    """Keeps what it hands on for its own backward, as the next unit does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))


def mlp() -> list[nn.Module]:
    again = Tanh(192, 192)
    return [Tanh(16, 192), again, Tanh(192, 96), Tanh(96, 192), again, nn.Linear(192, 1)]


def shared() -> list[nn.Module]:
    """The gradient of one module waits in the backward of those between its two places."""
    again = Tanh(256, 256)
    return [Tanh(16, 256), again, Tanh(256, 320), Tanh(320, 320), Tanh(320, 256), again, nn.Linear(256, 1)]


def squared(made: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (made.squeeze(1) - batch["y"]).square().sum(), len(made)


def rows(draw: torch.Generator) -> Batch:
    x = torch.randn(160, 16, generator=draw)
    return {"x": x, "y": x.sum(1).sin()}


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs).eval()
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(hidden)))


class Classes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 10)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.mean((2, 3)))


def convolutional() -> list[nn.Module]:
    return [Convolution(3, 32), nn.MaxPool2d(2), Convolution(32, 64), nn.ReLU(inplace=True), Classes(64)]


def entropy(made: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(made, batch["class"], reduction="sum"), len(made)


def pictures(draw: torch.Generator) -> Batch:
    pixels = torch.randn(4, 3, 24, 24, generator=draw)
    return {"x": pixels, "class": torch.randint(0, 10, (4,), generator=draw)}


class Words(nn.Module):
    """Hands on a mask beside the hidden state, which all layers keep."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        length = batch["x"].shape[1]
        mask = torch.full((length, length), float("-inf"), device=batch["x"].device).triu(1)
        return {"mask": mask, "hidden": self.words(batch["x"])}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)

    def forward(self, hidden: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**hidden, "hidden": self.layer(hidden["hidden"], hidden["mask"])}


class Head(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, hidden: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        scores, labels = F.linear(hidden["hidden"][:, :-1], self.words.weight), batch["x"][:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def transformer() -> list[nn.Module]:
    """The table of the first unit is that of the last."""
    words = nn.Embedding(500, 64)
    return [Words(words), *(Layer() for _ in range(4)), Head(words)]


def sentences(draw: torch.Generator) -> Batch:
    return {"x": torch.randint(0, 500, (4, 32), generator=draw)}


class CutWords(nn.Module):
    tp_plan: Mapping[str, str] = {"words": "vocabulary"}

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(501, 72)

    def forward(self, batch: Batch) -> Tensor:
        return self.words(batch["x"])


class CutBlock(nn.Module):
    """Attention whose heads tp ranks share, with dropout, and an MLP."""

    tp_plan: Mapping[str, str] = {
        "qkv": "column 3",
        "heads": "divided",
        "dry": "cut 1",
        "out": "row",
        "up": "column",
        "down": "row",
    }

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out, self.dry = 6, nn.Linear(72, 216), nn.Linear(72, 72), nn.Dropout(0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(72), nn.LayerNorm(72)])
        self.up, self.down = nn.Linear(72, 144), nn.Linear(144, 72, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](hidden)).chunk(3, -1)
        queries, keys, values = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in split)
        weights = self.dry((queries @ keys.transpose(2, 3)).softmax(-1))
        hidden = hidden + self.out((weights @ values).transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class CutHead(nn.Module):
    """With the table of the first unit."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.out = nn.Linear(72, 501, bias=False)
        self.out.weight = words.weight

    def forward(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, int]:
        scores, labels = self.out(hidden[:, :-1]), batch["x"][:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def cut() -> list[nn.Module]:
    first = CutWords()
    return [first, *(CutBlock() for _ in range(4)), CutHead(first.words)]


class SixteenBits(nn.Module):
    """Products of bfloat16, and a norm of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128, bias=False)
        self.up.bfloat16()
        self.down.bfloat16()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden).bfloat16()))).float()


def several_dtypes() -> list[nn.Module]:
    return [nn.Linear(16, 128), *(SixteenBits() for _ in range(4)), nn.Linear(128, 1)]


class Sized(NamedTuple):
    """A model whose tensors are large beside what nobody counts."""

    units: Callable[[], list[nn.Module]]
    loss: Callable[..., tuple[Tensor, int]] | None
    batch: Callable[[torch.Generator], Batch]
    input: str | None

    def model(self) -> megazero.Model:
        torch.manual_seed(5)
        return megazero.Model(self.units(), self.loss, input=self.input)


MODELS: Mapping[str, Sized] = {
    "mlp": Sized(mlp, squared, rows, "x"),
    "shared": Sized(shared, squared, rows, "x"),
    "convolutional": Sized(convolutional, entropy, pictures, "x"),
    "transformer": Sized(transformer, None, sentences, None),
    "cut": Sized(cut, None, sentences, None),
    "several dtypes": Sized(several_dtypes, squared, rows, "x"),
}
FULL = {"recompute_granularity": "full"}
RUNS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("mlp", 1, {}),
    ("mlp", 1, FULL),
    ("mlp", 2, {"zero_stage": 2, "bucket_size": 20_000}),
    ("mlp", 2, {"zero_stage": 3, **FULL}),
    ("mlp", 2, {"pp": 2}),
    ("mlp", 2, {"pp": 2, "virtual_stages": 2, "zero_stage": 1}),
    ("mlp", 2, {"pp": 2, "pipeline_schedule": "zb-h1"}),
    ("mlp", 1, {"micro_batch_order": "vertical"}),
    ("shared", 1, {}),
    ("shared", 2, {"zero_stage": 3}),
    ("convolutional", 1, {}),
    ("convolutional", 2, {"zero_stage": 1}),
    ("convolutional", 2, {"pp": 2, "partition": [2, 3]}),
    ("transformer", 1, {}),
    ("transformer", 1, FULL),
    ("transformer", 2, {"zero_stage": 3}),
    ("transformer", 2, {"pp": 2}),
    ("transformer", 4, {"pp": 2, "zero_stage": 3, **FULL}),
    ("transformer", 1, {"precision": "bf16"}),
    ("transformer", 1, {"offload_optimizer": "cpu"}),
    ("transformer", 2, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", "late_update": True}),
    ("transformer", 1, {"offload_optimizer": "nvme", "offload_params": "nvme", "zero_stage": 3}),
    ("several dtypes", 1, {}),
    ("several dtypes", 2, {"zero_stage": 3}),
    ("several dtypes", 2, {"zero_stage": 2, **FULL}),
    ("several dtypes", 2, {"pp": 2, "offload_optimizer": "cpu"}),
    ("cut", 2, {"tp": 2}),
    ("cut", 2, {"tp": 2, **FULL}),
    ("cut", 3, {"tp": 3, "zero_stage": 1}),
    ("cut", 4, {"tp": 2, "zero_stage": 3}),
    ("cut", 4, {"tp": 2, "pp": 2}),
    ("cut", 4, {"tp": 2, "pp": 2, "virtual_stages": 2, "pipeline_schedule": "zb-v", "zero_stage": 1}),
    ("cut", 4, {"tp": 2, "zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", **FULL}),
    ("cut", 2, {"tp": 2, "precision": "bf16", "offload_activations": "cpu:0.5"}),
    ("transformer", 1, {"offload_activations": "cpu"}),
    ("transformer", 1, {"offload_activations": "cpu:0.5", "offload_gradients": "cpu"}),
    ("transformer", 1, {"offload_activations": "cpu", **FULL}),
    ("transformer", 1, {"offload_activations": "nvme"}),
    ("transformer", 1, {"offload_activations": "nvme", **FULL}),
    ("transformer", 2, {"offload_activations": "nvme:0.5", "pp": 2, "pipeline_schedule": "gpipe"}),
    ("mlp", 1, {"offload_activations": "cpu"}),
    ("mlp", 1, {"offload_activations": "nvme", "micro_batch_order": "vertical"}),
    ("mlp", 1, {"offload_activations": "cpu", "micro_batch_order": "vertical", **FULL}),
    ("mlp", 2, {"offload_activations": "cpu", "pp": 2, "zero_stage": 1, **FULL}),
)
MICRO_BATCHES = 4


class Held(NamedTuple):
    """Bytes of a rank and those that are planned."""

    measured: int
    host: int
    planned: TierPeaks


def planned_peaks(case: Sized, fields: Mapping[str, Any], ranks: int) -> list[TierPeaks]:
    """By arithmetic, of a model that no engine has."""
    model = case.model()
    run = run_of(fields, "adamw", model, ranks)
    measured = unit_bytes(model, case.batch(torch.Generator()), run, torch.device("cpu"))
    axes = own_axes(model, run, ranks)
    planned = OwnPlannedModel(OwnChunks.of(model, run), lambda _: measured)
    steps = StageLists(with_batches(run, MICRO_BATCHES, axes.dp), axes, nccl=False, model=planned)
    return [memory.peaks for memory in stage_memories(steps, "cpu")]


SEND = p2p.Channels.send


def send_unseen(channels: p2p.Channels, tensor: Tensor, *to: Any) -> None:
    """Send a copy in memory that no profiler sees: messages are freed by another thread, of which it knows nothing."""
    copied = torch.frombuffer(bytearray(tensor.view(-1).view(torch.uint8).numpy()), dtype=tensor.dtype)
    SEND(channels, copied.view(tensor.shape), *to)


def held_on_rank(rank: int, name: str, ranks: int, fields: dict[str, Any]) -> Held:
    """The most that tensors take in the third step of an engine that is metered from before the model is built."""
    case = MODELS[name]
    peaks = planned_peaks(case, fields, ranks)
    batches = [case.batch(torch.Generator().manual_seed(number)) for number in range(MICRO_BATCHES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p.Channels, "send", send_unseen)
        with profile(profile_memory=True) as recorded:
            engine = megazero.engine(case.model(), run=fields)
            for _ in range(3):
                with record_function("step"):
                    engine.step(batches)
            engine.state.wait_parameters()
    job = SimpleNamespace(state=SimpleNamespace(model=engine.state), activations=engine._activations)
    host, seen = in_host_memory(cast(Any, job))
    at = engine.grid.at.pp
    engine.close()
    assert recorded.kineto_results is not None
    begin = max(e.start_ns() for e in recorded.kineto_results.events() if e.name() == "step")
    changes = allocations(recorded)
    alive = accumulate(change.size for change in changes)
    most = max(total for total, change in zip(alive, changes, strict=True) if change.at >= begin)
    return Held(most - seen, host, peaks[at])


@pytest.mark.parametrize(("name", "ranks", "fields"), RUNS, ids=[f"{name} {fields}" for name, _, fields in RUNS])
def test_a_step_takes_what_is_planned(name: str, ranks: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """On the device to 2 %, on every rank; host memory up to the alignment of its pieces."""
    fields = {**fields, "nvme_buffer_bytes": 4_000_000 if "offload_activations" in fields else 400_000}
    if "nvme" in str(fields.values()):
        fields["nvme_path"] = [str(tmp_path)]
    for rank, held in enumerate(run_ranks(ranks, held_on_rank, name, ranks, fields)):
        assert held.measured == pytest.approx(held.planned.device_bytes, rel=EXACT), (rank, held)
        assert held.host == pytest.approx(held.planned.host_bytes, rel=0.01), (rank, held)
