"""All ranks fail together. If one rank raised alone, its peers would wait in a collective until they are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from megazero.checkpoint.fence import FenceLost
from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.config.source import ConfigError
from megazero.mpu.collectives import all_reduce, broadcast
from megazero.mpu.grid import Group

_KINDS: tuple[type[Exception], ...] = (CheckpointError, Damaged, FenceLost, ValueError, ConfigError)


def raise_on_all_ranks(world: Group, device: torch.device, error: Exception | None) -> None:
    """Return when no rank has an error; otherwise raise the error of the lowest failing rank on all ranks.

    A collective of the world: an all-reduce of one int64 (the lowest rank with an error), and a broadcast of the
    message only if there is an error. It also is a barrier: when it returns, all ranks have called it. The lowest
    failing rank raises its own exception. The other ranks raise the same class if it is in `_KINDS`, else (an OSError,
    for example) a CheckpointError with the class name and the text.
    """
    kind = _KINDS.index(type(error)) if type(error) in _KINDS else 0
    told = text_of_lowest(world, device, f"{kind} {_describe(error)}" if error else None)
    if told is None:
        return
    index, described = told
    if error is not None and index == world.index:
        raise error
    number, _, text = described.partition(" ")
    raised = _KINDS[int(number)]
    raise (ConfigError(json.loads(text)) if raised is ConfigError else raised(text)) from error


def text_of_lowest(world: Group, device: torch.device, text: str | None) -> tuple[int, str] | None:
    """The index of the lowest member with a text, and its text, on all ranks; None if none has one.

    A collective of the world: an all-reduce of one int64, and a broadcast of the text if there is one.
    """
    first = torch.tensor([world.size if text is None else world.index], dtype=torch.int64, device=device)
    all_reduce(first, world, "min").wait()
    index = int(first.item())
    if index == world.size:
        return None
    told = broadcast_text(world, device, text, index)
    assert told is not None, "the member with this index has a text"
    return index, told


def attempt_on_all_ranks(world: Group, device: torch.device, action: Callable[[], Any] | None) -> Any:
    """Run this rank's action, if it has one, then `raise_on_all_ranks`. Returns what it returned. A collective."""
    failure: Exception | None = None
    result = None
    try:
        if action is not None:
            result = action()
    except Exception as error:
        failure = error
    raise_on_all_ranks(world, device, failure)
    return result


def found_by_rank_0(world: Group, device: torch.device, find: Callable[[], Any]) -> Any:
    """What `find` returns on rank 0, in JSON's types (a tuple becomes a list), on all ranks. `find` is called there
    alone; what it raises is raised as by `raise_on_all_ranks`.

    A collective of the world, if it has several ranks: `attempt_on_all_ranks` and `broadcast_text`.
    """
    if world.size == 1:
        return json.loads(json.dumps(find()))
    answer = attempt_on_all_ranks(world, device, (lambda: json.dumps(find())) if world.index == 0 else None)
    return json.loads(broadcast_text(world, device, answer) or "null")


def broadcast_text(world: Group, device: torch.device, text: str | None, index: int = 0) -> str | None:
    """Return the text (or None) of member `index` on all ranks.

    A collective of the world: a broadcast of the length (one int64), then a broadcast of the UTF-8 bytes.
    """
    mine = world.index == index
    content = (text or "").encode() if mine else b""
    length = torch.tensor([-1 if text is None else len(content)], dtype=torch.int64, device=device)
    broadcast(length, world, index).wait()
    size = int(length.item())
    body = torch.zeros(max(size, 0), dtype=torch.uint8, device=device)
    if mine and size > 0:
        body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    if size > 0:
        broadcast(body, world, index).wait()
    return body.cpu().numpy().tobytes().decode() if size >= 0 else None


def _describe(error: Exception) -> str:
    if type(error) is ConfigError:
        return json.dumps(error.problems)
    return str(error) if type(error) in _KINDS else f"{type(error).__name__}: {error}"
