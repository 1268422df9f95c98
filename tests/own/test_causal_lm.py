"""Causal language models of `transformers`, cut into units, beside the same models in plain torch with torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero
from tests.own.models import RATE, Batch, Case, Trained, plainly_trained
from tests.own.training import EXACT, LAYOUTS, RULE, require_equal, trained_with
from tests.ranks import run_ranks

WORDS, LENGTH, IGNORED = 61, 7, -100
SIZES = {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3}
GATED = {**SIZES, "intermediate_size": 20, "num_key_value_heads": 1}
NAMED = {"vocab_size": WORDS, "n_embd": 24, "n_layer": 4, "n_head": 3, "rotary_dim": 4, "n_positions": 32}
DRY = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        # none of these has a converter here; each gives other things to its layers
        "cohere": ("CohereConfig", {**GATED, "logit_scale": 0.3}),
        "gptj": ("GPTJConfig", {**NAMED, **DRY}),
        "biogpt": (
            "BioGptConfig",
            {**SIZES, "intermediate_size": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        "experts": (
            "Qwen2MoeConfig",
            {
                **GATED,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 12,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "experts_implementation": "eager",
            },
        ),
        "state space": ("MambaConfig", {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 4}),
        "a scale behind the ids": (
            "FalconH1Config",
            {
                **GATED,
                "num_hidden_layers": 2,
                "mamba_d_ssm": 48,
                "mamba_n_heads": 6,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_n_groups": 1,
                "embedding_multiplier": 2.0,
            },
        ),
        "windows": ("Gemma3TextConfig", {**GATED, "head_dim": 8, "sliding_window": 3}),
        "embedding of another width": (
            "OPTConfig",
            {**SIZES, "ffn_dim": 20, "word_embed_proj_dim": 16, "max_position_embeddings": 32, "dropout": 0.0},
        ),
    }
)


SLOW = "a scale behind the ids"
"""A family on one process alone."""
EVERYWHERE = tuple(family for family in FAMILIES if family != SLOW)


def built(family: str, *, on_meta: bool = False) -> nn.Module:
    name, settings = FAMILIES[family]
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(5)
    with torch.device("meta" if on_meta else "cpu"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def with_dropout(family: str) -> nn.Module:
    """A model whose embeddings, attention and layers drop."""
    model = built(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def micro_batch(draw: torch.Generator) -> Batch:
    tokens = torch.randint(3, WORDS, (2, LENGTH), generator=draw)
    labels = torch.where(torch.rand(2, LENGTH, generator=draw) < 0.2, IGNORED, tokens)
    return {"input_ids": tokens, "labels": labels}


class Whole(nn.Module):
    """A model as its authors call it, with the loss in float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, labels = self.model(batch["input_ids"], use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()


def case_of(family: str) -> Case:
    return Case(lambda: [Whole(built(family))], None, micro_batch)


@cache
def plain(family: str) -> Trained:
    """With the names of the model."""
    made = plainly_trained(case_of(family))
    return replace(made, values={name.removeprefix("0.model."): value for name, value in made.values.items()})


def trained(
    rank: int, family: str, layouts: list[dict[str, Any]], build: Callable[[str], nn.Module] = built
) -> list[Trained]:
    case = case_of(family)
    return [
        trained_with(case, {**RULE, **layout}, model=megazero.from_transformers(build(family))) for layout in layouts
    ]


def layouts_of(number: int) -> list[str]:
    """Four layouts of each family, so that all families together have all layouts."""
    names = [*LAYOUTS]
    return [names[(4 * number + each) % len(names)] for each in range(4)]


def run_layouts(family: str, names: list[str]) -> None:
    for size in sorted({LAYOUTS[name][0] for name in names}):
        layouts = {name: LAYOUTS[name][1] for name in names if LAYOUTS[name][0] == size}
        for made in run_ranks(size, trained, family, [*layouts.values()]):
            for words, own in zip(layouts, made, strict=True):
                require_equal(own, plain(family), f"{family}, {words}")


@pytest.mark.parametrize("family", EVERYWHERE)
def test_families_train_as_in_plain_torch(family: str) -> None:
    run_layouts(family, layouts_of(EVERYWHERE.index(family)))


def test_what_a_model_does_with_ids_alone_is_done() -> None:
    """It scales the embedding where it gets ids, and not where it gets the embedding."""
    (made,) = trained(0, SLOW, [{}])
    require_equal(made, plain(SLOW), SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERYWHERE)
def test_every_layout_trains_as_in_plain_torch(family: str) -> None:
    run_layouts(family, [name for name in LAYOUTS if name not in layouts_of(EVERYWHERE.index(family))])


def test_dropout_is_the_same_in_every_layout() -> None:
    """What a layer drops does not depend on the layers that its rank has, nor on a second forward of it."""
    names = "zero-2", "pp 2", "interleaved"
    (expected,) = trained(0, "gptj", [{}], with_dropout)
    assert expected.numbers[0] != pytest.approx(plain("gptj").numbers[0], rel=1e-4), "something is dropped"
    for made in run_ranks(2, trained, "gptj", [LAYOUTS[name][1] for name in names], with_dropout):
        for name, layout in zip(names, made, strict=True):
            require_equal(layout, expected, name)


def exported(rank: int, family: str, folder: str) -> float:
    """Train a model that is built on the meta device for a step, export it, and evaluate."""
    case, model = case_of(family), built(family, on_meta=True)
    torch.manual_seed(11)
    with megazero.engine(megazero.from_transformers(model), "adamw", RATE, {**RULE, "pp": 2}) as engine:
        engine.step(case.micro_batch(0, 0))
        engine.export(Path(folder) / "model.safetensors")
        return float(engine.evaluate(case.micro_batch(1, 0)))


@pytest.mark.parametrize("family", ["cohere", "windows", "experts"])
def test_a_model_on_the_meta_device_is_trained_and_opened_by_transformers(family: str, tmp_path: Path) -> None:
    losses = run_ranks(2, exported, family, str(tmp_path))
    built(family).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        total, number = Whole(opened)(case_of(family).micro_batch(1, 0))
    assert losses == [pytest.approx(float(total / number), rel=EXACT)] * 2
    assert 3.5 < losses[0] < 4.8, "the beginning is that of the family: nothing is known of the words"
    assert load_file(tmp_path / "model.safetensors").keys() == plain(family).values.keys(), "what is tied stays so"


def test_an_evaluation_drops_nothing() -> None:
    """Neither in units, nor in what the model has around them."""
    model = with_dropout("gptj")
    state = torch.get_rng_state()
    units = megazero.from_transformers(model)
    assert torch.equal(torch.get_rng_state(), state), "looking at a model draws nothing"
    batch = micro_batch(torch.Generator().manual_seed(3))
    with torch.no_grad():
        total, number = Whole(with_dropout("gptj").eval())(batch)
    with megazero.engine(units, "adamw", RATE, RULE) as engine:
        assert float(engine.evaluate(batch)) == pytest.approx(float(total / number), rel=EXACT)
        assert float(engine.step(batch).loss) != pytest.approx(float(total / number), rel=1e-4), "a step drops"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * (1.0 if scale is None else scale)


class Family(nn.Module):
    """A model of the usual parts, which does something more: by words."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.more, self.config = more, SimpleNamespace(num_hidden_layers=3)
        self.words, self.layers = nn.Embedding(WORDS, 8), nn.ModuleList(Plain() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS)
        if "frozen" in more:
            self.middle = nn.Linear(8, 8).requires_grad_(False)
        if "list" in more:
            self.gains = nn.ParameterList([nn.Parameter(torch.ones(8))])
        if "itself" in more:
            self.gain = nn.Parameter(torch.ones(8))
        if "nothing" in more:
            self.idle = nn.Linear(2, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        first = hidden = self.words(input_ids)
        hidden = hidden * self.gains[0] if "list" in self.more else hidden
        hidden = self.norm(hidden) if "twice" in self.more else hidden
        hidden = hidden * self.gain if "itself" in self.more else hidden
        scale = first.mean(-1, keepdim=True) if "argument" in self.more else None
        scale = self.middle(torch.ones(8, dtype=first.dtype)) if "frozen argument" in self.more else scale
        for layer in self.layers:
            scale = hidden.mean(-1, keepdim=True) if "each layer" in self.more else scale
            hidden = layer(hidden, scale)
            hidden = hidden * 0.5 if "scales" in self.more else hidden
            hidden = hidden.mul_(0.5) if "in place" in self.more else hidden
            hidden = self.middle(hidden) if "frozen between" in self.more else hidden
        hidden = self.norm(hidden + first if "skips" in self.more else hidden)
        return SimpleNamespace(
            logits=F.linear(hidden, torch.cat([self.words.weight])) if "table" in self.more else self.head(hidden)
        )


BETWEEN = "cannot be cut into units: it changes the hidden state between two layers"
MORE = "cannot be cut into units: layer 1 gets something beside its hidden state that depends on the embedding"
UNCUT: Mapping[str, str] = MappingProxyType(
    {
        "scales": BETWEEN,
        "in place": BETWEEN,
        "a frozen between": BETWEEN,
        "skips": "cannot be cut into units: what follows the layers reads more than what the last one makes",
        "an argument of each layer": MORE,
        "a list": r"it uses gains\.0 elsewhere than in a module that it calls",
        "the model itself": "it uses gain elsewhere than in a module that it calls",
        "a table": r"it uses words\.weight elsewhere than in a module that it calls",
        "a module for nothing": r"its parameter idle\.weight is in no module that the model calls",
    }
)
"""What a model does, and the words that refuse it: its numbers would be wrong, without an error."""


@pytest.mark.parametrize("more", UNCUT)
def test_what_units_cannot_do_is_refused(more: str) -> None:
    megazero.from_transformers(Family("no more"))
    with pytest.raises(ValueError, match=UNCUT[more]):
        megazero.from_transformers(Family(more))


MORE_IN_UNITS = ("no more", "an argument", "a frozen argument", "a norm twice")
"""What a model does that units do, too: what its layers get beside their hidden state goes from unit to unit."""


def more_trained(rank: int, layout: dict[str, Any]) -> list[Trained]:
    return [
        trained_with(case_of_more(more), {**RULE, **layout}, model=megazero.from_transformers(family_with(more)))
        for more in MORE_IN_UNITS
    ]


def family_with(more: str) -> nn.Module:
    torch.manual_seed(5)
    return Family(more).double()


def case_of_more(more: str) -> Case:
    return Case(lambda: [Whole(family_with(more))], None, micro_batch, steps=3)


def test_what_layers_get_beside_goes_from_unit_to_unit() -> None:
    for made in (*run_ranks(1, more_trained, {}), *run_ranks(2, more_trained, {"pp": 2})):
        for more, own in zip(MORE_IN_UNITS, made, strict=True):
            expected = plainly_trained(case_of_more(more))
            values = {name.removeprefix("0.model."): value for name, value in expected.values.items()}
            require_equal(own, replace(expected, values=values), more)


def with_a_head(kind: str) -> nn.Module:
    """A small model of transformers of another kind."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    if kind.startswith("Mixtral"):
        config: Any = transformers.MixtralConfig(**sizes, **heads, num_local_experts=2, output_router_logits=True)
    elif kind.startswith("Bart"):
        config = transformers.BartConfig(
            vocab_size=11, d_model=16, encoder_layers=2, decoder_layers=2, decoder_attention_heads=2
        )
    else:
        config = transformers.LlamaConfig(**sizes, **heads)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


OTHER_LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForTokenClassification": "its loss is of the kind ForTokenClassification, and that of units is ForCausal",
        "LlamaModel": "it returns no logits: it has no head",
        "BartForCausalLM": "its own loss is not the cross-entropy of the token behind each one alone",  # no shift
        "MixtralForCausalLM": "cannot be cut|do not make one hidden state",  # a loss of its router beside
    }
)
"""Models with a loss of another kind, and the words that refuse them."""


