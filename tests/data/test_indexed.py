"""The pair of files: reading, writing, and every way in which a pair can be broken."""

import errno
import fcntl
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megazero.config.schema import DataConfig
from megazero.data.build import build_datasets
from megazero.data.indexed import HEADER, DataError, IndexedDataset, dtype_for
from megazero.data.writer import PairWriter, merge
from tests.data.pairs import write_pair
from tests.reference import REFERENCE, needs_reference


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<i4", "<i8", "<u2"])
def test_what_is_written_is_read(tmp_path, dtype):
    documents = [np.array(ids, dtype=dtype) for ids in ([1, 2, 3], [], [4], [5, 6, 7, 8, 9])]
    with PairWriter(tmp_path / "a.b", np.dtype(dtype)) as writer:
        writer.write(np.concatenate(documents[:2]), [3, 0])
        writer.write(documents[2], [], unfinished=1)
        writer.write(documents[3], [1, 5])
    data = IndexedDataset(tmp_path / "a.b")
    data.check()
    assert data.dtype == np.dtype(dtype)
    assert [data[number].tolist() for number in range(4)] == [ids.tolist() for ids in documents]
    assert data.document_indices[:].tolist() == [0, 1, 2, 3, 4]
    assert data.tokens_between(1, 4) == 6 and data.tokens_between(2, 2) == 0


def test_bytes_of_the_index(tmp_path):
    write_pair(tmp_path / "p", [2, 3])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 1, 2)
    assert (tmp_path / "p.idx").read_bytes() == expected


