"""Encoders with decoders, and models of pictures, cut into units, beside the same models in plain torch."""

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
from torch import Tensor, nn

import megazero
from tests.own.models import RATE, Batch, Case, Trained, plainly_trained
from tests.own.training import EXACT, RULE, require_equal, trained_with
from tests.ranks import run_ranks

WORDS, CLASSES, PAD, IGNORED, STEPS = 29, 4, 1, -100, 6
HALVES = {
    "vocab_size": WORDS,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "scale_embedding": True,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 12,
    "d_kv": 6,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 4,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
}
PICTURES = {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_channels": 2,
    "image_size": 8,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "BartForConditionalGeneration": ("BartConfig", HALVES),
        "MarianMTModel": ("MarianConfig", {**HALVES, "decoder_vocab_size": WORDS}),
        # the bias of positions is made by the first layer of each half, which hands it to the others
        "T5ForConditionalGeneration": ("T5Config", T5),
        "ViTForImageClassification": ("ViTConfig", PICTURES),
    }
)
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = MappingProxyType(
    {
        "one": (1, {}),
        "zero-3": (2, {"zero_stage": 3}),
        "pp 2, recompute": (2, {"pp": 2, "recompute_granularity": "full"}),
        "pp 3, late": (3, {"pp": 3, "late_update": True, "zero_stage": 1}),
    }
)


def built(kind: str, **more: Any) -> nn.Module:
    config, settings = KINDS[kind]
    torch.manual_seed(5)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**{**settings, **more})).double()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":  # zeros would be no trial of a buffer that is in no module
                buffer.uniform_(-0.5, 0.5)
    return model.train()


def entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["class"], reduction="sum"), len(logits)


