"""Which kernels a process takes: the level of its processor, and where their library comes from."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

from fused_ops.native import cache as kept
from fused_ops.native import compile as compiling
from fused_ops.native import library
from fused_ops.native.compile import LEVELS, CompileError, cpu_target

AVX512 = {"avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq"}


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("AVX512", {"avx512f", "avx512_bf16"}, "avx512_bf16"),
        ("AVX512", {"avx512f"}, "avx512"),
        ("AVX512", set(), "avx512"),
        ("AVX2", {"avx2", "avx512f", "avx512_bf16"}, "avx2"),  # as where ATEN_CPU_CAPABILITY holds torch back
        ("DEFAULT", {"sse2"}, "generic"),
        ("SVE256", set(), "generic"),
    ],
)
def test_the_level_of_a_processor(monkeypatch, capability, flags, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset(flags))
    assert library.level() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({*AVX512, "avx512_bf16"}, "avx512_bf16"),
        (AVX512, "avx512"),
        ({"avx512f", "avx512_bf16", "avx2", "fma"}, "avx2"),
        ({"avx2", "fma"}, "avx2"),
        ({"avx2", "sse2"}, "generic"),
    ],
)
def test_set_up_knows_a_level_by_the_flags_by_which_torch_does(monkeypatch, flags, expected):
    monkeypatch.setattr(compiling, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
    assert compiling.levels_of_this_processor() == (expected,)


def test_where_the_system_does_not_tell_set_up_compiles_all_that_may_run(monkeypatch):
    monkeypatch.setattr(compiling, "processor_flags", frozenset)
    for machine, possible in (("x86_64", tuple(LEVELS)), ("aarch64", ("generic",))):
        monkeypatch.setattr(compiling.platform, "machine", lambda machine=machine: machine)
        assert compiling.levels_of_this_processor() == possible


def test_set_up_and_a_run_agree_on_the_level_of_this_processor():
    """Set-up has no torch. Where they differ a run compiles its own level at first use."""
    assert library.level() in compiling.levels_of_this_processor()
    assert not sys.platform.startswith("linux") or len(compiling.levels_of_this_processor()) == 1


def test_levels_are_choices():
    assert set(LEVELS) <= set(library.CHOICES) and list(LEVELS)[-1] == "generic"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, nothing installed, and libraries that are compiled to empty files."""
    monkeypatch.setenv("MEGAZERO_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "build", lambda targets, folder, work: (folder / f"{targets[0].name}.so").touch())
    monkeypatch.setattr(kept, "INSTALLED", tmp_path / "nowhere")
    return tmp_path


def put(cache: Path, level: str, compiler: str) -> Path:
    target = cpu_target(level)
    path = cache / target.digest() / compiler / f"{target.name}.so"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.mark.parametrize("recorded", ["its own", "another", None])
def test_an_installed_library_is_taken_if_it_was_made_of_these_sources(cache, monkeypatch, recorded):
    """Whatever its time is: pip unpacks libraries before sources, which are then the newer ones."""
    target, installed = cpu_target("generic"), cache / "installed" / "cpu_generic.so"
    installed.parent.mkdir()
    installed.touch()
    os.utime(installed, (0, 0))
    if recorded is not None:
        text = target.digest() if recorded == "its own" else cpu_target("avx2").digest()
        compiling.digest_file(installed).write_text(text)
    monkeypatch.setattr(kept, "INSTALLED", installed.parent)
    assert (kept.find_or_build(target) == installed) == (recorded == "its own")


@pytest.fixture
def closed_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that is no folder, which not even root can write into, and an empty temporary folder: that one."""
    (cache / "home").touch()
    monkeypatch.setenv("HOME", str(cache / "home"))
    for name in ("MEGAZERO_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(cache / "tmp"))
    (cache / "tmp").mkdir()
    return cache / "tmp"


def test_without_a_home_kernels_are_cached_in_a_folder_of_the_users_own(closed_home, monkeypatch):
    found = kept.find_or_build(cpu_target("generic"))
    own = closed_home / f"megazero-{os.getuid()}"
    assert found.exists() and own in found.parents and own.stat().st_mode & 0o777 == 0o700
    assert kept.find_or_build(cpu_target("generic")) == found
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # as for a user without an account
    assert kept.find_or_build(cpu_target("generic")) == found
    monkeypatch.setenv("MEGAZERO_KERNEL_CACHE", str(closed_home.parent / "home" / "kernels"))
    with pytest.raises(NotADirectoryError):
        kept.find_or_build(cpu_target("generic"))


def test_what_others_may_write_is_no_cache(closed_home):
    """Kernels of such a folder would run as this user."""
    own = closed_home / f"megazero-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(NotADirectoryError):
        kept.find_or_build(cpu_target("generic"))
    own.rmdir()
    own.symlink_to(closed_home.parent)
    with pytest.raises(NotADirectoryError):
        kept.find_or_build(cpu_target("generic"))


def test_a_level_that_is_not_installed_is_compiled_at_first_use(cache, monkeypatch):
    """As on another machine of a cluster that shares the folder of an editable install."""
    installed = cache / "installed" / "cpu_avx2.so"
    installed.parent.mkdir()
    installed.touch()
    compiling.digest_file(installed).write_text(cpu_target("avx2").digest())
    monkeypatch.setattr(kept, "INSTALLED", installed.parent)
    found = kept.find_or_build(cpu_target("generic"))
    assert found.name == "cpu_generic.so" and found.exists() and installed.parent not in found.parents


def test_without_a_compiler_what_another_machine_compiled_serves(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    made = put(cache, "generic", "01234567")
    assert kept.find_or_build(cpu_target("generic")) == made
    with pytest.raises(CompileError, match="no-such-compiler"):
        kept.find_or_build(cpu_target("avx2"))


def test_another_compiler_compiles_for_itself(cache, monkeypatch):
    made = put(cache, "generic", "01234567")
    monkeypatch.setattr(compiling, "compiler", lambda kind: "some-compiler")
    monkeypatch.setattr(compiling, "compiler_version", lambda command: f"{command} 1")
    found = kept.find_or_build(cpu_target("generic"))
    assert found.exists() and found != made and found.parent.parent == made.parent.parent
    assert kept.find_or_build(cpu_target("generic")) == found


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_without_file_locks_every_process_compiles_for_itself(cache, monkeypatch, code):
    """Another error of the lock is one."""

    def refuse(file, kind):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(kept.fcntl, "flock", refuse)
    if code != errno.EIO:
        assert kept.find_or_build(cpu_target("generic")).exists()
        return
    with pytest.raises(OSError, match="Input/output error"):
        kept.find_or_build(cpu_target("generic"))
