"""`--help` and `--help-all`: what they show, that it fits, and that no torch is needed for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.config.flags import CommandOptions, read_command_line
from megazero.config.help import EXAMPLES, GOALS, Invocation, help_text
from megazero.config.options import listed_options, options_of, run_options, sections
from megazero.config.parse import parse_run
from megazero.config.presets import presets
from megazero.config.source import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MEASURED = re.compile(r"\d+(\.\d+)? ?(s|ms|seconds|times|GB|MB|GiB|MiB|%)(?![\w-])|times as fast|faster")


def entries(text: str) -> dict[str, str]:
    """Flag -> what is said of it, in one line."""
    found: dict[str, list[str]] = {}
    for line in text.split("\n\n" + "examples:")[0].split("\n\n" + "presets:")[0].splitlines():
        left = re.match(r"  (?:-\w, )?(--[\w-]+)(.*)", line)
        if left:
            found[left[1]] = [left[2].strip()]
        elif line.startswith("   ") and found:
            list(found.values())[-1].append(line.strip())
        elif not line.startswith(" "):
            found.setdefault("", []).append(line)
    return {flag: " ".join(lines) for flag, lines in found.items() if flag}


@pytest.mark.slow
def test_help_all_has_every_flag_with_its_sentence_its_default_and_its_other_names() -> None:
    told = entries(help_text(everything=True))
    assert set(told) == {known.flag for known in (*options_of(CommandOptions, ""), *listed_options().values())}
    for known in listed_options().values():
        said = told[known.flag]
        assert known.sentence.endswith((".", " ...")) and known.sentence in said, known.name
        assert f"(default: {known.shown_default})" in said, known.name
        assert all(alias in said for alias in known.aliases), known.name
    assert told["--tp"].endswith("(default: 1) Also: --tensor-model-parallel-size.")
    assert "(default: 65536)" in told["--initial-loss-scale"] and "(default: 1e-08)" in told["--adam-eps"]
    assert "(default: off)" in told["--async-save"] and "(default: off)" in told["--finetune"]
    assert "(default: the sequence length)" in told["--max-position-embeddings"]
    assert all(preset in help_text(everything=True) for preset in presets())


def test_help_shows_what_most_runs_need() -> None:
    text = help_text()
    told, common = entries(text), [known for known in listed_options().values() if known.common]
    assert len(common) == 23 and {known.flag for known in common} < set(told)
    others = {"--preset", "--config", "--validate-only", "--print-config", "--world-size", "--ranks"}
    assert set(told) - {known.flag for known in common} == others | {"--help", "--help-all"}
    plain = " ".join(text.split())
    assert all(goal.heading in plain for goal in GOALS)
    left_out = sum(map(int, re.findall(r"\(\+(\d+)\)", plain)))
    assert left_out + len(told) == len(entries(help_text(everything=True)))


def test_every_listed_flag_serves_one_goal() -> None:
    section_of = {name: known.section for name, known in listed_options().items()}
    assert sorted(name for goal in GOALS for name in goal.all_fields(section_of)) == sorted(listed_options())
    of_goals = sorted(section for goal in GOALS for section in goal.sections)
    assert of_goals == sorted(sections()), "a new field has a goal"
    commands = options_of(CommandOptions, "")
    assert len(listed_options()) + len(commands) <= 110, "a person reads a list of these; `expert` is for the others"


def test_a_setting_for_a_file_is_a_flag_that_no_help_lists() -> None:
    unlisted = run_options().keys() - listed_options().keys()
    text = help_text(everything=True)
    assert f"{len(unlisted)} settings that few runs need are not listed" in " ".join(text.split())
    assert not [name for name in unlisted if run_options()[name].flag in entries(text) or run_options()[name].common]
    assert read_command_line(["--no-overlap", "--bucket-size", "7"]).source.settings == {
        "overlap": False,
        "bucket_size": 7,
    }
    with pytest.raises(ConfigError, match=r"there is no --bucket-sise; did you mean --bucket-size\?"):
        parse_run(["--bucket-sise", "7"], 1)


@pytest.mark.parametrize(("columns", "lines"), [(80, 100), (100, 93), (120, 87)])
def test_help_fits(columns: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two screens; no line is longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert len(help_text().splitlines()) <= lines
    for text in (help_text(), help_text(everything=True)):
        assert max(map(len, text.splitlines())) <= columns
        assert not re.search(r"[^\x00-\x7f]|[ \t]\n", text), "plain letters, and nothing behind a line"


def test_no_measurements_in_the_help() -> None:
    said = {known.flag: known.sentence for known in run_options().values() if MEASURED.search(known.sentence)}
    assert not said, f"these belong in docs/performance.md: {said}"
    assert MEASURED.search("1.17 s a step") and MEASURED.search("kernels are faster")


@pytest.mark.parametrize(("ranks", "flags"), [example[1:] for example in EXAMPLES])
def test_the_examples_are_right(ranks: int, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_run(shlex.split(flags), ranks)
    monkeypatch.setenv("COLUMNS", "80")
    program = Invocation("megazero pretrain", "torchrun --nproc-per-node {ranks} -m megazero pretrain")
    shown = help_text(program).partition("examples:")[2].partition("\n\n")[0]
    pasted = [shlex.split(command, comments=True) for command in shown.replace("\\\n", " ").splitlines()]
    start = (program.one if ranks == 1 else program.many.format(ranks=ranks)).split()
    assert [*start, *flags.split()] in pasted


def test_help_needs_no_torch_and_one_rank_tells_it() -> None:
    code = (
        "import runpy, sys\n"
        "try: runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit as end: sys.stderr.write(f\"{end.code} {'torch' in sys.modules}\")\n"
    )

    def told(flag: str, rank: int) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": str(rank), "COLUMNS": "100"}
        words = [sys.executable, "-c", code, "--tp", "nonsense", flag]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == "0 False"
        return done.stdout

    assert told("-h", 0).startswith("usage: megazero pretrain [flags]") and told("--help-all", 1) == ""


def test_help_asked_of_the_parser_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_run(["--tp", "nonsense", "--help-all"], 4)
    assert caught.value.code == 0 and "bloom-176b" in capsys.readouterr().out
