"""Which way of moving bytes runs, and why."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from fused_ops.native import library
from megazero.disk.swap_file import DiskError
from megazero.disk.transports import REFUSED, DiskOptions
from tests.disk.conftest import require_ring
from tests.disk.contents import contents, opened, read_all, same
from tests.forks import fork

PIECES = {"a": 200_001}
OPTIONS = DiskOptions(1 << 16, 2)
SYSCALLS = 425, 426, 427
"""io_uring_setup, _enter, _register: the same numbers on every architecture."""


def backend_of(folder: Path, options: DiskOptions = OPTIONS) -> str:
    """Its words, after bytes went to disk and back by it."""
    space = opened(folder, PIECES, options)
    space.write(contents(PIECES)).wait()
    assert same(read_all(space, PIECES), contents(PIECES))
    space.close(remove=True)
    return space.backend


class Refusing:
    """The compiled kernels on a system whose answers to io_uring are others."""

    def __init__(self, setup: int = 0, registering: int = 0) -> None:
        kernels = library.host_library("auto")
        if kernels is None:
            pytest.skip("the kernels are not compiled")
        self._kernels, self._setup, self._registering = kernels, setup, registering

    def call(self, name: str, *arguments: Any) -> None:
        if name == "disk_ring_open" and self._setup:
            arguments[-1][1] = self._setup
        else:
            self._kernels.call(name, *arguments)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EACCES, errno.ENOMEM])
def test_where_io_uring_is_refused_threads_run(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(code)
    monkeypatch.setattr(library, "host_library", lambda asked: refusing)
    assert backend_of(tmp_path) == f"threads with O_DIRECT (no io_uring: {REFUSED[code]} (errno {code}))"
    with pytest.raises(DiskError, match=rf"io_uring was asked for: .*\(errno {code}\)"):
        opened(tmp_path, PIECES, DiskOptions(1 << 16, 2, "io_uring"))
    assert list(tmp_path.iterdir()) == []


def test_without_kernels_threads_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "host_library", lambda asked: None)
    assert backend_of(tmp_path) == "threads with O_DIRECT (no io_uring: the compiled kernels are missing)"


def test_io_uring_runs_where_it_can(tmp_path: Path) -> None:
    require_ring()
    assert backend_of(tmp_path) == "io_uring with O_DIRECT and registered buffers"
    assert backend_of(tmp_path, DiskOptions(1 << 16, 2, "threads")) == "threads with O_DIRECT (asked for)"


def in_a_child(restrict: Any, folder: Path) -> str:
    """The words of a process that has restricted itself."""
    read, write = os.pipe()
    child = fork()
    if not child:
        try:
            restrict()
            os.write(write, backend_of(folder).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    words = os.read(read, 4096).decode()
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, words
    return words


def forbid_io_uring() -> None:
    """As a container does: a filter of the kernel answers these system calls with EPERM."""
    program = [(0x20, 0, 0, 0)]  # load the number of the system call
    for left, number in zip((2, 1, 0), SYSCALLS, strict=True):
        program.append((0x15, left, 0 if left else 1, number))  # equal: to EPERM
    program += [(0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in program))
    table = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(table), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def test_a_seccomp_filter_that_forbids_io_uring(tmp_path: Path) -> None:
    library.host_library("auto")  # before the fork
    said = f"no io_uring: {REFUSED[errno.EPERM]} (errno {errno.EPERM})"
    assert in_a_child(forbid_io_uring, tmp_path) == f"threads with O_DIRECT ({said})"


def test_a_small_limit_of_locked_memory(tmp_path: Path) -> None:
    """Of a user without privileges: buffers are not registered, and io_uring runs without."""
    require_ring()
    if os.geteuid() != 0:
        pytest.skip("not root: the limit of this user counts already")
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)

    def unprivileged() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)

    words = in_a_child(unprivileged, tmp_path)
    assert words in (
        "io_uring with O_DIRECT and unregistered buffers (the limit of locked memory, ulimit -l, is too small)",
        f"threads with O_DIRECT (no io_uring: {REFUSED[errno.ENOMEM]} (errno {errno.ENOMEM}))",
    )
