"""`megazero plan`: what it prints is true of the run that its flags give."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megazero.cli.main import main
from megazero.config.parse import parse_run
from tests.docs.pages import ROOT

MODEL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 30003 --seq-length 512 --precision bf16 "
    "--global-batch-size 16 --position-embedding learned --data-path x --eod-id 0"
)
CLUSTER = "--gpus 4 --gpu a100-40gb"
ROW = "layers,hidden,heads,seq,gpus,tp,pp,dp,micro_batch,global_batch"


def plan(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["plan", *words.split()])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_json_has_the_best_layouts_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(f"{MODEL} {CLUSTER} --tokens 1e9 --price 2 --json", capsys)
    best = json.loads(out)["best"]
    assert status == 0 and len(best) >= 2
    seconds = [layout["seconds"] for layout in best]
    assert seconds == sorted(seconds) and all(layout["fits"] for layout in best)
    first = best[0]
    assert first["tp"] * first["pp"] * first["dp"] == 4
    assert sum(first["parts"].values()) == pytest.approx(first["seconds"], rel=1e-6)
    assert first["tokens_per_second"] == pytest.approx(16 * 512 / first["seconds"])
    assert first["days"] == pytest.approx(1e9 / first["tokens_per_second"] / 86_400)
    assert first["kwh"] == pytest.approx(first["days"] * 24 * 4 * 400 / 1000)
    assert first["price"] == pytest.approx(first["days"] * 24 * 4 * 2)
    peaks = [sum(stage["device"].values()) for stage in first["stages"]]
    assert first["memory_bytes"] == max(peaks)
    assert all("slower" not in layout and "why_slower" in layout for layout in best[1:])


def test_a_step_of_another_program_takes_longer_and_keeps_more(capsys: pytest.CaptureFixture[str]) -> None:
    # large enough that no host is slower than its device
    layout = f"{MODEL} --hidden-size 8192 --seq-length 1024 --gpus 4 --gpu a100-80gb --tp 2 --pp 2 --micro-batch-size 2"
    layout += " --recompute-granularity full"
    layouts = dict[str, dict[str, Any]]()
    for program in ("megazero", "megatron-lm", "megatron-deepspeed"):
        status, out, _ = plan(f"{layout} --program {program} --json", capsys)
        told = json.loads(out)
        assert status == 0 and told["program"] == program
        layouts[program] = first = told["best"][0]
        assert first["memory_bytes"] == max(sum(stage["device"].values()) for stage in first["stages"])
    ours, lm, deepspeed = layouts.values()
    # their stages wait, and their loss moves more
    assert min(lm["seconds"], deepspeed["seconds"]) > 1.01 * ours["seconds"]
    # Megatron-DeepSpeed keeps 4.7 bytes more for each parameter
    assert "program" not in ours["stages"][0]["device"] and deepspeed["stages"][0]["device"]["program"] > 4.7 * 1e6
    assert "zb-" in ours["flags"] and "1f1b" in deepspeed["flags"]
    status, out, _ = plan(f"{layout} --program megatron-lm", capsys)
    assert status == 0 and ", steps of megatron-lm; global batch 16" in out.splitlines()[0]


def test_constants_that_are_borrowed_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    layout = f"{MODEL} --gpus 4 --tp 2 --pp 1"
    _, ours, _ = plan(f"{layout} --gpu h100", capsys)
    _, out, _ = plan(f"{layout} --gpu mi300x", capsys)
    told = "constants  of h100: no measured step of mi300x is known"
    assert told in out and "no measured step" not in ours
    assert json.loads(plan(f"{layout} --gpu mi300x --json", capsys)[1])["constants_of"] == "h100"


def test_the_step_of_bloom(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the page, beside the 105.2 s that steps took."""
    page = (ROOT / "docs/how-to/plan.md").read_text()
    (words,) = re.findall(r"^megazero plan (.* --program megatron-deepspeed .*)$", page, re.MULTILINE)
    status, out, _ = plan(f"{words} --json", capsys)
    (best,) = json.loads(out)["best"]
    assert status == 0 and abs(best["seconds"] / 105.2 - 1) < 0.05
    (written,) = re.findall(r"105.2 s that BLOOM was trained with are predicted \((.*?) s\)", page)
    assert f"{best['seconds']:.1f}" == written


