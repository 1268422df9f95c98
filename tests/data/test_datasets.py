"""From flags to samples: reference orders, named sets, blends of one, empty splits, ids outside the vocabulary."""

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.config.schema import DataConfig
from megazero.data.build import build_datasets, parse_data_path, parse_valid_data_path
from megazero.data.dataset import BlendedDataset, GPTDataset
from megazero.data.indexed import DataError
from tests.data.pairs import write_pair
from tests.reference import REFERENCE, needs_reference

RUNS = sorted(REFERENCE.glob("orders/*.json")) if REFERENCE else []
FIELDS = {"document_index": "documents", "sample_index": "rows", "shuffle_index": "order"}


def _reference(run: Path, tmp_path: Path):
    settings = json.loads(run.read_text())
    names, weights = settings["blend"]
    prefixes = [str(run.parents[1] / name) for name in names]
    words = (
        prefixes
        if weights is None
        else [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair]
    )
    cfg = DataConfig(
        data_path=tuple(words), split=settings["split"], seed=settings["seed"], data_cache_path=str(tmp_path)
    )
    samples = tuple(settings["requested_samples"])
    return settings, build_datasets(cfg, seq_length=settings["sequence_length"], samples=samples, vocab_size=5000)


@needs_reference
@pytest.mark.parametrize("run", RUNS, ids=[run.stem for run in RUNS])
def test_reference_orders_come_out_exactly(run, tmp_path):
    settings, datasets = _reference(run, tmp_path)
    arrays = np.load(run.with_suffix(".npz"))
    assert [len(datasets.train), len(datasets.valid), len(datasets.test)] == settings["lengths"]
    for name in ("train", "valid", "test"):
        samples = getattr(datasets, name)
        assert np.array_equal([samples[number] for number in range(len(arrays[name]))], arrays[name])
        for index, field in FIELDS.items():
            file = run.with_name(f"{run.stem}-{name}-{index}.npy")
            if file.exists():
                expected, mine = np.load(file), getattr(samples, field)
                assert mine.dtype == expected.dtype and np.array_equal(mine, expected), (name, index)


@needs_reference
def test_all_reference_files_were_looked_at():
    assert REFERENCE is not None
    used = {f"{run.stem}-{name}-{index}.npy" for run in RUNS for name in ("train", "valid", "test") for index in FIELDS}
    assert len(RUNS) == 3 and {file.name for file in REFERENCE.glob("orders/*.npy")} <= used


def _build(tmp_path, words, samples=(10, 0, 0), split="1", seq_length=8, **more):
    cfg = DataConfig(
        data_path=tuple(map(str, words)), split=split, data_cache_path=str(tmp_path / "cache"), **more.pop("cfg", {})
    )
    return build_datasets(cfg, seq_length=seq_length, samples=samples, **more)


def test_samples_are_the_tokens_in_document_order(tmp_path):
    """Joined without the shuffle, samples are the shuffled documents one after the other."""
    data = write_pair(tmp_path / "p", [5, 0, 1, 30, 2, 0, 0, 9, 3, 3, 3], dtype="<i4", vocab_size=90_000)
    train = _build(tmp_path, [data.prefix], samples=(20, 0, 0)).train
    assert isinstance(train, GPTDataset)
    stream = np.concatenate([data[number] for number in train.documents[:]])
    for place, sample in enumerate(train.order[:].tolist()):
        assert np.array_equal(train[place], stream[sample * 8 : sample * 8 + 9])
        assert train[place].dtype == np.int64
    assert len(train) == (len(stream) - 1) // 8 >= 20


def test_a_weight_makes_a_blend_of_one(tmp_path):
    data = write_pair(tmp_path / "p", [40] * 20)
    plain, weighed = _build(tmp_path, [data.prefix]), _build(tmp_path, [0.3, data.prefix])
    assert isinstance(plain.train, GPTDataset) and isinstance(weighed.train, BlendedDataset)
    assert len(weighed.train) == 10 < len(plain.train)
    assert all(np.array_equal(weighed.train[number], plain.train[number]) for number in range(10))
    assert len(weighed.valid) == 0
    with pytest.raises(DataError, match="number of train samples"):
        _build(tmp_path, [0.3, data.prefix], samples=(None, 0, 0))


def test_every_requested_sample_of_a_blend_exists(tmp_path):
    words = []
    for number in range(30):
        data = write_pair(tmp_path / f"p{number}", [9] * 2, seed=number)
        words += [0.5 if number == 0 else 0.5 / 29, data.prefix]
    train = _build(tmp_path, words, samples=(10, 0, 0)).train
    assert len(train) >= 10 and all(len(train[number]) == 9 for number in range(10))


