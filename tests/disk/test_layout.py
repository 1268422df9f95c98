"""Where pieces lie: nothing overlaps, all is aligned, every byte is moved once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megazero.disk.layout import PieceMemory, SwapLayout, moves, shared

PIECES = {"one": 1, "page": 4096, "more": 4097, "block": 65536, "large": 10 * 65536 + 5}


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("slots", [1, 2])
def test_slots_are_aligned_and_apart(weights: tuple[float, ...], slots: int) -> None:
    layout = SwapLayout(PIECES, weights, slots)
    for path, size in enumerate(layout.file_bytes):
        extents = [one for piece in PIECES for slot in range(slots) for one in layout.extents(piece, slot)]
        taken = sorted((one.offset, one.offset + one.bytes) for one in extents if one.path == path)
        assert all(start % 4096 == 0 for start, _ in taken) and size % 4096 == 0
        assert all(end <= start for (_, end), (start, _) in pairwise([(0, 4096), *taken, (size, size)]))
    for piece, count in PIECES.items():
        for slot in range(slots):
            parts = layout.extents(piece, slot)
            assert [part.first for part in parts] == [sum(one.bytes for one in parts[:i]) for i in range(len(parts))]
            assert sum(part.bytes for part in parts) == count and all(part.first % 65536 == 0 for part in parts)


def test_paths_share_by_their_weights() -> None:
    assert shared(8 * 65536, (3, 1)) == [6 * 65536, 2 * 65536]
    assert shared(8 * 65536 + 9, (1, 1)) == [4 * 65536, 4 * 65536 + 9]
    assert shared(5, (1, 1)) in ([5, 0], [0, 5])
    assert sum(shared(123456789, (0.1, 0.2, 0.3, 0.4))) == 123456789


@pytest.mark.parametrize("buffer_bytes", [65536, 3 * 65536])
@pytest.mark.parametrize("direct", [False, True])
def test_moves_have_every_byte_once_and_keep_all_paths_busy(buffer_bytes: int, direct: bool) -> None:
    layout = SwapLayout(PIECES, (2.0, 1.0))
    names, base = ["large", "more", "one"], 1 << 30
    parts = [PieceMemory(layout.extents(name, 1), base * (at + 1), direct) for at, name in enumerate(names)]
    plan = moves(parts, buffer_bytes, 4 * buffer_bytes)
    for at, name in enumerate(names):
        own = sorted((move.address - base * (at + 1), move.bytes, move.block) for move in plan if move.piece == at)
        assert [start for start, _, _ in own] == [sum(count for _, count, _ in own[:i]) for i in range(len(own))]
        assert sum(count for _, count, _ in own) == PIECES[name]
        assert all(block * 65536 == start for start, count, block in own)
    done = dict.fromkeys((0, 1), 0)
    total = {path: sum(move.file == path for move in plan) for path in (0, 1)}
    for move in plan:
        done[move.file] += 1
        assert abs(done[0] / total[0] - done[1] / total[1]) <= 1 / min(total.values())


def test_only_whole_pages_of_aligned_memory_need_no_buffer_and_then_requests_are_larger() -> None:
    block, pieces = 65536, {"whole": 9 * 65536 + 4096, "ragged": 9 * 65536 + 4097, "short": 100}
    layout = SwapLayout(pieces)

    def cut(name: str, address: int, direct: bool) -> list[tuple[int, int]]:
        part = PieceMemory(layout.extents(name, 0), address, direct)
        return [(move.bytes, move.direct) for move in moves([part], 2 * block, 4 * block)]

    buffered = [(2 * block, 0)] * 4
    assert cut("whole", 1 << 20, True) == [(4 * block, 1), (4 * block, 1), (block + 4096, 1)]
    assert cut("ragged", 1 << 20, True) == [(4 * block, 1), (4 * block, 1), (block, 1), (4097, 0)]
    assert cut("short", 1 << 20, True) == [(100, 0)]
    assert cut("whole", (1 << 20) + 64, True) == cut("whole", 1 << 20, False) == [*buffered, (block + 4096, 0)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 3}, "3 slots for each piece"),
        ({"weights": (1.0, 0.0)}, r"above 0: \(1.0, 0.0\)"),
        ({"weights": ()}, "above 0"),
        ({"pieces": {"a": 1, "b": 0}}, "at least 1 byte: b"),
    ],
)
def test_what_no_layout_can_be(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SwapLayout(**{"pieces": PIECES, **wrong})  # type: ignore[arg-type]