def test_its_flags_and_its_file_are_a_run_with_that_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"{MODEL} {CLUSTER} --pp 2"
    status, out, _ = plan(f"{words} --emit-flags", capsys)
    run = parse_run(out.split(), 4)
    assert status == 0 and run.parallel.pp == 2 and run.model.hidden_size == 1024
    file = tmp_path / "plan.yaml"
    assert plan(f"{words} --emit-flags {file}", capsys)[0] == 0
    of_file = parse_run(["--config", str(file)], 4)
    assert of_file.parallel == parse_run(["--device", "cuda", *out.split()], 4).parallel
    assert of_file.schedule.micro_batch_size == run.schedule.micro_batch_size


def test_flags_with_blanks_are_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    pattern = "window:64 x3, full"
    words = [*f"{MODEL} {CLUSTER} --tp 2 --pp 1".split(), "--layer-pattern", pattern, "--emit-flags"]
    assert main(["plan", *words]) == 0
    run = parse_run(shlex.split(capsys.readouterr().out), 4)
    assert str(run.model.layer_pattern) == pattern


def test_a_ramp_is_kept_with_sizes_that_the_layout_shares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two replicas with micro-batches of 4 share no 4 samples. From 8 in steps of 8 the batch of 32 is met."""
    model = MODEL.replace("--global-batch-size 16", "--global-batch-size 32")
    words = f"{model} {CLUSTER} --tp 2 --pp 1 --micro-batch-size 4 --rampup-batch-size 4 4 640"
    file = tmp_path / "plan.yaml"
    assert plan(f"{words} --emit-flags {file}", capsys)[0] == 0
    assert parse_run(["--config", str(file)], 4).schedule.rampup_batch_size == (8, 8, 640)
    assert "--rampup-batch-size 8 8 640" in plan(f"{words} --emit-flags", capsys)[1]


@pytest.mark.parametrize(
    ("ramp", "kept"),
    [("192 16 9000", None), ("4 28 640", (8, 24, 640)), ("4 5 640", (8, 8, 640)), ("32 5 640", (32, 8, 640))],
)
def test_a_ramp_to_another_batch_is_no_mistake_of_a_plan(
    ramp: str, kept: tuple[int, ...] | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = MODEL.replace("--global-batch-size 16", "--global-batch-size 32")
    words = f"{model} {CLUSTER} --tp 2 --pp 1 --micro-batch-size 4 --rampup-batch-size {ramp}"
    file = tmp_path / "plan.yaml"
    assert plan(f"{words} --emit-flags {file}", capsys)[0] == 0
    of_flags = parse_run(shlex.split(plan(f"{words} --emit-flags", capsys)[1]), 4)
    assert (
        of_flags.schedule.rampup_batch_size == parse_run(["--config", str(file)], 4).schedule.rampup_batch_size == kept
    )
    word = "none" if kept is None else " ".join(map(str, kept))
    assert f"does not fit this layout; nearest: --rampup-batch-size {word}\n" in plan(words, capsys)[1]


def test_a_page_replaces_pages_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words, notes = f"{MODEL} {CLUSTER} --tp 2 --pp 1 --micro-batch-size 4", tmp_path / "notes.txt"
    notes.write_text("mine\n")
    status, out, err = plan(f"{words} --report {notes}", capsys)
    assert (status, out, notes.read_text()) == (2, "", "mine\n")
    assert f"--report {notes}: is there already and is no page of megazero" in err
    page = tmp_path / "plan.html"
    assert plan(f"{words} --report {page}", capsys)[0] == plan(f"{words} --report {page}", capsys)[0] == 0
    status, _, err = plan(f"{words} --report {page} --measured {notes}", capsys)
    assert status == 2 and str(notes) in err


def test_a_file_of_flags_replaces_files_of_runs_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words, notes = f"{MODEL} {CLUSTER} --tp 2 --pp 1 --micro-batch-size 4", tmp_path / "notes.yaml"
    notes.write_text("mine: 1")
    status, _, err = plan(f"{words} --emit-flags {notes}", capsys)
    assert (status, notes.read_text()) == (2, "mine: 1") and "is there already and is no file of a run" in err
    file = tmp_path / "plan.yaml"
    assert plan(f"{words} --emit-flags {file}", capsys)[0] == plan(f"{words} --emit-flags {file}", capsys)[0] == 0


@pytest.mark.parametrize(
    "place", ["--report /proc/plan.html", "--report /proc/a/b.html", "--emit-flags /proc/plan.yaml"]
)
def test_a_folder_that_takes_no_file_is_told_before_the_search(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("megazero.plan.cluster.layout_search.LayoutSearch.run")
    status, out, err = plan(f"{MODEL} {CLUSTER} {place}", capsys)
    assert (status, out) == (2, "") and f"{place}: its folder takes no file" in err


def test_what_is_fixed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(f"{MODEL} {CLUSTER} --tp 2 --pp 1 --emit-flags", capsys)[1]
    assert out.count("--tp 2") == out.count("--pp 1") == out.count("--micro-batch-size") == 1


def test_arithmetic_that_leaves_no_layout_is_no_want_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--gpus 4 --pp 3", "--gpus 7"):
        status, _, err = plan(f"{MODEL} --gpu a100-40gb {words}", capsys)
        assert status == 1 and "divide the global batch of 16" in err and "model state" not in err


def test_text_names_the_layout_and_its_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "deep" / "plan.html"
    status, out, err = plan(f"{MODEL} {CLUSTER} --tp 2 --micro-batch-size 4 --report {page}", capsys)
    assert status == 0 and str(page) in err
    assert "4 x a100-40gb, 1 node; global batch 16" in out
    assert "--tp 2" in out and "--micro-batch-size 4" in out and "optimizer" in out
    html = page.read_text()
    assert "The step" in html and "Layouts" in html and "--micro-batch-size 4" in html


def test_stages_with_the_same_bytes_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Under zb-h1 each stage is looked at for itself."""
    fixed = "--tp 1 --pp 8 --pipeline-schedule zb-h1 --micro-batch-size 1 --zero-stage 0 --num-layers 14"
    status, out, err = plan(f"{MODEL} --gpus 8 --gpu a100-40gb {fixed}", capsys)
    assert status == 0, err
    lines = out.split("Memory of a rank of each stage, in GiB\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1-2", "3-4", "5-6", "7"]
    assert all(len(line) <= 100 for line in lines)


