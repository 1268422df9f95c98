"""Shared code of the peers: the loss, and AdamW with fp32 master weights for bf16 parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workload import Batches, Workload

Step = Callable[[], float | Tensor]
"""One optimizer step; returns its loss. On a GPU it may be a tensor that is not computed yet."""


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32, as transformers and nanoGPT compute it; logits [b, s, v], labels [b, s]."""
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))


def decayed(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay, norms and biases do not."""
    held = list(parameters)
    matrices = [p for p in held if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(parameters: Iterable[Tensor], work: Workload) -> torch.optim.AdamW:
    """torch's fused AdamW."""
    return torch.optim.AdamW(
        decayed(parameters, work.weight_decay), lr=work.lr, betas=work.betas, eps=work.eps, fused=True
    )


class MasterAdamW:
    """AdamW for bf16 parameters with fp32 masters: convert the gradients to fp32, clip, fused AdamW, round back. Every
    pass is a foreach op of torch.

    split: the model is sharded over the ranks, so the squares of the norm are summed over them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], work: Workload, *, split: bool = False) -> None:
        self.split = split
        self.parameters: list[Tensor] = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.adam, self.clip = adamw(self.masters, work), work.clip

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.gradients, [p.grad for p in self.parameters if p.grad is not None])
        norm = torch.nn.utils.get_total_norm(self.gradients, foreach=True)
        if self.split:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.clip, norm, foreach=True)
        self.adam.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for p in self.parameters:
            p.grad = None


class AutocastAdamW:
    """AdamW for fp32 parameters, which autocast casts to bf16 where they are used."""

    def __init__(self, parameters: Iterable[nn.Parameter], work: Workload) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.adam, self.clip = adamw(self.parameters, work), work.clip

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def compile_blocks(model: nn.Module) -> None:
    """Compile one graph for all blocks, which differ in their weights only. This takes a tenth of the time that a graph
    of the whole model takes.
    """
    torch._dynamo.config.recompile_limit = 64  # for models whose graphs contain the block's number
    for block in model.get_submodule("transformer.h").children():
        block.compile(dynamic=False)


def compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """`function`, compiled for fixed shapes where wanted."""
    if not wanted:
        return function
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def steps_of(
    forward: Callable[[Tensor, Tensor], Tensor],
    optimizer: Any,
    batches: Callable[[], tuple[Tensor, Tensor]],
    micro_batches: int = 1,
) -> Step:
    """forward: (tokens, labels) -> loss.

    Gradients of a step's micro-batches are accumulated in the parameters' `grad`.
    """

    def step() -> Tensor:
        losses = []
        for _ in range(micro_batches):
            loss = forward(*batches())
            (loss / micro_batches if micro_batches > 1 else loss).backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).mean()

    return step


def in_one_process(
    model: nn.Module,
    logits_of: Callable[[nn.Module, Tensor], Tensor],
    work: Workload,
    compile: bool | str,
    precision: str,
) -> Step:
    """A step in one process. logits_of: (model, tokens) -> logits. precision, of a workload in bf16: "master" for bf16
    parameters with fp32 masters, else fp32 parameters with autocast.

    compile: True for model and loss as one graph, "blocks" for one of a block and one of the loss.
    """
    narrow = work.precision == "bf16"
    master = narrow and precision == "master"
    model = model.to(torch.bfloat16) if master else model
    optimizer = (MasterAdamW if master else AutocastAdamW)(model.parameters(), work)

    loss = compiled(loss_of, compile == "blocks")
    if compile == "blocks":
        compile_blocks(model)

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(work.device, torch.bfloat16, enabled=narrow and not master):
            logits = logits_of(model, tokens)
        result: Tensor = loss(logits, labels)
        return result

    return steps_of(compiled(forward, compile is True), optimizer, Batches(work), work.micro_batches)


def rank() -> int:
    """This process's rank: 0 where no launcher started it."""
    return int(os.environ.get("RANK", "0"))


def own_folder() -> Path:
    """A new folder of this rank, which is removed when the contestant stops."""
    folder = Path(os.environ["BENCH_FOLDER"]) / f"rank-{rank()}"
    folder.mkdir()
    return folder