@needs_reference
def test_other_peoples_files(tmp_path):
    assert REFERENCE is not None
    source = REFERENCE / "meg-gpt2-openwebtext_text_document"
    data = IndexedDataset(source)
    data.check()
    assert (len(data), data.count, data.dtype) == (1000, 1_361_845, np.dtype("<u2"))
    merge([str(source)], str(tmp_path / "copy"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"copy{ending}").read_bytes() == Path(f"{source}{ending}").read_bytes()


def test_dtype_by_vocabulary():
    assert dtype_for(65499) == np.dtype("<u2") and dtype_for(65500) == np.dtype("<i4")


def test_an_empty_pair(tmp_path):
    assert len(write_pair(tmp_path / "none", [])) == 0
    assert write_pair(tmp_path / "hollow", [0, 0]).count == 0


def _patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def _misalign(prefix: str) -> None:
    """The last sequence one byte further on, in a .bin of one byte more."""
    _patch(Path(prefix + ".idx"), POINTERS + 24, struct.pack("<q", 19))
    Path(prefix + ".bin").write_bytes(bytes(21))


LENGTHS, POINTERS, BOUNDS = HEADER.size, HEADER.size + 4 * 4, HEADER.size + 12 * 4
BROKEN = {
    "bin cut": (lambda p: os.truncate(p + ".bin", 7), r"p\.bin has 7 bytes.*describes 20"),
    "bin longer": (lambda p: Path(p + ".bin").write_bytes(bytes(22)), r"p\.bin has 22 bytes.*describes 20"),
    "idx cut": (lambda p: os.truncate(p + ".idx", 100), r"p\.idx has 100 bytes.*4 sequences, 4 documents.* needs 122"),
    "idx cut in header": (lambda p: os.truncate(p + ".idx", 10), r"p\.idx has 10 bytes, fewer than the header's 34"),
    "idx empty": (lambda p: os.truncate(p + ".idx", 0), r"p\.idx has 0 bytes"),
    "magic": (lambda p: _patch(Path(p + ".idx"), 0, b"XX"), r"p\.idx starts with"),
    "version": (lambda p: _patch(Path(p + ".idx"), 9, b"\x02"), r"p\.idx has version 2"),
    "dtype": (lambda p: _patch(Path(p + ".idx"), 17, b"\x09"), r"p\.idx has dtype code 9"),
    "other dtype": (lambda p: _patch(Path(p + ".idx"), 17, b"\x04"), r"p\.bin has 20 bytes.*describes"),
    "count": (
        lambda p: _patch(Path(p + ".idx"), 18, struct.pack("<Q", 2**60)),
        r"p\.idx has 122 bytes, but its header",
    ),
    "last bound": (
        lambda p: _patch(Path(p + ".idx"), BOUNDS + 32, b"\x09"),
        r"p\.idx: document bounds run from 0 to 9, not from 0 to 4",
    ),
    "negative length": (
        lambda p: _patch(Path(p + ".idx"), LENGTHS + 4, struct.pack("<i", -3)),
        r"p\.idx: sequence 1 has length -3",
    ),
    "length": (
        lambda p: _patch(Path(p + ".idx"), LENGTHS + 4, b"\x04"),
        r"p\.idx: sequence 2 starts at byte 10.*end at byte 12",
    ),
    "pointer": (
        lambda p: _patch(Path(p + ".idx"), POINTERS + 8, b"\x06"),
        r"p\.idx: sequence 1 starts at byte 6.*end at byte 4",
    ),
    "bounds": (
        lambda p: _patch(Path(p + ".idx"), BOUNDS + 8, b"\x03"),
        r"p\.idx: document 1 ends at sequence 2 before",
    ),
    "misaligned": (_misalign, r"p\.bin has 21 bytes, as .*p\.idx says: no whole number of uint16 ids"),
    "no idx": (lambda p: Path(p + ".idx").unlink(), r"no file .*p\.idx"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pairs_are_named(tmp_path, name):
    write_pair(tmp_path / "p", [2, 3, 4, 1])
    damage, message = BROKEN[name]
    damage(str(tmp_path / "p"))
    with pytest.raises(DataError) as error:
        IndexedDataset(tmp_path / "p").check()
    assert re.search(message, str(error.value)), str(error.value)


def test_prefix_given_with_its_ending(tmp_path):
    write_pair(tmp_path / "p", [2])
    for ending in (".bin", ".idx"):
        with pytest.raises(DataError, match=rf"p\{ending}: a pair is named without its endings: .*/p$"):
            IndexedDataset(tmp_path / f"p{ending}")


def test_what_is_no_prefix_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a b.txt").write_text("text")
    (tmp_path / "pairs").mkdir()
    for number in range(7):
        write_pair(tmp_path / "pairs" / f"p{number}", [2])
    for words, said in {
        "texts/a b.txt": r"a b\.txt is no pair .*megazero prepare-data --input 'texts/a b\.txt' --output-prefix ",
        "texts": r"texts is a folder without pairs .*--input texts ",
        "pairs": r"pairs is a folder; name a pair in it .*, of which it has 7: pairs/p0, .* and 2 more$",
        "0.7,pairs/p0,0.3,pairs/p1": r"words of their own: 0\.7 pairs/p0 0\.3 pairs/p1$",
        "absent": r"no file absent\.bin and no file absent\.idx",
        "a,b": r"no file a,b\.bin",
    }.items():
        with pytest.raises(DataError, match=said):
            IndexedDataset(words)


def test_a_failure_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), PairWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.write(np.arange(3, dtype="<u2"), [3])
        raise RuntimeError
    with pytest.raises(DataError, match="no end"), PairWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.write(np.arange(3, dtype="<u2"), [], unfinished=3)
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_left_is_removed_and_what_others_write_is_not(tmp_path):
    for name in ("p.bin", "p.idx"):
        (tmp_path / f"{name}.unfinished-1").write_bytes(b"left behind")
    kept = ["p.bin.unfinished-1-mine", "pp.bin.unfinished-1", "p.bin.unfinished-old"]
    for name in kept:
        (tmp_path / name).write_bytes(b"of others")
    other = tmp_path / "p.bin.unfinished-3"
    with open(other, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with PairWriter(tmp_path / "p", np.dtype("<u2")) as writer:
            assert not (tmp_path / "p.bin.unfinished-1").exists() and other.exists()
            writer.write(np.arange(3, dtype="<u2"), [3])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, other.name, "p.bin", "p.idx"])


def test_two_processes_with_one_number_do_not_share_a_file(tmp_path):
    """As in two containers, on one folder."""
    with open(tmp_path / f"p.bin.unfinished-{os.getpid()}", "wb") as held:
        held.write(b"text")
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"p\.bin is being written by another process"):
            PairWriter(tmp_path / "p", np.dtype("<u2"))
    assert (tmp_path / f"p.bin.unfinished-{os.getpid()}").read_bytes() == b"text"


