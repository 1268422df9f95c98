"""megazero's own loop over a user's model, beside plain torch: steps, evaluations, saves and stops on any layout."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from megazero.data.own import marked
from megazero.own.loop.samples import OwnSource
from megazero.own.saved import BESIDE
from megazero.pipeline.engine import PipelineEngine
from tests.own.models import CASES, RATE, SEED, Batch, Case, Trained, plainly_trained, squared
from tests.own.training import LAYOUTS, RULE, model_of, require_equal
from tests.ranks import config_error, run_ranks

NAMES = ("mlp", "vision", "tied ends")


OF_MODELS: dict[str, Any] = {
    "data": [],
    "optimizer": torch.optim.SGD,
    "collate": list,
    "shuffle": True,
    "timed": True,
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_what_a_model_has_is_refused_without_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is of a model of your own, and there is none"):
        megazero.training({"train_iters": 1}, **{name: OF_MODELS[name]})


class Rows:
    """The micro-batches of a case as samples, one behind the other. first: the first step."""

    def __init__(self, case: Case, first: int = 0, steps: int | None = None) -> None:
        self.case, self.first, self.steps = case, first, case.steps if steps is None else steps
        self.size = len(next(iter(case.micro_batch(0, 0).values())))

    def __len__(self) -> int:
        return self.steps * self.case.micro_batches * self.size

    def __getitem__(self, index: int) -> Batch:
        number, row = divmod(index, self.size)
        step, number = divmod(number, self.case.micro_batches)
        batch = self.case.micro_batch(self.first + step, number)
        return {name: tensor[row] for name, tensor in batch.items()}


def settings(case: Case, layout: Mapping[str, Any]) -> dict[str, Any]:
    size = Rows(case).size
    loop = {"micro_batch_size": size, "global_batch_size": size * case.micro_batches, "train_iters": case.steps}
    rate = {"lr": RATE, "lr_decay_style": "constant", "seed": SEED}
    return {**RULE, **loop, **rate, "eval_iters": 1, **layout}


def trained_by_loop(case: Case, layout: Mapping[str, Any], **more: Any) -> Trained:
    """What megazero's loop makes of a case on this rank."""
    with TemporaryDirectory() as folder:
        disks = {"nvme_path": [folder]} if "nvme" in str(layout) else {}
        run, data, held_out = settings(case, {**layout, **disks}), Rows(case), Rows(case, case.steps, 1)
        with megazero.training(model=model_of(case), data=data, valid_data=held_out, run=run, **more) as training:
            numbers = [(float(step.loss), float(step.grad_norm)) for step in training.steps()]
            values = training.engine.state_dict()
        return Trained(numbers, training.result.evaluations["valid_loss"], values)


