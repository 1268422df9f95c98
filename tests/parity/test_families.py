"""A folder of each family of today, trained by the program, equals `transformers` under torch's own AdamW in float64.

The loss and every gradient of a batch, then losses, norms and weights of twelve steps. The models are odd: three groups
of heads, a head of its own width, a prime vocabulary, windows shorter than the samples, layers of several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.hf.families import FAMILIES
from megazero.convert.hf.rules import HEAD
from megazero.convert.stages import copy_box
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import single_rank_group
from megazero.mpu.parameter import spec_of
from megazero.train.job import Job
from tests.convert.hf_models import CASES, Case, in_double, saved
from tests.parameters import assemble, gradients_of, parameters_of, values_of, worst_difference
from tests.parity.float64 import in_float64
from tests.parity.training import data_flags, job_on_rank, train

STEPS, WARMUP, BATCH, LENGTH, VOCABULARY = 12, 3, 4, 16, 1009
LR, DECAY, CLIP = 5e-3, 0.2, 0.5
OLD = ("bloom", "gpt2", "opt")
NAMES = [name for name, case in CASES.items() if case.kind not in OLD]
WORDS = (
    f"--seq-length {LENGTH} --precision fp64 --train-iters {STEPS} --lr-warmup-iters {WARMUP} --lr {LR} --min-lr 0 "
    f"--weight-decay {DECAY} --clip-grad {CLIP} --global-batch-size {BATCH} --micro-batch-size {BATCH // 2} "
    "--bucket-size 5000 --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8"
)


def larger(case: Case) -> Case:
    """The case with a vocabulary for the tests' corpus, which is prime."""
    return replace(case, config={**case.config, "vocab_size": VOCABULARY})


def in_our_names(kind: str, model: ModelConfig, state: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Tensors of a `transformers` model as global tensors of ours."""
    family, made = FAMILIES[kind].names, {}
    if family.head not in state and HEAD in state:  # renamed by transformers where it reads and writes files
        state = {**state, family.head: state[HEAD]}
    for name in names:
        rule = family.rule(name)
        made[name] = rule.how.ours(model, [state[key] for key in family.written(rule)])
    return made


def rate(step: int) -> float:
    if step <= WARMUP:
        return LR * step / WARMUP
    return 0.5 * LR * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def loss_of(model: Any, batches: list[MicroBatch]) -> Tensor:
    tokens, labels = (torch.cat(list(parts)) for parts in zip(*((b.tokens, b.labels) for b in batches), strict=True))
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


def train_theirs(model: Any, job: Job) -> list[tuple[float, float]]:
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    seen = []
    for step in range(STEPS):
        loss = loss_of(model, job.trainer.batches.train.micro_batches(step * BATCH, BATCH))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def built(name: str, corpus: Path, folder: Path) -> tuple[Case, Job, Any, Any]:
    """(the case, our job from its folder, our recorder, their model)."""
    case = larger(CASES[name])
    theirs = in_double(case).train()
    path = saved(case, folder / "theirs")
    flags = ["--init-from", str(path), *WORDS.split(), *data_flags(corpus, folder / "cache")]
    job, recorder = job_on_rank(0, 1, flags)
    return case, job, recorder, theirs


def alone(model: ModelConfig, kind: str, theirs: Any) -> Stage:
    """A stage with the whole model, whose gradients autograd keeps, with their weights."""
    stage = Stage(ModelLayout(model, single_rank_group(), torch.float64), whole_model(model))
    parameters = parameters_of(stage)
    values = in_our_names(kind, model, theirs.state_dict(), [spec_of(parameter).name for parameter in parameters])
    with torch.no_grad():
        for parameter in parameters:
            copy_box(parameter, spec_of(parameter), values[spec_of(parameter).name])
    return stage


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", NAMES)
def test_twelve_steps_equal_transformers(name: str, corpus: Path, tmp_path: Path) -> None:
    case, job, recorder, theirs = built(name, corpus, tmp_path)
    batches = job.trainer.batches.train.micro_batches(0, BATCH)

    stage = alone(job.run.model, case.kind, theirs)
    ours = torch.stack([stage(None, batch) for batch in batches]).sum() / (BATCH * LENGTH)
    ours.backward()
    with in_float64():
        loss = loss_of(theirs, batches)
        loss.backward()
    assert abs(ours.item() - loss.item()) < 1e-11 * loss.item()
    whole = assemble([gradients_of(stage)])
    state = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    apart, worst = worst_difference(whole, in_our_names(case.kind, job.run.model, state, list(whole)))
    assert apart < 1e-9, worst

    theirs.zero_grad()
    with in_float64():
        expected = train_theirs(theirs, job)
    job.fit()
    job.state.model.wait_parameters()
    found = [(record.loss, record.grad_norm) for record in recorder.records]
    assert len(found) == STEPS and any(norm > CLIP for _, norm in found), "clipping is to bind"
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0.0)
    weights = assemble([values_of(job.stages[0])])
    wanted = in_our_names(case.kind, job.run.model, theirs.state_dict(), list(weights))
    apart, worst = worst_difference(weights, wanted)
    assert apart < 1e-9, worst


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--pp 2", "--pp 2 --zero-stage 3"])
@pytest.mark.parametrize("name", ["granite, tied", "gemma 2"])
def test_tied_with_multipliers_on_two_stages(name: str, layout: str, corpus: Path, tmp_path: Path) -> None:
    """Megatron-LM#3058: the first stage multiplies what the matrix embeds, the last stage the logits of its own copy,
    each once, and the gradients of both are one sum.
    """
    _, job, _, theirs = built(name, corpus, tmp_path)
    model = job.run.model
    assert not model.untie_embeddings_and_output_weights and model.embedding_multiplier > 2
    assert model.logits_cap is not None or model.logits_multiplier > 1
    with in_float64():
        expected = train_theirs(theirs, job)
    flags = ["--init-from", str(tmp_path / "theirs"), *WORDS.split(), *data_flags(corpus, tmp_path / "cache")]
    ours = train(2, [*flags, *layout.split()])
    assert any(norm > CLIP for _, norm in expected)
    torch.testing.assert_close(
        [(record.loss, record.grad_norm) for record in ours.records], expected, rtol=1e-11, atol=0.0
    )
    wanted = in_our_names(CASES[name].kind, model, theirs.state_dict(), list(ours.weights))
    apart, worst = worst_difference(ours.weights, wanted)
    assert apart < 1e-9, worst