class AsItIs(nn.Module):
    """A model as its authors call it: it makes what its decoder gets, and its own mean of the losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if "class" in batch:
            return entropy(self.model(batch["pixel_values"]).logits, batch)
        number = (batch["labels"] != IGNORED).sum()
        return self.model(**batch).loss * number, number


def micro_batch(kind: str, draw: torch.Generator) -> Batch:
    """Sentences of which one is padded, and labels of which some do not count; or pictures."""
    if kind.startswith("ViT"):
        pixels = torch.randn(2, 2, 8, 8, generator=draw, dtype=torch.float64)
        return {"pixel_values": pixels, "class": torch.randint(0, CLASSES, (2,), generator=draw)}
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    tokens = torch.randint(3, WORDS, (2, 6), generator=draw)
    labels = torch.randint(3, WORDS, (2, 5), generator=draw)
    labels[0, 3:] = IGNORED
    return {"input_ids": torch.where(mask == 1, tokens, PAD), "attention_mask": mask, "labels": labels}


def case_of(kind: str) -> Case:
    return Case(lambda: [AsItIs(built(kind))], None, lambda draw: micro_batch(kind, draw), steps=STEPS)


@cache
def plain(kind: str) -> Trained:
    made = plainly_trained(case_of(kind))
    return replace(made, values={name.removeprefix("0.model."): value for name, value in made.values.items()})


def units_of(model: nn.Module) -> megazero.Model:
    return megazero.from_transformers(model, loss=entropy if hasattr(model, "vit") else None)


def trained(rank: int, kinds: list[str], layout: dict[str, Any], more: dict[str, Any]) -> dict[str, Trained]:
    return {
        kind: trained_with(case_of(kind), {**RULE, **layout}, model=units_of(built(kind, **more))) for kind in kinds
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_and_pictures_train_as_in_plain_torch(layout: str) -> None:
    size, settings = LAYOUTS[layout]
    for rank, made in enumerate(run_ranks(size, trained, [*KINDS], settings, {})):
        for kind, own in made.items():
            require_equal(own, plain(kind), f"{kind}, {layout}, rank {rank}")


def test_dropout_of_a_decoder_is_the_same_in_every_layout() -> None:
    kinds, more = ["BartForConditionalGeneration"], {"dropout": 0.2, "attention_dropout": 0.1}
    (expected,) = run_ranks(1, trained, kinds, {}, more)
    assert expected[kinds[0]].numbers[0] != pytest.approx(plain(kinds[0]).numbers[0], rel=1e-4), "something is dropped"
    for made in run_ranks(2, trained, kinds, LAYOUTS["pp 2, recompute"][1], more):
        require_equal(made[kinds[0]], expected[kinds[0]], "pp 2")


def test_what_is_exported_is_opened_by_transformers(tmp_path: Path) -> None:
    """With the shared table, and with a buffer that is in no module; so does a checkpoint have them."""
    kind = "BartForConditionalGeneration"
    batch = micro_batch(kind, torch.Generator().manual_seed(3))
    with megazero.engine(units_of(built(kind)), "adamw", RATE, RULE) as engine:
        engine.step(batch)
        engine.export(tmp_path / "model.safetensors")
        engine.save(str(tmp_path / "saved"))
        loss = float(engine.evaluate(batch))
    built(kind).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    opened = transformers.BartForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        total, number = AsItIs(opened)(batch)
    assert float(total) / float(number) == pytest.approx(loss, rel=EXACT)
    other = built(kind)
    other.get_buffer("final_logits_bias").zero_()
    with megazero.engine(units_of(other), "adamw", RATE, RULE) as engine:
        engine.load(str(tmp_path / "saved"))
        assert float(engine.evaluate(batch)) == pytest.approx(loss, rel=EXACT)


def test_what_a_decoder_gets_may_be_said() -> None:
    """In place of the model's own rule; and a loss of the program's own has the logits."""
    model, batch = built("T5ForConditionalGeneration"), micro_batch("T5", torch.Generator().manual_seed(3))
    answers = batch["labels"].clamp(min=0).flip(1)
    labels = {**batch, "decoder_input_ids": answers, "decoder_attention_mask": torch.ones_like(answers)}
    with torch.no_grad():
        expected = float(model.eval()(**labels).loss)
    for loss in (None, lambda logits, batch: (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), 1)):
        units = megazero.from_transformers(
            built("T5ForConditionalGeneration"), loss=loss, layers=("encoder.block", "decoder.block")
        )
        with megazero.engine(units, "adamw", RATE, RULE) as engine:
            assert float(engine.evaluate(labels)) == pytest.approx(expected, rel=EXACT)


def test_an_example_says_shapes_that_a_configuration_does_not() -> None:
    """And layers may make hidden states of other shapes."""
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "num_channels": 2, "num_labels": CLASSES}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    with pytest.raises(ValueError, match="takes pixel_values, whose shape its configuration does not say: say exam"):
        megazero.from_transformers(model, loss=entropy)
    units = megazero.from_transformers(model.eval(), loss=entropy, example={"pixel_values": torch.zeros(1, 2, 16, 16)})
    batch = {"pixel_values": torch.randn(3, 2, 16, 16), "class": torch.tensor([0, 3, 1])}
    with torch.no_grad():
        expected, number = entropy(model(batch["pixel_values"]).logits, batch)
    with megazero.engine(units, "adamw", RATE, {"pp": 1}) as engine:
        assert float(engine.evaluate(batch)) == pytest.approx(float(expected) / number, rel=1e-5)


def test_values_on_the_meta_device() -> None:
    """Pictures have the rule of their family, and an encoder with a decoder has one of the whole alone."""
    with torch.device("meta"):
        model = built("ViTForImageClassification")
        halves = built("T5ForConditionalGeneration")
    with megazero.engine(megazero.from_transformers(model, loss=entropy), "adamw", RATE, RULE) as engine:
        loss = float(engine.evaluate(micro_batch("ViT", torch.Generator().manual_seed(3))))
    assert loss == pytest.approx(torch.tensor(CLASSES).log().item(), abs=0.1), "nothing is known of the classes"
    with pytest.raises(ValueError, match="is an encoder with a decoder on the meta device"):
        megazero.from_transformers(halves)


# --- what is refused -------------------------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    """It returns a bias for later layers beside its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.bias(hidden) if bias is None else bias
        return hidden + torch.tanh(self.linear(hidden) + bias), bias


class DecoderLayer(EncoderLayer):
    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return hidden + torch.tanh(self.linear(hidden) + self.bias(memory.mean(1, keepdim=True)))


