"""Set-up: an isolated build brings no torch, versions are pinned, and what is missing is said with the line that
installs it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import megazero
from fused_ops.native.compile import compiler, cpu_target, levels_of_this_machine_type, levels_of_this_processor
from megazero.system.device import cuda_available

ROOT = Path(__file__).resolve().parents[1]
tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def constraints() -> dict[str, str]:
    """Pinned versions by lower-case name, of the lines that concern this Python."""
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    wanted = [Requirement(line) for line in lines]
    return {
        r.name.lower(): str(r.specifier).removeprefix("==") for r in wanted if r.marker is None or r.marker.evaluate()
    }


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=!~; \[]", requirement)[0].lower() for requirement in requirements]


def imported_by(path: Path) -> set[str]:
    """Modules that a file names in its imports."""
    return {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def test_the_build_needs_setuptools_and_ninja_alone() -> None:
    assert names(PROJECT["build-system"]["requires"]) == ["setuptools", "ninja"]
    imported = imported_by(ROOT / "setup.py")
    assert imported <= sys.stdlib_module_names | {"setuptools", "setuptools.command.build_ext", "importlib.util"}
    allowed = sys.stdlib_module_names | {"collections.abc", "importlib.util"}
    assert imported_by(ROOT / "fused_ops/native/compile.py") <= allowed


def test_what_is_needed_is_pinned() -> None:
    pinned = constraints()
    needed = names(PROJECT["project"]["dependencies"]) + [
        n for extra in PROJECT["project"]["optional-dependencies"].values() for n in names(extra)
    ]
    assert "torch" in needed
    assert re.fullmatch(r"\d+\.\d+\.\d+", pinned["torch"])
    assert set(needed) - {"setuptools", "megazero"} <= set(pinned), "an extra may hold another of ours"


def test_apex_is_never_required() -> None:
    """The package called apex on PyPI is another program."""
    assert "apex" not in (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text()


def test_the_installed_torch_is_the_pinned_one() -> None:
    if (ROOT / ".venv").resolve() != Path(sys.prefix).resolve():
        pytest.skip("these tests do not run in the .venv that the Makefile makes")
    assert importlib.metadata.version("torch").split("+")[0] == constraints()["torch"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of the project, and no compiled kernels."""
    source = tmp_path_factory.mktemp("clone") / "source"
    left = ".git", ".venv", "runs", "tests", "__pycache__", "_kernels", ".mypy_cache", ".hypothesis", "*.egg-info"
    return Path(shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left)))


