"""The arithmetic of boxes and flat ranges, against marking every element by hand."""

import itertools
import math
import random

import pytest
import torch

from megazero.checkpoint.reshard import FlatRange, intersection, overlaps, sub_boxes
from megazero.mpu.parameter import Box


def random_box(rng: random.Random, shape: tuple[int, ...], *, may_be_empty: bool = False) -> Box:
    pairs = []
    for extent in shape:
        start, stop = sorted((rng.randint(0, extent), rng.randint(0, extent)))
        if start == stop and not may_be_empty:
            start, stop = (start, start + 1) if start < extent else (start - 1, start)
        pairs.append((start, stop))
    return tuple(pairs)


def random_range(rng: random.Random, shape: tuple[int, ...]) -> FlatRange:
    box = random_box(rng, shape, may_be_empty=rng.random() < 0.05)
    numel = math.prod(stop - start for start, stop in box)
    start, stop = sorted((rng.randint(0, numel), rng.randint(0, numel)))
    return FlatRange(box, start, stop)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def elements(numbers: torch.Tensor, flat: FlatRange) -> torch.Tensor:
    """The elements of a flat range in its own order."""
    return numbers[region(flat.box)].reshape(-1)[flat.start : flat.stop]


@pytest.mark.parametrize("seed", range(20))
def test_sub_boxes_are_the_flat_range_in_order(seed):
    rng = random.Random(seed)
    for _ in range(50):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        flat = random_range(rng, shape)
        found = sub_boxes(flat)
        assert len(found) <= 2 * len(shape) - 1
        parts = [numbers[region(r.box)].reshape(-1) for r in found]
        assert [r.offset for r in found] == [sum(p.numel() for p in parts[:i]) for i in range(len(parts))]
        assert torch.equal(torch.cat([*parts, numbers.new_empty(0)]), elements(numbers, flat))


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_moves_exactly_the_shared_elements(seed):
    rng = random.Random(100 + seed)
    for _ in range(50):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
        numbers = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        source, target = random_range(rng, shape), random_range(rng, shape)
        values, into = elements(numbers, source).clone(), torch.full((target.numel,), -1.0)
        found = overlaps(source, target)
        for overlap in found:
            overlap.copy(values, into)
        wanted = elements(numbers, target)
        shared = torch.isin(wanted, values)
        assert torch.equal(into, torch.where(shared, wanted, -1.0).float())
        assert sum(overlap.numel for overlap in found) == int(shared.sum())


@pytest.mark.parametrize("seed", range(10))
def test_a_partition_into_spans_fills_any_target_once(seed):
    rng = random.Random(200 + seed)
    shape = tuple(rng.randint(4, 12) for _ in range(2))
    numbers = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    dim = rng.randint(0, 1)
    cuts = sorted({0, shape[dim], *(rng.randint(0, shape[dim]) for _ in range(3))})
    ranges = []
    for low, high in itertools.pairwise(cuts):
        box = tuple((low, high) if d == dim else (0, n) for d, n in enumerate(shape))
        numel = math.prod(stop - start for start, stop in box)
        ends = sorted({0, numel, *(rng.randint(0, numel) for _ in range(4))})
        ranges += [FlatRange(box, a, b) for a, b in itertools.pairwise(ends)]
    for _ in range(30):
        target = random_range(rng, shape)
        into = torch.full((target.numel,), -1.0, dtype=torch.float64)
        found = [(flat, overlap) for flat in ranges for overlap in overlaps(flat, target)]
        for flat, overlap in found:
            overlap.copy(elements(numbers, flat).contiguous(), into)
        assert torch.equal(into, elements(numbers, target))
        assert sum(overlap.numel for _, overlap in found) == target.numel


def test_the_work_does_not_grow_with_rows():
    """A matrix of the model's width split along its second dimension is nine copies at most, not one per row."""
    wide = (14336, 4 * 14336)
    source = FlatRange(((0, 14336), (14336, 2 * 14336)), 1000, 14336 * 14336 - 77)
    target = FlatRange(((0, 14336), (7168, 7168 * 5)), 12345, 10**8)
    assert 1 <= len(overlaps(source, target)) <= 9
    assert all(
        0 <= start < stop <= extent
        for o in overlaps(source, target)
        for (start, stop), extent in zip(o.box, wide, strict=True)
    )


def test_spans_apart_share_nothing():
    assert intersection(((0, 2), (0, 4)), ((2, 4), (0, 4))) is None
    assert overlaps(FlatRange(((0, 4),), 0, 2), FlatRange(((0, 4),), 2, 4)) == []
    assert overlaps(FlatRange(((0, 4),), 1, 1), FlatRange(((0, 4),), 0, 4)) == []
    assert overlaps(FlatRange(((3, 3), (0, 4)), 0, 0), FlatRange(((0, 3), (0, 4)), 0, 12)) == []


def test_a_span_outside_its_box_is_refused():
    with pytest.raises(AssertionError):
        sub_boxes(FlatRange(((0, 2), (0, 3)), 0, 7))