def looped_on_rank(rank: int, name: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    return [trained_by_loop(CASES[name], layout) for layout in layouts]


plain = cache(plainly_trained)


@pytest.mark.parametrize("size", sorted({size for size, _ in LAYOUTS.values()}))
@pytest.mark.parametrize("name", NAMES)
def test_the_loop_trains_as_plain_torch(name: str, size: int) -> None:
    layouts = {words: layout for words, (ranks, layout) in LAYOUTS.items() if ranks == size}
    for rank, made in enumerate(run_ranks(size, looped_on_rank, name, list(layouts.values()))):
        for words, own in zip(layouts, made, strict=True):
            require_equal(own, plain(CASES[name]), f"{name}, {words}, rank {rank}")


# --- saves, stops, and the position in the data ----------------------------------------------------------------------

SAVED = ({"zero_stage": 1}, 1), ({"pp": 2, "async_save": True}, 2), ({"zero_stage": 3, "late_update": True}, 2)
"""Layouts and numbers of ranks, of which each makes some steps of a run."""


def steps_until(rank: int, layout: dict[str, Any], folder: str, stop: int) -> list[tuple[int, float]]:
    case = CASES["vision"]
    run = settings(case, {**layout, "save": folder, "load": folder, "save_interval": 2, "exit_interval": stop})
    made = list[tuple[int, float]]()
    with megazero.training(model=model_of(case), data=Rows(case), shuffle=True, run=run) as training:
        made += [(step.iteration, float(step.loss)) for step in training.steps()]
    result = training.result
    assert result.finished == (result.iteration == case.steps) and result.checkpoint is not None
    assert result.stopped_by == (None if result.finished else f"--exit-interval {stop}")
    return made


def test_a_run_goes_on_over_layouts_with_the_next_sample(tmp_path: Path) -> None:
    """Shuffled, with dropout: every loss is that of a run without a stop."""
    (whole,) = run_ranks(1, steps_until, {}, str(tmp_path / "whole"), 100)
    made = list[tuple[int, float]]()
    for stop, (layout, size) in zip((3, 6, 100), SAVED, strict=True):
        made += run_ranks(size, steps_until, layout, str(tmp_path / "parts"), stop)[0]
    assert [step for step, _ in made] == [*range(1, 11)]
    assert [loss for _, loss in made] == pytest.approx([loss for _, loss in whole], rel=1e-10)
    in_order = plain(CASES["vision"]).numbers
    assert max(abs(a - b) for (_, a), (b, _) in zip(whole, in_order, strict=True)) > 0.05, "the order is another one"


def test_each_pass_has_every_sample_once_in_an_order_of_its_own() -> None:
    rows = [{"x": torch.tensor(float(number))} for number in range(7)]

    def taken(source: OwnSource, numbers: range) -> list[float]:
        return source.batch(numbers, seeded=False)["x"].tolist()

    shuffled = OwnSource(rows, "data", seed=3, shuffle=True)
    passes = [taken(shuffled, range(7 * number, 7 * number + 7)) for number in range(3)]
    assert all(sorted(one) == [0, 1, 2, 3, 4, 5, 6] for one in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] != sorted(passes[0])
    assert taken(shuffled, range(5, 9)) == [*passes[0][5:], *passes[1][:2]]
    assert taken(OwnSource(rows, "data"), range(5, 9)) == [5, 6, 0, 1]


def stopped(rank: int, folder: str) -> tuple[int, str | None]:
    case = CASES["mlp"]
    with megazero.training(model=model_of(case), data=Rows(case), run=settings(case, {"save": folder})) as training:
        for step in training.steps():
            if step.iteration == 3 and rank == 1:
                training.stop("enough")
    assert training.engine.steps == training.result.iteration
    return training.result.iteration, training.result.stopped_by


def test_one_rank_stops_all_behind_a_step(tmp_path: Path) -> None:
    assert run_ranks(2, stopped, str(tmp_path)) == [(4, "another rank was asked to"), (4, "enough")]


def test_a_checkpoint_of_a_loop_of_ones_own_goes_on(tmp_path: Path) -> None:
    """And the other way round: an engine has the state and the number of steps of a run's checkpoint."""
    case, expected = CASES["mlp"], plain(CASES["mlp"])
    with megazero.engine(model_of(case), lr=RATE, run=RULE) as engine:
        for step in range(4):
            engine.step([case.micro_batch(step, number) for number in range(case.micro_batches)])
        engine.save(tmp_path / "engine", {"next": 4})
    run = settings(case, {"load": tmp_path / "engine", "save": tmp_path / "run", "exit_interval": 7})
    with megazero.training(model=model_of(case), data=Rows(case), run=run) as training:
        losses = [float(step.loss) for step in training.steps()]
    with megazero.engine(model_of(case), lr=RATE, run=RULE) as engine:
        about = engine.load(tmp_path / "run")
        assert about is not None and about["iteration"] == engine.steps == 7
        for step in range(7, 10):
            made = engine.step([case.micro_batch(step, number) for number in range(case.micro_batches)])
            losses.append(float(made.loss))
    assert losses == pytest.approx([loss for loss, _ in expected.numbers[4:]], rel=1e-10)


def test_the_learning_rate_is_the_runs(tmp_path: Path) -> None:
    case = CASES["mlp"]
    rate = {"lr_decay_style": "linear", "lr_warmup_iters": 2, "min_lr": 0.002}
    with megazero.training(model=model_of(case), data=Rows(case), run=settings(case, rate)) as training:
        rates = [step.lr for step in training.steps()]
    assert rates == pytest.approx([0, 0.005, 0.01] + [0.01 - 0.001 * number for number in range(1, 8)])


def test_epochs_are_passes_over_the_samples() -> None:
    case = CASES["mlp"]
    run = {**settings(case, {}), "epochs": 0.5}
    del run["train_iters"]
    with megazero.training(model=model_of(case), data=Rows(case), run=run) as training:
        assert len([*training.steps()]) == 5
    assert training.result.consumed_samples == 60 == training.result.consumed_tokens


def test_what_is_printed_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, records = CASES["mlp"], list[megazero.StepRecord]()
    run = settings(case, {"metrics_file": tmp_path / "metrics.jsonl", "log_interval": 5})
    with megazero.training(
        model=model_of(case), data=Rows(case), valid_data={"first": Rows(case)}, run=run, on_step=records.append
    ) as training:
        losses = [float(step.loss) for step in training.steps()]
    assert [record.loss for record in records] == losses
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in written if "loss" in line] == losses
    assert [line["valid_loss/first"] for line in written if "valid_loss/first" in line] == [
        training.result.evaluations["valid_loss/first"]
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "5 units, 421 parameters, of which 421 are trained" in lines[0], lines
    header = next(number for number, line in enumerate(lines) if "grad norm" in line)
    assert "samples/s" in lines[header] and "FLOP" not in lines[header] and "tokens" not in lines[header]
    assert f"{losses[4]:.4f}" in lines[header + 1] and f"{losses[9]:.4f}" in lines[header + 2]


def test_a_pass_without_messages_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages cannot be sent at once (NCCL), a first step, and a first evaluation, are computed before without
    them: losses, counts and the statistics of a batch norm are as without that.
    """
    assert run_ranks(2, with_cold_engines, False) == run_ranks(2, with_cold_engines, True)


def with_cold_engines(rank: int, cold: bool) -> list[float]:
    torch.manual_seed(1)
    units = [nn.Linear(5, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 6), nn.Linear(6, 1)]
    model = megazero.Model([unit.double() for unit in units], squared, input="x")
    case, passes = CASES["mlp"], list[str]()
    with pytest.MonkeyPatch.context() as patch:
        if cold:
            for name in ("warm_up", "warm_up_evaluation"):
                patch.setattr(PipelineEngine, name, _noted(getattr(PipelineEngine, name), name, passes))
            cool = PipelineEngine.cool

            def without_messages(engine: PipelineEngine) -> None:
                engine._sends_at_once = False
                cool(engine)

            patch.setattr(PipelineEngine, "cool", without_messages)
        with megazero.engine(model, lr=RATE, run={**RULE, "pp": 2, "partition": [2, 2]}) as engine:
            numbers = [float(engine.evaluate(case.micro_batch(9, 0)))]
            for step in range(2):
                made = engine.step([case.micro_batch(step, number) for number in range(2)])
                numbers += [float(made.loss), float(made.grad_norm)]
            numbers.append(float(engine.evaluate(case.micro_batch(9, 0))))
            values = engine.state_dict()
    assert passes == (["warm_up_evaluation", "warm_up"] if cold else [])
    return [*numbers, *values["1.0.running_mean"].tolist(), float(values["1.0.num_batches_tracked"])]


def _noted(function: Any, name: str, passes: list[str]) -> Any:
    def called(*arguments: Any) -> None:
        passes.append(name)
        function(*arguments)

    return called


# --- mistakes --------------------------------------------------------------------------------------------------------


def of_nothing() -> Batch:
    return {}


DRAW = torch.Generator().manual_seed(3)
DATA = [
    {"x": torch.rand(5, generator=DRAW), "y": torch.rand((), generator=DRAW), "counts": torch.tensor(1.0)}
    for _ in range(24)
]
MORE = {"more": torch.ones(1)}
MISTAKES: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no data": ({}, {"data": None}, "data is needed with model"),
    "data without a length": ({}, {"data": iter(DATA)}, "data is .*it lacks __len__"),
    "empty data": ({}, {"data": []}, "data holds no samples"),
    "samples that are tuples": ({}, {"data": [(1, 2)] * 24}, r"data\[0\] is tuple: a mapping"),
    "samples of other shapes": (
        {},
        {"data": [{**sample, "x": torch.rand(5 + (number == 1))} for number, sample in enumerate(DATA)]},
        r"samples \[.*\] are no micro-batch: .*collate=",
    ),
    "words": ({}, {"data": [{**sample, "name": "a"} for sample in DATA]}, "'name' of a micro-batch is list"),
    "a collate that returns a list": ({}, {"collate": lambda samples: samples}, "collate returns list"),
    "a collate that takes nothing": ({}, {"collate": of_nothing}, "collate: a function of a list of samples"),
    "shuffle as a word": ({}, {"shuffle": "yes"}, "shuffle is .*True or False"),
    "no length": ({"train_iters": None}, {}, "run has no length: train_iters, train_samples or epochs"),
    "a batch that does not divide": ({"global_batch_size": 5}, {}, "global_batch_size 5 is not a multiple"),
    "a field of families": ({"hidden_size": 5}, {}, "run has hidden_size: a model of modules reads none"),
    "a short validation set": (
        {},
        {"valid_data": DATA[:3]},
        "valid_data holds 3 samples; trainer.eval_iters 1 x ",
    ),
    "data of families": ({}, {"train_data": DATA}, "train_data is of megazero's families"),
    "two lengths": ({"train_samples": 8}, {}, "train_iters and .*train_samples say the same thing in two ways"),
    "lengths in two units": (
        {"lr_decay_samples": 8},
        {},
        "train_iters counts iterations, and .*lr_decay_samples counts",
    ),
    "samples of other names": (
        {},
        {
            "data": [
                {**sample, **({"more": torch.ones(1)} if number == 1 else {})} for number, sample in enumerate(DATA)
            ]
        },
        r"data\[1\] has x, y, counts, more, and data\[0\] has x, y, counts",
    ),
    "activations by name": (
        {"offload_activations": "cpu:head"},
        {},
        "units of a list have no names that a flag knows",
    ),
    "both kinds of weights": ({"finetune": True, "no_load_optim": True, "load": "x"}, {}, "finetune loads weights"),
    "a warm-up longer than the run": ({"lr_warmup_iters": 50}, {}, "lr_warmup_iters 50 is longer than"),
}


def begun(fields: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    torch.manual_seed(1)
    units = [nn.Linear(5, 6), nn.Linear(6, 1)]
    model = megazero.Model(units, squared, input="x")
    run = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 2, "eval_iters": 1, **fields}
    run = {name: value for name, value in run.items() if value is not None}
    with megazero.training(**{"model": model, "data": DATA, "run": run, **arguments}) as training:
        for _ in training.steps():
            pass


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_error(words: str) -> None:
    fields, arguments, message = MISTAKES[words]
    with pytest.raises((ConfigError, ValueError), match=message):
        begun(fields, arguments)


def test_what_is_right_is_no_mistake() -> None:
    begun({}, {})


def test_data_without_a_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="data is of a model of your own"):
        megazero.training({"train_iters": 1}, data=DATA)
    with pytest.raises(TypeError, match="model is Linear"):
        megazero.training({"train_iters": 1}, data=DATA, model=nn.Linear(2, 2))


def with_other_data(rank: int) -> str:
    return config_error(lambda: begun({}, {"data": [{**sample, "y": torch.tensor(float(rank))} for sample in DATA]}))


def test_ranks_with_other_data_are_named() -> None:
    assert all("the ranks have other data" in words for words in run_ranks(2, with_other_data))


def test_a_run_goes_on_with_its_own_data(tmp_path: Path) -> None:
    save = {"save": tmp_path, "load": tmp_path}
    begun(save, {})
    more = {**save, "train_iters": 4}
    with pytest.raises(ConfigError, match="data has 20 samples, and had 24"):
        begun(more, {"data": DATA[:20]})
    with pytest.raises(ConfigError, match="samples of data have other contents"):
        begun(more, {"data": [*DATA[:-1], {**DATA[-1], "y": torch.tensor(5.0)}]})
    begun({**more, "override_data": True}, {"data": DATA[:20]})


class Noisy:
    """Samples that are drawn, by each generator of the process."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Batch:
        noise = torch.rand(5) + float(np.random.random()) + random.random()  # noqa: NPY002
        return {**DATA[index], "x": DATA[index]["x"] + noise, "y": DATA[index]["y"] + noise[0]}


def noisy(rank: int, run: dict[str, Any]) -> list[float]:
    """The losses of twelve steps, three passes, with a dropout that draws by torch's generator, too."""
    torch.manual_seed(1)
    units = [nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), nn.Linear(6, 1)]
    model = megazero.Model(units, squared, input="x")
    loop = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 12, "lr": 0.0, "lr_decay_style": "constant"}
    with megazero.training(model=model, data=Noisy(), run={**loop, **run}) as training:
        return [float(step.loss) for step in training.steps()]


