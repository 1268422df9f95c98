"""The library of CUDA kernels, which are launched on torch's current stream with scratch memory per stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.native.binding import Argument, Library, host_array

MORE_SCRATCH = -1
_FIRST_BYTES = 1 << 20
# What torch.cuda.current_device and current_stream ask. They check before that CUDA is initialised; a tensor is there.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Launch(ctypes.Structure):
    """The struct `Launch` of csrc/cuda/launch.h."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("needed", ctypes.c_int64),
    ]


class CudaLibrary(Library):
    """A library whose functions launch CUDA kernels and return at once.

    Sums over rows need scratch memory, which all launches of one stream share. When the scratch memory grows, the
    smaller ones are kept, since a captured graph may use them. Each is at least twice as large as the one before, so
    all together are less than twice the last.

    A model's step launches hundreds of kernels, and the host must stay ahead of a fast card. So a call makes no object
    that it can keep: argument types are declared once, and each stream has one structure. A lock guards it. The lock
    also keeps the two kernels of a sum together, so that another thread's launch does not take their scratch memory.
    """

    on_device = True
    ahead = ctypes.c_void_p
    result = ctypes.c_int

    def __init__(self, path: Path, level: str) -> None:
        super().__init__(path, level)
        self._scratch: dict[tuple[int, int], list[Tensor]] = {}
        self._launches: dict[tuple[int, int], tuple[_Launch, Any]] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: Argument) -> None:
        """Launch `name` on the current stream of the tensors' device, which need not be the current one.

        Arguments as in `Library.call`, without threads.

        Raises RuntimeError if the launch fails, or if tensors lie on several devices. CUDA reports later errors of the
        kernel as for any other kernel.
        """
        function, pointers, arrays = self._typed.get(name) or self._types(name, arguments)
        given: list[Any] = [*arguments]
        one, index, apart = None, -1, False
        for at in pointers:
            tensor: Any = given[at]
            if tensor is None:
                continue
            given[at], own = tensor.data_ptr(), tensor.get_device()
            if one is None:
                one, index = tensor, own
            if own != index or (own < 0 and not tensor.is_cpu):
                apart = True
        for at in arrays:
            inside = [value.get_device() for value in given[at] if isinstance(value, Tensor)]
            if index < 0 or inside.count(index) != len(inside):
                apart = True
            given[at] = host_array(given[at])
        if apart:
            _assert_one_device(name, arguments)
        if index < 0 or index == _current_device():
            self._queue(name, function, one, index, given)
        else:
            with torch.cuda.device(index):  # a launch on a stream of another device than the current fails
                self._queue(name, function, one, index, given)

    def versions(self) -> tuple[int, int]:
        """Versions of CUDA, 12090 for 12.9: (the newest that the driver runs, that of the runtime in this library);
        zeros without a driver, and of the emulation.
        """
        driver, runtime = ctypes.c_int32(), ctypes.c_int32()
        code = self.function("cuda_versions")(ctypes.byref(driver), ctypes.byref(runtime))
        if code:
            raise RuntimeError(f"CUDA says no version: {self._error(code)} (CUDA error {code})")
        return driver.value, runtime.value

    def _queue(self, name: str, function: Any, one: Any, index: int, given: list[Any]) -> None:
        stream = _current_stream(index) if index >= 0 else 0
        with self._lock:
            launch, reference = self._launches.get((index, stream)) or self._prepared(one, stream)
            code = function(reference, *given)
            if code == MORE_SCRATCH:
                self._give_scratch(launch, one, launch.needed)
                code = function(reference, *given)
        if code:
            raise RuntimeError(f"{name}: {self._error(code)} (CUDA error {code})")

    def _prepared(self, one: Tensor, stream: int) -> tuple[_Launch, Any]:
        """The structure for launches on a stream of the device of `one`, and a reference to it as an argument."""
        launch = _Launch(stream)
        self._give_scratch(launch, one, 0)
        found = self._launches[one.get_device(), stream] = launch, ctypes.byref(launch)
        return found

    def _give_scratch(self, launch: _Launch, one: Tensor, needed: int) -> None:
        kept = self._scratch.setdefault((one.get_device(), launch.stream or 0), [])
        more = max(needed, 2 * launch.bytes, _FIRST_BYTES)
        kept.append(torch.empty(more, dtype=torch.uint8, device=one.device))
        launch.scratch, launch.bytes = kept[-1].data_ptr(), more

    def _error(self, code: int) -> str:
        function: Any = self.function("error_text")
        function.restype = ctypes.c_char_p
        text: bytes = function(ctypes.c_int64(code))
        return text.decode()


def _assert_one_device(name: str, arguments: Sequence[Argument]) -> None:
    """Raise RuntimeError if tensors lie on several devices."""
    flat = [one for argument in arguments for one in (argument if isinstance(argument, tuple) else (argument,))]
    devices = [argument.device for argument in flat if isinstance(argument, Tensor)]
    if any([device != devices[0] for device in devices]):  # noqa: C419 - a generator takes twice as long
        raise RuntimeError(f"{name}: its tensors lie on {', '.join(sorted({str(device) for device in devices}))}")
