"""Data files that unpack or claim without bound: one error with the file's name, in little memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.data import documents as module
from megazero.data.conversations import ConversationEncoder, read_conversations
from megazero.data.documents import documents, open_documents, text_of
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.preprocess import raw_batches
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer, build_tokenizer
from megazero.inference.prompts import read_prompts
from megazero.system.reading import BOUNDS

zstandard = pytest.importorskip("zstandard")
BOMB = 400 << 20


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """12 kB that unpack to 400 MB."""
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), packer.flush()])


def peak_of(path: Path, kind: str) -> tuple[int, int]:
    """(peak of memory, bytes read) of reading all documents of a file."""
    tracemalloc.start()
    try:
        read = sum(len(raw.data) for _, batch in raw_batches([path], ReaderOptions(format=kind)) for raw in batch)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, read


@pytest.mark.slow
def test_zstd_unpacks_as_it_is_read(bomb: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.txt.zst").write_bytes(bomb)
    assert len(bomb) < 50_000
    peak, read = peak_of(tmp_path / "x.txt.zst", "text")
    assert read == BOMB and peak < 200 << 20


def test_a_document_has_a_largest_size(bomb: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BOUNDS", replace(BOUNDS, document=1 << 22), raising=False)
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(bomb)
    tracemalloc.start()
    with (
        open_documents(path) as reading,
        pytest.raises(DataError, match=r"x\.jsonl\.zst, line 1 is longer than 4,194,304 bytes"),
    ):
        list(documents(reading, path, True, "line"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_several_frames_after_small_pieces(tmp_path: Path) -> None:
    """Frames that end inside what was read at once."""
    path, lines = tmp_path / "x.jsonl.zst", [json.dumps({"text": "x" * n}) + "\n" for n in (1, 5000, 70_000, 3)]
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(line.encode()) for line in lines))
    found = [text_of(raw, "text", "strict") for _, batch in raw_batches([path], ReaderOptions()) for raw in batch]
    assert [len(text) for text in found] == [1, 5000, 70_000, 3]


LINES = {
    "deep": "[" * 100_000,
    "less deep": '{"text": ' + "[" * 150 + "]" * 150 + "}",
    "number": '{"text": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("case", LINES)
def test_lines_of_json(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "prompt": "a", "completion": "b"}\n' + LINES[case] + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 2 is (nested|no JSON)"):
        [text_of(raw, "text", "strict") for _, batch in raw_batches([path], ReaderOptions()) for raw in batch]
    with pytest.raises(DataError, match=r"x\.jsonl, line 2 is (nested|no JSON)"):
        list(read_conversations([path], ConversationEncoder(ByteTokenizer(), 256, 257), silent))
    path.write_text(LINES[case] + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 1 is (nested|no JSON)"):
        read_prompts((), str(path))


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | changes.pop("model", {})
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    } | changes


_ADDED = {
    "content": "<x>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
TOKENIZERS: dict[str, tuple[Any, str]] = {
    "id of the vocabulary": (
        tokenizer_json(model={"vocab": {"a": 0, "b": 2**31 - 1}, "merges": []}),
        "holds the id 2147483647",
    ),
    "id of an added token": (tokenizer_json(added_tokens=[_ADDED | {"id": 2**31 - 1}]), "holds the id 2147483647"),
    "id of the post-processor": (
        tokenizer_json(post_processor={"type": "BertProcessing", "sep": ["a", 2**31 - 1], "cls": ["a", 0]}),
        "holds the id 2147483647",
    ),
    "negative": (tokenizer_json(model={"vocab": {"a": -1}, "merges": []}), "holds the id -1"),
    "no tokens": (tokenizer_json(model={"vocab": {}, "merges": []}), "holds no tokens"),
    "no model": ({"model": []}, "it has no model"),
    "no object": ([], "it has no model"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer_json_is_looked_at_before_its_library(case: str, tmp_path: Path) -> None:
    content, message = TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"tokenizer\.json .*{message}"):
        build_tokenizer("hf", str(tmp_path))


def test_ids_of_a_vocabulary_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 2**31 - 1}))
    (tmp_path / "merges.txt").write_text("")
    start = time.process_time()
    with pytest.raises(DataError, match=r"vocab\.json holds the id 2147483647; ids are below 16,777,216"):
        build_tokenizer("gpt2", str(tmp_path))
    assert time.process_time() - start < 1
