"""A value that rank 0 reads, broadcast to all ranks as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from megazero.data.indexed import DataError
from megazero.mpu.collectives import broadcast
from megazero.mpu.grid import ProcessGrid


def read_on_first_rank(grid: ProcessGrid, read: Callable[[], Any]) -> Any:
    """Call `read` on rank 0, and return its result, which must be JSON, on every rank.

    A collective of the world: two broadcasts. A DataError that `read` raises is raised on every rank.
    """
    if grid.world.size == 1:
        return read()
    words = _answer(read) if grid.rank == 0 else b""
    size = torch.tensor([len(words)], dtype=torch.int64, device=grid.device)
    broadcast(size, grid.world).wait()
    text = torch.zeros(int(size.item()), dtype=torch.uint8, device=grid.device)
    if grid.rank == 0:
        text.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    broadcast(text, grid.world).wait()
    answer = json.loads(bytes(text.tolist()))
    if "error" in answer:
        raise DataError(answer["error"])
    return answer["found"]


def _answer(read: Callable[[], Any]) -> bytes:
    """The result or the error as JSON in ASCII, which can also encode half a surrogate pair from a terminal."""
    try:
        return json.dumps({"found": read()}).encode("ascii")
    except DataError as error:
        return json.dumps({"error": str(error)}).encode("ascii")
