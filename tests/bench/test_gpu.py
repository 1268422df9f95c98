"""The benchmark of a card, rehearsed on the CPU: all of its code that needs no card runs, and what it concludes from
numbers is right.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import flex_options, gpu, gpu_ops, gpu_report, gpu_train
from bench.case import Sizes
from bench.harness import Unavailable
from bench.op_cases import CASES
from megazero.system.device import card_peak_flops

ROOT = Path(__file__).resolve().parents[2]


def rehearse(*words: str) -> str:
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_ops_are_rehearsed(tmp_path: Path) -> None:
    said = rehearse("--parts", "ops", "--only", "residual + ", "--results", str(tmp_path))
    (path,) = tmp_path.glob("*-gpu-rehearsal.json")
    found = json.loads(path.read_text())
    measured = [tuple(item["item"]) for item in found["ops"] if "skipped" not in item]
    assert measured == [item for item in gpu_ops.items() if "residual + " in item[0]], found["ops"]
    assert all(len(times) == 2 and min(times) > 0 for item in found["ops"] for times in item["seconds"].values())
    assert all(set(item["seconds"]) == {"forward", "backward"} for item in found["ops"])
    assert found["facts"]["copy_bytes_per_second"] > 0 and "rehearsal" in found["note"]
    text = path.with_suffix(".md").read_text()
    assert "rehearsal" in text.splitlines()[0] and "rehearsal" in said.splitlines()[0]
    assert "| residual + layernorm" in text


@pytest.mark.slow
def test_training_is_rehearsed(tmp_path: Path) -> None:
    """Ours; --cuda-graphs, which a CPU has none of, is left out with the program's own words."""
    written = report(tmp_path)
    gpu.measure_training(written, "GPT 1.3B, megazero", True, time.monotonic() + 3600)
    written.finish()
    (path,) = tmp_path.glob("*-gpu-rehearsal.json")
    runs = {run["name"]: run for run in json.loads(path.read_text())["training"]}
    assert set(runs) == {"megazero", "megazero --cuda-graphs", "megazero --fp8", "megazero --fp8 --cuda-graphs"}
    assert "ConfigError" in runs["megazero --cuda-graphs"]["skipped"]
    for name in ("megazero", "megazero --fp8"):
        run = runs[name]
        assert len(run["step_seconds"]) == 2 and run["tokens_per_second"] > 0
        assert run["peak_gib"] > 0 and 4 < run["loss"] < 6


@pytest.mark.slow
def test_a_rival_is_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    """Eager. Nothing is written where no folder is named."""
    results = ROOT / "bench" / "results"
    before = sorted(results.iterdir())
    gpu.measure_training(report(), "GPT 1.3B, transformers, sdpa", True, time.monotonic() + 3600)
    said = capsys.readouterr().out
    assert "tokens/s" in said and "skipped" not in said
    assert sorted(results.iterdir()) == before


