"""The benchmark scripts start, measure something and write it down. How fast anything is, is not looked at."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import results
from bench.case import Sizes
from bench.contestants.megazero_memory import largest
from bench.contestants.megazero_meter import Peaks
from bench.contestants.megazero_split import Clock
from bench.field import TABLES
from bench.field_offload import KINDS, SEARCHED
from bench.harness import Contestant, Match, Samples, Unavailable
from bench.held import run_held
from bench.op_cases import CASES
from bench.recorded import PARTS
from bench.script import tables_of
from bench.workload import Entry, Workload, entry_from, to_json, workload_from
from fused_ops.native.compile import levels_of_this_machine_type

ROOT = Path(__file__).resolve().parents[2]
TINY = Workload("tiny", layers=1, hidden=16, heads=2, sequence=8, vocabulary=64, micro_batch=1, threads=1)


def run_quick(script: str, folder: Path, *words: str, ranks: int = 0) -> dict[str, Any]:
    """What the script wrote. ranks: of torchrun, which not every script starts by itself."""
    launcher = [sys.executable, *(["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else [])]
    command = [*launcher, "-m", f"bench.{script}", "--quick", "--results", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".md").read_text().startswith("|") or "\n|" in path.with_suffix(".md").read_text()
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["machine"]["cores"] >= 1 and found["versions"]["torch"] and found["date"]
    return found


def peers(tmp_path: Path) -> None:
    """One table with one rival: turns of both, a ratio, memory above the imports."""
    found = run_quick("peers", tmp_path, "--tables", "W1", "--only", "plain")
    (rival,) = found["tables"]["W1"]["rivals"]
    assert "skipped" not in rival, rival
    assert rival["ratio"] > 0 and len(rival["seconds"]["megazero"]) == len(rival["seconds"]["rival"]) == 1
    assert all(value > 0 for value in rival["peak_mib_above_imports"].values())


def offloaded_peers(tmp_path: Path) -> None:
    """Every kind of state off the device, updated late beside updated on time where no search chooses that."""
    names = [f"offload-{kind}-late" for kind in KINDS if kind not in SEARCHED]
    found = run_quick("peers", tmp_path, "--tables", ",".join(names), "--only", "megazero")
    assert list(found["tables"]) == names
    for table in found["tables"].values():
        (rival,) = table["rivals"]
        assert "skipped" not in rival, rival
        assert rival["ratio"] > 0 and "--late-update" in table["megazero"]["settings"]["layout"]


def train(tmp_path: Path) -> None:
    """The parts of a pipeline whose ranks wait for each other, and the same checkout's turns beside it."""
    found = run_quick("train", tmp_path, "--tables", "pp", "--before", str(ROOT))
    layout = found["layouts"]["pp"]
    assert "skipped" not in layout, layout
    assert len(layout["parts_by_rank"]) == 2
    took = [parts[name] for parts in layout["parts_by_rank"] for name in ("forward", "backward", "optimizer")]
    assert min(took) > 0
    assert layout["parts_by_rank"][-1]["loss"] > 0, "the head is on the last rank"
    (own,), (other,) = layout["seconds"], layout["before"]["seconds"]
    assert layout["ratio"] == pytest.approx(other[0] / own[0])
    assert layout["before"]["commit"] == found["versions"]["commit"]


def demonstration(tmp_path: Path) -> None:
    """A run with all of its state on disks, what it exports, and its refusal without them, in control groups."""
    try:
        run_held(["true"], 1 << 30, ROOT, tmp_path)
    except OSError as reason:
        pytest.skip(f"control groups cannot be made: {reason}")
    found = run_quick("demonstration", tmp_path, "--folder", str(tmp_path))
    trained, exported, said = found["on_disks"], found["exported"], found["predicted"]
    assert found["without"]["status"] == 2 and not found["without"]["steps"]
    assert trained["status"] == exported["status"] == 0, trained["text"] + exported["text"]
    assert [set(step["parts"]) for step in trained["steps"]] == [set(PARTS)] * 2
    assert all(0 < step["parts"]["computes"] <= step["parts"]["step"] for step in trained["steps"])
    assert 2 * said["parameters"] < exported["bytes"] < 2.1 * said["parameters"], "in bf16"
    assert said["disk"] <= trained["disk"] < found["disk"]
    assert said["device"] + said["host"] < trained["resident"] < found["limit"]


