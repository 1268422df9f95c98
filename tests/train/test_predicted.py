"""A run says of its step what a plan says, by the entry of its own devices; without one it says nothing."""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.cli.main import main
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.data.progress import silent
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.own_devices import hardware_problems, own_step
from megazero.report.banner import prediction_sentence
from megazero.report.run_report import PredictionReport
from megazero.system import device as devices
from megazero.train.prepare import prepare
from megazero.train.report import prediction_or_why_not
from megazero.train.requirements import machine_problems
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

ENTRY = """
    kind: cpu
    memory: [16e9, me]
    flops: {bf16: [100e9, me], fp32: [80e9, me]}
    bandwidth: [10e9, me]
    processors: [2, me]
    inside: [5e9, me]
    host: [5e9, me]
    host_memory: [16e9, me]
    watts: [50, me]
    interconnect: [1xeth10, me]
    constants:
      {products: [1, me], bandwidth: [1, me], misaligned: [1, me], launch: [1e-5, me], hiding: [1, me],
      straggling: [0, me], latency: [1e-5, me], inside: [1, me], between: [1, me], strided: [1, me], blocking: [1, me],
      update: [28, me], context: [3e8, me]}
"""
DESK = f"""sources: {{me: "made up for a test of predictions"}}
gpus:
  desk:{ENTRY}"""
MODEL = [*small_model(4, heads=4), "--global-batch-size", "8", "--train-iters", "1", "--device", "cpu", "--eod-id", "0"]
CARD = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 30003 --seq-length 512 --data-path x "
CARD += "--device cuda --eod-id 0 --global-batch-size 16 --micro-batch-size 2 --pp 2 --precision bf16 --train-iters 1"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    file = tmp_path / "desk.yaml"
    file.write_text(DESK)
    return file


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """What a plan says of its first layout, and its flags."""
    assert main(["plan", *words, "--json"]) == 0
    best: dict[str, Any] = json.loads(capsys.readouterr().out)["best"][0]
    assert main(["plan", *words, "--emit-flags"]) == 0
    return best, shlex.split(capsys.readouterr().out)


def banner_on_rank(rank: int, flags: list[str], size: int, fault: str | None = None) -> str:
    """What a rank prints while its job is built. fault: the name of a number of a plan that fails."""
    with redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(ClusterStep, fault, property(lambda step: 1 // 0))
        job_on_rank(rank, size, flags)[0].close()
    return " ".join(said.getvalue().split())


def test_a_run_says_what_a_plan_says(
    desk: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*MODEL, *data_flags(corpus, tmp_path / "cache"), "--precision", "fp32", "--pp", "2"]
    best, flags = planned([*words, "--hardware", str(desk), "--gpu", "desk", "--gpus", "2"], capsys)
    report = tmp_path / "report.json"
    flags += ["--hardware", str(desk), "--report-json", str(report)]
    first, second = run_ranks(2, banner_on_rank, flags, 2)
    said = json.loads(report.read_text())["prediction"]
    assert said == {
        "cluster": "2 x desk, 1 node",
        "seconds": best["seconds"],
        "tokens_per_second": best["tokens_per_second"],
        "mfu": None,
        "memory": best["memory_bytes"],
        "room": 16_000_000_000,
    }
    assert f"predicted {prediction_sentence(PredictionReport(**said))}" in first
    assert f"{best['seconds']:.4g} s a step" in first and "`megazero plan` says of 2 x desk" in first
    assert second == "", "the others go on meanwhile"


def test_a_run_without_an_entry_says_nothing(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), "--precision", "fp32"]
    (said,) = run_ranks(1, banner_on_rank, flags, 1)
    assert "allocator" in said and "predict" not in said


def test_an_error_of_the_arithmetic_is_a_note_and_stops_no_run(desk: Path, corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), "--precision", "fp32", "--hardware", str(desk)]
    (said,) = run_ranks(1, banner_on_rank, flags, 1, "seconds")
    told = "Worth knowing - no prediction of a step, for an error in its arithmetic: ZeroDivisionError: "
    assert told in said and "predicted" not in said