@pytest.mark.slow
def test_flex_options_are_rehearsed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All bodies run, and the options change nothing where they do nothing: in eager."""
    monkeypatch.setattr(sys, "argv", ["flex_options", "--rehearse"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flex_options.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["flex"] * 4 + ["softmax", "flash,"]
    assert all("off by 0.0e+00" in line for line in lines[:4]) and "forward" in lines[4]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_everything_is_rehearsed(tmp_path: Path) -> None:
    """Nothing is left out but for a reason that a CPU has; a busy machine has an hour for it."""
    rehearse("--results", str(tmp_path), "--seconds", "3600")
    (path,) = tmp_path.glob("*-gpu-rehearsal.json")
    found = json.loads(path.read_text())
    assert {tuple(item["item"]) for item in found["ops"]} | {("facts", "", "")} == set(gpu_ops.items())
    assert {run["name"] for run in found["training"]} == {runner.entry.name for runner in gpu_train.RUNNERS}
    skipped = {entry["skipped"] for entry in [*found["ops"], *found["training"]] if "skipped" in entry}
    assert all("apex" in reason or "ConfigError" in reason for reason in skipped), skipped


def report(folder: Path | None = None) -> gpu.Report:
    return gpu.Report(folder, {"rehearse": True}, {"card": {}, "note": "", "facts": {}, "ops": [], "training": []})


@pytest.mark.slow
def test_an_item_that_ends_its_process_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four: the second ends the process without a word, the third hangs, the last is measured by a third process."""
    items = [(name, "", "ours") for name in ("good", "dies", "hangs", "also good")]
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, time\n"
        "for item in json.loads(sys.argv[1]):\n"
        "    print('a word that is no result')\n"
        "    print(json.dumps({'begin': item}), flush=True)\n"
        "    if item[0] == 'dies': os._exit(7)\n"
        "    if item[0] == 'hangs': time.sleep(60)\n"
        "    print(json.dumps({'item': item, 'seconds': {'whole': [1.0]}}), flush=True)\n"
    )
    lines_of = gpu.lines_of
    monkeypatch.setattr(
        gpu, "lines_of", lambda command, patience: lines_of([command[0], str(program), command[3]], patience)
    )
    monkeypatch.setattr(gpu_ops, "items", lambda: items)
    monkeypatch.setattr(gpu, "ITEM_SECONDS", 3.0)
    found = report()
    gpu.measure_ops(found, "", True, time.monotonic() + 60)
    assert {item["item"][0]: item.get("skipped") for item in found.found["ops"]} == {
        "good": None,
        "dies": "its process ended or hung",
        "hangs": "its process ended or hung",
        "also good": None,
    }
    gpu.measure_ops(late := report(), "", True, time.monotonic() - 1)
    assert [item["skipped"] for item in late.found["ops"]] == ["no time was left"] * 4


class Refusing:
    """A contestant that fits into memory with two samples at a time."""

    def __init__(self, runner: gpu_train.Runner, plan: gpu_train.Plan, micro_batch: int, deadline: float) -> None:
        self.micro_batch, self.contestant = micro_batch, self
        self.work, self.stopped = gpu_train.replace(runner.work, micro_batch=micro_batch), False

    def measure(self, plan: gpu_train.Plan) -> dict[str, Any]:
        if self.micro_batch > 2:
            raise Unavailable("steps: OutOfMemoryError: CUDA out of memory")
        return {"step_seconds": [3.0, 2.0, 2.5], "micro_batch": self.micro_batch}

    def stop(self) -> None:
        self.stopped = True


def test_micro_batches_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_train, "Started", Refusing)
    runner, other = gpu_train.RUNNERS[:2]
    plan, said = gpu_train.Plan(), list[str]()
    ((_, found),) = gpu_train.trained([runner], plan, time.monotonic() + 1000, said.append)
    assert found["micro_batch"] == 2 and len([line for line in said if "does not fit" in line]) == 2
    assert found["seconds"] == 2.5 and found["tokens_per_second"] == 32 * 2048 / 2.5
    late = list(gpu_train.trained([runner, other], plan, time.monotonic() + 5, said.append))
    assert [("left" in result["skipped"]) for _, result in late] == [True, True]


def test_flops_are_those_of_the_formula() -> None:
    for work in (gpu_train.GPT, gpu_train.BLOOM):
        layers, h, s, v = work.layers, work.hidden, work.sequence, work.vocabulary
        formula = 72 * 32 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        assert gpu_train.flops_of(work, 32) == pytest.approx(formula, rel=1e-12)


def test_micro_batches_divide_the_global_batch() -> None:
    assert all(gpu_train.GLOBAL_BATCH % runner.micro_batch == 0 for runner in gpu_train.RUNNERS)
    assert sum(runner.need for runner in gpu_train.RUNNERS) < gpu.SECONDS - gpu.OPS_SECONDS + 100, (
        "what comes last would never run"
    )


TIMED = sorted({item[:2] for item in gpu_ops.items() if item[0] != "facts" and "apex" not in item[0]})