class Side(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words, self.layers, self.norm = nn.Embedding(WORDS, 8), nn.ModuleList([layer(), layer()]), nn.LayerNorm(8)


class Translator(nn.Module):
    """An encoder and a decoder, which do something more: by words."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.more, self.config = more, SimpleNamespace(num_hidden_layers=2, is_encoder_decoder=True)
        self.encoder, self.decoder, self.head = Side(EncoderLayer), Side(DecoderLayer), nn.Linear(8, WORDS)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.words

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return labels.clamp(min=0).roll(1, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, use_cache: bool) -> Any:
        hidden, bias, early = self.encoder.words(input_ids), None, None
        for layer in self.encoder.layers:
            hidden, bias = layer(hidden, bias)
            bias = bias * 2 if "doubles" in self.more else bias
            early = hidden if early is None else early
        last = hidden
        memory = self.encoder.norm(early + hidden if "early" in self.more else hidden)
        memory = memory + bias if "reads the bias" in self.more else memory
        memory = memory.detach() if "holds" in self.more else memory
        hidden = self.decoder.words(decoder_input_ids)
        for number, layer in enumerate(self.decoder.layers):
            if "between" in self.more and number == 1:
                last, _ = self.encoder.layers[1](last, bias)
            hidden = layer(hidden, self.encoder.norm(memory) if "anew" in self.more else memory)
        hidden = self.decoder.norm(hidden + memory.mean(1, keepdim=True) if "skips" in self.more else hidden)
        return SimpleNamespace(logits=self.head(hidden))


UNCUT: Mapping[str, str] = MappingProxyType(
    {
        "the head skips the decoder": r"what follows the layers in decoder\.layers reads more than what the last one",
        "the decoder gets an early state": r"what follows the layers in encoder\.layers reads more than what the last",
        "the decoder reads the bias": r"what follows the layers in encoder\.layers reads more than what the last one",
        "it doubles the bias": "layer 1 gets something beside its hidden state that depends on .*no layer has returned",
        "it makes the memory anew": "layer 1 gets something beside its hidden state that depends on .*no layer has ret",
        "a layer between others": r"it calls layer 1 in encoder\.layers out of turn",
    }
)
"""What a model does, and the words that refuse it: its numbers would be wrong, without an error."""


@pytest.mark.parametrize("more", UNCUT)
def test_what_units_cannot_do_is_refused(more: str) -> None:
    with pytest.raises(ValueError, match=f"Translator cannot be cut into units: .*{UNCUT[more]}"):
        megazero.from_transformers(Translator(more))


@pytest.mark.parametrize("more", ["nothing more", "it holds the encoder as it is"])
def test_what_a_layer_returns_reaches_later_ones_with_its_gradient(more: str) -> None:
    torch.manual_seed(3)
    model, batch = Translator(more).double(), micro_batch("Translator", torch.Generator().manual_seed(3))
    found = []
    units = megazero.from_transformers(model, unused=True).called_units
    for whole in (True, False):
        model.zero_grad()
        if whole:
            answers = batch["labels"].clamp(min=0).roll(1, 1)
            made = model(batch["input_ids"], batch["attention_mask"], answers, use_cache=False)
            scores = made.logits.flatten(0, 1)
            total = F.cross_entropy(scores, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
        else:
            hidden: Any = None
            for unit in units:
                hidden = unit(hidden, batch)
            total, _ = hidden
        total.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append((float(total.detach()), {name: each.clone() for name, each in gradients.items()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=EXACT) and found[0][1].keys() == found[1][1].keys()
    assert ("encoder.layers.0.bias.weight" in found[0][1]) == ("holds" not in more)
    for name, gradient in found[0][1].items():
        assert (found[1][1][name] - gradient).abs().max() < EXACT, name


OTHERS: Mapping[str, tuple[Callable[[], nn.Module], str]] = MappingProxyType(
    {
        "layers at random": (
            lambda: built("BartForConditionalGeneration", encoder_layerdrop=0.1),
            r"model\.encoder leaves out layers at random \(layerdrop 0.1\)",
        ),
        "layers at random, by the configuration": (
            lambda: transformers.Wav2Vec2ForSequenceClassification(
                transformers.Wav2Vec2Config(
                    hidden_size=12,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    conv_dim=[4] * 7,
                    num_conv_pos_embedding_groups=2,
                )
            ),
            r"its configuration leaves out layers at random \(layerdrop 0.1\)",
        ),
        "a table of positions": (
            lambda: transformers.ProphetNetForConditionalGeneration(
                transformers.ProphetNetConfig(
                    vocab_size=WORDS,
                    hidden_size=8,
                    num_encoder_layers=1,
                    num_decoder_layers=1,
                    encoder_ffn_dim=8,
                    decoder_ffn_dim=8,
                    num_encoder_attention_heads=2,
                    num_decoder_attention_heads=2,
                )
            ),
            "it uses prophetnet.decoder.position_embeddings.weight elsewhere than in a module that it calls",
        ),
        "experts behind a bias": (
            lambda: transformers.SwitchTransformersForConditionalGeneration(
                transformers.SwitchTransformersConfig(**{**T5, "num_experts": 2, "num_sparse_encoder_layers": 1})
            ),
            r"encoder\.block\.1 \(SwitchTransformersBlock\) cannot run on torch's meta device",
        ),
    }
)


@pytest.mark.parametrize("name", OTHERS)
def test_families_that_cannot_be_cut_say_why(name: str) -> None:
    make, told = OTHERS[name]
    example = {"input_values": torch.zeros(1, 600)} if "configuration" in name else None
    with pytest.raises(ValueError, match=told):
        megazero.from_transformers(make(), example=example)
