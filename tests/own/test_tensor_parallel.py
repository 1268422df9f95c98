"""A user's modules cut among tp ranks, beside plain torch with torch.optim: loss, norm, weights in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import megazero
from megazero.checkpoint.api import Checkpoint
from tests.own.models import RATE, Case, Trained, plainly_trained
from tests.own.parallel_models import CASES, LAYOUTS
from tests.own.test_causal_lm import Whole, micro_batch
from tests.own.training import RULE, model_of, require_equal, share_of, trained_with
from tests.ranks import run_ranks

WORDS = 61
plain = cache(plainly_trained)


def trained_on_rank(rank: int, name: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    return [trained_with(CASES[name], {**RULE, **layout}, evaluates_each=True) for layout in layouts]


@pytest.mark.parametrize("size", sorted({size for size, _ in LAYOUTS.values()}))
@pytest.mark.parametrize("name", CASES)
def test_tp_ranks_train_as_plain_torch(name: str, size: int) -> None:
    layouts = {words: layout for words, (ranks, layout) in LAYOUTS.items() if ranks == size}
    expected = plain(CASES[name])
    for rank, made in enumerate(run_ranks(size, trained_on_rank, name, list(layouts.values()))):
        for words, own in zip(layouts, made, strict=True):
            require_equal(own, expected, f"{name}, {words}, rank {rank}")


# --- checkpoints -----------------------------------------------------------------------------------------------------

JOURNEY: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "zero_stage": 1}),
    (1, {}),
    (4, {"tp": 2, "pp": 2, "zero_stage": 3, "late_update": True}),
    (3, {"tp": 3, "offload_optimizer": "cpu"}),
]
"""Layouts that take one step each, from each other's checkpoints."""


def go_on(rank: int, name: str, layout: dict[str, Any], step: int, folders: list[str], export: str | None) -> Trained:
    """A step behind those of other layouts. export: where the weights go at its end."""
    case = CASES[name]
    with megazero.engine(model_of(case), "adamw", RATE, {**RULE, **layout}) as engine:
        if step:
            assert engine.load(folders[step - 1]) is not None and engine.steps == step
        result = engine.step(share_of(engine, case, step))
        numbers = [(float(result.loss), float(result.grad_norm))]
        evaluated = float(engine.evaluate(share_of(engine, case, case.steps)))
        engine.save(folders[step])
        if export is not None:
            engine.export(export)
        with engine.parameters_whole() as whole:
            shapes = {parameter: tuple(value.shape) for parameter, value in whole.items()}
        values = engine.state_dict()
    assert all(shape == tuple(values[parameter].shape) for parameter, shape in shapes.items())
    return Trained(numbers, evaluated, values)


@pytest.mark.parametrize("name", ["tied", "partly frozen"])
def test_checkpoints_go_from_layout_to_layout(name: str, tmp_path: Path) -> None:
    expected = plain(Case(**{**vars(CASES[name]), "steps": len(JOURNEY)}))
    folders, export = [str(tmp_path / str(step)) for step in range(len(JOURNEY))], str(tmp_path / "made.safetensors")
    numbers = list[tuple[float, float]]()
    for step, (size, layout) in enumerate(JOURNEY):
        made = run_ranks(size, go_on, name, layout, step, folders, export if size == 3 else None)[size - 1]
        numbers += made.numbers
    require_equal(Trained(numbers, expected.evaluated, made.values), expected, name)
    exported = load_file(export)
    assert {*exported} == {*expected.values}
    assert all(torch.equal(exported[each], value) for each, value in made.values.items())


# --- models of transformers ------------------------------------------------------------------------------------------

