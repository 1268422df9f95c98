"""Models as people write them in torch, and the same training in plain torch: no code of ours is in it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, MICRO_BATCHES, RATE, DECAY, CLIP = 10, 4, 1e-2, 0.1, 0.7
BETAS, EPSILON, SEED = (0.9, 0.95), 1e-8, 1234
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model: its units in forward order, its loss (None: the last unit has it), and its micro-batches."""

    units: Callable[[], Sequence[nn.Module]]
    loss: Callable[..., tuple[Tensor, Tensor | int]] | None
    batch: Callable[[torch.Generator], Batch]
    unused: bool = False
    """Whether there is a parameter without influence."""
    steps: int = STEPS
    micro_batches: int = MICRO_BATCHES
    """Of a step, of all ranks."""

    def built(self) -> list[nn.Module]:
        """The same values each time, in float64."""
        torch.manual_seed(5)
        return [unit.double() for unit in self.units()]

    def micro_batch(self, step: int, number: int) -> Batch:
        return self.batch(torch.Generator().manual_seed(1000 * step + number))


# --- an MLP, one of whose modules is used twice ----------------------------------------------------------------------


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 12)

    def forward(self, batch: Batch) -> Tensor:
        return torch.tanh(self.into(batch["x"]))


class Layer(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(width, width), nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gain * torch.tanh(self.linear(hidden))


def mlp() -> list[nn.Module]:
    again = Layer()
    return [Begin(), again, Layer(), again, nn.Linear(12, 1)]


def frozen_first() -> list[nn.Module]:
    """No gradient reaches the first two units."""
    units = [Begin(), Layer(), Layer(), Layer(), nn.Linear(12, 1)]
    for parameter in (each for unit in units[:2] for each in unit.parameters()):
        parameter.requires_grad_(False)
    return units


def squared(made: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the samples that count: a micro-batch may have none."""
    counted = batch["counts"]
    return ((made.squeeze(-1) - batch["y"]).square() * counted).sum(), counted.sum()


def of_mlp(draw: torch.Generator) -> Batch:
    x = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    counts = torch.randint(0, 2, (3,), generator=draw).double()
    return {"x": x, "y": x.sum(1).sin(), "counts": counts}


# --- a convolutional net with frozen batch norms ---------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False).uniform_(0.5, 1.5)
        for statistic in (self.norm.running_mean, self.norm.running_var):
            assert statistic is not None
            statistic.uniform_(0.5, 1.5)
        self.norm.eval()

    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(hidden)))


class Pixels(Convolution):
    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(batch["pixels"])


class Classes(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.mean((2, 3)))


def convolutional() -> list[nn.Module]:
    return [Pixels(3, 6), Convolution(6, 6), nn.ReLU(inplace=True), nn.MaxPool2d(2), Convolution(6, 8), Classes(8, 4)]


def entropy(made: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(made, batch["class"], reduction="sum"), len(made)


def of_pictures(draw: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 8, 8, generator=draw, dtype=torch.float64)
    return {"pixels": pixels, "class": torch.randint(0, 4, (2,), generator=draw)}


# --- a vision transformer --------------------------------------------------------------------------------------------


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.randn(1, 5, 12) * 0.1)
        self.first = nn.Parameter(torch.randn(1, 1, 12) * 0.1)

    def forward(self, batch: Batch) -> Tensor:
        patches = self.cut(batch["pixels"]).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(patches), -1, -1), patches], 1) + self.place


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden[:, 0]))


def vision() -> list[nn.Module]:
    layers = [nn.TransformerEncoderLayer(12, 3, 20, 0.2, batch_first=True, norm_first=True) for _ in range(3)]
    return [Patches(), *layers, FirstToken()]


# --- an encoder and a decoder: tuples and dicts between units --------------------------------------------------------


class Source(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 12)

    def forward(self, batch: Batch) -> Tensor:
        return self.words(batch["source"])


class Target(nn.Module):
    """Hands on what the encoder has made, with the beginning of the decoder and which words are hidden."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        target = batch["target"][:, :-1]
        length = target.shape[1]
        hides = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        return {"memory": hidden, "hides": hides, "hidden": self.words(target)}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(12, 3, 20, 0.0, batch_first=True)

    def forward(self, hidden: dict[str, Tensor]) -> dict[str, Tensor]:
        made = self.layer(hidden["hidden"], hidden["memory"], tgt_mask=hidden["hides"])
        return {**hidden, "hidden": made}


class Words(nn.Module):
    """The last unit, which has the loss, and the embedding of the decoder as its table."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, hidden: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["target"][:, 1:]
        scores = F.linear(hidden["hidden"], self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum"), (
            labels != 0
        ).sum()


def encoder_decoder() -> list[nn.Module]:
    encoders = [nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True) for _ in range(2)]
    source, words = Source(), nn.Embedding(11, 12)
    return [source, *encoders, Target(words), Decoder(), Decoder(), Words(words)]


def tied_ends() -> list[nn.Module]:
    """The table of the first unit is that of the last."""
    units = encoder_decoder()
    first, *inner, _ = units
    assert isinstance(first, Source)
    return [first, *inner, Words(first.words)]


def of_sentences(draw: torch.Generator) -> Batch:
    source = torch.randint(1, 11, (2, 6), generator=draw)
    return {"source": source, "target": torch.randint(0, 11, (2, 5), generator=draw)}


# --- tuples of which not all have gradients, and of which one is not used --------------------------------------------


class Named(NamedTuple):
    a: Tensor
    number: Tensor
    b: Tensor
    plain: Tensor


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 4)

    def forward(self, batch: Batch) -> Named:
        x = batch["x"]
        return Named(self.a(x), (x > 0).sum(1), torch.tanh(self.b(x)), x.detach())


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.a = nn.Embedding(6, 6), nn.Linear(6, 6)

    def forward(self, hidden: Named) -> Named:
        return hidden._replace(a=torch.tanh(self.a(hidden.a)) + self.row(hidden.number))


class FirstOfPair(nn.Module):
    """Takes nothing of the second tensor that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 1)

    def forward(self, hidden: tuple[Tensor, ...]) -> Tensor:
        a, _, _, plain = hidden  # a named tuple is a tuple, too
        return self.out(a) + plain.sum(1, keepdim=True)


def tuples() -> list[nn.Module]:
    return [Pair(), Chosen(), Chosen(), FirstOfPair()]


CASES: Mapping[str, Case] = {
    "mlp": Case(mlp, squared, of_mlp),
    "frozen first": Case(frozen_first, squared, of_mlp),
    "convolutional": Case(convolutional, entropy, of_pictures),
    "vision": Case(vision, entropy, of_pictures),
    "encoder and decoder": Case(encoder_decoder, None, of_sentences),
    "tied ends": Case(tied_ends, None, of_sentences),
    "tuples": Case(tuples, squared, of_mlp, unused=True),
}


def whole_loss(case: Case, units: Sequence[nn.Module], step: int, number: int) -> tuple[Tensor, Any]:
    """Of a micro-batch. Each unit draws as docs/how-to/own-model.md says."""
    batch = case.micro_batch(step, number)
    hidden: Any = batch
    for at, unit in enumerate(units):
        torch.manual_seed(zlib.crc32(f"{SEED} {step} {number} {at}".encode()))
        hidden = unit(hidden, batch) if isinstance(unit, Target | Words) else unit(hidden)
    return hidden if case.loss is None else case.loss(hidden, batch)


@dataclass(frozen=True)
class Trained:
    """What training has made: loss and norm of each step, the loss of an evaluation, and the values by name."""

    numbers: list[tuple[float, float]]
    evaluated: float
    values: dict[str, Tensor]


def adamw(trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def plainly_trained(case: Case, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw) -> Trained:
    """By an optimizer of torch on one process."""
    units = nn.ModuleList(case.built())
    trained = [parameter for parameter in units.parameters() if parameter.requires_grad]
    optimizer = make(trained)
    numbers = list[tuple[float, float]]()
    for step in range(case.steps):
        optimizer.zero_grad()
        total, count = 0.0, 0.0
        for number in range(case.micro_batches):
            loss, counted = whole_loss(case, list(units), step, number)
            loss.backward()
            total, count = total + loss.item(), count + float(counted)
        for parameter in trained:
            if parameter.grad is not None:  # nobody uses it
                parameter.grad /= count
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        for parameter in trained:  # as one that is used and has no influence: it decays
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        numbers.append((total / count, float(norm)))
    units.eval()
    with torch.no_grad():
        losses = [whole_loss(case, list(units), case.steps, number) for number in range(case.micro_batches)]
    evaluated = sum(float(loss) for loss, _ in losses) / sum(float(counted) for _, counted in losses)
    return Trained(numbers, evaluated, {name: value.detach().clone() for name, value in units.state_dict().items()})
