"""A model whose parameters have several dtypes, which they keep: beside plain torch with master weights by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import megazero
from tests.own.models import BETAS, CLIP, DECAY, EPSILON, RATE, Batch
from tests.own.training import EXACT, LAYOUTS, RULE
from tests.ranks import run_ranks

STEPS, MICRO_BATCHES, VOCABULARY, WIDTH = 5, 4, 11, 8
RUN = {name: value for name, value in RULE.items() if name != "precision"}


class Dtypes(NamedTuple):
    """Of parameters, and of their state."""

    narrow: torch.dtype
    wide: torch.dtype
    state: torch.dtype


EXACTLY = Dtypes(torch.float32, torch.float64, torch.float64)
"""Where nothing is lost but what the model itself rounds."""


class Table(nn.Module):
    """What it returns has two dtypes."""

    def __init__(self, dtypes: Dtypes) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=dtypes.narrow)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=dtypes.wide) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH, dtype=dtypes.narrow))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        begun = self.table(batch["ids"])
        return begun.to(self.gain.dtype) * self.gain, begun + self.shift


class Layer(nn.Module):
    def __init__(self, dtypes: Dtypes) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtypes.narrow)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=dtypes.wide) + 0.5)
        self.still = nn.Parameter(torch.rand(WIDTH, dtype=dtypes.wide) + 0.5, requires_grad=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtypes.narrow)

    def forward(self, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        wide, narrow = hidden
        made = torch.tanh(self.linear(wide.to(narrow.dtype)) + narrow)
        return wide + self.gain * self.still * made.to(wide.dtype), self.last(made)


class Head(nn.Module):
    def __init__(self, dtypes: Dtypes) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY, dtype=dtypes.narrow)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=dtypes.wide) + 0.5)

    def forward(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        wide, narrow = hidden
        return self.out((wide * self.gain).to(narrow.dtype) + narrow).to(wide.dtype)


def units_of(dtypes: Dtypes, *, tied: bool) -> list[nn.Module]:
    """The same values each time. tied: whether the last unit has the first one's table and gain."""
    torch.manual_seed(7)
    units = [Table(dtypes), *(Layer(dtypes) for _ in range(4)), Head(dtypes)]
    first, last = units[0], units[-1]
    if tied:
        assert isinstance(first, Table) and isinstance(last, Head)
        last.out.weight, last.gain = first.table.weight, first.gain
    return units


def entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


def micro_batch(step: int, number: int) -> Batch:
    draw = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=draw)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


class Made(NamedTuple):
    numbers: list[tuple[float, float]]
    """Loss and norm of each step."""
    values: dict[str, Tensor]
    masters: dict[str, Tensor]


@cache
def plainly(dtypes: Dtypes, *, tied: bool) -> Made:
    """Parameters in their dtypes are rounded from masters, which torch's AdamW updates by sums in the state's dtype."""
    modules = nn.ModuleList(units_of(dtypes, tied=tied))
    named = {name: each for name, each in modules.named_parameters() if each.requires_grad}
    masters = {name: nn.Parameter(each.detach().to(dtypes.state)) for name, each in named.items()}
    optimizer = torch.optim.AdamW(masters.values(), RATE, BETAS, EPSILON, weight_decay=DECAY)
    numbers = []
    for step in range(STEPS):
        total, count = 0.0, 0
        sums = {name: torch.zeros_like(each) for name, each in masters.items()}
        for number in range(MICRO_BATCHES):
            batch = micro_batch(step, number)
            made: Any = modules[0](batch)
            for unit in modules[1:]:
                made = unit(made)
            loss, of_batch = entropy(made, batch)
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
                assert gradient.dtype == named[name].dtype
                sums[name] += gradient
            total, count = total + loss.item(), count + of_batch
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums.values())) / count
        for name, master in masters.items():
            master.grad = sums[name] / count * min(1.0, CLIP / (norm + 1e-6))
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
        numbers.append((total / count, norm))
    return Made(numbers, modules.state_dict(), {name: each.detach() for name, each in masters.items()})


def engine_of(dtypes: Dtypes, layout: Mapping[str, Any], *, tied: bool) -> megazero.Engine:
    plan = {"*.table": "vocabulary"}
    model = megazero.Model(units_of(dtypes, tied=tied), entropy, tp_plan=plan)
    return megazero.engine(model, "adamw", RATE, {**RUN, **layout})


