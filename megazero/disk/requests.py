"""A request on its way: its moves are executed, and a failure is said with path, piece and bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from megazero.disk.errors import DiskError, SwapDamaged, reason
from megazero.disk.layout import Move, padded
from megazero.disk.swap_file import SwapFile
from megazero.disk.transport import Broken, Failure, Transport


def run_moves(
    transport: Transport,
    write: bool,
    plan: Sequence[Move],
    memory: object,
    names: Sequence[str],
    files: Sequence[SwapFile],
) -> list[int]:
    """Execute moves, whose files are indices of `files`; return the checksums of the pieces, whose names these are.

    memory: what keeps the moves' addresses valid.

    Raises DiskError, or SwapDamaged for a file that ends early.
    """
    try:
        opened = [move._replace(file=files[move.file].handle) for move in plan]
        return transport.run(write, opened, len(names), memory)
    except Failure as failure:
        move = plan[failure.number]
        raise _explained(failure, write, move, names[move.piece], files[move.file]) from failure.__cause__
    except Broken as error:
        what = "writing" if write else "reading"
        raise DiskError(f"{files[plan[0].file].path}: {what} piece {names[0]!r}: {error}") from error


def _explained(failure: Failure, write: bool, move: Move, name: str, file: SwapFile) -> DiskError:
    what, verb = ("writing", "written") if write else ("reading", "read")
    where = (
        f"{file.path}: {what} piece {name!r}: {failure.done:,} of {padded(move.bytes):,} bytes at byte {move.offset:,}"
    )
    if failure.code:
        return DiskError(f"{where} were {verb}: {reason(failure.code)}", failure.code)
    if failure.__cause__ is not None:
        return DiskError(f"{where} were {verb}: {failure.__cause__!r}")
    there = -1
    with suppress(OSError):
        there = os.fstat(file.handle).st_size
    ends = f"the file has {there:,} bytes, not the {file.size:,} with which it was made"
    return SwapDamaged(f"{where} were {verb}: {ends}")