def memory(tmp_path: Path) -> None:
    """The account adds up to the peak that the kernel tells of the process, on one process and on two that share
    memory.
    """
    found = run_quick("memory", tmp_path, "--tables", "W1,tp")
    for name in ("W1", "tp"):
        layout = found["layouts"][name]
        parts, tensors = layout["parts"], layout["tensors"]
        assert sum(parts.values()) == pytest.approx(layout["peak_mib_above_imports"], rel=0.03)
        assert sum(tensors.values()) == pytest.approx(parts["tensors of a step at their largest"])
        assert all(size > 0 for size in tensors.values()) and any("activation" in function for function in tensors)
        assert parts["model state: master"] == 2 * parts["model state: parameter"] > 0, "fp32 beside bf16"
        assert (parts["shared memory"] > 0) == (name == "tp")


def state_memory(tmp_path: Path) -> None:
    """What is allocated is what was predicted, the meter sees all of it, and what cannot run is named."""
    found = run_quick("state_memory", tmp_path, "--layouts", "pp2-dp2-z2")
    ranks = found["layouts"]["pp2-dp2-z2"]
    assert len(ranks) == 4 and not found["left_out"]
    for rank in ranks:
        held, phases = rank["held"], rank["peaks"]
        assert held["parameter"] == rank["predicted"]["weights"] and held["gradient"] == rank["predicted"]["gradients"]
        assert held["master"] + held["exp_avg"] + held["exp_avg_sq"] == rank["predicted"]["optimizer"]
        assert sum(held.values()) < phases["construction"]["end"] <= phases["construction"]["peak"]
        assert phases["construction"]["end"] < phases["step"]["peak"]


def ops(tmp_path: Path) -> None:
    found = run_quick("ops", tmp_path, "--only", "gelu")
    assert [row["name"] for row in found["ops"]] == [name for name in CASES if "gelu" in name]
    assert all(row["ours"] and row["theirs"] for row in found["ops"])


def exchange(tmp_path: Path) -> None:
    found = run_quick("exchange", tmp_path, ranks=2)
    assert all(row["shared_memory"][0] > 0 and row["gloo"][0] > 0 for row in found["collectives"])


def async_save(tmp_path: Path) -> None:
    found = run_quick("async_save", tmp_path, "--saves", "2", "--every", "2", "--folder", str(tmp_path))
    for way, part in (("async", "copy"), ("sync", "write")):
        one = found["ways"][way]
        assert len(one["seconds"]["saving"]) == 1 and len(one["parts"][part]) == 2 and one["bytes"] > 100_000
    assert all("; the step waited" in told for told in found["ways"]["async"]["told"] if told.startswith("saved"))