def steps_of(engine: megazero.Engine, steps: Sequence[int]) -> list[tuple[float, float]]:
    share = MICRO_BATCHES // engine.data_ranks
    made = [
        engine.step([micro_batch(step, engine.data_rank * share + number) for number in range(share)]) for step in steps
    ]
    return [(float(step.loss), float(step.grad_norm)) for step in made]


def trained(rank: int, dtypes: Dtypes, layouts: Sequence[Mapping[str, Any]], tied: bool) -> list[Made]:
    every = list[Made]()
    for layout in layouts:
        with TemporaryDirectory() as folder:
            disks = {"nvme_path": [folder]} if "nvme" in str(layout) else {}
            with engine_of(dtypes, {**layout, **disks}, tied=tied) as engine:
                every.append(Made(steps_of(engine, range(STEPS)), engine.state_dict(), {}))
    return every


EVERY = {
    **LAYOUTS,
    "tp 2": (2, {"tp": 2, "recompute_granularity": "full"}),
    "tp 2 x dp 2": (4, {"tp": 2, "zero_stage": 3, "offload_optimizer": "cpu:0.5"}),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", sorted({size for size, _ in EVERY.values()}))
def test_every_layout_trains_as_plain_torch_with_masters(size: int, tied: bool) -> None:
    """With 5 layers per unit of float32 and float64. What two units share is added up in float32 within a process, and
    in float64 between stages.
    """
    layouts = {words: layout for words, (ranks, layout) in EVERY.items() if ranks == size}
    expected, close = plainly(EXACTLY, tied=tied), 2e-6 if tied else EXACT
    for made in run_ranks(size, trained, EXACTLY, list(layouts.values()), tied):
        for words, own in zip(layouts, made, strict=True):
            for step, (numbers, right) in enumerate(zip(own.numbers, expected.numbers, strict=True)):
                assert numbers == pytest.approx(right, rel=close), f"{words}, step {step}"
            assert own.values.keys() == expected.values.keys()
            for name, value in own.values.items():
                right_value = expected.values[name]
                assert value.dtype == right_value.dtype, f"{words}, {name}"
                near = close if value.dtype == torch.float64 else 1e-6  # one more rounding, once in a million
                assert (value - right_value).abs().max() < near, f"{words}, {name}"


SIXTEEN = {
    "bf16": (Dtypes(torch.bfloat16, torch.float32, torch.float32), {}),
    "fp16": (Dtypes(torch.float16, torch.float32, torch.float32), {"initial_loss_scale": 256.0}),
}


@pytest.mark.parametrize("name", SIXTEEN)
def test_sixteen_bits_beside_float32(name: str) -> None:
    """The state is float32. A gradient of 16 bits loses as much in plain torch."""
    dtypes, more = SIXTEEN[name]
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": "int8", "zero_stage": 3}
    every: list[dict[str, Any]] = [{"zero_stage": 3}, {"zero_stage": 1}, {"pp": 2, "late_update": True}, quantized]
    layouts = [{**more, **layout} for layout in every]
    expected = plainly(dtypes, tied=True)
    for made in run_ranks(2, trained, dtypes, layouts, True):
        for layout, own in zip(layouts, made, strict=True):
            close = 5e-2 if "zero_quantized_weights" in layout else 5e-3
            for numbers, right in zip(own.numbers, expected.numbers, strict=True):
                assert numbers == pytest.approx(right, rel=close)
            assert {key: value.dtype for key, value in own.values.items()} == {
                key: value.dtype for key, value in expected.values.items()
            }


def precision_said(rank: int) -> tuple[set[torch.dtype], set[str]]:
    with engine_of(EXACTLY, {"precision": "fp32"}, tied=True) as engine:
        steps_of(engine, range(1))
        return {each.dtype for each in engine.state_dict().values()}, set(engine.state.bytes())


def test_a_precision_is_of_all_parameters() -> None:
    """With one the model is cast, and its parameters are their own masters."""
    ((dtypes, columns),) = run_ranks(1, precision_said)
    assert dtypes == {torch.float32}
    assert "master" not in columns


def journey(rank: int, folder: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    numbers = list[tuple[float, float]]()
    layouts: list[dict[str, Any]] = [{"zero_stage": 3}, {"pp": 2, "zero_stage": 1}, {"precision": "fp64"}]
    for leg, layout in enumerate(layouts):
        with engine_of(EXACTLY, layout, tied=False) as engine:
            if leg:
                assert engine.load(folder) is not None
            numbers += steps_of(engine, [engine.steps, engine.steps + 1][: 2 if leg < 2 else 1])
            engine.save(folder)
            values = engine.state_dict()
    return numbers, values


def test_a_checkpoint_has_the_masters(tmp_path: Path) -> None:
    """So it goes on in another layout with the same bits, and in a run with parameters of one dtype, whose first step
    alone differs by the rounding of parameters.
    """
    numbers, values = run_ranks(2, journey, str(tmp_path))[0]
    expected = plainly(EXACTLY, tied=False)
    for step, close in enumerate([EXACT] * 4 + [1e-5]):
        assert numbers[step] == pytest.approx(expected.numbers[step], rel=close)
    assert all((values[name] - master).abs().max() < 1e-6 for name, master in expected.masters.items())


T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 23, "dropout_rate": 0.0}


def t5() -> nn.Module:
    """In bfloat16 with the products of float32 that its own `from_pretrained` keeps."""
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)).bfloat16()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    return model


