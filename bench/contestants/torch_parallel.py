"""torch's own parallelism on two ranks: DDP and FSDP2 with transformers' BLOOM, DTensor's tensor parallelism and
`pipelining` with the plain GPT. The backend is gloo, torch's default on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bench.contestants.common import AutocastAdamW, MasterAdamW, Step, adamw, loss_of, rank, steps_of
from bench.contestants.plain_gpt import Trunk
from bench.contestants.transformers_ import model_of
from bench.workload import Batches, Workload


def build(work: Workload, kind: str, **settings: Any) -> Step:
    """kind: a name of the table below."""
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    return KINDS[kind](work, **settings)


def _compile_blocks(blocks: Any, wanted: bool) -> None:
    """Compile one graph for each block, as these libraries advise, because their hooks run between blocks."""
    for block in blocks if wanted else ():
        block.compile(dynamic=False)


def ddp(work: Workload, compile: bool = False, precision: str = "autocast") -> Step:
    """precision "master" reduces bf16 gradients, "autocast" fp32 ones."""
    model = model_of(work, "bloom", "eager")
    model = model.to(torch.bfloat16) if precision == "master" else model
    _compile_blocks(model.get_submodule("transformer.h"), compile)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = (
        MasterAdamW(model.parameters(), work) if precision == "master" else AutocastAdamW(model.parameters(), work)
    )

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return loss_of(replica(input_ids=tokens, use_cache=False).logits, labels)

    return steps_of(forward, optimizer, Batches(work, rank()))


def fsdp2(work: Workload, compile: bool = False, reduce: str = "float32") -> Step:
    """Shards of fp32 parameters, gathered in bf16; every block is a unit."""
    model = model_of(work, "bloom", "eager")
    blocks = model.get_submodule("transformer.h")
    _compile_blocks(blocks, compile)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*blocks.children(), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    optimizer = AutocastAdamW(model.parameters(), work)

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model(input_ids=tokens, use_cache=False).logits, labels)

    return steps_of(forward, optimizer, Batches(work, rank()))


class LocalAdamW:
    """AdamW on a rank's local parts of DTensors and plain tensors. torch's fused step accepts no mixture of them, and
    this avoids DTensor's dispatch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], work: Workload) -> None:
        self.parameters = list(parameters)
        self.values = [_local(p.detach()) for p in self.parameters]
        self.adam, self.clip = adamw(self.values, work), work.clip

    @torch.no_grad()
    def step(self) -> None:
        shards: list[Tensor] = []
        replicas: list[Tensor] = []
        for p, value in zip(self.parameters, self.values, strict=True):
            gradient = p.grad
            assert gradient is not None
            value.grad = _local(gradient.redistribute(placements=p.placements) if isinstance(p, DTensor) else gradient)  # type: ignore[attr-defined]
            (shards if isinstance(p, DTensor) and p.placements[0].is_shard() else replicas).append(value.grad)
            p.grad = None
        squares = torch.nn.utils.get_total_norm(shards).square()
        dist.all_reduce(squares)
        norm = (squares + torch.nn.utils.get_total_norm(replicas).square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.values, self.clip, norm, foreach=True)
        self.adam.step()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_parallel(work: Workload, compile: bool = False, attention: str = "sdpa") -> Step:
    """Column- and row-parallel linears of every block, embedding and head sharded over the vocabulary, loss on the
    shards.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Trunk(work, attention)
    for block in model.blocks:
        plan = {
            "attention.mixed": ColwiseParallel(),
            "attention.output": RowwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding.word": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    assert model.embedding is not None and model.head is not None
    model.head.weight = model.embedding.word.weight
    _compile_blocks(model.blocks, compile)
    optimizer, batches = LocalAdamW(model.parameters(), work), Batches(work)

    def step() -> float:
        tokens, labels = batches()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.reshape(-1))
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def pipeline(work: Workload, compile: bool = False, attention: str = "sdpa") -> Step:
    """1F1B over two halves of the layers. The head is not tied, because torch does not sum a weight over two stages."""
    own, size = rank(), dist.get_world_size()
    layers = work.layers // size
    trunk = Trunk(work, attention, layers=layers, first=own == 0, last=own == size - 1, tied=False).to(torch.bfloat16)
    _compile_blocks(trunk.blocks, compile)
    stage = PipelineStage(trunk, own, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, work.micro_batches, loss_fn=loss_of)
    optimizer, batches = MasterAdamW(trunk.parameters(), work, split=True), Batches(work)

    def step() -> float:
        parts = [batches() for _ in range(work.micro_batches)]
        tokens, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        losses: list[Tensor] = []
        if own == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return step


KINDS: dict[str, Callable[..., Step]] = {"ddp": ddp, "fsdp2": fsdp2, "tp": tensor_parallel, "pp": pipeline}
