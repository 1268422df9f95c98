"""CUDA kernels that cannot run on a card are refused when they are loaded; those that can run on any card of a process.

No card is needed: the emulation stands for one, and tensors without memory for those of others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_ops.native import compile as compiling
from fused_ops.native import cuda, library
from fused_ops.native.binding import Argument
from fused_ops.native.cache import find_or_build
from fused_ops.native.card_trial import card_refusal
from fused_ops.native.cuda import MORE_SCRATCH, CudaLibrary

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path() -> Path:
    return find_or_build(compiling.emulated_target())


class Wrong(CudaLibrary):
    """A kernel that launches and gives another number."""

    def call(self, name: str, *arguments: Argument) -> None:
        super().call(name, *arguments)
        (total,) = (given for given in arguments if isinstance(given, Tensor) and given.dim() == 0)
        total.mul_(1 + 1e-9)


class Failing(CudaLibrary):
    """A kernel that no code in the library is for."""

    def call(self, name: str, *arguments: Argument) -> None:
        raise RuntimeError(f"{name}: no kernel image is available for execution on the device (CUDA error 209)\nmore")


def test_kernels_that_give_their_numbers_are_taken(path: Path) -> None:
    found = CudaLibrary(path, "emulated")
    assert found.versions() == (0, 0) and card_refusal(found, CPU) == ""


@pytest.mark.parametrize(("kind", "words"), [(Wrong, "is wrong: its numbers are off by 1.0e-09"), (Failing, "209")])
def test_kernels_that_fail_or_are_wrong_are_refused_in_a_line(kind: type[CudaLibrary], words: str, path: Path) -> None:
    why = card_refusal(kind(path, "emulated"), CPU)
    assert words in why and "\n" not in why


@pytest.mark.parametrize(
    ("driver", "runtime", "refused"),
    [(12080, 13000, True), (0, 12040, True), (12020, 12090, False), (13010, 12040, False), (13000, 13000, False)],
)
def test_a_driver_of_an_older_major_version_is_refused(
    driver: int, runtime: int, refused: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a major version CUDA promises that an older driver runs what a newer compiler made."""
    monkeypatch.setattr(CudaLibrary, "versions", lambda self: (driver, runtime))
    why = card_refusal(CudaLibrary(path, "emulated"), CPU)
    assert bool(why) == refused
    if refused:
        assert f"linked to CUDA {runtime // 1000}.{runtime % 1000 // 10}" in why
        assert ("CUDACXX" if driver else "no driver was found") in why


@pytest.mark.parametrize("why", ["", "the driver is old"])
def test_refused_kernels_are_a_warning_and_torchs_own_ops_run(
    why: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(library, "find_or_build", lambda target: path)
    monkeypatch.setattr(library, "card_refusal", lambda found, device: why)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = library.cuda_library.__wrapped__("auto", 1)
    assert (found is None) == bool(why)
    assert [str(warning.message).endswith(f"instead: {why}") for warning in said] == [True] * bool(why)


class Streams:
    """Stands for torch.cuda in a process with several cards: which one is current, and the streams that were used."""

    def __init__(self, current: int) -> None:
        self.current, self.launched, self.streams = current, list[tuple[int, int]](), dict[int, int]()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "_current_device", self.current_device)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(cuda, "_current_stream", self.current_stream)

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def current_stream(self, index: int) -> int:
        self.launched.append((self.current, index))
        return self.streams.get(index, 0)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_launch_is_on_the_device_of_its_tensors(current: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is that of the tensors while a kernel is launched, and afterwards what it was."""
    found, cards = CudaLibrary(path, "emulated"), Streams(current)
    cards.stand_in(monkeypatch)
    monkeypatch.setattr(found, "function", lambda name: lambda *arguments: 0)
    with FakeTensorMode():
        tensors = [torch.empty(4, device=torch.device("cuda", index)) for index in (1, 0, 1)]
        for tensor in tensors:
            found.call("sum_of_squares_f32", 4, tensor)
    assert cards.launched == [(1, 1), (0, 0), (1, 1)] and cards.current == current


def test_tensors_of_several_devices_are_refused(path: Path) -> None:
    found = CudaLibrary(path, "emulated")
    with pytest.raises(RuntimeError, match="softmax_f32: its tensors lie on cpu, meta"):
        found.call("softmax_f32", torch.ones(3), None, torch.ones(3, device="meta"))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_every_stream_has_a_structure_with_its_scratch_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled once, and again when a launcher asks for more; another stream's stays as it is."""
    found, cards, given = CudaLibrary(path, "emulated"), Streams(0), list[tuple[int, int, int]]()

    def launcher(launch: Any, elements: int, *rest: object) -> int:
        own = launch._obj
        given.append((own.stream or 0, own.scratch, own.bytes))
        own.needed = elements
        return MORE_SCRATCH if own.bytes < elements else 0

    cards.stand_in(monkeypatch)
    monkeypatch.setattr(found, "function", lambda name: launcher)
    empty = torch.empty
    addresses = iter(range(1000, 2000))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: next(addresses))
    with FakeTensorMode():
        x = empty(4, device=torch.device("cuda", 0))
        for stream, elements in ((7, 10), (7, 10), (9, 10), (7, 3 << 20), (7, 10), (9, 10)):
            cards.streams[0] = stream
            found.call("sum_of_squares_f32", elements, x)
    assert [(stream, size) for stream, _, size in given] == [
        *[(7, 1 << 20)] * 2,
        (9, 1 << 20),
        *[(7, 1 << 20), (7, 3 << 20)],  # called again
        (7, 3 << 20),
        (9, 1 << 20),
    ]
    scratch = [at for _, at, _ in given]
    assert scratch[0] == scratch[1] == scratch[3] and scratch[4] == scratch[5] and scratch[2] == scratch[6]
    assert len({*scratch}) == 3


def test_threads_do_not_share_scratch_memory_in_the_middle_of_a_sum(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is two kernels, the first of which leaves its parts in the scratch memory of the stream.

    So no two threads are inside a launcher at once: each waits there for the other, in vain.
    """
    found, both, met = CudaLibrary(path, "emulated"), Barrier(2, timeout=0.3), list[bool]()

    def launcher(*arguments: object) -> int:
        try:
            both.wait()
            met.append(True)
        except BrokenBarrierError:
            met.append(False)
        return 0

    monkeypatch.setattr(found, "function", lambda name: launcher)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: found.call("column_sums_f32", 1, 1, 1, x, x), [torch.ones(1), torch.ones(1)]))
    assert met == [False, False]


def test_tensors_of_several_devices_are_refused_in_an_array_too(path: Path) -> None:
    """A range of Adam whose gradient lies elsewhere."""
    found, x = CudaLibrary(path, "emulated"), torch.ones(3)
    given = x, x, torch.ones(3, device="meta"), x, None, 3, 1.0, 0.0
    with pytest.raises(RuntimeError, match="sgd_on_device_f32_f32: its tensors lie on cpu, meta"):
        found.call("sgd_on_device_f32_f32", 1, given, x, x, 0.1, 0.9)
