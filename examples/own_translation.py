#!/usr/bin/env python3
"""An encoder and a decoder that learn to read Roman numbers. Start it with `python` or with `torchrun`."""

import argparse
import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero

MICRO_BATCHES, NUMBERS, LR = 2, 64, 3e-3
ROMAN, DIGITS = " IVXLCDM", " 0123456789<"  # 0 fills up, "<" begins an answer
LONGEST, PLACES, WIDTH = 15, 4, 48
VALUES = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX"}
VALUES |= {5: "V", 4: "IV", 1: "I"}

State = dict[str, Tensor]
"""What units hand on: the encoder's `memory`, the decoder's `hidden` state, and which letters are `padding`."""


class Source(nn.Module):
    """The first unit takes the micro-batch. A unit may return a dict of tensors, some of them without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(ROMAN), WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> State:
        words = batch["roman"]
        hidden = self.words(words) + self.places.weight[: words.shape[1]]
        return {"memory": hidden, "padding": words == 0}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)

    def forward(self, state: State) -> State:
        memory = self.layer(state["memory"], src_key_padding_mask=state["padding"])
        return {**state, "memory": memory}


class Target(nn.Module):
    """A unit in the middle takes both: what the unit before returns, and the micro-batch by the name `batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(DIGITS), WIDTH), nn.Embedding(PLACES + 1, WIDTH)

    def forward(self, state: State, batch: dict[str, Tensor]) -> State:
        words = batch["digits"]
        return {**state, "hidden": self.words(words) + self.places.weight[: words.shape[1]]}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)

    def forward(self, state: State) -> State:
        length = state["hidden"].shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=state["hidden"].device).triu(1)
        hides = {"tgt_mask": later, "memory_key_padding_mask": state["padding"]}
        return {**state, "hidden": self.layer(state["hidden"], state["memory"], **hides)}


class Digits(nn.Module):
    """The last unit: a score for each digit at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(DIGITS))

    def forward(self, state: State) -> Tensor:
        return self.out(self.norm(state["hidden"]))


def reader() -> nn.ModuleList:
    return nn.ModuleList([Source(), Encoder(), Encoder(), Target(), Decoder(), Decoder(), Digits()])


def loss(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Of each digit, given the right ones before it."""
    wanted = batch["digits"][:, 1:]
    return F.cross_entropy(scores[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()


def roman(number: int) -> str:
    made = ""
    for value, letters in VALUES.items():
        made, number = made + letters * (number // value), number % value
    return made


def sentences(numbers: list[int]) -> dict[str, Tensor]:
    """Numbers as [b, 15] letters and as [b, 5] digits behind a "<"."""
    letters = [[ROMAN.index(letter) for letter in roman(number).ljust(LONGEST)] for number in numbers]
    digits = [[DIGITS.index(digit) for digit in f"<{number:04}"] for number in numbers]
    return {"roman": torch.tensor(letters), "digits": torch.tensor(digits)}


def shuffled() -> list[int]:
    """The numbers from 1 to 3999; the last 500 are not trained on."""
    return (1 + torch.randperm(3999, generator=torch.Generator().manual_seed(5))).tolist()


@torch.no_grad()
def read_aloud(model: nn.ModuleList, numbers: list[int]) -> list[int]:
    """What the trained model, in plain torch, makes of Roman numbers: digit by digit, each from its own ones before."""
    batch = sentences(numbers)
    said = batch["digits"][:, :1]
    for _ in range(PLACES):
        state = model[0](batch)
        for unit in model[1:]:
            state = unit(state, {"digits": said}) if isinstance(unit, Target) else unit(state)
        said = torch.cat([said, state[:, -1:].argmax(2)], 1)
    return [int("".join(DIGITS[digit] for digit in digits).strip(" <") or 0) for digits in said[:, 1:].tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the run, as JSON")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--save", default="own-translation", help="folder of checkpoints, from which it goes on")
    parser.add_argument("--export", default="own-translation.safetensors", help="a new file for the trained weights")
    args = parser.parse_args()
    torch.manual_seed(1)  # all ranks begin with the same values
    run = {"weight_decay": 0.01, **args.settings}
    numbers = shuffled()
    with megazero.engine(megazero.Model(reader(), loss), optimizer="adamw", lr=LR, run=run) as engine:
        engine.load(args.save)  # where no checkpoint is, it changes nothing
        share = NUMBERS * MICRO_BATCHES // engine.data_ranks
        while engine.steps < args.steps:
            draw = torch.Generator().manual_seed(engine.steps)
            drawn = torch.randint(0, 3499, (MICRO_BATCHES * NUMBERS,), generator=draw).tolist()
            mine = [numbers[at] for at in drawn[engine.data_rank * share :][:share]]
            lr = LR * min(1, (engine.steps + 1) / 20, (args.steps - engine.steps) / 80)  # a warm-up and a decay
            result = engine.step([sentences(mine[at : at + NUMBERS]) for at in range(0, share, NUMBERS)], lr)
            if engine.steps % 40 == 0 and engine.rank == 0:
                print(f"step {engine.steps}: loss {float(result.loss):.3f}")
        engine.save(args.save)
        held_out = engine.evaluate(sentences(numbers[3499:]))
        engine.export(args.export)
        if engine.rank == 0:
            print(f"held out: loss {float(held_out):.3f}")
    if engine.rank == 0:
        model = reader().eval()
        model.load_state_dict(load_file(args.export))
        read = read_aloud(model, numbers[3499:])
        right = sum(a == b for a, b in zip(read, numbers[3499:], strict=True)) / len(read)
        print(f"held out: accuracy {right:.3f}; {roman(numbers[-1])} is {read[-1]}")


if __name__ == "__main__":
    main()
