"""A checkpoint is named alike in every tool, a name of the Hub's gets its command, and programs without flags have a
help.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import megazero.convert.loading
from megazero.cli import doctor, evaluate, generate, inspect
from megazero.cli.shared_flags import checkpoint_of, checkpoint_problems
from megazero.config.source import ConfigError
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from megazero.convert.source import ConversionError
from tests.convert.hub_cache import use_cache
from tests.convert.sources import made

TOOLS: dict[str, tuple[str, ...]] = {
    "generate": ("--prompt", "x"),
    "evaluate": ("--data-path", "x"),
    "convert": ("--to", "hf", "--output", "new"),
}


def parsed(name: str, *words: str) -> Any:
    return import_module(f"megazero.cli.{name}").parser().parse_args([*words, *TOOLS[name]])


@pytest.mark.parametrize("name", TOOLS)
def test_a_checkpoint_is_named_as_it_is_or_by_load(name: str, tmp_path: Path) -> None:
    one, other = str(tmp_path), str(tmp_path.parent)
    for words in ([one], ["--load", one]):
        args = parsed(name, *words)
        assert not list(checkpoint_problems(args)) and checkpoint_of(args) == tmp_path
    assert list(checkpoint_problems(parsed(name))) == ["there is no checkpoint: name one, as it is or by --load"]
    assert list(checkpoint_problems(parsed(name, one, "--load", other))) == [
        f"2 checkpoints, {other} {one}: name one; other words follow a --flag"
    ]


def test_what_is_converted_may_be_called_input(tmp_path: Path) -> None:
    assert checkpoint_of(parsed("convert", "--input", str(tmp_path))) == tmp_path


def test_inspection_takes_one_or_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write_native(made(), tmp_path / name, TargetOptions(), lambda count: None)
    a, b = (str(tmp_path / name) for name in ("a", "b"))
    told = []
    for words in ([a, b], ["--load", a, b]):
        assert inspect.main(words) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "the same to the bit" in told[0]
    for words in ([], [a, b, a]):
        with pytest.raises(SystemExit):
            inspect.main(words)
        assert f"{len(words)} checkpoints: name one to look at, or two" in capsys.readouterr().err


@pytest.mark.parametrize("hub", ["bigscience/bloom-560m", "gpt2"])
def test_a_name_of_the_hub_gets_its_command(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is no folder, in every tool; a mistyped folder is just not there."""
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    words = (
        f"{hub} is no folder here, and is not in the cache .* \\(hf download {hub}\\)"
        if "/" in hub
        else "gpt2: there is no such checkpoint here; if it is a model of Hugging Face's Hub, .* ORG/gpt2"
    )
    with pytest.raises(ConversionError, match=words):
        megazero.convert.loading.load(hub)
    for name, check in (("generate", generate.check), ("evaluate", evaluate.check)):
        with pytest.raises(ConfigError, match=words):
            check(parsed(name, hub), 1)
    assert inspect.main([hub]) == 2
    (tmp_path / "runs").mkdir()
    for path in ("runs/mine", "/models/mine", "a/b/c", "../x/y"):
        with pytest.raises(ConversionError, match=f"{path}: there is no such checkpoint$"):
            megazero.convert.loading.load(path)


def test_the_doctor_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an examination, which may compile."""
    with pytest.raises(SystemExit) as left:
        doctor.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0 and "usage: megazero doctor" in said and "what is missing and what that costs" in said
    with pytest.raises(SystemExit) as left:
        doctor.main(["--nonsense"])
    assert left.value.code == 2
