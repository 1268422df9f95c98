"""A user's modules in every layout, beside plain torch with torch.optim: loss, norm, weights of ten steps in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

import megazero
from megazero.pipeline.kept import KeptTensors
from tests.own.models import CASES, MICRO_BATCHES, RATE, Trained, plainly_trained
from tests.own.training import LAYOUTS, RULE, model_of, require_equal, trained_with
from tests.ranks import run_ranks


def trained_on_rank(rank: int, name: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    return [trained_with(CASES[name], {**RULE, **layout}, evaluates_each=True) for layout in layouts]


plain = cache(plainly_trained)


@pytest.mark.parametrize("size", sorted({size for size, _ in LAYOUTS.values()}))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_trains_as_plain_torch(name: str, size: int) -> None:
    layouts = {words: layout for words, (ranks, layout) in LAYOUTS.items() if ranks == size}
    if name == "convolutional":  # a unit that changes its input cannot be computed again
        layouts = {words: {**layout, "recompute_granularity": "none"} for words, layout in layouts.items()}
    expected = plain(CASES[name])
    for rank, made in enumerate(run_ranks(size, trained_on_rank, name, list(layouts.values()))):
        for words, own in zip(layouts, made, strict=True):
            require_equal(own, expected, f"{name}, {words}, rank {rank}")


def evaluated_first(rank: int) -> list[float]:
    """The losses of an evaluation, and of two steps behind it."""
    case = CASES["mlp"]
    batches = [case.micro_batch(0, number) for number in range(MICRO_BATCHES)]
    with megazero.engine(model_of(case), "adamw", RATE, {**RULE, "pp": 2}) as engine:
        return [float(engine.evaluate(batches)), *(float(engine.step(batches).loss) for _ in range(2))]


def test_an_evaluation_may_come_before_the_first_step() -> None:
    """It runs without a graph, and the messages of the steps behind it have gradients all the same."""
    for evaluated, first, second in run_ranks(2, evaluated_first):
        assert evaluated == pytest.approx(first, rel=1e-12) and second < first


QUANTIZED: Mapping[str, dict[str, Any]] = {
    "weights": {"zero_quantized_weights": True, "zero_stage": 3},
    "weights that stay": {"zero_quantized_weights": True, "zero_stage": 1},
    "gradients": {"zero_quantized_gradients": "int8", "zero_stage": 2},
    "gradients with feedback": {
        "zero_quantized_gradients": "int4",
        "zero_gradient_error_feedback": True,
        "zero_stage": 3,
        "zero_shard_size": 2,
    },
}


def quantized(rank: int, name: str) -> Trained:
    return trained_with(CASES["vision"], {**RULE, **QUANTIZED[name]})


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_messages_lose_little(name: str) -> None:
    """And something: they are in use. All ranks have the same weights."""
    ranks, expected = run_ranks(4, quantized, name), plain(CASES["vision"])
    losses, right = ([loss for loss, _ in made.numbers] for made in (ranks[0], expected))
    off = max(abs(a / b - 1) for a, b in zip(losses, right, strict=True))
    assert 1e-7 < off < 0.1
    for other in ranks[1:]:
        assert all(torch.equal(value, ranks[0].values[key]) for key, value in other.values.items())


ACTIVATIONS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"offload_activations": "cpu"}),
    "half of the units": (1, {"offload_activations": "cpu:0.5", "micro_batch_order": "vertical"}),
    "stages": (2, {"offload_activations": "cpu", "pp": 2, "pipeline_schedule": "gpipe"}),
    "sharded": (2, {"offload_activations": "cpu", "zero_stage": 3, "late_update": True}),
}


def left_behind(rank: int, model: str, layout: dict[str, Any]) -> tuple[Trained, int]:
    """What is trained, and how often activations have left the device."""
    with pytest.MonkeyPatch.context() as patch:
        copies, copy_of = list[Any](), KeptTensors._copy_of

        def counted(kept: KeptTensors, piece: Any) -> torch.Tensor:
            copies.append(piece)
            return copy_of(kept, piece)

        patch.setattr(KeptTensors, "_copy_of", counted)
        return trained_with(CASES[model], {**RULE, **layout}), len(copies)


@pytest.mark.parametrize("model", ["encoder and decoder", "vision"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_wait_in_host_memory(name: str, model: str) -> None:
    """Losses, norms and weights are plain torch's, and something has left."""
    ranks, layout = ACTIVATIONS[name]
    for rank, (made, copies) in enumerate(run_ranks(ranks, left_behind, model, layout)):
        require_equal(made, plain(CASES[model]), f"{name}, rank {rank}")
        assert copies > 0


def losses_of(precision: str, run: Mapping[str, Any]) -> list[float]:
    case, dtype = CASES["mlp"], {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]

    def batch(number: int) -> dict[str, torch.Tensor]:
        made = case.micro_batch(0, number)
        return {**made, "x": made["x"].to(dtype), "counts": torch.ones(3)}

    model = megazero.Model([unit.to(dtype) for unit in case.built()], case.loss)
    with megazero.engine(model, "adamw", RATE, run) as engine:
        assert next(iter(engine.state_dict().values())).dtype == dtype
        return [float(engine.step([batch(number) for number in range(2)]).loss) for _ in range(20)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_as_32_do(precision: str) -> None:
    expected = losses_of("fp32", {})
    found = losses_of(precision, {"zero_stage": 3, "recompute_granularity": "full"})
    assert expected[-1] < 0.2 * expected[0]
    assert found[0] == pytest.approx(expected[0], rel=0.02) and found[-1] < 0.25 * expected[0]