def test_an_open_micro_batch_divides_every_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One that the user gives, in a file too, has to divide it."""
    words = f"{MODEL.replace('--global-batch-size 16', '--global-batch-size 15')} {CLUSTER} --tp 1 --pp 4"
    status, out, _ = plan(f"{words} --json", capsys)
    assert status == 0 and json.loads(out)["best"][0]["flags"].startswith("--tp 1 --pp 4 --micro-batch-size ")
    file = tmp_path / "run.yaml"
    file.write_text("schedule:\n  micro_batch_size: 2\n")
    for given in ("--micro-batch-size 2", f"--config {file}"):
        status, _, err = plan(f"{words} {given}", capsys)
        assert status == 2 and "--global-batch-size 15 is not a multiple of --micro-batch-size 2" in err


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            "",
            ["--gpus: is missing", "--gpu: is missing", "--vocab-size: is missing", "--global-batch-size: is missing"],
        ),
        (f"{MODEL} --gpus 4 --gpu v100", ["--precision bf16: v100 computes in fp16, fp32, fp64"]),
        (f"{MODEL} {CLUSTER} --tokens 0 --price -1", ["--tokens 0: must be", "--price -1: must be"]),
        (f"{MODEL} {CLUSTER} --tp 3x", ["--tp"]),
        (
            f"{MODEL} {CLUSTER} --token 5 --interconect 2xhdr --emit-flag",
            [f"did you mean {flag}?" for flag in ("--tokens", "--interconnect", "--emit-flags")],
        ),
        (f"{MODEL} {CLUSTER} --ranks 8", ["--ranks 8: a plan is for the ranks of --gpus, 4"]),
        (
            f"{MODEL} {CLUSTER} --validate-only --skip-files --world-size 2 --print-config",
            [
                "--validate-only: says how a run starts",
                "--skip-files: says",
                "--print-config: says",
                "--world-size 2: a",
            ],
        ),
        (f"{MODEL} {CLUSTER} --measured runs/x", ["--measured runs/x: goes with --report FILE.html"]),
        (
            f"{MODEL} {CLUSTER} --rampup-batch-size 8 0 --pp 0",
            ["--rampup-batch-size 0: must be at least 1", "--pp 0: must be"],
        ),
        (f"{MODEL} {CLUSTER} --rampup-batch-size 8 8", ["--rampup-batch-size 8 8: three numbers are needed"]),
        (
            f"{MODEL} {CLUSTER} --price -5e-1 --interconnect -1xhdr",
            ["--interconnect -1xhdr: the number of links, -1, must be at least 1", "--price -0.5: must be"],
        ),
        (f"{MODEL} {CLUSTER} --price 2", ["--price 2: goes with --tokens N"]),
        (f"{MODEL} {CLUSTER} --price nan", ["--price nan: must be a finite number above 0"]),
        (f"{MODEL} {CLUSTER} --device cpu", ["--device cpu: a100-40gb is a device of another kind"]),
        (f"{MODEL} {CLUSTER} --json --emit-flags", ["--json and --emit-flags print different things"]),
        (f"{MODEL} {CLUSTER} --emit-flags=", ["--emit-flags : names no file"]),
        (
            f"{MODEL} {CLUSTER} --emit-flags nowhere/plan.yaml",
            ["--emit-flags nowhere/plan.yaml: there is no such folder"],
        ),
        (
            f"{MODEL} {CLUSTER} --report x.html --emit-flags x.html",
            ["--emit-flags x.html: is the page of --report, too"],
        ),
        (f"typo {MODEL} {CLUSTER}", ["'typo' stands alone"]),
        ("--predict nowhere.csv", ["--predict nowhere.csv: No such file or directory"]),
        ("--predict nowhere.csv --gpus 4 --report x.html", ["--gpus --report: --predict takes runs"]),
        ("--predict nowhere.csv --program megatron-lm", ["--program: --predict takes runs"]),
        ("--predict nowhere.csv --tp 2", ["--tp 2: --predict takes runs from its table alone"]),
    ],
)
def test_mistakes_are_told_at_once(words: str, problems: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = plan(words, capsys)
    assert status == 2 and out == ""
    assert all(problem in err for problem in problems), err


def test_each_row_of_a_table_is_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = ["# measured by nobody", ROW, "8,1024,16,512,4,1,2,2,2,32", "8,1024,16,512,4,2,1,2,2,32", "8,1024,16,512,4"]
    rows += ["96,12288,96,2048,8,1,1,8,16,1536", "8,1024,16,512,4,0,2,2,2,32", "8,1024,16,512,4,two,2,2,2,32"]
    table.write_text("\n".join([*rows, "8,1024,16,512,4,1,1,4,,3"]) + "\n", encoding="utf-8-sig")
    status, out, _ = plan(f"--predict {table} --json", capsys)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(lines) == 7
    assert all(0.01 < line["seconds"] < 1 and line["fits"] for line in lines[:2])
    assert lines[0]["seconds"] != lines[1]["seconds"] and lines[0]["memory_bytes"] > 1e9
    assert "no global_batch" in lines[2]["error"]
    assert lines[3]["fits"] is False and lines[3]["memory_bytes"] > 80e9
    assert [line["error"] for line in lines[4:6]] == [f"tp {tp}: is not a whole number above 0" for tp in ("0", "two")]
    assert "no micro-batch" in lines[6]["error"] or "not a multiple" in lines[6]["error"]
    names = ROW.replace("layers,", "layers,num_layers,")
    rows = ["8,,1024,16,512,4,1,2,2,2,32", "8,9,1024,16,512,4,1,2,2,2,32", "8,,1024,16,512,4,1,2,2,2,32,,1"]
    table.write_text("\n".join([names, *rows, f"{'9' * 18},,1024,16,512,4,1,2,2,2,32"]))
    lines = [json.loads(line) for line in plan(f"--predict {table} --json", capsys)[1].splitlines()]
    assert lines[0]["fits"] and lines[1]["error"] == "columns layers and num_layers say different things"
    assert lines[2]["error"] == "a row has 1 cells more than there are names: 1"
    assert "--num-layers 999999999999999999: must be at most" in lines[3]["error"]
    table.write_text("a,b\n")
    assert plan(f"--predict {table}", capsys)[0] == 2


def test_tables_are_read_as_spreadsheets_write_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    names, row = "layers, Hidden ,heads,seq,GPUs,tp,micro_batch,global_batch", "8,1024,16,512,4,2.0,2,32"
    table.write_text(f'"Layers"{names[6:]},notes\r\n{row},"fast, I think"\r\n', newline="")
    status, out, _ = plan(f"--predict {table}", capsys)
    assert status == 0 and json.loads(out)["fits"]
    for lines, message in (
        ((names, row.replace("8,1024", "8" * 200_000 + ",1024")), "field larger than field limit"),
        ((names.replace("heads,", ""), row), "has no column heads or attention_heads or num_attention_heads; commas"),
        ((f"{names},,tp ,,gpu, GPU", f"{row},,2,,h100,h100"), "has several columns tp, gpu"),
        ((names.replace(",", ";"), row.replace(",", ";")), "has no column layers or num_layers, no hidden"),
    ):
        table.write_text("\n".join(lines))
        status, out, err = plan(f"--predict {table}", capsys)
        assert (status, out) == (2, "") and message in err