def generate(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = run_quick("generate", tmp_path)
    rows = found["generation"]
    cases = [(dtype, batch) for dtype in ("fp32", "bf16") for batch in (1, 8)]
    assert [(row["dtype"], row["batch"]) for row in rows] == cases
    assert all(row["ratio"] > 0 and len(row["ours"]) == len(row["theirs"]) == 1 for row in rows)
    assert all(row["same"] == row["batch"] for row in rows if row["dtype"] == "fp32"), "both sides generate the same"


def placement(tmp_path: Path) -> None:
    """Static placements under 80 %, those with disks left out, beside auto, which keeps to its budget."""
    found = run_quick("placement", tmp_path, "--no-disks")
    (one,) = found["budgets"].values()
    assert {"auto", "--offload-optimizer cpu:0.4"} < one["seconds"].keys()
    assert not any("nvme" in name for name in one["seconds"])
    assert all(min(steps) > 0 for steps in one["seconds"].values())
    assert 0 < one["taken"]["device"] <= one["limits"][0] < found["need"] and one["taken"]["host"] > 0
    assert one["settings"]["auto"]["offload_optimizer"].startswith("cpu") and one["rates"]["flops"] > 0


def checksum(tmp_path: Path) -> None:
    """Rates of each instruction set of this processor and of numpy, beside those of a plain read and copy."""
    found = run_quick("checksum", tmp_path)
    levels = [level for level in levels_of_this_machine_type() if level in found["rows"]]
    assert levels and list(found["rows"]) == ["a plain read, or copy", *levels, "numpy"]
    assert all(len(rates) == 1 and rates[0] > 0 for row in found["rows"].values() for rates in row.values())


def window_attention(tmp_path: Path) -> None:
    """Seconds of attention with windows and without, in both dtypes."""
    found = run_quick("window_attention", tmp_path)
    assert list(found["seconds"]) == ["64 bf16", "64 fp32"]
    for kinds in found["seconds"].values():
        assert {"no window", "a window, a cap"} < kinds.keys()
        assert all(len(rounds) == 1 and min(rounds[0]) > 0 for rounds in kinds.values())


CHECKS = [peers, offloaded_peers, train, memory, demonstration, state_memory, ops, exchange, async_save, generate]
CHECKS += [placement, checksum, window_attention]
SCRIPTS = {check.__name__: check for check in CHECKS}


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    SCRIPTS[name](tmp_path)


def test_what_was_alive_when_that_was_most() -> None:
    """Of a trace: what is freed before the peak, made after it, or freed without having been made in
    it does not count.
    """

    def change(ts: int, address: int, size: int) -> dict[str, Any]:
        return {"name": "[memory]", "tid": 1, "ts": ts, "args": {"Addr": address, "Bytes": size}}

    def call(name: str, ts: int, dur: int, tid: int = 1) -> dict[str, Any]:
        return {"cat": "python_function", "name": name, "tid": tid, "ts": ts, "dur": dur}

    calls = [call("megazero/a.py", 0, 100), call("fused_ops/b.py", 10, 15), call("torch/c.py", 12, 1)]
    calls += [call("megazero/d.py", 0, 50, tid=2)]
    before = [(5, 1, 40), (6, 9, -70), (11, 2, 30), (12, 1, -40), (20, 3, 50), (30, 2, -30)]
    behind = [(31, 4, 10), (120, 5, 25), (121, 4, -10), (122, 6, 20)]
    changes = [change(*numbers) for numbers in (*before, *behind)]
    assert largest([*reversed(changes), *calls]) == {"fused_ops/b.py": 50, "elsewhere": 45}


def test_the_peak_of_a_phase_counts_what_was_there_before() -> None:
    peaks = Peaks()
    for phase, sizes in (("construction", (100, 50, -50)), ("between", (500,)), ("step", (-300,)), ("step", (40,))):
        peaks.add(phase, sizes)
    assert peaks.phases == {
        "construction": {"peak": 150, "end": 100},
        "between": {"peak": 600, "end": 600},
        "step": {"peak": 340, "end": 340},
    }


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_contestants_of_zero_3_train_the_same_model() -> None:
    """Without compilation, and of those that are installed."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "bench.agreement", "--quick", "--steps", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "FSDP2: " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in CASES if "DeepSpeed" not in name and "apex" not in name])
def test_an_op_and_its_rival_run(name: str) -> None:
    torch.manual_seed(3)
    case = CASES[name](Sizes.tiny())
    assert case.name == name and case.bytes > 0
    for run in (case.ours, case.theirs):
        run(*case.prepare())


@pytest.mark.slow
def test_a_contestant_that_is_not_there_says_why() -> None:
    contestant = Contestant(TINY, Entry("nobody", "nobody"))
    try:
        with pytest.raises(Unavailable, match=r"load: ModuleNotFoundError: .*nobody"):
            contestant.prepare(1)
    finally:
        contestant.stop()


def test_another_checkout_runs_its_own_code(tmp_path: Path) -> None:
    """Also where another is installed, or on PYTHONPATH."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "child.py").write_text(
        "import bench, json, sys; print(json.dumps({'file': bench.__file__}), file=open(int(sys.argv[2]), 'w'))"
    )
    contestant = Contestant(TINY, Entry("nobody", "nobody"), patience=60, root=tmp_path)
    try:
        assert contestant.hear("load") == [{"file": str(tmp_path / "bench" / "__init__.py")}]
    finally:
        contestant.stop()


def test_the_ratio_is_of_neighbouring_turns() -> None:
    """A machine that becomes three times slower halfway does not change it."""
    ours, theirs = Samples([[1.0, 1.1, 1.0], [3.0, 3.0, 9.0]]), Samples([[2.0, 2.0, 2.0], [6.0, 6.0, 6.0]])
    assert Match(ours, theirs, (10, 10), (1, 1), {}).ratio == 2.0
    assert Match(ours, theirs, (20, 10), (1, 1), {}).ratio == 4.0


def test_the_clock_gives_every_second_to_one_part() -> None:
    clock = Clock()
    began = time.perf_counter()
    wait = clock.around("communication", time.sleep)

    def backward() -> None:
        time.sleep(0.01)
        wait(0.02)

    clock.around("backward", backward)()
    clock.switch("other")
    assert clock.seconds["communication"] >= 0.02 and clock.seconds["backward"] >= 0.01
    assert sum(clock.seconds.values()) == pytest.approx(time.perf_counter() - began, abs=0.01)


def test_entries_travel_as_json() -> None:
    for table in TABLES:
        for entry in (table.ours, *table.rivals):
            assert entry_from(to_json(entry)) == entry
        assert workload_from(to_json(table.work)).samples == table.work.samples


def test_everybody_of_a_table_trains_as_many_tokens() -> None:
    for table in TABLES:
        assert {entry.tokens(table.work) for entry in (table.ours, *table.rivals)} == {table.ours.tokens(table.work)}


def test_a_table_is_aligned() -> None:
    lines = results.table(("name", "ms"), [["a", "1"], ["longer", "1,234"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[2] == "| a      |     1 |"


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="--tables: no such table: W9; there are W1, "):
        tables_of(argparse.Namespace(tables="W1,W9", quick=False))
