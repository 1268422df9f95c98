"""Orders and blends against a specification in plain loops, for many seeds, lengths, splits and weights."""

import numpy as np
import pytest

from megazero.data.blend import blend_index, normalise_weights, planned_samples, samples_to_build
from megazero.data.indexed import DataError
from megazero.data.orders import EpochPlan, build_orders, plan_epochs, sample_index, split_bounds


def plain_sample_index(lengths, documents, seq_length, samples):
    """Walk through the tokens as Megatron's C++ does: S+1 tokens per sample, the last one shared."""
    rows, place, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        remaining = seq_length + 1
        while remaining:
            length = int(lengths[documents[place]]) - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                place += 1
                offset = 0
        rows.append((place, offset))
    return np.array(rows)


def plain_orders(lengths, first, last, seq_length, seed, requested):
    tokens = int(sum(lengths[first:last]))
    epochs = 1
    while epochs * tokens < (requested or 0) * seq_length + 1:
        epochs += 1
    samples = (epochs * tokens - 1) // seq_length
    separate, before = False, samples
    if epochs > 1:
        sans = ((epochs - 1) * tokens - 1) // seq_length
        separate = requested - sans < int(0.80 * ((tokens - 1) // seq_length))
        before = sans if separate else samples
    random = np.random.RandomState(seed)
    documents = np.array(list(range(first, last)) * (epochs - 1 if separate else epochs), dtype=np.int32)
    random.shuffle(documents)
    if separate:
        final = np.arange(first, last, dtype=np.int32)
        random.shuffle(final)
        documents = np.concatenate([documents, final])
    index = plain_sample_index(lengths, documents, seq_length, samples)
    head, tail = np.arange(before, dtype=np.uint32), np.arange(before, samples, dtype=np.uint32)
    random.shuffle(head)
    if len(tail):
        random.shuffle(tail)
    return {"document_index": documents, "sample_index": index, "shuffle_index": np.concatenate([head, tail])}


@pytest.mark.parametrize("seed", range(150))
def test_orders_equal_plain_loops(seed):
    choose = np.random.RandomState(1000 + seed)
    count = choose.randint(1, 60)
    lengths = choose.randint(0, choose.choice([2, 9, 70]), count).astype(np.int32)
    lengths[choose.randint(count)] += 1
    first = choose.randint(0, count)
    last = choose.randint(first + 1, count + 1)
    tokens = int(lengths[first:last].sum())
    if tokens == 0:
        first, last, tokens = 0, count, int(lengths.sum())
    seq_length = int(choose.choice([1, 2, 3, 7, 16, 50]))
    requested = [None, 0, 1, choose.randint(1, 40), 1 + (3 * tokens) // seq_length][choose.randint(5)]
    how = plan_epochs(tokens, seq_length, requested)
    mine = build_orders(lengths, first, last, seq_length, seed, how)
    spec = plain_orders(lengths, first, last, seq_length, seed, requested)
    for name, expected in spec.items():
        assert mine[name].shape == expected.shape and np.array_equal(mine[name], expected), name
    assert [mine[name].dtype for name in spec] == [np.int32, np.int32, np.uint32]
    assert how.samples >= (requested or 0)


def test_both_ways_of_the_last_epoch_are_tried():
    """T = 1000, S = 10: 99 samples per epoch; the last epoch is apart below int(0.8 * 99) = 79 samples."""
    assert plan_epochs(1000, 10, 99) == EpochPlan(1, 99, 99)
    assert plan_epochs(1000, 10, 99 + 78) == EpochPlan(2, 199, 99)
    assert plan_epochs(1000, 10, 99 + 79) == EpochPlan(2, 199, 199)
    assert plan_epochs(1000, 10, 0) == plan_epochs(1000, 10, None) == EpochPlan(1, 99, 99)


def test_samples_behind_two_billion_tokens_are_found() -> None:
    """Numbers of tokens are wider than the index."""
    lengths, seq_length = np.array([1 << 30] * 4, dtype=np.int32), 1 << 28
    index = sample_index(lengths, np.array([2, 0, 3, 1], dtype=np.int32), seq_length, 15)
    assert index.dtype == np.int32
    assert [place * (1 << 30) + offset for place, offset in index.tolist()] == [row * seq_length for row in range(16)]


def test_a_boundary_is_offset_zero_of_the_next_document_and_empty_ones_are_passed():
    lengths = np.array([0, 4, 0, 0, 4, 1], dtype=np.int32)
    orders = build_orders(lengths, 0, 6, 4, 0, EpochPlan(1, 2, 2))
    documents = orders["document_index"]
    assert np.array_equal(orders["sample_index"], plain_sample_index(lengths, documents, 4, 2))
    assert orders["sample_index"][0].tolist() == [0, 0]
    assert all(lengths[documents[place]] > offset for place, offset in orders["sample_index"][1:])


@pytest.mark.parametrize(
    ("split", "count", "bounds"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("0,1,0", 7, [(0, 0), (0, 7), (7, 7)]),
        ("98,2", 734, [(0, 719), (719, 734), (734, 734)]),
        ("1,1,1", 5, [(0, 2), (2, 3), (3, 5)]),
        (".5,.25,.25", 2, [(0, 1), (1, 2), (2, 2)]),
    ],
)
def test_splits(split, count, bounds):
    assert split_bounds(split, count) == bounds


@pytest.mark.parametrize("split", ["", "a,b", "-1,2", "0,0,0", "1,2,3,4", "1,,2", "nan,1"])
def test_wrong_splits(split):
    with pytest.raises(DataError, match="--split"):
        split_bounds(split, 10)


def plain_blend(shares, size):
    shares = (shares / np.sum(shares)).tolist()
    taken, dataset, item = [0] * len(shares), [], []
    for step in range(size):
        behind = [share * float(max(step, 1)) - float(count) for share, count in zip(shares, taken, strict=True)]
        best = behind.index(max(behind))
        dataset.append(best)
        item.append(taken[best])
        taken[best] += 1
    return np.array(dataset, dtype=np.int16), np.array(item, dtype=np.int64)


def _same(weights, size):
    shares = normalise_weights(weights)
    mine = blend_index(shares, size)
    dataset, item = plain_blend(shares, size)
    assert mine["dataset_index"].dtype == np.int16 and mine["dataset_sample_index"].dtype == np.int64
    assert np.array_equal(mine["dataset_index"], dataset) and np.array_equal(mine["dataset_sample_index"], item)


@pytest.mark.few(cases=8)
@pytest.mark.parametrize("seed", range(40))
def test_blend_equals_plain_loop(seed):
    choose = np.random.RandomState(seed)
    count = choose.randint(1, 12)
    weights = choose.rand(count) ** choose.choice([1, 5]) + 1e-6
    if seed % 3 == 0:
        weights = choose.randint(1, 10, count).astype(float) / 10
    _same(weights.tolist(), int(choose.choice([0, 1, 2, 100, 4095, 4096, 20_000])))


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(
    "weights", [[0.6, 0.3, 0.1], [1, 1], [1] * 7, [0.999, 0.0005, 0.0005], [1.0, *[1e-5] * 10], [3, 1, 1e-3, 1e-4]]
)
def test_blend_with_ties_and_rare_datasets(weights):
    """Rare datasets are where a lane's guess is wrong and must be corrected by its predecessor."""
    _same(weights, 150_000)


def test_blend_over_several_blocks(monkeypatch):
    monkeypatch.setattr("megazero.data.blend.LANES", 70)
    _same([0.37, 0.31, 0.32], 6 * 70 * 70 + 500)


def test_blend_sizes():
    shares = normalise_weights([0.6, 0.3, 0.1])
    assert sum(planned_samples(shares, 100)) in (100, 101, 102, 103) and samples_to_build(shares, 100) == [
        -(-count * 1005 // 1000) for count in planned_samples(shares, 100)
    ]
    assert blend_index(normalise_weights([2.0]), 3)["dataset_sample_index"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0], []])
def test_wrong_weights(weights):
    with pytest.raises(DataError, match="weights"):
        normalise_weights(weights)
