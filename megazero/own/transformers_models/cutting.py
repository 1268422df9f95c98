"""A model of `transformers` as a list of units, without a line of code for its family."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megazero.own.tensor_parallel.plan import PLAN
from megazero.own.tensor_parallel.words import TensorParallelPlan
from megazero.own.transformers_models.agreement import require_agreement
from megazero.own.transformers_models.family_rule import fill_buffers
from megazero.own.transformers_models.label_loss import rule_of
from megazero.own.transformers_models.layer_lists import (
    has_encoder_and_decoder,
    layers_at,
    main_input,
    paths_of_layers,
)
from megazero.own.transformers_models.look import KnownPass, LayerList, LookedAt, looked_at
from megazero.own.transformers_models.parts import parts_of
from megazero.own.transformers_models.skeleton import Skeleton
from megazero.own.transformers_models.stand_ins import Uncuttable
from megazero.own.transformers_models.trial_batches import trial_batch
from megazero.own.units.model import BatchTensors, Loss, Model


def from_transformers(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    layers: str | Sequence[str] | None = None,
    example: BatchTensors | None = None,
    unused: bool = False,
    tp_plan: TensorParallelPlan | None = None,
    is_proven: bool = True,
) -> Model:
    """The units of a model of `transformers`: of tokens, of pictures or sounds, or an encoder with a decoder.

    model    whose parts are what is in front of a list of layers, the layers, and what follows; or these of an encoder,
             and these of a decoder. Its modules become the engine's
    loss     as of `Model`, of the model's logits: for a model of any head, such as one that classifies. None: that of a
             model that makes words, the cross-entropy of the token behind each one; of a decoder that of each label
    layers   the path of the list of layers, such as "model.layers", or those of an encoder's and a decoder's lists.
             None: the lists as long as its configuration says
    example  a micro-batch whose shapes fit, without labels, for a model of an input whose shape its configuration does
             not say
    unused   as of `Model`. So is `is_proven`
    tp_plan  as of `Model`, of the names in this model. None: the plan of `transformers` for its family, which not all
             have

    A micro-batch has the model's main input, such as `input_ids`, [b, s], or `pixel_values`, [b, c, h, w], and what
    else the model's `forward` takes. Without `loss` it has `labels`, [b, s], of which -100 does not count; with it,
    whatever `loss` reads. A decoder gets the labels, each one place later by the model's own rule, if there are no
    `decoder_input_ids`. Raises ValueError for a model that is not made so, and says what it does.
    """
    paths = paths_of_layers(model, layers)
    lists = [LayerList(path, tuple(layers_at(model, path))) for path in paths]
    if main_input(model) == "input_ids":
        table = getattr(model, "get_input_embeddings", lambda: None)()
        if not isinstance(table, nn.Module):
            raise ValueError(f"{type(model).__name__} has no get_input_embeddings() that returns a module")
    if has_encoder_and_decoder(model) and any(each.is_meta for each in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder on the meta device: its rules make values of the "
            "model as a whole alone. Build it in host memory"
        )
    batch = trial_batch(model, example, has_loss=loss is None)
    try:
        units = _units(model, lists, batch, has_loss=loss is None)
    except Uncuttable as error:
        raise ValueError(f"{type(model).__name__} cannot be cut into units: {error}") from error
    plan = _plan_of(model) if tp_plan is None else tp_plan
    units_of_model = Model(units, loss, unused=unused, named_by_unit=False, tp_plan=plan, is_proven=is_proven)
    units_of_model.has_plan_of_family = tp_plan is None
    return units_of_model


def _plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that `transformers` has for a model: of it what names anything, as it is for all models of a family."""
    names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]
    plan: Mapping[str, str] = getattr(model, PLAN, None) or {}
    return {pattern: text for pattern, text in plan.items() if fnmatch.filter(names, pattern)}


def _units(
    model: nn.Module, lists: Sequence[LayerList], batch: Mapping[str, Tensor], *, has_loss: bool
) -> dict[str, nn.Module]:
    """The units by name. has_loss: whether its own loss has to be that of the last one."""
    fill_buffers(model, [layer for each in lists for layer in each.layers])
    looked = looked_at(model, lists, batch)

    def passed(given: Mapping[str, Tensor]) -> object:
        with torch.no_grad():
            return KnownPass(model, lists, given, looked.copies, looked.first_shapes).output

    rule = rule_of(model, batch, looked.first.logits, passed) if has_loss else None
    held = _held(model, lists, looked)
    skeleton = Skeleton(model, lists, looked, has_loss=has_loss)
    units = parts_of(skeleton, rule, held)
    require_agreement(skeleton, units, batch, looked.first)
    return units


def _held(model: nn.Module, lists: Sequence[LayerList], looked: LookedAt) -> dict[str, nn.Module]:
    """The modules with parameters by path that nothing calls, and whose parameters are those of others, as a table is
    that an encoder and a decoder share. Raises Uncuttable for a parameter that would be in no unit.
    """
    parts = [module for region in looked.regions for module in region.values()]
    parts += [layer for each in lists for layer in each.layers]
    called = {id(parameter) for part in parts for parameter in part.parameters()}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in called]
    if left:
        raise Uncuttable(
            f"its parameter {left[0]} is in no module that the model calls in front of the layers in "
            f"{' and '.join(each.path for each in lists)} or behind them"
        )
    inside = {module for part in parts for module in part.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if module not in inside and any(True for _ in module.parameters(recurse=False))
    }