def test_drawn_samples_are_the_same_in_every_layout_and_behind_a_resume(tmp_path: Path) -> None:
    expected = noisy(0, {})
    assert len({*expected}) == 12, "each pass has other draws"
    assert noisy(0, {"num_workers": 2}) == expected, "no thread draws beside the units"
    for layout in ({"pp": 2}, {"zero_stage": 3}):
        for made in run_ranks(2, noisy, layout):
            assert made == pytest.approx(expected, rel=1e-5)
    saved = {"save": tmp_path, "load": tmp_path}
    assert [*noisy(0, {**saved, "exit_interval": 5}), *noisy(0, saved)] == expected


def drawing(samples: list[Batch]) -> Batch:
    """A collate that hides some numbers, as for masked words."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**batch, "x": batch["x"] * (torch.rand(len(samples), 5) > 0.3) * float(np.random.random())}  # noqa: NPY002


def hidden_by_collate(rank: int, run: dict[str, Any]) -> list[float]:
    torch.manual_seed(1)
    units = [nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), nn.Linear(6, 1)]
    loop = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 5, "lr": 0.0, "lr_decay_style": "constant"}
    model = megazero.Model(units, squared, input="x")
    with megazero.training(model=model, data=DATA, collate=drawing, run={**loop, **run}) as training:
        return [float(step.loss) for step in training.steps()]


def test_what_a_collate_draws_is_the_same_in_every_layout() -> None:
    expected = hidden_by_collate(0, {})
    assert expected == hidden_by_collate(0, {"num_workers": 3})
    for layout in ({"pp": 2}, {"zero_stage": 1}):
        for made in run_ranks(2, hidden_by_collate, layout):
            assert made == pytest.approx(expected, rel=1e-5)


class Seldom(Noisy):
    """One sample draws, which is none of those that are looked at."""

    def __getitem__(self, index: int) -> Batch:
        return super().__getitem__(index) if index == 2 else DATA[index]


def test_a_sample_that_draws_unseen_is_named() -> None:
    """A thread would draw it beside the draws of units. Without threads it is seeded."""
    assert 2 not in marked(len(DATA))
    with pytest.raises(RuntimeError, match=r"data among \[2, 3\] draws by torch's generator \(rand\)"):
        begun({}, {"data": Seldom()})
    begun({"num_workers": 0}, {"data": Seldom()})


class Foreign(Noisy):
    """Samples that no seed of the process knows."""

    def __getitem__(self, index: int) -> Batch:
        return {**DATA[index], "x": DATA[index]["x"] + float(np.random.default_rng().random())}


def with_foreign_data(rank: int, run: dict[str, Any]) -> str:
    return config_error(lambda: begun(run, {"data": Foreign()}))


def test_samples_that_no_seed_knows_are_not_for_stages() -> None:
    begun({}, {"data": Foreign()})
    for words in run_ranks(2, with_foreign_data, {"pp": 2}):
        assert "not the same when it is read twice" in words


def test_a_sample_that_raises_is_named() -> None:
    class Missing(Noisy):
        def __getitem__(self, index: int) -> Batch:
            if index == 5:
                raise FileNotFoundError("x.png")
            return DATA[index]

    with pytest.raises(FileNotFoundError, match=r"x\.png") as raised:
        begun({}, {"data": Missing()})
    assert getattr(raised.value, "__notes__", ["in data[5]"]) == ["in data[5]"]


def test_an_order_or_a_schedule_that_changes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = {"save": tmp_path, "load": tmp_path, "seed": 3}
    begun(saved, {"shuffle": True})
    with pytest.raises(ConfigError, match="samples are shuffled by seed 4, and were shuffled by seed 3"):
        begun({**saved, "seed": 4, "train_iters": 3}, {"shuffle": True})
    with pytest.raises(ConfigError, match="samples are in order, and were shuffled by seed 3"):
        begun({**saved, "train_iters": 3}, {})
    capsys.readouterr()
    begun({**saved, "train_iters": 3, "lr": 0.5}, {"shuffle": True})
    told = " ".join(capsys.readouterr().out.split())
    assert "; changed: train_length 2 iterations -> 3 iterations, lr 0.001 -> 0.5" in told


def test_the_steps_of_a_run_are_the_runs(tmp_path: Path) -> None:
    case = CASES["mlp"]
    run = settings(case, {"save": tmp_path / "run"})
    with megazero.training(model=model_of(case), data=Rows(case), run=run) as training:
        next(training.steps())
        with pytest.raises(RuntimeError, match="step of the engine of a run"):
            training.engine.step(case.micro_batch(0, 0))
        with pytest.raises(RuntimeError, match="load of the engine of a run"):
            training.engine.load(tmp_path)
        with pytest.raises(ValueError, match="is where the run saves"):
            training.engine.save(tmp_path / "run")
        training.engine.save(tmp_path / "beside")


class Counting(nn.Module):
    """Counts its forwards in a buffer, beside enough numbers that a save takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(5, 1), nn.Parameter(torch.zeros(4_000_000))
        self.forwards: Tensor
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(x) + 0 * self.large.sum()


def test_a_save_in_the_background_has_the_buffers_of_its_step(tmp_path: Path) -> None:
    """Also where the program saves elsewhere meanwhile."""
    run = {"micro_batch_size": 4, "global_batch_size": 4, "train_iters": 3, "save_interval": 2, "async_save": True}
    model = megazero.Model([Counting()], squared, input="x")
    with megazero.training(model=model, data=DATA, run={**run, "save": tmp_path / "run"}) as training:
        for step in training.steps():
            if step.iteration == 3:
                training.engine.save(tmp_path / "beside")
    kept = {path.parent.name: load_file(path)["0.forwards"] for path in (tmp_path / "run").rglob(BESIDE)}
    assert {name: float(number) for name, number in kept.items()} == {"iter_0000002": 2, "iter_0000003": 3}