@pytest.mark.parametrize("kind", OTHER_LOSSES)
def test_another_loss_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=OTHER_LOSSES[kind]):
        megazero.from_transformers(with_a_head(kind))


WRONG: Mapping[str, tuple[Callable[[], Any], str]] = MappingProxyType(
    {
        "no model": (lambda: nn.Linear(2, 2), "Linear has its layers at an unknown place: say layers=; it has no list"),
        "a wrong place": (
            lambda: (built("cohere"), "model.blocks"),
            "model.blocks of CohereForCausalLM is NoneType: a ModuleList",
        ),
        "no embedding": (lambda: (nn.ModuleDict({"a": nn.ModuleList(mlp_layers())}), "a"), "no get_input_embeddings"),
    }
)


def mlp_layers() -> list[nn.Module]:
    return [nn.Linear(3, 3), nn.Linear(3, 3)]


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    make, told = WRONG[name]
    given = make()
    model, layers = given if isinstance(given, tuple) else (given, None)
    with pytest.raises(ValueError, match=told):
        megazero.from_transformers(model, layers=layers)


TOKENS = torch.ones(1, 4, dtype=torch.long)
LACKING: dict[str, tuple[dict[str, Tensor], str]] = {
    "labels": ({"input_ids": TOKENS}, "the micro-batch has no 'labels': it has input_ids"),
    "tokens": ({"labels": TOKENS}, "the micro-batch has no 'input_ids': it has labels"),
    "a label": (
        {"input_ids": TOKENS, "labels": TOKENS[:, 1:]},
        r"'labels' of the micro-batch are \[1, 3\], and the logits are \[1, 4, 61\]",
    ),
    "nothing": (
        {"input_ids": TOKENS, "labels": TOKENS, "use_cache": TOKENS},
        "the micro-batch has 'use_cache', which the units set themselves",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_micro_batch_of_other_tensors_is_named(name: str) -> None:
    given, told = LACKING[name]
    engine = megazero.engine(megazero.from_transformers(built("cohere")), run=RULE)
    with engine, pytest.raises(ValueError, match=told):
        engine.step(given)


def compiled_losses(rank: int, is_compiled: bool, runs: list[dict[str, Any]]) -> list[list[float]]:
    """Of steps, with layers as they are or as torch's compiler traces them, which its guards then watch."""
    made = list[list[float]]()
    for run in runs:
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED))
        for layer in model.model.layers if is_compiled else ():
            layer.compile(dynamic=False, backend="eager")
        draw = torch.Generator().manual_seed(7 + rank)
        with megazero.engine(megazero.from_transformers(model), "adamw", RATE, run) as engine:
            batch = micro_batch(draw)
            made.append([float(engine.step(batch).loss) for _ in range(3)])
    return made


def test_layers_may_be_compiled() -> None:
    """Also in a run whose precision is another than the model's dtype, so that outlines of layers are cast."""
    runs: list[dict[str, Any]] = [{"precision": "bf16", "zero_stage": 3}, {"precision": "fp32", "zero_stage": 1}]
    plain_layers, compiled = (run_ranks(2, compiled_losses, is_compiled, runs) for is_compiled in (False, True))
    assert compiled == plain_layers and compiled[0][0][2] < compiled[0][0][0]