def test_a_file_system_without_locks_keeps_leftovers(tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "p.bin.unfinished-1").write_bytes(b"left behind")
    write_pair(tmp_path / "p", [3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.bin.unfinished-1", "p.idx"]


def test_an_existing_pair_is_kept_unless_asked(tmp_path):
    write_pair(tmp_path / "p", [2])
    with pytest.raises(DataError, match=r"p\.bin.*exist already"):
        write_pair(tmp_path / "p", [3])
    with PairWriter(tmp_path / "p", np.dtype("<u2"), overwrite=True) as writer:
        writer.write(np.arange(3, dtype="<u2"), [3])
    assert IndexedDataset(tmp_path / "p")[0].tolist() == [0, 1, 2]


def _all(data: IndexedDataset) -> list[int]:
    return data.read(0, data.count).tolist()


def test_merge_widens_and_keeps_order(tmp_path):
    first, second = write_pair(tmp_path / "a", [3, 0, 2]), write_pair(tmp_path / "b", [4], 100_000, "<i4", seed=1)
    merge([first.prefix, second.prefix, first.prefix], str(tmp_path / "m"))
    data = IndexedDataset(tmp_path / "m")
    data.check()
    assert data.dtype == np.dtype("<i4")
    assert data.lengths[:].tolist() == [3, 0, 2, 4, 3, 0, 2] and data.document_indices[:].tolist() == list(range(8))
    assert _all(data) == [*_all(first), *_all(second), *_all(first)]


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=8)), max_size=3),
    cut=st.integers(0, 122) | st.none(),
)
def test_a_damaged_index_is_one_error_or_reads_what_it_says(tmp_path, changes, cut):
    with PairWriter(tmp_path / "p", np.dtype("<u2"), overwrite=True) as writer:
        writer.write(np.arange(1, 11, dtype="<u2"), [2, 3, 4, 1])
    for offset, data in changes:
        _patch(tmp_path / "p.idx", offset, data)
    if cut is not None:
        os.truncate(tmp_path / "p.idx", cut)
    try:
        found = IndexedDataset(tmp_path / "p")
        found.check()
    except DataError as error:
        assert str(tmp_path / "p") in str(error)
    else:
        rows = [found[number] for number in range(len(found))]
        assert b"".join(row.tobytes() for row in rows) == (tmp_path / "p.bin").read_bytes()


@pytest.mark.parametrize(
    "name", ["p.bin", "p.idx", "shuffle_index.npy", "sample_index.npy", "document_index.npy", "dataset_index.npy"]
)
def test_a_file_that_is_cut_off_under_a_run_is_named(name, tmp_path):
    """Nothing is asked before a read that could be otherwise by then: a mapped file would be SIGBUS."""
    write_pair(tmp_path / "p", [600] * 40)
    cfg = DataConfig(data_path=("1", str(tmp_path / "p")), split="1", data_cache_path=str(tmp_path / "cache"))
    train = build_datasets(cfg, seq_length=4, samples=(5000, 0, 0)).train
    assert train[0] is not None
    (file,) = tmp_path.rglob(name)
    os.truncate(file, 100)
    with pytest.raises(DataError, match=rf"{re.escape(name)} has 100 bytes, \d+ when it was opened: it was cut off"):
        train[4999]


def test_no_part_of_an_index_is_mapped(tmp_path):
    data = write_pair(tmp_path / "p", [3] * 5000)
    assert data.lengths[-1] == 3 and data.pointers[np.array([1, 4999])].tolist() == [6, 6 * 4999]
    os.truncate(tmp_path / "p.idx", 100)
    for column in (data.lengths, data.pointers, data.document_indices):
        for at in (4999, slice(4000, 4010), np.array([4000, 4500])):
            with pytest.raises(DataError, match=r"p\.idx has 100 bytes, 100042 when it was opened: it was cut off"):
                column[at]
