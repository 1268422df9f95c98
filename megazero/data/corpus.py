"""The default corpus: the source files of this Python's standard library, which every machine has.

It is prepared once per cache folder: a byte-level BPE is trained on it, and the files become a .bin/.idx pair with one
document per file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.cache import build_once
from megazero.data.indexed import DataError, dtype_for
from megazero.data.progress import Progress, Report
from megazero.data.tokenizer import build_tokenizer
from megazero.data.train_bpe import train_bpe
from megazero.data.writer import PairWriter

VOCAB_SIZE, EOD_ID = 4096, 0
"""Of the corpus's tokenizer: number of tokens, and the one behind each file."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"})
FORMAT = 1


@dataclass(frozen=True)
class Corpus:
    """The prepared corpus: prefix of its pair, folder of its gpt2 tokenizer, a description for the banner."""

    prefix: str
    tokenizer_path: str
    description: str


def source_files(library: Path) -> list[Path]:
    """Python files of the library without its tests, ordered by a hash: splits are contiguous and need a mixture."""
    found: list[Path] = []
    for folder, inside, names in os.walk(library):
        inside[:] = [
            name for name in inside if name not in LEFT_OUT
        ]  # site-packages can be far larger than the library
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest())


def planned_corpus(root: Path, library: Path | None = None) -> Corpus:
    """The corpus as `default_corpus` makes it, whether or not it is there. Arguments and errors are the same."""
    files, name = _named(library)
    return _corpus(root / name, len(files))


def default_corpus(root: Path, report: Report, library: Path | None = None) -> Corpus:
    """Prepare the corpus unless it is in the cache. Any number of ranks may call this together.

    library: folder of the source files; default: Python's standard library. Raises DataError if it has none.
    """
    files, name = _named(library)

    def build(folder: Path, say: Report) -> None:
        _prepare(files, folder, say)

    def complete(folder: Path) -> bool:
        return all((folder / name).is_file() for name in ("vocab.json", "merges.txt", "text.bin", "text.idx"))

    return _corpus(build_once(root, name, build, report, complete), len(files))


def _named(library: Path | None) -> tuple[list[Path], str]:
    """The source files, and the name of the folder that their corpus has in the cache."""
    library = library or Path(sysconfig.get_path("stdlib"))
    files = source_files(library)
    if not files:
        raise DataError(f"no --data-path, and no Python source files in {library} to stand in; give a --data-path")
    listing = "\n".join(f"{path.relative_to(library).as_posix()} {path.stat().st_size}" for path in files)
    digest = hashlib.sha256(f"{FORMAT} {VOCAB_SIZE}\n{listing}".encode()).hexdigest()[:12]
    return files, f"python-{platform.python_version()}-{digest}"


def _corpus(folder: Path, files: int) -> Corpus:
    text = f"{files} source files of Python {platform.python_version()}'s standard library"
    return Corpus(str(folder / "text"), str(folder), text)


def _prepare(files: list[Path], folder: Path, report: Report) -> None:
    texts = [path.read_bytes().decode("utf-8", errors="replace") for path in files]
    size = sum(map(len, texts)) / 1e6
    report(f"default corpus: {len(files)} files of the standard library, {size:.1f} million characters")
    train_bpe(texts, VOCAB_SIZE, folder, report)
    tokenizer = build_tokenizer("gpt2", str(folder))
    assert tokenizer.eod_id == EOD_ID, "the first of the trained tokens"
    progress = Progress(report, "tokenizing the default corpus", size, "million characters")
    done = 0
    with PairWriter(folder / "text", dtype_for(tokenizer.vocab_size)) as writer:
        for text in texts:
            ids = [*tokenizer.encode(text), tokenizer.eod_id]
            writer.write(np.array(ids, dtype=writer.dtype), [len(ids)])
            done += len(text)
            progress.reach(done / 1e6)
    report(f"default corpus: {writer.documents} documents, {writer.tokens:,} tokens")
