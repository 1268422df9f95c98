"""All ranks train one run: what one rank has in another way than rank 0 is found before there are process groups."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch.distributed as dist
import yaml

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.convert.source import Source
from megazero.data.progress import silent
from megazero.mpu.meeting import Environment
from megazero.train import same_run
from megazero.train.embedded import Rendezvous
from megazero.train.prepare import Prepared, prepare
from megazero.train.same_run import require_same_run
from tests.corpus import write_corpus
from tests.e2e.command import ROOT, TINY, run

SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 1003".split()
BATCH = "--global-batch-size 4 --micro-batch-size 1 --train-length 6 --lr 1e-3 --eval-iters 1 --split 8,2,0".split()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pairs `here`, `copy` with the same contents, and `other`: other tokens in files of the same size."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder / "here", documents=40, vocabulary=1000)
    for name in ("copy", "other"):
        for ending in (".bin", ".idx"):
            shutil.copy(folder / f"here{ending}", folder / f"{name}{ending}")
    tokens = np.fromfile(folder / "other.bin", dtype=np.uint16)
    (np.uint16(999) - tokens % 1000).astype(np.uint16).tofile(folder / "other.bin")
    assert (folder / "other.bin").stat().st_size == (folder / "here.bin").stat().st_size
    return folder


def prepared(corpora: Path, *words: str) -> Prepared:
    flags = [*SHAPE, *BATCH, "--data-cache-path", str(corpora / "cache")]
    return prepare(parse_run([*flags, *words], 2), 2, silent)


def answers(*ranks: Prepared) -> list[Exception | None]:
    """What each rank raises, as threads that share a store."""
    store = dist.HashStore()
    raised: list[Exception | None] = [None] * len(ranks)

    def begin(rank: int) -> None:
        try:
            require_same_run(ranks[rank], Rendezvous(Environment(rank, rank, len(ranks), len(ranks)), store, False))
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return raised


OLD = "all ranks need the same, and a file or an installation on this rank's host may be an old one"
DIFFERENT = {
    "--lr 0.0005": "--lr 0.0005, where rank 0 has 0.001; ",
    "--seed 7": "--seed 7, where rank 0 has 1234; ",
    "--zero-stage 3": "--zero-stage 3, where rank 0 has 0; ",
    "--num-layers 4": "--num-layers 4, where rank 0 has 2; ",
    "--global-batch-size 8 --train-length 5": "--global-batch-size 8, where rank 0 has 4, --train-length 5 iterations, "
    "where rank 0 has 6 iterations; ",
    "--tp 2 --sequence-parallel": "--tp 2, where rank 0 has 1, --sequence-parallel on, where rank 0 has off; ",
    "--pp 2": "--pp 2, where rank 0 has 1; ",
    "--lr-warmup 2": "--lr-warmup 2 iterations, where rank 0 has none; ",
    "--save SAVED": "--save a place, where rank 0 has none; ",
    "--lr 1 --seed 1 --tp 2 --zero-stage 1 --clip-grad 2 --weight-decay 0.3 --adam-eps 1e-7": "; and 2 other settings: "
    "lr, seed; ",
}


@pytest.mark.parametrize("words", DIFFERENT)
def test_another_setting_of_one_rank_is_an_error_of_all(words: str, corpora: Path, tmp_path: Path) -> None:
    data = ["--data-path", str(corpora / "here")]
    other = prepared(corpora, *data, *words.replace("SAVED", str(tmp_path / "saved")).split())
    same = prepared(corpora, *data)
    zero, one, two = answers(same, other, same)
    text = DIFFERENT[words]
    assert one is not None and "another run than that of rank 0: " in str(one) and text in str(one)
    for error in (zero, two):
        assert isinstance(error, ConfigError) and "  1. rank 1: another run" in str(error) and text in str(error)


def test_the_same_run_under_other_names_of_places_is_one_run(corpora: Path, tmp_path: Path) -> None:
    first, second = (
        prepared(corpora, "--data-path", str(corpora / pair), "--save", str(tmp_path / pair))
        for pair in ("here", "copy")
    )
    assert answers(first, second) == [None, None]
    assert answers(first) == [None]


@pytest.mark.parametrize(
    ("here_words", "other_words", "difference"),
    [
        ("here", "other", "rank 0: checksum of training data: "),
        ("1 here 1 here", "1 here 1 other", "rank 0: checksum of training data, part 2 of 2: "),
        ("here --valid-data-path x here", "here --valid-data-path x other", "rank 0: checksum of validation data: "),
        ("1 here 3 other", "3 here 1 other", "--data-path a place 0.75 0.25, where rank 0 has a place 0.25 0.75"),
        ("here", "1 here", "--data-path a place 1.0, where rank 0 has a place"),
    ],
    ids=["contents", "part", "validation", "weights", "blend"],
)
def test_other_data_are_another_run(here_words: str, other_words: str, difference: str, corpora: Path) -> None:
    """A mixture of two corpora would train without any sign of it."""
    pairs = {name: str(corpora / name) for name in ("here", "other")}
    runs = [
        prepared(corpora, "--data-path", *(pairs.get(word, word) for word in words.split()))
        for words in (here_words, other_words)
    ]
    for error in answers(*runs):
        assert difference in str(error)


def on_hosts(same: Prepared, folders: tuple[Path, Path], section: str, **fields: str) -> list[Prepared]:
    """The run on two hosts, where the fields name places in a folder each."""
    runs = []
    for folder in folders:
        part = getattr(same.run, section)
        places = {name: word.format(folder) for name, word in fields.items()}
        run = replace(same.run, **{section: replace(part, **places)})
        runs.append(replace(same, resolved=replace(same.resolved, run=run)))
    return runs


@pytest.mark.parametrize(
    ("section", "fields", "name", "difference"),
    [
        (
            "data",
            {"tokenizer": "gpt2", "tokenizer_path": "{}"},
            "merges.txt",
            "--tokenizer-path: checksum of merges.txt: {:08x}, where rank 0 has {:08x}; all ranks",
        ),
        (
            "offload",
            {"placement_rates": "{}/rates.yaml"},
            "rates.yaml",
            "--placement-rates: checksum of the file: {:08x}, where rank 0 has {:08x}; all ranks",
        ),
        (
            "checkpoint",
            {"init_from": "{}"},
            "model.safetensors",
            "--init-from: bytes of model.safetensors: 6, where rank 0 has 3; HERE, where rank 0 has FIRST; all ranks",
        ),
    ],
)
def test_other_files_in_a_place_are_another_run(
    section: str,
    fields: dict[str, str],
    name: str,
    difference: str,
    corpora: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An old copy on one host would train with other tokens or weights, or be placed for another machine."""
    monkeypatch.setattr(same_run, "open_source", lambda path: Source("hf", path, Run(), {}))
    same, hosts = (
        prepared(corpora, "--data-path", str(corpora / "here")),
        (tmp_path / "a" / "model", tmp_path / "b" / "model"),
    )
    for host in hosts:
        host.mkdir(parents=True)
        for file in ("vocab.json", "merges.txt", "rates.yaml", "model.safetensors", ".fetched"):
            (host / file).write_text("new")
    (hosts[1] / ".fetched").write_text("a moment later")
    assert answers(*on_hosts(same, hosts, section, **fields)) == [None, None]
    (hosts[1] / name).write_text("an old")
    told = f"another run than that of rank 0: {difference.format(crc32(b'an old'), crc32(b'new'))}"
    told = told.replace("HERE", str(hosts[1])).replace("FIRST", str(hosts[0]))
    for error in answers(*on_hosts(same, hosts, section, **fields)):
        assert isinstance(error, ConfigError) and told in str(error)