SIZES = {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 20, "num_key_value_heads": 2, "pad_token_id": 0}
OF_GPT2 = {
    "*.wte": "vocabulary",
    "*.attn.c_attn": "column 3",
    "*.attn.split_size": "divided",
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
}
"""transformers has no plan for this family."""
DRY = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "num_experts": 4}
FAMILIES: Mapping[str, tuple[str, dict[str, Any], Mapping[str, str] | None]] = {
    "norms of queries": ("Qwen3Config", {**GATED, "head_dim": 8, "tie_word_embeddings": True}, None),
    "gathered": ("Phi3Config", {**GATED, "resid_pdrop": 0.0}, None),
    "experts": (
        "Qwen2MoeConfig",
        {**GATED, **EXPERTS, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        None,
    ),
    "transposed": (
        "GPT2Config",
        {**DRY, "vocab_size": WORDS, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        OF_GPT2,
    ),
}
"""The configuration of each, and the program's own plan, if transformers has none."""


def built(family: str) -> nn.Module:
    name, settings, _ = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, name)(**settings)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def case_of(family: str) -> Case:
    return Case(lambda: [Whole(built(family))], None, micro_batch, steps=4)


def of_transformers(rank: int, family: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    return [
        trained_with(
            case_of(family),
            {**RULE, **layout},
            model=megazero.from_transformers(built(family), tp_plan=FAMILIES[family][2]),
        )
        for layout in layouts
    ]


@pytest.mark.parametrize(("size", "names"), [(2, ["tp 2", "tp 2, recompute"]), (4, ["tp 2 x pp 2", "tp 2 x zero-3"])])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_cut_by_their_plans(family: str, size: int, names: list[str]) -> None:
    expected = plain(case_of(family))
    values = {name.removeprefix("0.model."): value for name, value in expected.values.items()}
    layouts = [LAYOUTS[name][1] for name in names]
    for rank, made in enumerate(run_ranks(size, of_transformers, family, layouts)):
        for words, own in zip(names, made, strict=True):
            require_equal(own, replace(expected, values=values), f"{family}, {words}, rank {rank}")


def adapted() -> nn.Module:
    """A model with adapters in both kinds of linears, which begin with numbers other than zero."""
    targets = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets)
    config.init_lora_weights = False
    model = built("norms of queries")
    torch.manual_seed(6)
    wrapped: nn.Module = peft.inject_adapter_in_model(config, model).double()
    return wrapped


ADAPTED = Case(lambda: [Whole(adapted())], None, micro_batch, steps=4)


def of_adapters(rank: int) -> Trained:
    layout = {"tp": 2, "pp": 2, "zero_stage": 1}
    return trained_with(ADAPTED, {**RULE, **layout}, model=megazero.from_transformers(adapted()))


def test_adapters_are_cut_with_the_linears_that_have_them() -> None:
    expected = plainly_trained(ADAPTED)
    values = {name.removeprefix("0.model."): value for name, value in expected.values.items()}
    for rank, made in enumerate(run_ranks(4, of_adapters)):
        require_equal(made, replace(expected, values=values), f"rank {rank}")


# --- checkpoints between models with plans and without ---------------------------------------------------------------

PLAN_OR_NONE: list[tuple[int, bool, dict[str, Any]]] = [
    (1, False, {}),
    (2, True, {"tp": 2}),
    (2, False, {"zero_stage": 3, "offload_optimizer": "cpu:0.5"}),
    (4, True, {"tp": 2, "zero_stage": 3, "bucket_size": 300}),
    (2, False, {"pp": 2, "zero_stage": 1}),
]
"""Ranks, whether the model has a plan, and a layout: each takes a step from the checkpoint of the one before."""


def with_plans_or_none(name: str, *, has_plans: bool) -> megazero.Model:
    if name == "transposed":
        return megazero.from_transformers(built(name), tp_plan=OF_GPT2 if has_plans else {})
    model = model_of(CASES[name])
    for module in (module for unit in model.units for module in unit.modules()):
        if not has_plans:
            vars(module)["tp_plan"] = {}
    return model


def go_on_with_plans_or_none(rank: int, name: str, number: int, folders: list[str]) -> Trained:
    _, has_plans, layout = PLAN_OR_NONE[number]
    return trained_with(
        case_of(name) if name == "transposed" else CASES[name],
        {**RULE, **layout},
        model=with_plans_or_none(name, has_plans=has_plans),
        steps=range(number, number + 1),
        load=folders[number - 1] if number else None,
        save=folders[number],
    )


@pytest.mark.parametrize(
    ("name", "tensor", "shapes"),
    [
        ("tied", "1.attention.qkv.weight", {(3, 24, 24), (72, 24)}),
        ("transposed", "transformer.h.0.attn.c_attn.weight", {(24, 3, 24), (24, 72)}),
    ],
)
def test_checkpoints_go_between_plans_and_none(name: str, tensor: str, shapes: set[Any], tmp_path: Path) -> None:
    """Queries, keys and values of one product are three parts where tp ranks share them, and one tensor elsewhere."""
    case = case_of(name) if name == "transposed" else CASES[name]
    expected = plain(Case(**{**vars(case), "steps": len(PLAN_OR_NONE)}))
    folders, numbers = [str(tmp_path / str(step)) for step in range(len(PLAN_OR_NONE))], list[tuple[float, float]]()
    for number, (size, *_) in enumerate(PLAN_OR_NONE):
        made = run_ranks(size, go_on_with_plans_or_none, name, number, folders)[0]
        numbers += made.numbers
    values = {each: made.values[each.removeprefix("0.model.")] for each in expected.values}
    require_equal(Trained(numbers, expected.evaluated, values), expected, "with plans and without")
    assert {Checkpoint(folder).tensors[tensor].shape for folder in folders} == shapes
