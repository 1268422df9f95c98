"""The ways of moving bytes, each a value of the fixture `way`."""

from __future__ import annotations

import pytest

from fused_ops.native import library
from megazero.disk.transports import IO_URING, THREADS, DiskOptions, Failure, RingTransport

WAYS = "ring", "threads", "plain"
"""io_uring; threads with the compiled copy; threads without any compiled kernel."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(library, "host_library", lambda asked: None)
    elif request.param == "ring":
        require_ring()
    return str(request.param)


@pytest.fixture
def options(way: str) -> DiskOptions:
    """Small buffers, so that small pieces are many chunks."""
    backend = IO_URING if way == "ring" else THREADS
    return DiskOptions(buffer_bytes=1 << 16, depth=4, backend=backend, seconds=20, direct_bytes=2 << 16)


def require_ring() -> None:
    kernels = library.host_library("auto")
    if kernels is None:
        pytest.skip("the kernels are not compiled")
    try:
        RingTransport(kernels, 1, 1 << 16, 1).close()
    except Failure as failure:
        pytest.skip(f"no io_uring: errno {failure.code}")