def test_of_a_folder_of_checkpoints_rank_0_says_which_is_compared(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one may appear before the last rank looks."""
    folders = [tmp_path / name for name in ("iter_0000001", "iter_0000002")]
    for size, folder in enumerate(folders, 1):
        folder.mkdir()
        (folder / "manifest.json").write_text("x" * size)
    newest = iter(folders)  # each rank looks once
    monkeypatch.setattr(same_run, "open_source", lambda path: Source("megazero", next(newest), Run(), {}))
    same = prepared(corpora, "--data-path", str(corpora / "here"))
    assert answers(*on_hosts(same, (tmp_path, tmp_path), "checkpoint", init_from="{}")) == [None, None]


@pytest.mark.parametrize("second", ["b/iter_0000002", "a/iter_0000002"], ids=["another run", "another step"])
def test_another_checkpoint_is_an_error_with_both_paths(
    second: str, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are as long. One of rank 0's name stands beside it, and nobody on this rank has asked for that one."""
    monkeypatch.setattr(same_run, "open_source", lambda path: Source("megazero", path, Run(), {}))
    first = "a/iter_0000001"
    for number, folder in enumerate((first, second, "b/iter_0000001")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "fragments-0").write_bytes(bytes(2 * same_run.END_BYTES) + bytes([number, 1]))
    same = prepared(corpora, "--data-path", str(corpora / "here"))
    hosts = tmp_path / first, tmp_path / second
    checksums = [crc32(bytes(same_run.END_BYTES - 2) + bytes([number, 1])) for number in (1, 0)]
    told = "--init-from: checksum of the last 65,536 bytes of fragments-0: {:08x}, where rank 0 has {:08x}; {}, where "
    for error in answers(*on_hosts(same, hosts, "checkpoint", init_from="{}")):
        assert isinstance(error, ConfigError)
        assert f"rank 0: {told.format(*checksums, hosts[1])}rank 0 has {hosts[0]}; all ranks" in str(error)


def test_all_ranks_end_when_rank_0_cannot_read_its_weights(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for what it has to say."""

    def opened(path: Path) -> Source:
        if path == tmp_path / "gone":
            raise ConfigError(["the folder is gone"])
        return Source("hf", path, Run(), {})

    monkeypatch.setattr(same_run, "open_source", opened)
    same = prepared(corpora, "--data-path", str(corpora / "here"), "--distributed-timeout-minutes", "0.1")
    hosts = tmp_path / "gone", tmp_path / "model"
    hosts[1].mkdir()
    zero, one = answers(*on_hosts(same, hosts, "checkpoint", init_from="{}"))
    assert "1. the folder is gone" in str(zero) and "1. rank 0: the folder is gone" in str(one)


def test_another_version_is_the_reason_that_is_told(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = prepared(corpora, "--data-path", str(corpora / "here"))
    mine, first = (same_run._identity(same) | same_run._weights(same) for _ in range(2))
    mine["versions"]["megazero"] = "0.0.9"
    mine["settings"]["lr"] = 1.0
    assert same_run._difference(mine, first) == f"megazero 0.0.9, where rank 0 has {same_run.__version__}; {OLD}"
    assert same_run._difference(first, first) is None


@pytest.mark.slow
def test_a_node_with_an_old_file_ends_the_run_at_once(tmp_path: Path, corpora: Path) -> None:
    """Each rank reads `run.yaml` in a working folder of its own, as on two hosts."""
    schedule = {"train_length": 3, "global_batch_size": 4}
    for rank, lr in enumerate((1e-3, 5e-4)):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump({"schedule": {**schedule, "lr": lr}}))
    script = tmp_path / "host.py"
    script.write_text(
        "import os, runpy\n"
        f"os.chdir({str(tmp_path / 'host')!r} + os.environ['RANK'])\n"
        f"runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r}, run_name='__main__')\n"
    )
    data = ["--data-path", corpora / "here", "--data-cache-path", tmp_path / "cache", "--eval-iters", 0]
    flags = [*TINY, *data, "--precision", "fp32", "--config", "run.yaml", "--metrics-file", tmp_path / "m"]
    told = run(2, flags, status=1, script=str(script))
    difference = "rank 1: another run than that of rank 0: --lr 0.0005, where rank 0 has 0.001; "
    assert told.count(difference) == 2, "once by rank 0, once in torchrun's summary"
    assert "exitcode  : 2" in told and "failed:" not in told and not (tmp_path / "m").exists()
