"""The Dockerfile, as far as a machine without Docker goes: what it copies is there, is enough and is its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, what follows), in order; lines that end with a backslash are joined."""
    plain = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", plain)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def of(kind: str) -> list[str]:
    return [rest for word, rest in instructions() if word == kind]


def ignored(path: Path) -> bool:
    """Whether .dockerignore keeps a file out: the last line that fits it, or a folder that it is in, decides."""
    names = [str(Path(*path.parts[:n])) for n in range(1, len(path.parts) + 1)]
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        anywhere = line.removeprefix("!").startswith("**/")
        if any(fnmatch(Path(name).name if anywhere else name, pattern) for name in names):
            out = not line.startswith("!")
    return out


def copied() -> list[Path]:
    """Files that come into the image, relative to the project."""
    found = []
    for rest in of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            place = ROOT / source
            files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
            assert files, f"COPY {source}: there is no such file"
            kept = [path.relative_to(ROOT) for path in files if not ignored(path.relative_to(ROOT))]
            assert kept, f"COPY {source}: .dockerignore leaves nothing of it"
            found += kept
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands in the image's working folder."""
    folder = tmp_path_factory.mktemp("image")
    for path in copied():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    return folder


def test_instructions_and_bases() -> None:
    assert {word for word, _ in instructions()} <= KNOWN
    assert instructions()[:2] == [("ARG", "BASE=python:3.12-slim"), ("FROM", "${BASE}")]
    (cuda,) = re.findall(r"--build-arg BASE=(\S+)", TEXT)
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04", cuda), "nvcc is in devel images"
    named = set(re.findall(r"--build-arg (\w+)=", TEXT))
    assert named <= {rest.partition("=")[0] for rest in of("ARG")}


def test_it_runs_as_somebody_and_in_its_folder() -> None:
    (user,) = of("USER")
    assert user.isdigit() and int(user) > 0 and f"--uid {user} " in " ".join(of("RUN"))
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(n for n, word in enumerate(order) if word == "RUN"), "all is installed before"
    assert of("WORKDIR") == ["/megazero"]


def test_layers_are_small_and_the_largest_comes_first() -> None:
    runs = of("RUN")
    for line in runs:
        subprocess.run(["sh", "-n", "-c", line], check=True)
        assert "apt-get install" not in line or ("--no-install-recommends" in line and "rm -rf /var/lib/apt" in line)
        assert "pip install" not in line or "-c constraints.txt" in line
    assert "PIP_NO_CACHE_DIR=1" in " ".join(of("ENV"))
    flat = [rest for _, rest in instructions()]
    torch = next(n for n, rest in enumerate(flat) if rest.endswith(" torch"))
    assert torch < flat.index("megazero megazero"), "a change of ours does not install torch again"
    (extras,) = (rest.partition("=")[2] for rest in of("ARG") if rest.startswith("EXTRAS="))
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


def test_no_more_is_copied_than_is_needed() -> None:
    parts = {part for path in copied() for part in path.parts}
    assert not parts & {"__pycache__", "_kernels", ".git", ".venv", "tests", "bench"}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {source for rest in of("COPY") for source in rest.split()[:-1]}


def test_what_is_copied_can_be_installed(image: Path, tmp_path: Path) -> None:
    """setuptools reads all that pyproject.toml names."""
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(words, cwd=image, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (listed,) = tmp_path.glob("*.egg-info/top_level.txt")
    assert {"megazero", "fused_ops", "pretrain_gpt"} <= set(listed.read_text().split())


def run_in(image: Path, *words: str) -> str:
    place = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *words], cwd=image, env=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_copied_is_enough_for_its_command(image: Path) -> None:
    program, *words = json.loads(of("CMD")[0])
    assert program == "python" and "usage:" in run_in(image, *words)


@pytest.mark.slow
def test_what_is_copied_is_enough_to_train_with(image: Path) -> None:
    told = run_in(image, "pretrain_gpt.py", "--train-iters", "20", "--validate-only", "--skip-files")
    assert "OK" in told