@pytest.mark.parametrize(("name", "dtype"), TIMED)
def test_bytes_of_an_op_are_counted_by_part(name: str, dtype: str) -> None:
    case, bench = CASES[name](Sizes.tiny()), gpu_ops.Bench.on(torch.device("cpu"), tiny=True)
    for who in ("ours", "torch"):
        seconds = gpu_ops.measured(bench, (name, dtype, who), Sizes.tiny())["seconds"]
        assert set(seconds) == ({"forward", "backward"} if case.forward_bytes else {"whole"})
    assert case.moves and case.forward_bytes < case.bytes


def found_numbers() -> dict[str, Any]:
    """An H100 that copies 3 TB/s; a norm that takes as long as 90% of that needs, and half as long as torch's."""

    def item(who: str, milliseconds: float) -> dict[str, Any]:
        seconds = {"forward": [1e-3 * milliseconds] * 3, "backward": [2e-3 * milliseconds] * 3}
        about = {"item": ["layernorm", "bfloat16", who], "shape": "x", "seconds": seconds}
        return {**about, "bytes": {"forward": 2.7e9, "backward": 4.5e9}}

    def run(name: str, kind: str, tokens: float, gib: float, share: float) -> dict[str, Any]:
        numbers = {"tokens_per_second": tokens, "peak_gib": gib, "flops_per_second": share * 989e12}
        numbers |= {"seconds": 1.0, "micro_batch": 8}
        return {"model": "GPT", "name": name, "kind": kind, "note": "", "first_step_seconds": 3.0, **numbers}

    runs = [run("ours", "ours", 100, 40, 0.4), run("graphs", "ours", 120, 40, 0.48), run("hf", "eager", 60, 50, 0.2)]
    runs += [run("slow", "compiled", 80, 30, 0.3), run("hf compiled", "compiled", 110, 30, 0.4)]
    runs += [run("8 bits", "fp8", 150, 40, 0.6)]
    runs.append({"model": "GPT", "name": "lost", "kind": "ours", "note": "", "skipped": "build: it broke\nlines"})
    facts = {"copy_bytes_per_second": 3e12, "matmul_flops_per_second": 8e14, "matmul_width": 8192}
    ops = [item("ours", 1.0), item("torch", 2.0), item("compiled", 0.8)]
    ops += [{"item": ["softmax", "bfloat16", "ours"], "skipped": "why"}]
    return {"card": {"card": "NVIDIA H100 80GB HBM3"}, "note": "", "facts": facts, "ops": ops, "training": runs}


def test_verdicts() -> None:
    lines = list(gpu_report.op_verdicts(found_numbers())) + list(gpu_report.training_verdicts(found_numbers()))
    assert "layernorm, bfloat16, forward: of the copy's bandwidth: 90.0% (target 85%): reached" in lines
    assert (
        "layernorm, bfloat16, backward: of the copy's bandwidth: 75.0% (target 85%): not reached, 0.88 of it" in lines
    )
    assert "layernorm, bfloat16, forward: speed beside torch eager: 2.00 (target 1): reached" in lines
    assert "layernorm, bfloat16, forward: speed beside torch.compile: 0.80 (target 1): not reached, 0.80 of it" in lines
    assert "GPT: MFU of graphs: 48.0% (target 50%): not reached, 0.96 of it" in lines
    assert "GPT: speed beside hf: 2.00 (target 1.5): reached" in lines
    assert "GPT: speed beside hf compiled: 1.09 (target 1.15): not reached, 0.95 of it" in lines
    assert "GPT: peak memory of hf compiled over ours: 0.75 (target 1): not reached, 0.75 of it" in lines
    assert "GPT: 8 bits beside bf16: 1.25 (target 1.25): reached" in lines
    text = gpu_report.as_text(found_numbers())
    assert "* GPT, lost: build: it broke\n" in text + "\n" and "* softmax, bfloat16, ours: why" in text
    assert card_peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == gpu_report.H100
