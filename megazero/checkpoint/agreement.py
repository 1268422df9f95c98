"""All ranks fail together: a rank that alone raises leaves its peers in a collective until they are killed."""

from __future__ import annotations

import torch

from megazero.checkpoint.fence import FenceLost
from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.mpu.collectives import all_reduce, broadcast
from megazero.mpu.grid import Group

_KINDS: tuple[type[Exception], ...] = (CheckpointError, Damaged, FenceLost, ValueError)


def agree(world: Group, device: torch.device, error: Exception | None) -> None:
    """Return when no rank has an error; else raise that of the lowest rank on all of them, a collective of the world.

    Travels: one int64 (all-reduce, smallest rank with an error), and the message only if there is one. Serves as a
    barrier: what every rank did before is done when this returns. Where the error is of a kind of its own (OSError),
    the rank that has it raises it itself, and the others a CheckpointError with its text.
    """
    first = torch.tensor([world.size if error is None else world.index], dtype=torch.int64, device=device)
    all_reduce(first, world, "min").wait()
    index = int(first.item())
    if index == world.size:
        return
    mine = index == world.index and error is not None
    text = _describe(error).encode() if mine else b""
    kind = _KINDS.index(type(error)) if mine and type(error) in _KINDS else 0
    head = torch.tensor([len(text), kind], dtype=torch.int64, device=device)
    broadcast(head, world, index).wait()
    body = torch.zeros(int(head[0]), dtype=torch.uint8, device=device)
    if mine:
        body.copy_(torch.tensor(list(text), dtype=torch.uint8))
    broadcast(body, world, index).wait()
    if mine:
        assert error is not None
        raise error
    raise _KINDS[int(head[1])](bytes(body.tolist()).decode()) from error


def _describe(error: Exception | None) -> str:
    return str(error) if type(error) in _KINDS else f"{type(error).__name__}: {error}"
