"""The loss of a model that makes words: the cross-entropy of labels, and whether the model's own loss is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.own.transformers_models.layer_lists import has_encoder_and_decoder, names_taken
from megazero.own.transformers_models.nested import alike
from megazero.own.transformers_models.stand_ins import CannotRun, Uncuttable, first_line
from megazero.own.transformers_models.trial_batches import ANSWERS, LABELS, trial_labels
from megazero.own.units.model import BatchTensors

IGNORED = -100
"""A label that does not count."""
CAUSAL = "ForCausalLM"
"""The kind of loss that `transformers` has for the token behind each one."""
Passed = Callable[[Mapping[str, Tensor]], Any]
"""What a model returns for a micro-batch, with the same numbers in the places of its modules."""


@dataclass(frozen=True)
class LabelRule:
    """Which label a score is held to. shifts: that of the token behind, as of a causal model. If not, its own, as of a
    decoder that gets each label one place later.
    """

    shifts: bool

    @property
    def words(self) -> str:
        """The loss in words."""
        return f"the cross-entropy of {'the token behind each one' if self.shifts else 'each label'}"

    def loss(self, logits: Tensor, batch: BatchTensors) -> tuple[Tensor, Tensor]:
        """The sum of the losses of labels that count, 0-dim, and their number. logits: [b, s, words].

        Raises ValueError for a micro-batch without a label for each score.
        """
        if LABELS not in batch:
            raise ValueError(f"the micro-batch has no {LABELS!r}: it has {', '.join(batch)}")
        labels = batch[LABELS]
        if labels.shape != logits.shape[:-1]:
            shapes = f"{list(labels.shape)}, and the logits are {list(logits.shape)}"
            raise ValueError(f"{LABELS!r} of the micro-batch are {shapes}: a label for each token is needed")
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        labels = labels.reshape(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # as the models' own losses
        scores = logits.reshape(-1, logits.shape[-1]).to(wide)
        return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def rule_of(model: nn.Module, batch: BatchTensors, logits: Tensor, passed: Passed) -> LabelRule:
    """The rule of a model's own loss.

    batch   of the look
    logits  that the model has made of it
    passed  what the model returns for another micro-batch

    Raises Uncuttable where the model's own loss is no such cross-entropy. A model without a loss of its own gets one.
    """
    rule, tokens = LabelRule(shifts=not has_encoder_and_decoder(model)), trial_labels(model, batch)
    if logits.shape[:-1] != tokens.shape:
        raise Uncuttable(f"its logits of {list(tokens.shape)} tokens are {list(logits.shape)}: say loss=")
    words = getattr(model.config, "vocab_size", None)
    if rule.shifts and logits.shape[-1] != words:
        if (kind := getattr(model, "loss_type", None)) not in (None, CAUSAL):
            raise Uncuttable(f"its loss is of the kind {kind}, and that of units is {CAUSAL}: say loss=")
        return rule
    if LABELS in names_taken(model):
        _require_its_loss(model, rule, batch, logits, passed)
    return rule


def _require_its_loss(
    model: nn.Module,
    rule: LabelRule,
    batch: BatchTensors,
    logits: Tensor,
    passed: Passed,
) -> None:
    """Raise Uncuttable where the model's own loss is another one than that of the units."""
    labels = trial_labels(model, batch)
    given = {name: tensor for name, tensor in batch.items() if rule.shifts or name != ANSWERS}
    try:
        output = passed({**given, LABELS: labels})
    except CannotRun as error:
        raise Uncuttable(f"its own loss does not take a label for each token ({first_line(error)})") from error
    if not alike(output.logits.detach(), logits.detach()):
        raise Uncuttable("its decoder gets other tokens than the labels by the rule of the model")
    made = getattr(output, "loss", None)
    if made is None:
        return
    total, number = rule.loss(logits.detach().double(), {LABELS: labels})
    of_units, tolerance = float(total / number), 1e-5 if logits.dtype.itemsize > 2 else 2e-2
    if not math.isclose(float(made.detach()), of_units, rel_tol=tolerance):
        raise Uncuttable(
            f"its own loss is not {rule.words} alone: of the same scores it is {float(made.detach()):.6g}, and that is "
            f"{of_units:.6g}"
        )
