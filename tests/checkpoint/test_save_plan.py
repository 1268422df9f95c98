"""Who writes what: every element once, and no rank much more than its neighbours over tp and dp."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.reader import read_manifest
from megazero.checkpoint.save_plan import fragments_to_write, stored_to_write, values_to_write
from megazero.checkpoint.writer import write_manifest
from megazero.mpu.parameter import ParameterKind, shard
from megazero.zero.layout import FragmentSpec
from tests.checkpoint.fakes import Layout, expect, fragments_of, global_values, save, told, write_rank

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=3, dp=2, bucket=100),
    Layout(tp=4, pp=2, divisor=2),
    Layout(tp=2, dp=2, pp=2, bucket=150, tied=False),
]


def written(layout: Layout) -> list[list[FragmentSpec]]:
    at = layout.axes.coordinates
    return [fragments_to_write(held, at(rank).tp, layout.tp) for rank, held in enumerate(layout.all_fragments())]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_is_written_once(layout: Layout) -> None:
    counts: Counter[tuple[str, tuple[tuple[int, int], ...], int]] = Counter()
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for rank in written(layout):
        for part in rank:
            boxes.setdefault(part.spec.name, set()).add(part.spec.box)
            counts.update((part.spec.name, part.spec.box, i) for i in range(part.start, part.stop))
    assert set(counts.values()) == {1}
    shapes = {piece.spec.name: piece.spec.shape for held in layout.all_fragments() for piece in held}
    assert boxes.keys() == shapes.keys()
    for name, shape in shapes.items():
        assert sum(1 for key in counts if key[0] == name) == torch.Size(shape).numel(), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tp_ranks_write_equal_parts_of_what_all_of_them_hold(layout: Layout) -> None:
    bytes_of = [sum(s.stop - s.start for s in rank if not s.spec.tp_sharded) for rank in written(layout)]
    for first in range(0, len(bytes_of), layout.tp):
        part = bytes_of[first : first + layout.tp]
        assert max(part) - min(part) <= 1 and sum(part) > 0


def test_one_large_replica_is_cut() -> None:
    """A learned position table is most of what tp ranks have in common."""
    table = shard("embedding.position.weight", (1000, 8), ParameterKind.EMBEDDING)
    norm = shard("norm.weight", (8,), ParameterKind.NORM)
    held = [FragmentSpec(table, 0, 8000), FragmentSpec(norm, 0, 8)]
    parts = [fragments_to_write(held, index, 4) for index in range(4)]
    assert [[(s.spec.name, s.start, s.stop) for s in part] for part in parts] == [
        [("embedding.position.weight", 0, 2002)],
        [("embedding.position.weight", 2002, 4004)],
        [("embedding.position.weight", 4004, 6006)],
        [("embedding.position.weight", 6006, 8000), ("norm.weight", 0, 8)],
    ]


def test_values_are_cut_as_the_arithmetic_says() -> None:
    layout = LAYOUTS[1]
    for rank, every in enumerate(written(layout)):
        mine = fragments_of(layout, rank, global_values(layout, torch.float32), torch.float32)
        own = stored_to_write([told(mine)], rank % 3, 3)
        (values,) = values_to_write([mine], own)
        assert own == told(values)
        assert [(v.spec, v.start, v.stop) for v in values] == [(s.spec, s.start, s.stop) for s in every]
        assert all(v.weight.numel() == v.stop - v.start for v in values)


def test_files_of_a_layout_are_about_equal(tmp_path: Path) -> None:
    layout = Layout(tp=4, dp=2)
    save(tmp_path / "c", layout, global_values(layout, torch.float32), torch.float32)
    sizes = [
        sum(flat.numel for t in manifest.tensors.values() for n, flat in t.fragments if n == number)
        for manifest in [read_manifest(tmp_path / "c")]
        for number in range(8)
    ]
    assert len(sizes) == 8 and max(sizes) < 1.15 * min(sizes)


@pytest.mark.slow
def test_what_older_versions_wrote_is_read(tmp_path: Path) -> None:
    """They let the first tp rank write what all tp ranks hold; format and version are the same."""
    layout = Layout(tp=2, dp=2, pp=2, bucket=150)
    values = global_values(layout, torch.float32)
    tmp_path = tmp_path / "c"
    tmp_path.mkdir()

    def kept(rank: int, held: list) -> list:
        return [
            one
            for one in held
            if one.start < one.stop and (one.spec.tp_sharded or layout.axes.coordinates(rank).tp == 0)
        ]

    for rank in range(8):
        write_rank(tmp_path, rank, 8, kept(rank, fragments_of(layout, rank, values, torch.float32)), 64)
    writers = [kept(rank, held) for rank, held in enumerate(layout.all_fragments())]
    write_manifest(tmp_path, writers, run={}, progress={}, layout={"tp": 2, "pp": 2, "dp": 2, "cp": 1})
    for target in (layout, Layout(), Layout(tp=3, dp=2)):
        expect(tmp_path, target, values, torch.float32)
