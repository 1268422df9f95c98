"""The default corpus on a small library of our own: prepared once by many processes, and exactly what
the files hold.
"""

import multiprocessing
import sysconfig
from pathlib import Path

import pytest

from megazero.data.corpus import default_corpus, source_files
from megazero.data.indexed import IndexedDataset
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer


def _library(folder: Path) -> Path:
    for number in range(30):
        path = folder / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"import os\n\n\ndef function_{number}(x):\n    return x * {number}\n" * (number + 1), newline="\r\n"
        )
    (folder / "test").mkdir()
    (folder / "test" / "test_x.py").write_text("left out")
    (folder / "bad.py").write_bytes(b"# \xff\n")
    return folder


def _prepare(root: str, library: str) -> tuple[str, list[str]]:
    said: list[str] = []
    return default_corpus(Path(root), said.append, Path(library)).prefix, said


@pytest.mark.slow
def test_many_processes_prepare_it_once(tmp_path):
    library = _library(tmp_path / "library")
    with multiprocessing.get_context("spawn").Pool(5) as pool:
        results = pool.starmap(_prepare, [(str(tmp_path / "cache"), str(library))] * 5, chunksize=1)
    assert len({prefix for prefix, _ in results}) == 1
    assert sum(any("training a byte-level BPE" in line for line in said) for _, said in results) == 1
    assert not any(
        "unfinished" in line or ("waiting" not in line and "/" in line) for _, said in results for line in said
    ), "no temporary folder"
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [Path(results[0][0]).parent.name]


def test_documents_are_the_files(tmp_path):
    library = _library(tmp_path / "library")
    corpus = default_corpus(tmp_path / "cache", silent, library)
    data, tokenizer = IndexedDataset(corpus.prefix), build_tokenizer("gpt2", corpus.tokenizer_path)
    data.check()
    files = source_files(library)
    assert len(files) == len(data) == 31 and not any("test" in path.parts for path in files[0].parents)
    for number, path in enumerate(files):
        ids = data[number].tolist()
        assert ids[-1] == tokenizer.eod_id
        assert tokenizer.decode(ids[:-1]) == path.read_bytes().decode(errors="replace")
    (library / "new.py").write_text("x = 1\n")
    assert default_corpus(tmp_path / "cache", silent, library).prefix != corpus.prefix


def test_this_python_has_a_library_worth_reading():
    files = source_files(Path(sysconfig.get_path("stdlib")))
    assert len(files) > 200 and not any("site-packages" in path.parts for path in files)
