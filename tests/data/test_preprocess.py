"""Preprocessing: what goes in comes out, from every kind of file, with any number of workers, whole or not at all."""

import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megazero.cli.main import main
from megazero.data.documents import RawDocument, text_of
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.input_files import ReaderOptions
from megazero.data.inspect import summary
from megazero.data.preprocess import PreprocessJob, preprocess, raw_batches, texts
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.data.writer import PairWriter
from tests.cli.test_main import ended
from tests.data.pairs import write_pair
from tests.data.test_tokenizers import ODDITIES, random_text
from tests.reference import REFERENCE, needs_reference

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ODDITIES, "", *(random_text(seed) for seed in range(200)), ""]


def _jsonl(documents, key="text", ending="\n") -> bytes:
    return ending.join(
        json.dumps({"id": number, key: text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(documents)
    ).encode()


def _decoded(prefix, tokenizer, *, eod: bool) -> list[str]:
    data = IndexedDataset(prefix)
    data.check()
    rows = [data[number].tolist() for number in range(len(data))]
    if eod:
        assert all(row[-1] == tokenizer.eod_id for row in rows)
        rows = [row[:-1] for row in rows]
    return [tokenizer.decode(row) for row in rows]


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("eod", [False, True])
def test_jsonl_decodes_to_its_input(tmp_path, workers, eod, monkeypatch):
    monkeypatch.setattr("megazero.data.preprocess.BATCH_DOCUMENTS", 7)
    (tmp_path / "in.jsonl").write_bytes(_jsonl(DOCUMENTS) + b"\n\n")
    done = preprocess(
        [tmp_path / "in.jsonl"],
        tmp_path / "out",
        PreprocessJob("byte", None, append_eod=eod),
        workers=workers,
        report=silent,
    )
    assert _decoded(tmp_path / "out", build_tokenizer("byte", None), eod=eod) == DOCUMENTS
    assert done.documents == len(DOCUMENTS) and IndexedDataset(tmp_path / "out").dtype == np.dtype("<u2")


@pytest.mark.slow
@needs_reference
@pytest.mark.parametrize("eod", [False, True])
def test_reference_tokenizer_decodes_to_its_input(tmp_path, eod):
    assert REFERENCE is not None
    (tmp_path / "in.jsonl").write_bytes(_jsonl(DOCUMENTS, key="body", ending="\r\n"))
    job = PreprocessJob("gpt2", str(REFERENCE), ReaderOptions(json_key="body"), append_eod=eod)
    preprocess([tmp_path / "in.jsonl"], tmp_path / "out", job, workers=1, report=silent)
    assert _decoded(tmp_path / "out", build_tokenizer("gpt2", str(REFERENCE)), eod=eod) == DOCUMENTS


def test_folders_and_packed_files(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "corpus"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    packed = zstandard.ZstdCompressor().compress
    contents = {
        "a.txt": b"first\r\nfile",
        "b/deep/c.txt.gz": gzip.compress(b"second") + gzip.compress(b" and more"),
        "b/d.jsonl.gz": gzip.compress(_jsonl(["third", "fourth"])),
        "b/e.json.zst": packed(_jsonl(["fifth"]) + b"\n") + packed(_jsonl(["sixth"])),
        "c.md.zst": packed(b""),
        "d.txt": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    preprocess([folder, folder / "a.txt"], tmp_path / "out", PreprocessJob("byte", None), workers=1, report=silent)
    decoded = _decoded(tmp_path / "out", build_tokenizer("byte", None), eod=False)
    assert decoded == ["first\r\nfile", "third", "fourth", "second and more", "fifth", "sixth", "", "", "first\r\nfile"]


def test_lines_as_documents(tmp_path):
    (tmp_path / "in.txt").write_bytes("one\r\n\ntwo\x85still\u2028two\n three".encode())
    job = PreprocessJob("byte", None, ReaderOptions(document="line"))
    preprocess([tmp_path / "in.txt"], tmp_path / "out", job, workers=1, report=silent)
    decoded = _decoded(tmp_path / "out", build_tokenizer("byte", None), eod=False)
    assert decoded == ["one", "", "two\x85still\u2028two", " three"]


@pytest.mark.parametrize(("filler", "workers"), [("word ", 1), ("é", 1), ("é\n", 2), ("x", 1)])
def test_a_file_larger_than_memory_may_be_is_one_document(tmp_path, filler, workers, monkeypatch):
    monkeypatch.setattr("megazero.data.documents.PIECE", 1000)
    monkeypatch.setattr("megazero.data.preprocess.BATCH_BYTES", 2500)
    texts = [filler * 3000, "short", "", filler * 777 + "\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    inputs = [tmp_path / f"{number}.txt" for number in range(4)]
    preprocess(inputs, tmp_path / "out", PreprocessJob("byte", None, append_eod=True), workers=workers, report=silent)
    assert _decoded(tmp_path / "out", build_tokenizer("byte", None), eod=True) == texts


def test_lone_surrogates_in_json():
    raw = RawDocument("x", 1, rb'{"text": "a\ud800b \ud83d\ude00"}', True, True)
    assert text_of(raw, "text", "strict") == "a\ufffdb \U0001f600"


BROKEN = {
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', r"bad\.jsonl, line 2 is no JSON"),
    "key.jsonl": (
        b'{"body": "a", "id": 1}',
        r"key\.jsonl, line 1 has no text under --json-key 'text'; it holds body, id",
    ),
    "list.jsonl": (b"[1]", r"list\.jsonl, line 1 is a list, and no object"),
    "latin.txt": ("ok é".encode("latin-1"), r"latin\.txt, line 1: byte 3 of the document is no UTF-8"),
    "cut.txt.gz": (gzip.compress(b"word" * 1000)[:-20], r"cut\.txt\.gz cannot be read to its end"),
    "no.txt.gz": (b"plain", r"no\.txt\.gz cannot be read to its end"),
    "no.txt.zst": (b"plain", r"no\.txt\.zst cannot be read to its end"),
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in BROKEN), ("bad.jsonl", 2), ("cut.txt.gz", 2)])
def test_broken_input_is_named_and_leaves_nothing(tmp_path, name, workers):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        preprocess(
            [tmp_path / name], tmp_path / "o" / "out", PreprocessJob("byte", None), workers=workers, report=silent
        )
    assert re.search(message, str(error.value)), str(error.value)
    assert list((tmp_path / "o").iterdir()) == []


def test_a_cut_zst_is_named(tmp_path):
    packed = pytest.importorskip("zstandard").ZstdCompressor().compress(random.Random(1).randbytes(5000))
    (tmp_path / "cut.txt.zst").write_bytes(packed[:-100])
    with pytest.raises(DataError, match=r"cut\.txt\.zst cannot be read to its end: the last frame is cut off"):
        preprocess([tmp_path / "cut.txt.zst"], tmp_path / "out", PreprocessJob("byte", None), workers=1, report=silent)


def test_wrong_requests(tmp_path):
    with pytest.raises(DataError, match="no file or folder"):
        preprocess([tmp_path / "absent"], tmp_path / "out", PreprocessJob("byte", None), workers=1, report=silent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files in"):
        preprocess([tmp_path / "empty"], tmp_path / "out", PreprocessJob("byte", None), workers=1, report=silent)


BAD = "é".encode("latin-1")


def _told(inputs, output, **how) -> tuple[list[str], list[str]]:
    """Documents as they come out, and what is said."""
    said: list[str] = []
    preprocess(inputs, output, PreprocessJob("byte", None, ReaderOptions(**how)), workers=1, report=said.append)
    return _decoded(output, build_tokenizer("byte", None), eod=False), said


def test_files_in_folders_are_chosen_by_pattern(tmp_path):
    for name in ("a.txt", "b.md", "c.png", "deep/d.txt", "deep/e.rst"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    chosen, _ = _told([tmp_path / "in"], tmp_path / "out", include=("*.txt", "*.md"))
    assert chosen == ["a.txt", "b.md", "deep/d.txt"]
    assert _told([tmp_path / "in"], tmp_path / "deep", include=("deep/*",))[0] == ["deep/d.txt", "deep/e.rst"]
    assert _told([tmp_path / "in", tmp_path / "in" / "c.png"], tmp_path / "named", include=("*.md",))[0] == [
        "b.md",
        "c.png",
    ]
    with pytest.raises(DataError, match=r"no files in .*in that match --include \*\.tex"):
        _told([tmp_path / "in"], tmp_path / "none", include=("*.tex",))


@pytest.mark.parametrize("piece", [1000, 1 << 23])
def test_documents_that_are_no_utf8_are_left_out_whole(tmp_path, piece, monkeypatch):
    monkeypatch.setattr("megazero.data.documents.PIECE", piece)
    (tmp_path / "a.txt").write_bytes(b"good " * 1000)
    (tmp_path / "b.txt").write_bytes(b"begins well " * 1000 + BAD)
    (tmp_path / "c.jsonl").write_bytes(_jsonl(["first"]) + b'\n{"text": "' + BAD + b'"}\n' + _jsonl(["third"]))
    inputs = [tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")]
    documents, said = _told(inputs, tmp_path / "out", skip_undecodable=True)
    assert documents == ["good " * 1000, "first", "third"]
    assert f"--skip-undecodable: 2 documents left out, the first of them {tmp_path / 'b.txt'}" in said
    with pytest.raises(DataError, match=r"b\.txt.*--skip-undecodable leaves such documents out"):
        _told(inputs, tmp_path / "strict")


def test_replaced_characters_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes("a \ufffd of its own, ".encode() + BAD + b" and " + BAD + b" x")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "' + BAD + b'\\ufffd"}\n')
    documents, said = _told([tmp_path / "a.txt", tmp_path / "c.jsonl"], tmp_path / "out", encoding_errors="replace")
    assert documents == ["a \ufffd of its own, \ufffd and \ufffd x", "\ufffd\ufffd"]
    assert "--encoding-errors replace: 3 characters stand for bytes that are no UTF-8" in said


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = b"\xef\xbb\xbf" + (_jsonl(["text", "more"]) if "json" in name else "text \ufeff".encode())
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert _told([tmp_path / name], tmp_path / "out")[0] == (["text", "more"] if "json" in name else ["text \ufeff"])


def test_utf16_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match=r"it begins as UTF-16 does: iconv -f utf-16"):
        _told([tmp_path / "a.txt"], tmp_path / "out")


@pytest.mark.parametrize(("content", "how"), [(b"", {}), (b"\xef\xbb\xbf", {}), (BAD, {"skip_undecodable": True})])
def test_an_input_without_text_is_an_error(tmp_path, content, how):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"no text in .*a\.txt \(1 file\)" + ("; 1 document that is" if how else "$")):
        _told([tmp_path / "a.txt"], tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(DataError, match="no text in"):
        list(texts([tmp_path / "a.txt"], ReaderOptions(**how), silent, "reading"))


def test_a_tokenizer_that_gives_no_tokens_is_named(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text("nothing known")
    with pytest.raises(DataError, match=r"--tokenizer hf .*tokenizer\.json gives no token for any of 13 characters"):
        preprocess(
            [tmp_path / "in.txt"],
            tmp_path / "out",
            PreprocessJob("hf", str(tmp_path / "tokenizer.json")),
            workers=1,
            report=silent,
        )
    assert not (tmp_path / "out.bin").exists()


def _interrupted(monkeypatch, folder: Path, what) -> None:
    """Have `what` done in the middle: while a pair is being written, and before all batches are read."""
    read = raw_batches

    def batches(files, reader, told=None):
        for number, batch in enumerate(read(files, reader, told)):
            if number == 8:
                assert len(list(folder.glob("p.bin.unfinished-*"))) == 1 and not (folder / "p.bin").exists()
                what()
            yield batch

    monkeypatch.setattr("megazero.data.preprocess.raw_batches", batches)
    monkeypatch.setattr("megazero.data.preprocess.BATCH_DOCUMENTS", 2)


def _prepare_words(tmp_path: Path, workers: int) -> list[str]:
    (tmp_path / "in.jsonl").write_bytes(_jsonl(["some words"] * 40))
    words = f"prepare-data --input {tmp_path}/in.jsonl --output-prefix {tmp_path}/out/p --tokenizer byte --workers"
    return [*words.split(), str(workers)]


def test_a_worker_that_is_killed_is_one_line(tmp_path, monkeypatch, capsys):
    def kill_workers() -> None:
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for worker in workers:
            worker.kill()
            worker.join()

    _interrupted(monkeypatch, tmp_path / "out", kill_workers)
    assert main(_prepare_words(tmp_path, 2)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: a worker process was killed, as it happens where memory runs out; fewer of them need less: --workers 1"
    )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_leaves_nothing(tmp_path, monkeypatch, capsys, number, workers):
    before = signal.getsignal(number)
    _interrupted(monkeypatch, tmp_path / "out", lambda: os.kill(os.getpid(), number))
    assert ended(_prepare_words(tmp_path, workers)) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == "stopped; nothing was written"
    assert list((tmp_path / "out").iterdir()) == []
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    """As below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _interrupted(monkeypatch, tmp_path / "out", lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert main(_prepare_words(tmp_path, 1)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert IndexedDataset(tmp_path / "out" / "p").count == 400


def test_a_signal_leaves_nothing_of_a_merge(tmp_path, monkeypatch):
    write_pair(tmp_path / "q", [40])
    copy, copied = PairWriter.copy, []

    def interrupted(writer, source):
        copy(writer, source)
        copied.append(len(list(tmp_path.glob("p.bin.unfinished-*"))))
        if len(copied) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PairWriter, "copy", interrupted)
    words = ["merge-data", "--input", *[str(tmp_path / "q")] * 3, "--output-prefix", str(tmp_path / "p")]
    assert ended(words) == 128 + signal.SIGTERM and copied == [1, 1]
    assert not list(tmp_path.glob("p.*"))


def test_a_signal_leaves_nothing_of_a_tokenizer(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    (tmp_path / "in.txt").write_text("the cat sat on the mat\n" * 20)
    replace, seen = os.replace, []

    def interrupted(source, target):
        seen.append(Path(source).exists())
        os.kill(os.getpid(), signal.SIGTERM)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    words = ["train-tokenizer", "--input", str(tmp_path / "in.txt"), "--vocab-size", "270", "--output"]
    assert ended([*words, str(tmp_path / "made")]) == 128 + signal.SIGTERM and seen == [True]
    assert not list((tmp_path / "made").iterdir())


def _tool(name: str, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / name), *words]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_run_leaves_no_whole_looking_pair_and_no_workers(tmp_path):
    (tmp_path / "in.jsonl").write_bytes((_jsonl(["some words to be cut into bytes " * 300] * 300) + b"\n") * 40)
    words = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/out/p --tokenizer byte --workers 2"
    program = _tool("preprocess_data.py", *words.split())
    with subprocess.Popen(program, env=_environment(), stderr=subprocess.DEVNULL) as process:
        unfinished: list[Path] = []
        while not unfinished or unfinished[0].stat().st_size < 1 << 21:
            assert process.poll() is None, "it finished before it could be killed"
            time.sleep(0.01)
            unfinished = list((tmp_path / "out").glob("p.bin.unfinished*")) if (tmp_path / "out").exists() else []
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert len(children) >= 2
    assert not (tmp_path / "out" / "p.bin").exists() and not (tmp_path / "out" / "p.idx").exists()
    with pytest.raises(DataError, match="was never finished"):
        IndexedDataset(tmp_path / "out" / "p")
    deadline = time.monotonic() + 20
    while any(_alive(int(child)) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if _alive(int(child))]


@pytest.mark.slow
def test_tools_from_text_to_samples(tmp_path):
    """train_tokenizer, preprocess_data, merge_data and inspect_data, one after the other on the command line."""
    texts = [f"document {number}: " + random_text(number) + " and so on" * 20 for number in range(60)]
    (tmp_path / "in.jsonl").write_bytes(_jsonl(texts))

    def call(name, *words):
        done = subprocess.run(
            _tool(name, *map(str, words)), env=_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("train_tokenizer.py", "--input", tmp_path / "in.jsonl", "--vocab-size", "400", "--output", tmp_path / "bpe")
    kind = ("--tokenizer", "gpt2", "--tokenizer-path", tmp_path / "bpe")
    words = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/a --append-eod --workers 1"
    call("preprocess_data.py", *words.split(), *kind)
    tokenizer = build_tokenizer("gpt2", str(tmp_path / "bpe"))
    assert _decoded(tmp_path / "a", tokenizer, eod=True) == texts
    call("merge_data.py", "--input", tmp_path / "a", tmp_path / "a", "--output-prefix", tmp_path / "ab")
    assert _decoded(tmp_path / "ab", tokenizer, eod=True) == texts * 2
    run = f"--split 9,1 --seq-length 16 --seed 5 --samples 40,5,0 --data-cache-path {tmp_path}/c"
    dump = f"--data-path {tmp_path}/ab {run} --dump {tmp_path}/x.npz --first 12"
    shown = call("inspect_data.py", *dump.split(), *kind)
    arrays = np.load(tmp_path / "x.npz")
    assert sorted(arrays) == ["lengths", "train", "valid"]
    assert arrays["train"].shape == (12, 17) and arrays["lengths"][0] >= 40 and arrays["lengths"][2] == 0
    assert repr(tokenizer.decode(arrays["train"][0].tolist())) in shown
    assert (
        call("inspect_data.py", "--data-path", tmp_path / "ab")
        == summary(str(tmp_path / "ab")) + "\n"
        == shown[: shown.index("train:")]
    )


@needs_reference
def test_a_pair_is_summed_up():
    assert REFERENCE is not None
    data = IndexedDataset(REFERENCE / "meg-gpt2-openwebtext_text_document")
    sizes = sorted(len(data[number]) for number in range(len(data)))
    shown = summary(data.prefix)
    assert (
        "1,000 documents in 1,000 sequences, 1,361,845 tokens (uint16, 2,723,690 bytes)" in shown
        and "made with: not said" in shown
    )
    assert f"{sizes[0]:,} to {sizes[-1]:,}, mean 1,361.8, median {(sizes[499] + sizes[500]) / 2:,.0f};" in shown


def test_documents_of_several_sequences_and_of_none(tmp_path):
    preprocess_input = tmp_path / "in.jsonl"
    preprocess_input.write_bytes(_jsonl(["four", "", "seven77"]))
    preprocess([preprocess_input], tmp_path / "p", PreprocessJob("byte", None), workers=1, report=silent)
    shown = summary(str(tmp_path / "p"))
    assert (
        "3 documents in 3 sequences, 11 tokens" in shown
        and "0 to 7, mean 3.7, median 4; a tenth has at most 0, a tenth at least 7" in shown
        and "1 is empty" in shown
    )
    assert "made with: byte of 257 tokens, hash " in shown
    content = bytearray((tmp_path / "p.idx").read_bytes())
    content[26:34] = struct.pack("<Q", 2)
    (tmp_path / "p.idx").write_bytes(content[:-32] + struct.pack("<2q", 0, 3))
    assert "1 document in 3 sequences, 11 tokens" in summary(str(tmp_path / "p")) and "11 to 11" in summary(
        str(tmp_path / "p")
    )


@pytest.mark.slow
def test_tools_report_mistakes_in_one_line(tmp_path):
    write_pair(tmp_path / "q", [40])
    for words, message in (
        (("--data-path", "0.5", str(tmp_path / "p"), "--seq-length", "8"), "no file"),
        (("--data-path", "a", "b", "--seq-length", "8"), "where the weight"),
        (("--data-path", str(tmp_path / "q"), "--seq-length", "8", "--samples", "1,2"), "--samples '1,2'"),
        (("--data-path", "a", "--samples", "1,2,3"), "--samples needs --seq-length"),
    ):
        done = subprocess.run(
            _tool("inspect_data.py", *words), env=_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_nobody_reads_what_a_tool_prints(tmp_path):
    """`| head -1` whose reader has gone: no mistake in flags or files, and no traceback."""
    write_pair(tmp_path / "q", [40])
    reads, writes = os.pipe()
    os.close(reads)
    command = _tool("inspect_data.py", "--data-path", str(tmp_path / "q"))
    done = subprocess.run(command, env=_environment(), stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")
