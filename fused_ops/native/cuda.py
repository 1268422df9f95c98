"""The library of CUDA kernels, which are launched on torch's current stream with scratch memory per stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.native.binding import Library, as_c_argument

MORE_SCRATCH = -1
_FIRST_BYTES = 1 << 20


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
    """

    on_device = True
    result = ctypes.c_int

    def __init__(self, path: Path, level: str) -> None:
        super().__init__(path, level)
        self._scratch: dict[tuple[torch.device, int], list[Tensor]] = {}

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Launch `name` on the current stream of the tensors' device, which need not be the current one.

        Arguments as in `Library.call`, without threads.

        Raises RuntimeError if the launch fails, or if tensors lie on several devices. CUDA reports later errors of the
        kernel as for any other kernel.
        """
        device = _device_of(name, arguments)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # a launch on a stream of another device than the current fails
                self._queue(name, device, arguments)
        else:
            self._queue(name, device, arguments)

    def versions(self) -> tuple[int, int]:
        """Versions of CUDA, 12090 for 12.9: (the newest that the driver runs, that of the runtime in this library);
        zeros without a driver, and of the emulation.
        """
        driver, runtime = ctypes.c_int32(), ctypes.c_int32()
        code = self.function("cuda_versions")(ctypes.byref(driver), ctypes.byref(runtime))
        if code:
            raise RuntimeError(f"CUDA says no version: {self._error(code)} (CUDA error {code})")
        return driver.value, runtime.value

    def _queue(self, name: str, device: torch.device, arguments: Sequence[Tensor | int | float | None]) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        function, given = self.function(name), [as_c_argument(argument) for argument in arguments]
        launch = self._launch(device, stream, 0)
        code = function(ctypes.byref(launch), *given)
        if code == MORE_SCRATCH:
            launch = self._launch(device, stream, launch.needed)
            code = function(ctypes.byref(launch), *given)
        if code:
            raise RuntimeError(f"{name}: {self._error(code)} (CUDA error {code})")

    def _launch(self, device: torch.device, stream: int, needed: int) -> _Launch:
        kept = self._scratch.setdefault((device, stream), [])
        held = kept[-1].numel() if kept else 0
        if not kept or held < needed:
            kept.append(torch.empty(max(needed, 2 * held, _FIRST_BYTES), dtype=torch.uint8, device=device))
        return _Launch(stream, kept[-1].data_ptr(), kept[-1].numel(), 0)

    def _error(self, code: int) -> str:
        function: Any = self.function("error_text")
        function.restype = ctypes.c_char_p
        text: bytes = function(ctypes.c_int64(code))
        return text.decode()


def _device_of(name: str, arguments: Sequence[Tensor | int | float | None]) -> torch.device:
    """The device of all tensors."""
    devices = [argument.device for argument in arguments if isinstance(argument, Tensor)]
    if any([device != devices[0] for device in devices]):  # noqa: C419 - a generator takes twice as long
        raise RuntimeError(f"{name}: its tensors lie on {', '.join(sorted({str(device) for device in devices}))}")
    return devices[0]