def test_samples_of_an_empty_split(tmp_path):
    data = write_pair(tmp_path / "p", [40] * 20)
    datasets = _build(tmp_path, [data.prefix], samples=(10, 0, None))
    assert len(datasets.valid) == 0 == len(datasets.test)
    with pytest.raises(IndexError):
        datasets.valid[0]
    with pytest.raises(
        DataError, match=r"7 valid samples are asked of .*p, but its valid split is empty \(sequences 20 to 20 of 20"
    ):
        _build(tmp_path, [data.prefix], samples=(10, 7, 0))
    hollow = write_pair(tmp_path / "hollow", [0, 0])
    with pytest.raises(DataError, match="0 tokens"):
        _build(tmp_path, [hollow.prefix])


def test_ids_outside_the_vocabulary(tmp_path):
    data = write_pair(tmp_path / "p", [40] * 20, vocab_size=500)
    largest = int(data.read(0, data.count).max())
    assert len(_build(tmp_path, [data.prefix], vocab_size=largest + 1).train) >= 10
    with pytest.raises(DataError, match=rf"p\.bin holds token id {largest}, outside the vocabulary of {largest} "):
        _build(tmp_path, [data.prefix], vocab_size=largest)
    negative = write_pair(tmp_path / "n", [40], dtype="<i4")
    tokens = np.fromfile(negative.bin_path, "<i4")
    tokens[7] = -1
    tokens.tofile(negative.bin_path)
    with pytest.raises(DataError, match="token id -1"):
        _build(tmp_path, [negative.prefix], samples=(1, 0, 0), vocab_size=1000)


def test_each_sample_is_checked_too(tmp_path):
    """Very large files are only sampled at the start."""
    data = write_pair(tmp_path / "p", [40] * 20, vocab_size=500)
    train = _build(tmp_path, [data.prefix]).train
    assert isinstance(train, GPTDataset)
    train.vocab_size = 3
    with pytest.raises(DataError, match=r"sample 0 holds token id \d+, outside the vocabulary of 3"):
        train[0]


def test_named_validation_sets_read_their_whole_file(tmp_path):
    data, other = write_pair(tmp_path / "p", [40] * 20), write_pair(tmp_path / "q", [9] * 3)
    cfg = {"valid_data_path": ("wiki", other.prefix, "again", data.prefix)}
    named = _build(tmp_path, [data.prefix], cfg=cfg, named_samples=5).named_valid
    assert list(named) == ["wiki", "again"] and len(named["wiki"]) >= 5
    assert np.isin(named["wiki"][0], other.read(0, other.count)).all()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("a", "b"),
        ("1", "a", "2"),
        ("1", "a", "b", "c"),
        ("0", "a"),
        ("",),
        ("1", ""),
        ("-1", "a", "2", "b"),
        ("nan", "a"),
    ],
)
def test_wrong_data_paths(words):
    with pytest.raises(DataError, match="--data-path"):
        parse_data_path(words)


def test_wrong_valid_data_paths():
    for words in (("a",), ("n", "p", "n", "q"), ("n", ""), ("", "p")):
        with pytest.raises(DataError, match="--valid-data-path"):
            parse_valid_data_path(words)


def test_wrong_numbers(tmp_path):
    data = write_pair(tmp_path / "p", [40])
    with pytest.raises(DataError, match="--seq-length 0"):
        _build(tmp_path, [data.prefix], seq_length=0)
    with pytest.raises(DataError, match="--seed -1"):
        _build(tmp_path, [data.prefix], cfg={"seed": -1})


def test_more_samples_than_memory_has_an_order_for(tmp_path):
    """A run that is to go on until it is stopped: 10^13 samples of a small file."""
    write_pair(tmp_path / "p", [60] * 4, 200)
    cfg = DataConfig(data_path=(str(tmp_path / "p"),), split="1", data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(
        DataError,
        match=r"train order of .*p, 333,\d{3},\d{3},\d{3} epochs with 10,000,\d{3},\d{3},\d{3} samples, takes .* GiB",
    ):
        build_datasets(cfg, seq_length=8, samples=(10**13, 0, 0), vocab_size=200)


def test_more_samples_than_memory_has_a_blend_for(tmp_path, monkeypatch):
    """10^9 samples of eleven pairs: what each of them gives would fit, their blend does not.

    It is said before any order is made.
    """
    prefixes = [str(write_pair(tmp_path / f"p{number}", [60] * 4, 200, seed=number).prefix) for number in range(11)]
    words = tuple(word for prefix in prefixes for word in ("1", prefix))
    cfg = DataConfig(data_path=words, split="1", data_cache_path=str(tmp_path / "cache"))
    monkeypatch.setattr("megazero.system.host_memory.available_bytes", lambda: 8 << 30)
    for name in ("build_orders", "blend_index"):
        monkeypatch.setattr(f"megazero.data.dataset.{name}", lambda *_: pytest.fail("it is made"))
    told = (
        r"train blend of 11 datasets, 1,000,000,0\d\d samples, takes 9\.3 GiB to make, and this machine has 8\.0 "
        r"free: .*--train-iters"
    )
    with pytest.raises(DataError, match=told):
        build_datasets(cfg, seq_length=8, samples=(10**9, 0, 0), vocab_size=200)
    assert not list((tmp_path / "cache").glob("order-*"))
