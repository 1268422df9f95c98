"""How compilers are found, what is compiled for a card, and what a failing compiler is said to need.

Scripts stand for compilers: they list what they know, or fail with the words of the real ones.
"""

from __future__ import annotations

import shlex
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from fused_ops.native import compile as compiling
from fused_ops.native.compile import NVCC, CompileError, Target, compiler, cuda_target

PARTS = "bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/nv/target", "lib/libcudart_static.a"


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def of_pip(root: Path, monkeypatch: pytest.MonkeyPatch, *parts: str) -> Path:
    """pip's packages of CUDA with these parts, in an environment that has no others."""
    for part in parts:
        script(root / "nvidia/cu13" / part)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(root / "nvidia")]
    monkeypatch.setattr(compiling, "find_spec", lambda name: spec)
    return root / "nvidia/cu13/bin/nvcc"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No compiler in any variable or package; PATH has one folder, which is returned."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    return tmp_path / "path"


def test_nvcc_is_found_where_it_is_named_then_in_home_then_of_pip_then_on_path(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(nowhere / "nvcc")
    assert compiler(NVCC) == "nvcc"
    own = of_pip(tmp_path, monkeypatch, *PARTS)
    assert compiler(NVCC) == str(own)
    home = script(tmp_path / "home/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert compiler(NVCC) == str(home)
    named = script(tmp_path / "named")
    monkeypatch.setenv("CUDACXX", str(named))
    assert compiler(NVCC) == str(named)


@pytest.mark.parametrize("missing", PARTS)
def test_pips_compiler_without_a_part_is_passed_over(
    missing: str, nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own packages bring the runtime, and others ptxas."""
    of_pip(tmp_path, monkeypatch, *(part for part in PARTS if part != missing))
    script(nowhere / "nvcc")
    assert compiler(NVCC) == "nvcc"


def test_a_home_without_a_compiler_is_passed_over(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "none"))
    script(nowhere / "nvcc")
    assert compiler(NVCC) == "nvcc"


def test_without_any_the_message_says_what_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda command: None)
    with pytest.raises(CompileError, match=r"pip install 'megazero\[cuda\]'"):
        compiler(NVCC)
    assert cuda_target("90").flags[-1] == "-gencode=arch=compute_90,code=[sm_90,compute_90]"


@pytest.mark.parametrize(
    ("capability", "generated"),
    [
        ("80", "arch=compute_80,code=[sm_80,compute_80]"),
        ("90", "arch=compute_90,code=[sm_90,compute_90]"),
        ("100", "arch=compute_100,code=[sm_100,compute_100]"),
        ("121", "arch=compute_100,code=compute_100"),  # newer than the compiler: the driver makes the machine code
        ("95", "arch=compute_90,code=compute_90"),
        ("70", "arch=compute_70,code=[sm_70,compute_70]"),  # older: the compiler says what it thinks of it
    ],
)
def test_a_card_gets_machine_code_and_ptx_and_a_newer_one_the_newest_ptx(
    capability: str, generated: str, nowhere: Path
) -> None:
    listing = script(nowhere / "nvcc", "echo compute_100", "echo compute_80", "echo compute_90", "echo compute_90a")
    assert listing.exists()
    target = cuda_target(capability)
    assert target.name == f"cuda_sm{capability}" and target.flags[-1] == f"-gencode={generated}"


FAILURES = [
    ("error: -- unsupported GNU version! gcc versions later than 14 are not supported!", "-ccbin"),
    ("mathcalls.h(79): error: exception specification is incompatible with that of previous function", "CUDA 13"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_70'", "older one in CUDACXX"),
    ("error: something else", None),
]


@pytest.mark.parametrize(("words", "hint"), FAILURES)
def test_a_failing_compiler_is_quoted_with_what_helps(
    words: str, hint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = script(tmp_path / "nvcc", f'echo "{words}" >&2', "exit 1")
    monkeypatch.setenv("CUDACXX", str(failing))
    target = Target("cuda_sm90", "cuda", ("-O3",), compiler=NVCC)
    with pytest.raises(CompileError) as failed:
        compiling.build([target], tmp_path / "made", tmp_path / "work")
    assert words in str(failed.value)
    last = str(failed.value).splitlines()[-1]
    assert hint is None or hint in last
    assert hint is not None or not any(advice in str(failed.value) for _, advice in compiling.HINTS)


def test_pips_compiler_links_the_runtime_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own profile names lib64, which these packages do not have."""
    own = of_pip(tmp_path, monkeypatch, *PARTS)
    target = Target("cuda_sm90", "cuda", ("-O3",), compiler=NVCC)
    monkeypatch.setenv("CUDACXX", str(own))
    assert f"links = -L{own.parents[1] / 'lib'}" in compiling._rules([target])
    monkeypatch.setenv("CUDACXX", str(script(tmp_path / "toolkit/bin/nvcc")))
    assert "-L" not in compiling._rules([target])


def test_a_home_with_a_space_is_one_word(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "my home/bin/nvcc", "echo compute_90")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "my home"))
    assert shlex.split(compiler(NVCC)) == [str(tmp_path / "my home/bin/nvcc")]
    assert cuda_target("120").flags[-1] == "-gencode=arch=compute_90,code=compute_90"


def test_a_machine_without_a_compiler_finds_what_another_compiled_for_a_newer_card(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = cuda_target("120").digest()
    script(nowhere / "nvcc", "echo compute_90")
    assert cuda_target("120").flags[-1].endswith("code=compute_90") and cuda_target("120").digest() == without
    assert cuda_target("90").digest() != without


def test_builders_with_the_same_process_number_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the containers of several hosts on one file system: the copy of one is not renamed by another."""
    target = Target("cuda_sm90", "cuda", ("-O3",), compiler=NVCC)
    names: list[str] = []
    monkeypatch.setenv("CUDACXX", str(script(tmp_path / "nvcc", "exit 0")))
    monkeypatch.setattr(
        compiling.subprocess, "run", lambda *_, **__: compiling.subprocess.CompletedProcess([], 0, "", "")
    )
    monkeypatch.setattr(compiling.os, "getpid", lambda: 57)
    monkeypatch.setattr(compiling.shutil, "copyfile", lambda source, to: names.append(to.name))
    monkeypatch.setattr(compiling.shutil, "move", lambda source, to: to)
    for number in range(2):
        compiling.build([target], tmp_path / "made", tmp_path / f"work{number}")
    assert len(set(names)) == 2