def of_words(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    return {name: torch.randint(1, 23, (2, 6), generator=draw) for name in ("input_ids", "labels")}


def t5_losses(rank: int, layouts: Sequence[Mapping[str, Any]]) -> list[tuple[list[float], set[torch.dtype]]]:
    every = list[tuple[list[float], set[torch.dtype]]]()
    for layout in layouts:
        with megazero.engine(megazero.from_transformers(t5()), "adamw", RATE, {**RUN, **layout}) as engine:
            batches = [of_words(number) for number in range(2)]
            losses = [float(engine.step(batches[engine.data_rank :: engine.data_ranks]).loss) for _ in range(4)]
            every.append((losses, {value.dtype for value in engine.state_dict().values()}))
    return every


def test_a_model_of_transformers_keeps_its_wide_parts() -> None:
    """Beside the model itself, whose first loss is that of plain torch."""
    layouts = [{}, {"zero_stage": 3}, {"pp": 2}, {"pp": 2, "recompute_granularity": "full", "late_update": True}]
    model = t5()
    with torch.no_grad():
        first = sum(float(model(**of_words(number)).loss) for number in range(2)) / 2
    for made in run_ranks(2, t5_losses, layouts):
        for losses, dtypes in made:
            assert dtypes == {torch.bfloat16, torch.float32}
            assert losses[0] == pytest.approx(first, rel=1e-2)
            assert losses == pytest.approx(made[0][0], rel=1e-2)
            assert losses[-1] < losses[0] - 0.05


def frozen_base(rank: int, layouts: Sequence[Mapping[str, Any]]) -> list[tuple[list[float], set[torch.dtype]]]:
    """A base of bfloat16 that is frozen, and gains of float32 that are trained."""
    made = []
    for layout in layouts:
        units = units_of(SIXTEEN["bf16"][0], tied=False)
        for each in (each for unit in units for each in unit.parameters()):
            each.requires_grad_(each.dtype == torch.float32 and each.requires_grad)
        with megazero.engine(megazero.Model(units, entropy), "adamw", RATE, {**RUN, **layout}) as engine:
            losses = [loss for loss, _ in steps_of(engine, range(STEPS))]
            made.append((losses, {value.dtype for value in engine.state_dict().values()}))
    return made


def test_a_frozen_base_keeps_its_sixteen_bits() -> None:
    layouts = [{}, {"zero_stage": 3}, {"pp": 2}]
    first, *others = (made for rank in run_ranks(2, frozen_base, layouts) for made in rank)
    assert first[0][-1] < first[0][0]
    assert first[1] == {torch.bfloat16, torch.float32}
    for losses, dtypes in others:
        assert losses == pytest.approx(first[0], rel=1e-5)
        assert dtypes == first[1]


def eight_bits(rank: int) -> str:
    units = [nn.Linear(4, 4), nn.Linear(4, 1)]
    units[0].weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(megazero.ConfigError) as error:
        megazero.engine(megazero.Model(units, entropy, input="x"), run=RUN)
    return str(error.value)


def test_other_dtypes_beside_are_one_error() -> None:
    (words,) = run_ranks(1, eight_bits)
    assert "the model has parameters of torch.float8_e4m3fn" in words
    assert "fp64, fp32, bf16, fp16" in words