def banner_with_threads(rank: int, flags: list[str], own: int) -> str:
    """The banner of a rank with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        return banner_on_rank(rank, flags, 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", [1, 2])
def test_threads_that_were_not_measured_are_told(own: int, desk: Path, corpus: Path, tmp_path: Path) -> None:
    desk.write_text(DESK.replace("    watts:", "    threads: [2, me]\n    watts:"))
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), "--precision", "fp32", "--hardware", str(desk)]
    (said,) = run_ranks(1, banner_with_threads, flags, own)
    told = "was measured with 2 threads a rank, and this run's ranks have 1 (OMP_NUM_THREADS)"
    assert "predicted" in said and (told in said) == (own == 1)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, memory: int, cards: int = 4) -> torch.device:
    """A card of that name."""
    monkeypatch.setattr(devices, "name", lambda device: name)
    monkeypatch.setattr(devices, "total_memory_bytes", lambda device: memory)
    monkeypatch.setattr(devices, "device_count", lambda device: cards)
    return torch.device("cuda", 0)


def test_a_card_has_the_entry_of_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    best, flags = planned([*CARD.split(), "--gpu", "a100-80gb", "--gpus", "8", "--nodes-of", "4"], capsys)
    run, card = parse_run(flags, 8), pretend(monkeypatch, "NVIDIA A100-SXM4-80GB", 85_094_825_984)
    step = own_step(run, card, 8, 4)
    assert step is not None
    said = PredictionReport.of(step)
    assert (said.seconds, said.memory) == (best["seconds"], best["memory_bytes"])
    assert (said.mfu, said.room) == (best["mfu"], 84_980_000_000)
    assert said.cluster == "8 x a100-80gb, 2 nodes of 4, 8 x hdr between them"
    ramp = parse_run([*flags, "--rampup-batch-size", "8", "8", "64"], 8)
    assert prediction_or_why_not(ramp, card, 8, 4) == (said, ""), "of steps of the whole batch"


@pytest.mark.parametrize(
    ("name", "memory", "ranks", "ranks_here", "words"),
    [
        ("NVIDIA GeForce RTX 4090", 25_400_000_000, 4, 4, ""),
        ("NVIDIA A100-SXM4-80GB", 85_094_825_984, 6, 4, "--pp 1 --global-batch-size 12"),
        ("NVIDIA A100-SXM4-80GB", 85_094_825_984, 8, 8, ""),
        ("Tesla V100-SXM2-32GB", 34_079_899_648, 4, 4, ""),
    ],
    ids=["a card that nobody knows", "uneven nodes", "cards that ranks share", "a card without this precision"],
)
def test_other_cards_have_no_prediction(
    name: str, memory: int, ranks: int, ranks_here: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, card = parse_run([*CARD.split(), *words.split()], ranks), pretend(monkeypatch, name, memory)
    assert prediction_or_why_not(run, card, ranks, ranks_here) == (None, "")
    known = pretend(monkeypatch, "NVIDIA A100-SXM4-80GB", 85_094_825_984)
    assert own_step(parse_run(CARD.split(), 4), known, 4, 4) is not None


def test_too_much_memory_is_said() -> None:
    said = prediction_sentence(PredictionReport("1 x h100, 1 node", 1.23456, 2e6, 0.4321, 3 << 30, 2 << 30))
    assert said == (
        "1.235 s a step, 2.00M tokens a second (43.2% MFU); the fullest rank takes 3.00 GiB of 2.00 GiB, which is too "
        "much; as `megazero plan` says of 1 x h100, 1 node"
    )


@pytest.mark.parametrize(
    ("old", "new", "words", "told"),
    [
        ("", "", "", None),
        ("", "", "--precision fp64", r"desk computes in bf16, fp32, not in fp64"),
        (
            "kind: cpu",
            "kind: cuda",
            "",
            r"has no entry for .*, which is of kind cpu; it has: desk \(cuda\); nearest: --hardware none",
        ),
        ("  desk:", f"  other:{ENTRY}  desk:", "", r"has several entries for .*: other \(cpu\), desk \(cpu\)"),
        ("1xeth10", "1xether", "", r"desk: interconnect 1xether: there is no such link"),
        ("update: [28, me], ", "", "", r"desk: its entry has no constants update"),
        ("[10e9, me]", "10e9", "", r"desk: bandwidth: '10e9' is no pair of a value and its source"),
    ],
)
def test_a_wrong_file_is_an_error_before_anything_is_made(
    desk: Path, old: str, new: str, words: str, told: str | None
) -> None:
    desk.write_text(DESK.replace(old, new, 1) if old else DESK)
    run = parse_run([*MODEL, "--precision", "fp32", "--hardware", str(desk), *words.split()], 1)
    problems = hardware_problems(run)
    assert [problem for problem in machine_problems(run) if "--hardware" in problem] == problems
    if told is None:
        assert problems == []
    else:
        (problem,) = problems
        assert re.match(f"--hardware {desk}: .*{told}", problem)


def test_a_file_that_is_not_there_ends_the_start(corpus: Path, tmp_path: Path) -> None:
    missing, cache = tmp_path / "nowhere.yaml", tmp_path / "cache"
    words = [*MODEL, *data_flags(corpus, cache), "--precision", "fp32", "--hardware", str(missing)]
    with pytest.raises(ConfigError) as told:
        prepare(parse_run(words, 1), 1, silent)
    (problem,) = told.value.problems
    assert problem.startswith("--hardware ") and str(missing) in problem and not cache.exists()
