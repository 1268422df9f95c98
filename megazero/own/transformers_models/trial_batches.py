"""The micro-batch with which a model of `transformers` is looked at: small, in the shapes that its `forward` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.own.transformers_models.layer_lists import device_of, has_encoder_and_decoder, main_input, names_taken
from megazero.own.units.model import BatchTensors

TRIED = (2, 3)
"""Samples and tokens. The sizes differ: no axis is taken for another."""
LONGER = 5
"""Tokens of an encoder."""
LABELS, MASK, ANSWERS = "labels", "attention_mask", "decoder_input_ids"
SECTIONS = ("vision_config", "audio_config", "encoder")
"""Names of a configuration for that of a part."""


def trial_batch(model: nn.Module, example: BatchTensors | None, *, has_loss: bool) -> dict[str, Tensor]:
    """A micro-batch for a model. example: one with its main input; None: by its configuration. has_loss: whether the
    units have the loss of labels.

    Raises ValueError for an input whose shape is not known.
    """
    batch = _inputs(model) if example is None else _as_computed(model, example)
    batch.pop(LABELS, None)
    if has_loss:
        batch.pop(ANSWERS, None)
    return with_labels(model, batch, trial_labels(model, batch), has_loss=has_loss)


def trial_labels(model: nn.Module, batch: BatchTensors) -> Tensor:
    """A label for each token of a trial, [b, s]."""
    given = batch[main_input(model)]
    shape = (len(given), TRIED[1]) if has_encoder_and_decoder(model) else given.shape[:2]
    return torch.arange(torch.Size(shape).numel(), device=given.device).view(shape) % 2


def with_labels(model: nn.Module, batch: Mapping[str, Tensor], labels: Tensor, *, has_loss: bool) -> dict[str, Tensor]:
    """A micro-batch whose decoder gets the labels, each one place later, by the model's own rule. Where the rule is in
    the model's `forward` alone, that gets the labels, if they are words: `has_loss`. What the decoder gets of the
    micro-batch stays so, and a model without a decoder gets no labels.
    """
    if not has_encoder_and_decoder(model) or ANSWERS not in names_taken(model) or ANSWERS in batch:
        return {**batch}
    if (shift := shift_of(model)) is not None:
        return {**batch, ANSWERS: shift(labels=labels)}
    return {**batch, LABELS: labels} if has_loss and LABELS in names_taken(model) else {**batch}


def shift_of(model: nn.Module) -> Any:
    """The model's own rule for what its decoder gets, a function of labels, if it stands alone."""
    return getattr(model, "prepare_decoder_input_ids_from_labels", None)


def _as_computed(model: nn.Module, example: BatchTensors) -> dict[str, Tensor]:
    """The tensors of an example on the model's device, floats in its dtype."""
    device, dtype = device_of(model), _dtype(model)
    return {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in example.items()}


def _dtype(model: nn.Module) -> torch.dtype:
    """That of its first floats."""
    return next(each.dtype for each in model.parameters() if each.is_floating_point())


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    """The main input of a model, and for an encoder of words which of them count."""
    name, device = main_input(model), device_of(model)
    if name != "input_ids":
        shape = _shape(model, name)
        steps = torch.arange(torch.Size(shape).numel(), device=device).view(shape)
        return {name: torch.sin(steps * 0.9).to(_dtype(model))}
    if not has_encoder_and_decoder(model):
        return {name: _tokens(model, TRIED, device)}
    tokens = _tokens(model, (TRIED[0], LONGER), device)
    end = getattr(getattr(model, "config", None), "eos_token_id", None)
    if isinstance(end, int):
        tokens[:, -1] = end  # some heads read the hidden state at the end of a sentence
    mask = torch.ones_like(tokens)
    mask[1, 1] = 0
    return {name: tokens, MASK: mask}


def _tokens(model: nn.Module, shape: tuple[int, int], device: torch.device) -> Tensor:
    """The last words of a vocabulary: the first ones have a meaning for many models."""
    words = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    return int(words) - 1 - torch.arange(shape[0] * shape[1], device=device).view(shape) % int(words)


def _shape(model: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of an input of numbers, by the words that configurations have for it."""
    whole: Any = getattr(model, "config", None)
    parts = [whole, *(getattr(whole, section, None) for section in SECTIONS)]
    samples = TRIED[0]
    for config in parts:
        if name == "pixel_values" and getattr(config, "image_size", None) is not None:
            size = config.image_size
            high, wide = size if isinstance(size, list | tuple) else (size, size)
            return samples, getattr(config, "num_channels", 3), high, wide
        if name == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            return samples, config.num_mel_bins, 2 * config.max_source_positions
        if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return samples, config.max_length, config.num_mel_bins
    raise ValueError(
        f"{type(model).__name__} takes {name}, whose shape its configuration does not say: say example=, a micro-batch"
    )
