"""The command `megazero`: what it knows, what it says of what it does not know, and that help takes no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import megazero
from megazero.cli.main import SUBCOMMANDS, main
from megazero.convert.names import FORMATS
from megazero.convert.registry import format_table

ROOT = Path(__file__).resolve().parents[2]
HELPS = """
import contextlib, io, json, runpy, sys
from megazero.cli.main import COMMANDS, main

def said(program, *words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit, ImportError):
        program(*words)
    return out.getvalue()

helps = {name: said(main, [name, "--help"]) for name in COMMANDS}
sys.argv = ["gpu_test.py", "--help"]
helps["gpu_test"] = said(runpy.run_module, "tools.gpu_test", None, "__main__")
print(json.dumps([helps, [name for name in ("torch", "transformers", "tokenizers") if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What every command says of itself, in one process that imports nothing large for it."""
    done = subprocess.run([sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True, check=True)
    found, large = json.loads(done.stdout)
    assert large == []
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
        assert f"from megazero.cli.{command.module} import main" in script.read_text(), script
    scripts = {path.name for path in (ROOT / "tools").glob("*.py")} - {"gpu_test.py"}
    assert scripts == {
        Path(command.script).name for command in SUBCOMMANDS.values() if command.script.startswith("tools")
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pretrian", "there is no command 'pretrian'; did you mean pretrain? (megazero --help lists them all)"),
        ("generate_text", "did you mean generate?"),
        ("tools/preprocess_data.py", "did you mean prepare-data?"),
        ("xyzzy", "there is no command 'xyzzy' (megazero"),
        ("--tp", "there is no command '--tp' (megazero"),
    ],
)
def test_an_unknown_command_is_one_error(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--help"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and len(told.err.splitlines()) == 1


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


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    """As with `| head`: 141, which is what a shell says of SIGPIPE."""
    command = [sys.executable, "-m", "megazero", "draw-schedule"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("draw-schedule --forward-time nan", 2, "all of them are finite"),
        ("draw-schedule --profile 1 1 1 -1", 2, "those of messages at least 0"),
        ("draw-schedule --width 0", 2, "--width 0: must be at least 1"),
        ("draw-schedule --virtual-stages 0", 2, "0"),
        ("prepare-data --input {file} --output-prefix {folder}/x --tokenizer byte --workers 0", 2, "--workers 0: must"),
        ("prepare-data --input {file} --output-prefix {file}/x --tokenizer byte --workers 1", 1, "{file}"),
        ("train-tokenizer --input {file} --vocab-size 300 --output {file}", 1, "{file}"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str, status: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a file that stands where a folder should be is what it was."""
    (file := tmp_path / "text.txt").write_text("one two three\n" * 20)
    try:
        ended = main(words.format(file=file, folder=tmp_path).split())
    except SystemExit as end:  # argparse's way
        ended = int(end.code or 0)
    said = capsys.readouterr().err
    assert ended == status and told.format(file=file) in said.splitlines()[-1], said
    assert file.read_text() == "one two three\n" * 20 and "training a byte-level" not in said


def test_formats_are_named_as_the_table_has_them() -> None:
    assert tuple(format_table()) == FORMATS
    assert all(format.write is not None for format in format_table().values())