def isolated_build(clone: Path, folder: Path, kind: str, **variables: str) -> None:
    """What pip does in its own environment, where setuptools is and nothing else: build a wheel into the folder, of the
    kind `wheel` or `editable`. -S -I hides every installed package but those named. The compiler is a stand-in that
    links what it is told and compiles nothing: installing the tests has compiled the kernels.
    """
    only = folder / "only"
    only.mkdir()
    site = Path(importlib.metadata.distribution("setuptools").locate_file(""))  # type: ignore[arg-type]
    for found in site.iterdir():
        if found.name.startswith(("setuptools", "_distutils_hack", "pkg_resources", "packaging", "wheel", "ninja")):
            (only / found.name).symlink_to(found)
    build = (
        f"import site, sys; site.addsitedir({str(only)!r}); import setuptools.build_meta as b; "
        f"assert not b.get_requires_for_build_{kind}(); b.build_{kind}({str(folder)!r}); "
        "assert 'torch' not in sys.modules"
    )
    nothing = folder / "nothing"
    nothing.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) exec {compiler()} "$@";; esac\n'
        f'for output; do :; done\nexec {compiler()} -x c++ -fPIC -c /dev/null -o "$output"\n'
    )
    nothing.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", build],
        cwd=clone,
        env={**os.environ, "CXX": str(nothing), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_isolated_build_makes_the_wheel_without_torch(clone: Path, tmp_path: Path) -> None:
    """A wheel may go to another machine, so it has kernels for all levels."""
    isolated_build(clone, tmp_path, "wheel")
    (wheel,) = tmp_path.glob("megazero-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        inside = opened.namelist()
        digests = {name: opened.read(name).decode() for name in inside if name.endswith(".digest")}
        about = {name.rpartition("/")[2]: opened.read(name).decode() for name in inside if ".dist-info/" in name}
    kernels = {name for name in inside if name.startswith("fused_ops/_kernels/")}
    assert any("/cpu_" in name for name in kernels) and "none-any" not in wheel.name
    made = {f"fused_ops/_kernels/cpu_{level}": cpu_target(level).digest() for level in levels_of_this_machine_type()}
    assert kernels == {f"{name}.so" for name in made} | set(digests), "what is installed is found again by its digest"
    assert digests == {f"{name}.digest": digest for name, digest in made.items()}
    packed = {name for name in inside if ".dist-info/" not in name} - kernels
    assert packed == {"pretrain_gpt.py", *files_of("megazero"), *files_of("fused_ops")}
    assert {"megazero/cli/main.py", "fused_ops/csrc/cpu/vec.h", "fused_ops/csrc/cuda/emulation.h"} <= packed
    assert "Requires-Dist: torch>=" in about["METADATA"] and wheel.name.startswith(f"megazero-{megazero.__version__}-")
    assert "megazero = megazero.cli.main:main" in about["entry_points.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "levels"),
    [("", levels_of_this_processor()), ("all", levels_of_this_machine_type()), ("generic", ("generic",))],
    ids=["its own", "all", "named"],
)
def test_an_editable_install_compiles_for_its_processor(
    asked: str, levels: tuple[str, ...], clone: Path, tmp_path: Path
) -> None:
    """It stays where it is. MEGAZERO_LEVELS asks for other levels, as for an image that many machines run."""
    made = clone / "fused_ops/_kernels"
    shutil.rmtree(made, ignore_errors=True)
    isolated_build(clone, tmp_path, "editable", MEGAZERO_LEVELS=asked)
    assert {path.stem for path in made.glob("*.so")} == {f"cpu_{level}" for level in levels}


def files_of(package: str) -> set[str]:
    """All that a clone has of a package: what runs there runs where the wheel is installed."""
    made = ("__pycache__", "_kernels")
    paths = (path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not set(made) & set(path.parts)}


def install(
    tmp_path: Path, python: str | None, programs: tuple[str, ...] = ("git", "make")
) -> subprocess.CompletedProcess[str]:
    """Run the installer where only these programs and this stand-in for python3 are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("bash", "dirname", "cut", "grep", "sh", *programs):
        found = shutil.which(program)
        assert found, program
        (folder / program).symlink_to(found)
    if python is not None:
        (folder / "python3").write_text(f"#!/bin/sh\n{python}\n")
        (folder / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": str(folder), "PYTHON": "python3"}
    command = [str(ROOT / "tools" / "install.sh"), str(tmp_path / "venv"), ""]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_nothing_installed_gives_the_line_that_installs_it(tmp_path: Path) -> None:
    done = install(tmp_path, None, programs=("make",))
    assert done.returncode == 1
    assert "sudo apt-get update && sudo apt-get install -y python3 python3-venv git\n" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_missing_venv_is_named(tmp_path: Path) -> None:
    done = install(tmp_path, 'case "$*" in *ensurepip*) exit 1;; esac')
    assert done.returncode == 1
    assert done.stderr.endswith("apt-get install -y python3-venv\n")


def test_an_old_python_is_refused_by_its_version(tmp_path: Path) -> None:
    done = install(tmp_path, 'case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.2;; esac')
    assert done.returncode == 1
    assert "3.10 or newer" in done.stderr and "3.9.2" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(cuda_available(), reason="there is an NVIDIA GPU")
@pytest.mark.parametrize("goal", ["gpu-test", "gpu-bench"])
@pytest.mark.parametrize("given", [True, False], ids=["PYTHON", "VENV"])
def test_without_a_gpu_one_line_says_so(tmp_path: Path, goal: str, given: bool) -> None:
    """At once, with the Python that is there, and nothing is installed. make's own line comes after it."""
    words = [f"PYTHON={sys.executable}"] if given else []
    if not given:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / "bin" / "python").chmod(0o755)
    before, began = sorted(tmp_path.rglob("*")), time.monotonic()
    # As a user starts it: the tests themselves may run under make, which would tell of its levels.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", goal, f"VENV={tmp_path}", *words]
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(said) == 1 and said[0].startswith(f"make {goal}: torch ") and "finds no NVIDIA GPU" in said[0], (
        done.stderr
    )
    assert sorted(tmp_path.rglob("*")) == before and time.monotonic() - began < 30


@pytest.mark.parametrize("program", ["tools.gpu_test", "bench.gpu"])
def test_without_torch_the_line_names_the_python(tmp_path: Path, program: str) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert sys.executable in done.stderr and "no torch here" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_scripts_of_a_clone_run_where_none_is_installed(tmp_path: Path) -> None:
    """What they import is there. -S hides an editable install of this environment, with its .pth file."""
    there = [str(ROOT / "tools"), str(importlib.metadata.distribution("numpy").locate_file(""))]
    for script in sorted((ROOT / "tools").glob("*.py")):
        if script.stem in ("clone", "gpu_test"):
            continue
        program = f"import sys, runpy; sys.path[:0] = {there!r}; sys.argv = ['x', '--help']; "
        program += f"runpy.run_path({str(script)!r}, run_name='__main__')"
        command = [sys.executable, "-S", "-I", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "usage: megazero " in done.stdout, done.stderr


def test_scripts_are_executable() -> None:
    for script in (".ci/run", "tools/install.sh", "examples/pretrain_stdlib.sh"):
        assert os.access(ROOT / script, os.X_OK), script
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_the_pretraining_script_is_a_valid_run_of_four_ranks(tmp_path: Path) -> None:
    """With stand-ins for torchrun, which prints its arguments, and for python, which runs the tools behind it."""
    from megazero.config.parse import parse_run

    for name, prints in (("torchrun", "word"), ("python", "tool")):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "{prints} %s\\n" "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path / "run")}
    done = subprocess.run(
        [str(ROOT / "examples/pretrain_stdlib.sh")], env=environment, capture_output=True, text=True, check=True
    )
    words = [line.removeprefix("word ") for line in done.stdout.splitlines() if line.startswith("word ")]
    ranks, script = words[words.index("--nproc-per-node") + 1], words.index("pretrain_gpt.py")
    run = parse_run(words[script + 1 :], int(ranks))
    assert (ranks, run.optimizer.precision) == ("4", "bf16")
    assert (run.parallel.tp, run.parallel.pp, run.parallel.zero_stage) == (2, 2, 1)
    tools = [line.removeprefix("tool ") for line in done.stdout.splitlines() if line.startswith("tool ")]
    assert tools[0] == "tools/convert_checkpoint.py" and tools[tools.index("--to") + 1] == "hf" and "--verify" in tools
    assert "tools/generate_text.py" in tools and tools[tools.index("--load") + 1] == f"{tmp_path}/run/hf"
    told = [line for line in done.stdout.splitlines() if line.startswith("The curves")]
    assert told == ["The curves, for a browser: tool tools/report.py"] and tools[-1] == f"{tmp_path}/run"


@pytest.mark.parametrize("user", ["0", "1000"], ids=["root", "user"])
@pytest.mark.parametrize("there", [True, False], ids=["installed", "missing"])
def test_continuous_integration_names_the_browser_that_it_has(tmp_path: Path, there: bool, user: str) -> None:
    """Root gets one installed, and others need none. Stand-ins for all that it calls."""
    browser = tmp_path / "chromium"
    for name in ("bash", "dirname", "touch", "chmod"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    scripts = {
        "id": f"echo {user}",
        "make": 'echo "make $*: ${MEGAZERO_BROWSER-none}"',
        "apt-get": f'echo "apt-get $1" >&2; [ "$1" = update ] || {{ touch {browser}; chmod +x {browser}; }}',
    } | ({"chromium": "exit"} if there else {})
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!{tmp_path}/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = [str(tmp_path / "bash"), str(ROOT / ".ci/run")]
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    installs = user == "0" and not there
    assert done.stderr == "apt-get update\napt-get install\n" * installs
    assert done.stdout == f"make test: {browser if there or installs else 'none'}\n"


def test_linting_and_the_program_install_no_other_trainers() -> None:
    """DeepSpeed is built where it is installed, for minutes; ruff and mypy judge the same without it."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"ruff", "mypy", "types-pyyaml", "pytest"} == set(names(extras["lint"]))
    for goal, wanted in (("install", '""'), ("lint", "lint")):
        plan = subprocess.run(
            ["make", "-n", goal, "VENV=elsewhere"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert f'tools/install.sh "elsewhere" {wanted}' in plan and 'elsewhere" test' not in plan, plan
