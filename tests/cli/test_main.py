"""The command `megazero`: what it knows, what it says of what it does not know, and that help takes no torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megazero
from megazero.cli import data_commands
from megazero.cli.main import ABOUT_DATA, SUBCOMMANDS, SYNONYMS, main
from megazero.convert.names import FORMATS
from megazero.convert.registry import format_table
from tests.data.pairs import write_pair

ROOT = Path(__file__).resolve().parents[2]
HELPS = """
import contextlib, io, json, runpy, sys
from megazero.cli.main import SUBCOMMANDS, main

def said(program, *words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit, ImportError):
        program(*words)
    return out.getvalue()

def mistaken(name):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        main([name, "--no_such_flag", "3"])
    return errors.getvalue()

# lm_eval reads the flags of harness; those of pretrain may name a checkpoint, which torch reads.
mistakes = {name: mistaken(name) for name in SUBCOMMANDS if name not in ("harness", "pretrain")}
helps = {name: said(main, [name, "--help"]) for name in SUBCOMMANDS}
sys.argv = ["gpu_test.py", "--help"]
helps["gpu_test"] = said(runpy.run_module, "tools.gpu_test", None, "__main__")
print(json.dumps([helps, mistakes, [name for name in ("torch", "transformers", "tokenizers") if name in sys.modules]]))
"""


def ended(words: list[str]) -> int:
    """The status of the command in this process."""
    try:
        return main(words)
    except SystemExit as end:  # argparse's way
        return int(end.code or 0)


def test_the_commands_about_data_are_those_of_their_module() -> None:
    assert data_commands.COMMANDS.keys() == ABOUT_DATA


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What every command says of itself, in one process that imports nothing large for it, nor for a mistaken flag."""
    done = subprocess.run([sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True, check=True)
    found, mistakes, large = json.loads(done.stdout)
    assert large == []
    assert len(mistakes) == len(SUBCOMMANDS) - 2
    assert all("there is no --no_such_flag" in message for message in mistakes.values()), mistakes
    assert "python -m tools.gpu_test" in found.pop("gpu_test")
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_has_examples_in_both_forms(name: str, helps: dict[str, str]) -> None:
    command = SUBCOMMANDS[name]
    assert "megazero " + name in helps[name] and command.script in helps[name], helps[name]


def test_every_script_is_there_and_is_the_command() -> None:
    """A script of a clone and a command are the same program."""
    for name, command in SUBCOMMANDS.items():
        script = ROOT / (command.script if command.script.endswith(".py") else f"megazero/{name}.py")
        scripted = script.parent.name == "tools"
        calls = f'main(["{name}", *sys.argv[1:]])' if scripted else f"from megazero.cli.{name} import main"
        assert calls in script.read_text(), script
    scripts = {path.name for path in (ROOT / "tools").glob("*.py")} - {"gpu_test.py", "clone.py"}
    assert scripts == {
        Path(command.script).name for command in SUBCOMMANDS.values() if command.script.startswith("tools")
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pretrian", "there is no command 'pretrian'; did you mean pretrain? (megazero --help lists them all)"),
        ("generate_text", "did you mean generate?"),
        ("tools/preprocess_data.py", "did you mean prepare-data?"),
        ("chat", "did you mean generate MODEL --chat --interactive?"),
        ("fine-tune", "did you mean pretrain --init-from MODEL --instruction-data FILE?"),
        ("xyzzy", "there is no command 'xyzzy' (megazero"),
        ("--tp", "there is no command '--tp' (megazero"),
    ],
)
def test_an_unknown_command_is_one_error(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--help"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and len(told.err.splitlines()) == 1


@pytest.mark.parametrize("meant", sorted(set(SYNONYMS.values())))
def test_what_is_suggested_exists(meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = meant.split()
    with contextlib.suppress(SystemExit):  # argparse ends so
        main([name, "--help-all" if name == "pretrain" else "--help"])
    told = capsys.readouterr().out
    assert f"usage: megazero {name}" in told and all(word in told for word in rest if word.startswith("--"))


def test_without_a_command_there_is_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.endswith("megazero: name a command\n")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told and command.sentence in told for name, command in SUBCOMMANDS.items())


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megazero {megazero.__version__}\n"


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("words", ["draw-schedule", "prepare-data --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_quietly(words: str, unbuffered: str) -> None:
    """As with `| head`: 141, which is what a shell says of SIGPIPE. Python itself fails at its exit, with 120."""
    command = [sys.executable, "-m", "megazero", *words.split()]
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


TELLING = (
    *("--help", "--version", "help pretrain", "pretrain --help-all", "generate --help", "plan-schedule -h"),
    *("convert --help", "help merge-data"),
)
"""Help of every kind. The result of the last two commands is files, so that only their help needs an output."""


@pytest.mark.parametrize("words", TELLING)
def test_help_that_nobody_gets_has_a_status(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader of a pipe has left; the disk under a file is full."""
    reads, writes = os.pipe()
    os.close(reads)
    for place, status in ((writes, 141), ("/dev/full", 1)):
        with open(place, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert ended(words.split()) == status
        told = capsys.readouterr().err.splitlines()
        assert told == ["error: the standard output cannot be written: No space left on device"] * (status == 1)


def test_help_is_lost_where_the_output_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in TELLING:
        monkeypatch.setattr(sys, "stdout", None)
        assert ended(words.split()) == 1
        assert capsys.readouterr().err == "error: the standard output cannot be written: Bad file descriptor\n"


def test_help_may_be_asked_for_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in ("help pretrain", "pretrain --help", "help pretrain --help-all", "pretrain --help-all"):
        assert ended(words.split()) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] == said[3]
    assert ended(["help", "help"]) == 0 and "commands:" in capsys.readouterr().out
    assert ended(["help", "pretrian"]) == 2 and "did you mean pretrain?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("draw-schedule --forward-time nan", 2, "all of them are finite"),
        ("draw-schedule --profile 1 1 1 -1", 2, "those of messages at least 0"),
        ("draw-schedule --width 0", 2, "--width 0: must be at least 1"),
        ("draw-schedule --virtual-stages 0", 2, "--virtual-stages 0: must be at least 1"),
        ("draw-schedule --pp 0", 2, "--pp 0: must be at least 1"),
        ("draw-schedule --micro-batches -1", 2, "--micro-batches -1: must be at least 1"),
        ("draw-schedule --blocks 3", 2, "--blocks 3 goes with --zero-stage"),
        ("draw-schedule --zero-stage 2 --gathered-units 3", 2, "--gathered-units 3 goes with --zero-stage 3"),
        ("prepare-data --input {file} --output-prefix {folder}/x --tokenizer byte --workers 0", 2, "--workers 0: must"),
        (
            "prepare-data --input {file} --output-prefix {file}/x --tokenizer byte --workers 1",
            2,
            "--output-prefix {file}/x: {file} is no folder",
        ),
        ("train-tokenizer --input {file} --vocab-size 300 --output {file}", 2, "--output {file}: {file} is no folder"),
        ("train-tokenizer --input {file} --output {file}/x", 2, "--output {file}/x: {file} is no folder"),
        ("train-tokenizer --input {file} --output=", 2, "--output: is empty"),
        ("train-tokenizer --input= --output {folder}/x", 2, "--input: is empty"),
        ("prepare-data --input= --output-prefix {folder}/x --tokenizer byte", 2, "--input: is empty"),
        ("merge-data --input {folder}/q --output-prefix=", 2, "--output-prefix: is empty"),
        *(
            (f"{words} --output-prefix={prefix}", 2, f"--output-prefix '{prefix}': names no files; give a name: ")
            for words in ("prepare-data --input {file} --tokenizer byte --workers 1", "merge-data --input {folder}/q")
            for prefix in ("{folder}/", "{folder}/new/", "{folder}/.", "..")
        ),
        ("merge-data --input= --output-prefix {folder}/x", 2, "--input: is empty"),
        ("inspect-data --data-path=", 2, "--data-path: is empty"),
        ("inspect-data --data-path {folder}/q --seq-length 4 --dump=", 2, "--dump: is empty"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str,
    status: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a file that stands where a folder should be is what it was."""
    (file := tmp_path / "text.txt").write_text("one two three\n" * 20)
    write_pair(tmp_path / "q", [4])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert ended(words.format(file=file, folder=tmp_path).split()) == status
    said = capsys.readouterr().err
    assert told.format(file=file, folder=tmp_path) in said.splitlines()[-1], said
    assert sorted(tmp_path.rglob("*")) == before
    assert file.read_text() == "one two three\n" * 20 and "training a byte-level" not in said


@pytest.mark.parametrize("chat", ["", " --chat"])
def test_a_tokenizer_that_is_there_is_kept_unless_asked(
    chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the other kind in any case: files of two tokenizers in one folder would be neither's."""
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("one two three\n" * 20)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("mine")
    words = f"train-tokenizer --input {tmp_path}/text.txt --output {tmp_path}/made"
    assert ended(f"{words} --vocab-size 262{chat}".split()) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    capsys.readouterr()
    names = ", ".join(sorted(before.keys() - {"notes.txt"}))
    other = "" if chat else " --chat"
    for flags, told in (
        (chat, f"has a tokenizer already ({names}); name another folder, or replace it with --overwrite"),
        (other, f"has a tokenizer of another kind ({names}), whose files would stay; name another folder"),
        (f"{other} --overwrite", f"has a tokenizer of another kind ({names}), whose files would stay; name another"),
    ):
        assert ended(f"{words} --vocab-size 266 {flags}".split()) == 2
        assert capsys.readouterr().err.startswith(f"error: --output {tmp_path}/made: {told}")
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == before
    assert ended(f"{words} --vocab-size 266 --overwrite{chat}".split()) == 0
    after = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert after.keys() == before.keys() and after != before


def test_a_breadth_first_step_is_drawn_as_a_run_does_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its gradients are reduced once, under ZeRO-2 as well."""
    words = "draw-schedule --pp 1 --micro-batches 3 --virtual-stages 2 --blocks 1 --zero-stage 2 --list 0 --schedule"
    reduced = []
    for schedule in ("gpipe", "interleaved"):
        assert ended([*words.split(), schedule]) == 0
        reduced.append(capsys.readouterr().out.count("reduce gradients"))
    assert reduced == [4, 12]


def test_formats_are_named_as_the_table_has_them() -> None:
    assert tuple(format_table()) == FORMATS
    assert all(format.write is not None for format in format_table().values())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("inspect EMPTY", "PATH"),
        ("generate --load EMPTY --prompt x", "--load"),
        ("export EMPTY x", "FOLDER"),
        ("convert --input EMPTY --to hf --output x", "--load/--input"),
        ("convert a --to hf --output EMPTY", "--output"),
        ("evaluate a --input b --output EMPTY", "--output"),
        ("evaluate a --input EMPTY", "--input"),
        ("evaluate a --data-path EMPTY", "--data-path"),
        ("inspect-data --data-path EMPTY", "--data-path"),
        ("merge-data --input a --output-prefix EMPTY", "--output-prefix"),
        ("prepare-data --input EMPTY --output-prefix x --tokenizer byte", "--input"),
        ("train-tokenizer --input a --output EMPTY", "--output"),
        ("bench-nvme EMPTY", "PATH"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unset variable of the shell is one."""
    monkeypatch.chdir(tmp_path)
    assert ended([word.replace("EMPTY", "") for word in words.split()]) == 2
    assert f"error: {named}: is empty (megazero" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


OF_RUNS = "pretrain", "plan", "plan-schedule", "verify-layout"
"""Commands whose flags are those of a run: `config.flags` reads them."""


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name != "harness"])  # its flags are lm_eval's
def test_an_unknown_flag_is_one_line_in_every_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megazero.cli.pretrain.start_process", lambda argv: None)
    monkeypatch.setattr("megazero.launch.exit_now", lambda status: sys.exit(status))
    assert ended([name, "--no_such_flag", "3"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "there is no --no_such_flag" in told.err
    if name not in OF_RUNS:
        shown = f"error: there is no --no_such_flag (megazero {name} --help lists the flags)\n"
        assert told.err == shown


ASKED = {
    "generate x --max-tokens 3": "there is no --max-tokens; did you mean --max-new-tokens?",
    "generate x --max_new_tokens=3": "there is no --max_new_tokens; did you mean --max-new-tokens?",
    "generate --model x": "there is no --model; did you mean --load?",
    "generate x --bsz 3": "there is no --bsz; did you mean --batch-size?",
    "generate x --num-return-sequences 2": "did you mean --num-samples?",
    "generate x --seed x": "--seed: 'x' is not a whole number",
    "generate x --top-p x": "--top-p: 'x' is not a number",
    "generate x -q": "there is no -q (megazero",
    "evaluate x --dtype bf16": "there is no --dtype; did you mean --precision?",
    "evaluate x --tensor-parallel-size 2": "there is no --tensor-parallel-size; did you mean --tp?",
    "evaluate x --device gpu": "--device: 'gpu' is not one of auto, cpu, cuda; did you mean cuda?",
    "prepare-data --append_eod": "there is no --append_eod; did you mean --append-eod?",
    "prepare-data --out-dir x": "there is no --out-dir; did you mean --output-prefix?",
    "prepare-data --input x --output-prefix x --tokenizer byte --append-eod yes": "'yes' stands alone",
    "prepare-data --tokenizer GPT2BPETokenizer": "--tokenizer: 'GPT2BPETokenizer' is not one of",
    "convert x": "these are missing: --output, --to (megazero convert --help lists the flags)",
    "convert x --save-dir y --to hf": "there is no --save-dir; did you mean --output?",
    "convert x --output y --to transformers": "did you mean hf?",
    "convert x --output y --to": "--to: takes one value, and none follows",
    "inspect x --n-layers 3": "there is no --n-layers (megazero inspect",
    "draw-schedule --stages 2 --mbs 3 --ab": "there is no --mbs and there is no --ab (megazero draw-schedule",
}


@pytest.mark.parametrize("line", ASKED)
def test_a_mistake_in_flags_is_one_line_with_the_nearest(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(line.split()) == 2
    told = capsys.readouterr()
    assert told.out == "" and ASKED[line] in told.err, told.err
    assert len(told.err.splitlines()) == 1 and told.err.startswith("error: ")
    assert told.err.endswith(f" (megazero {line.split()[0]} --help lists the flags)\n")


def test_a_value_may_look_like_a_flag_where_it_has_a_blank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megazero.launch.exit_now", lambda status: sys.exit(status))
    monkeypatch.setattr("megazero.cli.exit_status.exit_now", lambda status: sys.exit(status), raising=False)
    assert ended(["generate", "none", "--prompt", "-- and so on"]) == 2
    assert "none: there is no such checkpoint" in capsys.readouterr().err
