"""What surrounds a command (streams, folder, variables, names that are no text) ends none that could go on, and what
cannot go on is one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_ops.native.binding import _load_openmp
from megazero.cli.pretrain import alone_among_tasks, train
from megazero.config.source import ConfigError
from megazero.mpu.meeting import Environment
from tests.data.pairs import write_pair

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "megazero"]


def ran(words: str, folder: Path, shell: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a folder. shell: what stands around it, with {} for the command."""
    line = (shell or "{}").replace("{}", " ".join([*COMMAND, words]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_a_path_that_the_terminal_cannot_show(encoding: str, tmp_path: Path) -> None:
    """Escaped as on stderr; also a name that is no UTF-8, which no encoding can show."""
    for name in ("ü日", os.fsdecode(b"\xff")):
        folder = tmp_path / name
        folder.mkdir()
        write_pair(folder / "d", [3])
        line = [*COMMAND, "inspect-data", "--data-path", f"{name}/d"]
        done = subprocess.run(
            line, cwd=tmp_path, capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        wanted = f"{name}/d".encode(encoding, errors="backslashreplace")
        assert wanted in done.stdout


def test_a_tokenizer_in_a_folder_that_the_locale_cannot_spell(tmp_path: Path) -> None:
    """And the same files as the library writes."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("the cat sat on the mat, ü and 日, and the dog saw it\n" * 40, encoding="utf-8")
    for name in ("ü日", os.fsdecode(b"\xff")):
        line = [*COMMAND, "train-tokenizer", "--input", "text.txt", "--vocab-size", "300", "--output", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
    (tmp_path / "theirs").mkdir()
    files = [str(tmp_path / "ü日" / file) for file in ("vocab.json", "merges.txt")]
    tokenizers.models.BPE.from_file(*files).save(str(tmp_path / "theirs"))
    for file in ("vocab.json", "merges.txt"):
        assert (tmp_path / "theirs" / file).read_bytes() == (tmp_path / "ü日" / file).read_bytes()


def test_a_library_in_a_folder_that_the_locale_cannot_spell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's list of mapped files has every name that is mapped, which may be of any bytes."""
    maps = b"7f-80 r-xp 0 0:0 1 /m\xff/model\n7f-80 r-xp 0 0:0 1 /nowhere/libgomp.so.1\n"
    read = Path.read_text

    def read_text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        given = str(path) == "/proc/self/maps"
        return maps.decode(encoding or "ascii", errors or "strict") if given else read(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(OSError, match=r"/nowhere/libgomp\.so\.1"):
        _load_openmp.__wrapped__()


def test_a_full_disk_under_remarks_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat\n" * 40)
    words = "train-tokenizer --input text.txt --vocab-size 300 --output made"
    assert ran(words, tmp_path, "{} 2>/dev/full").returncode == 0
    assert ran("inspect nowhere", tmp_path, "{} 2>/dev/full").returncode == 2
    strange = words.replace("made", "$'\\xff'")
    assert ran(strange, tmp_path, "{} <&- >&- 2>&-").returncode == 0, "a closed one escapes what no encoding spells"


def test_standard_streams_may_be_closed(tmp_path: Path) -> None:
    for closed in ("<&-", "2>&-"):
        assert ran("draw-schedule --pp 2", tmp_path, f"{{}} {closed}").returncode == 0
    write_pair(tmp_path / "d", [3])
    for number, closed in enumerate((">&-", "<&- >&- 2>&-")):
        made = f"made{number}"
        done = ran(f"merge-data --input d --output-prefix {made}", tmp_path, f"{{}} {closed}")
        assert done.returncode == 0 and (tmp_path / f"{made}.bin").exists(), "files are the command's result"


def test_a_closed_output_loses_what_a_command_prints(tmp_path: Path) -> None:
    """A status of 0 would say that the caller has it; help, checks and versions too."""
    write_pair(tmp_path / "d", [3])
    check = "pretrain --print-config --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8"
    for words in ("draw-schedule --pp 2", "inspect-data --data-path d", "--version", "generate --help", check):
        done = ran(words, tmp_path, "{} >&-")
        told = done.stderr.decode().splitlines()[-1:]
        assert told == ["error: the standard output cannot be written: Bad file descriptor"], words
        assert done.returncode == 1, words


def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    """Also for what is written in pieces: what failed is dropped by Python, and a later flush succeeds."""
    for words in ("draw-schedule --pp 2", "plan-schedule --train-iters 3 --iterations 1-3 --lr 1e-3"):
        done = ran(words, tmp_path, "{} >/dev/full")
        assert done.stderr.decode() == "error: the standard output cannot be written: No space left on device\n"
        assert done.returncode == 1


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    for command in (" ".join(COMMAND), f"{sys.executable} {ROOT / 'pretrain_gpt.py'}"):
        (tmp_path / "gone").mkdir(exist_ok=True)
        line = f"cd {tmp_path / 'gone'} && rmdir ../gone && {command} pretrain --train-iters 1"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
        assert done.stderr == f"error: the working folder {tmp_path / 'gone'} is gone: change into one that is there\n"
        assert done.returncode == 2


VARIABLES: tuple[tuple[dict[str, str], str], ...] = (
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment: no whole number"),
    ({"WORLD_SIZE": "2", "RANK": ""}, "RANK is '' in the environment"),
    ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1' in the environment"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2 in the environment: ranks are 0 to"),
    ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
)


@pytest.mark.parametrize(("variables", "message"), VARIABLES)
def test_a_launchers_variables(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        Environment.read()


def test_several_tasks_of_slurm_without_a_rank_are_worth_knowing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would train the same model into the same folder."""
    monkeypatch.delenv("RANK", raising=False)
    for tasks, told in (("2", True), ("1", False)):
        monkeypatch.setenv("SLURM_NTASKS", tasks)
        train(["--validate-only", "--skip-files", "--train-iters", "1"], Environment(0, 0, 1, 1))
        assert ("SLURM_NTASKS is 2, and no launcher says" in capsys.readouterr().out) == told
    assert alone_among_tasks({"SLURM_NTASKS": "8", "RANK": "3"}) == []


def test_wrong_variables_are_one_message(tmp_path: Path) -> None:
    for words in ("pretrain --train-iters 1", "generate x --prompt a"):
        done = ran(words, tmp_path, WORLD_SIZE="two")
        assert done.returncode == 2
        assert done.stderr.decode() == (
            "1 problem in the configuration:\n  1. WORLD_SIZE is 'two' in the environment: no whole number\n"
        )
