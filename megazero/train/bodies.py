"""Which bodies compute the ops of a run on this rank, and whether they are the same on all ranks."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping

import torch

from fused_ops.attention.selection import PLAIN, AttentionChoice, Body
from fused_ops.attention.trial import choices
from fused_ops.registry import COMPILED, describe
from megazero.checkpoint.agreement import broadcast_text, found_by_rank_0
from megazero.config.derive import RecomputeTable
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.mpu.collectives import all_reduce, broadcast
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.build import attention_support, attention_workloads, compiled_ops
from megazero.plan.recompute import recompute_table


def bodies_of(run: Run, device: torch.device) -> dict[str, str]:
    """Op -> the body that computes it on a device of this rank, in words."""
    support = attention_support(run, device)
    kinds = choices(attention_workloads(run), device, support)
    dtype, fp8 = compute_dtype(run.optimizer.precision), run.optimizer.fp8 != "off"
    bodies = describe(device, dtype=dtype, fp8=fp8) | dict.fromkeys(compiled_ops(run, device), COMPILED)
    if all(choice.body is Body.KERNEL for choice in kinds.values()):
        return bodies

    def named(choice: AttentionChoice) -> str:
        by_cudnn = choice.body is Body.FLASH and device.type == "cuda" and not support.of(PLAIN).cudnn
        return choice.body.value + ", cuDNN's" * by_cudnn

    texts = {kind: named(choice) for kind, choice in kinds.items()}
    if len(set(texts.values())) == 1:
        return bodies | {"attention": next(iter(texts.values()))}
    shown = (f"with {kind}: {text}" if kind else text for kind, text in texts.items())
    return bodies | {"attention": "; ".join(shown)}


def recompute_of_all_ranks(run: Run, grid: ProcessGrid) -> RecomputeTable:
    """What backward computes again of every block: rank 0's choice.

    The ranks of tp must recompute alike, and under --activation-memory-budget the choice depends on the body of
    attention that a rank has. Raises ConfigError on all ranks where rank 0 cannot keep the budget. With a budget it is
    a collective of the world: `found_by_rank_0`.
    """

    def table() -> RecomputeTable:
        return recompute_table(run, grid.axes, grid.device.type)

    if run.parallel.activation_memory_budget is None:
        return table()
    return tuple(found_by_rank_0(grid.world, grid.device, table))


def note_of_other_bodies(bodies: Mapping[str, str], grid: ProcessGrid) -> str:
    """A sentence on the ranks whose bodies are not those of rank 0; empty where all ranks have the same.

    The results of two bodies agree up to rounding, and a body that falls back is slower: the step waits for it. A
    collective of the world: a broadcast and an all-reduce of one int64 each. Where bodies differ one more of each, and
    a text of the lowest rank that differs.
    """
    world, device = grid.world, grid.device
    if world.size == 1:
        return ""
    text = json.dumps(dict(bodies), sort_keys=True).encode()
    # Seven bytes, because the number has to fit into an int64, which has a sign.
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    own = torch.tensor([digest], dtype=torch.int64, device=device)
    first = own.clone()
    broadcast(first, world, 0).wait()
    differs = bool((own != first).item())
    lowest = torch.tensor([world.index if differs else world.size], dtype=torch.int64, device=device)
    all_reduce(lowest, world, "min").wait()
    index = int(lowest.item())
    if index == world.size:
        return ""
    count = torch.tensor([int(differs)], dtype=torch.int64, device=device)
    all_reduce(count, world).wait()
    mine = json.dumps([socket.gethostname(), dict(bodies)]) if index == world.index else None
    host, others = json.loads(broadcast_text(world, device, mine, index) or "[]")
    changed = [f"{op}: {body}, here {bodies.get(op)}" for op, body in others.items() if body != bodies.get(op)]
    return (
        f"{int(count.item())} of {world.size} ranks compute with other bodies than rank 0: the first, rank {index} on "
        f"{host}, with {'; '.join(changed)}. Its own warnings say why. Results of two bodies agree up to rounding; "
        "a step takes as long as on the slowest rank"
    )
