"""Five training steps of the program equal those of `transformers` under a training loop of torch's own parts, in
float64.

Their side is a few lines: the whole batch at once, `cross_entropy`, `clip_grad_norm_`, `torch.optim`. Ours is the
program: two micro-batches, flat buckets, its own norm, clipping, schedule and optimizer. Losses, norms and final
weights agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.model.batch import MicroBatch
from megazero.train.job import Job
from tests.convert.transformers_tensors import from_transformers
from tests.parameters import assemble, load_transformers_state, values_of, worst_difference
from tests.parity.float64 import in_float64
from tests.parity.test_transformers import shake, their_model
from tests.parity.training import Recorder, data_flags, job_on_rank

STEPS, WARMUP, BATCH = 5, 2, 4
LR, DECAY, CLIP, SMOOTHING, Z_LOSS = 5e-3, 0.2, 0.8, 0.1, 1e-2
NUMBERS = {
    "--num-layers": 2,
    "--hidden-size": 48,
    "--vocab-size": 1003,
    "--seq-length": 16,
    "--precision": "fp64",
    "--train-iters": STEPS,
    "--lr-warmup-iters": WARMUP,
    "--lr": LR,
    "--weight-decay": DECAY,
    "--global-batch-size": BATCH,
    "--micro-batch-size": BATCH // 2,
    "--bucket-size": 5000,
}
BLOOM = "--num-attention-heads 6 --position-embedding alibi --embedding-layernorm --activation gelu-tanh"
GPT2 = "--num-attention-heads 4 --position-embedding learned --activation gelu-tanh"
OPT = "--num-attention-heads 4 --position-embedding learned --activation relu --ffn-hidden-size 60 --position-offset 2"
LLAMA = (
    "--num-attention-heads 6 --num-query-groups 2 --position-embedding rotary --norm rmsnorm --norm-epsilon 1e-6 "
    "--activation swiglu"
    " --ffn-hidden-size 40 --disable-bias-linear --untie-embeddings-and-output-weights"
)
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-8)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9, lr=LR)


@dataclass(frozen=True)
class Case:
    family: str
    flags: str
    optimizer: Optimizer = adamw
    clip: float = CLIP
    smoothing: float = 0.0
    z_loss: float = 0.0
    masked: bool = False
    tolerance: float = 1e-9

    def words(self) -> list[str]:
        more = {
            "--optimizer": self.optimizer.__name__,
            "--clip-grad": self.clip,
            "--label-smoothing": self.smoothing,
            "--z-loss": self.z_loss,
        }
        words = [str(word) for pair in (NUMBERS | more).items() for word in pair] + self.flags.split()
        return words + (["--eod-mask-loss", "--eod-id", "0"] if self.masked else [])


CASES = {
    # The constant inside BLOOM's GELU is rounded to eight digits over there.
    "bloom": Case("bloom", BLOOM, tolerance=1e-7),
    "gpt2": Case("gpt2", GPT2),
    "gpt2, adam": Case("gpt2", GPT2, adam),
    "gpt2, sgd, no clipping": Case("gpt2", GPT2, sgd, clip=0.0),
    # Gradients of the size of eps: what Adam does then depends on their scale.
    "gpt2, clipped to nearly nothing": Case("gpt2", GPT2, clip=1e-6),
    "gpt2, smoothed and masked": Case("gpt2", GPT2, smoothing=SMOOTHING, z_loss=Z_LOSS, masked=True),
    "llama": Case("llama", LLAMA),
    # Rows before that of position 0 have no gradients; decay takes them like any others.
    "opt": Case("opt", OPT),
    "llama, heads of their own width": Case("llama", f"{LLAMA} --kv-channels 10 --attention-bias"),
}


def rate(step: int) -> float:
    """Of step 0, 1, ...: linear warm-up from 0, then half a cosine to 0 at the end of the run."""
    if step <= WARMUP:
        return LR * step / WARMUP
    return 0.5 * LR * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def loss_of(case: Case, logits: Tensor, batches: list[MicroBatch]) -> Tensor:
    """Mean over the predictions that count."""
    labels = torch.cat([batch.labels for batch in batches]).flatten()
    logits = logits.flatten(0, 1)
    losses = F.cross_entropy(logits, labels, label_smoothing=case.smoothing, reduction="none")
    losses = losses + case.z_loss * logits.logsumexp(-1).square()
    if case.masked:
        losses = losses[torch.cat([batch.tokens for batch in batches]).flatten() != 0]
    return losses.mean()


def train_theirs(case: Case, model: Any, batches_of: Callable[[int], list[MicroBatch]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    optimizer = case.optimizer([{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}])
    seen = []
    for step in range(STEPS):
        batches = batches_of(step)
        loss = loss_of(case, model(torch.cat([batch.tokens for batch in batches])).logits, batches)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, case.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def train_ours(job: Job, recorder: Recorder) -> list[tuple[float, float]]:
    job.fit()
    job.state.model.wait_parameters()
    return [(record.loss, record.grad_norm) for record in recorder.records]


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_five_steps_equal_transformers(case: Case, corpus: Path, tmp_path: Path) -> None:
    job, recorder = job_on_rank(0, 1, [*case.words(), *data_flags(corpus, tmp_path / "cache")])
    with in_float64():
        theirs = their_model(case.family, job.run.model).double().train()
        shake(theirs)
    load_transformers_state(job.stages[0], case.family, theirs.state_dict())
    with in_float64():
        expected = train_theirs(case, theirs, lambda step: job.trainer.batches.train.micro_batches(step * BATCH, BATCH))
    found = train_ours(job, recorder)

    assert torch.tensor(found, dtype=torch.float64).isfinite().all() and len(found) == STEPS
    torch.testing.assert_close(found, expected, rtol=case.tolerance, atol=0.0)
    assert any(norm > case.clip for _, norm in found), "clipping is to bind"
    weights = assemble([values_of(job.stages[0])])
    state = theirs.state_dict()
    apart, name = worst_difference(
        weights, {name: from_transformers(case.family, job.run.model, name, state) for name in weights}
    )
    assert apart < case.tolerance, name
