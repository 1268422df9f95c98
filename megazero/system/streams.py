"""What a card does beside what the host does: times, copies and graphs on its streams."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class Stopwatch:
    """Seconds of what the current stream of a device does between `start` and `stop`; on a CPU those of the host.

    Neither waits, so that the host can run ahead; `seconds` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def _take(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times[which] = time.perf_counter()

    def start(self) -> None:
        self._take(0)

    def stop(self) -> None:
        self._take(1)

    def seconds(self) -> float:
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class SideCopies:
    """Copies from host memory to the device on a stream of their own, beside what the device computes.

    On devices without streams they are plain copies. `start` from pinned memory, and neither call waits for the device.
    The pinned memory may be dropped at once: torch's allocator of it keeps it until a copy with non_blocking is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin to copy. The function returned makes the current stream wait for these copies, and gives them; call it
        once.
        """
        if self._stream is None:
            there = [None if tensor is None else tensor.to(self._device, non_blocking=True) for tensor in tensors]
            return lambda: there
        stream = self._stream
        with torch.cuda.stream(stream):
            copies = [None if tensor is None else tensor.to(self._device, non_blocking=True) for tensor in tensors]
            arrived = stream.record_event()

        def take() -> list[Tensor | None]:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(arrived)
            for copy in copies:
                if (
                    copy is not None
                ):  # it belongs to the copies' stream, which must not get it back before this one is done with it
                    copy.record_stream(current)
            return copies

        return take


class HostCopies:
    """Copies of a device's tensors in host memory that stays: the next copies go where the last ones were.

    For a card the memory is pinned, so that copies run at the speed of the bus. It is allocated first and pinned then:
    torch's allocator of pinned memory rounds every piece up to a power of two, and this is one piece as large as the
    state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, tensors: Sequence[Tensor]) -> int:
        """Have the memory for copies of these, its pages included; bytes.

        Raises RuntimeError where it cannot be pinned.
        """
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(needed, dtype=torch.uint8).zero_()
            if self._device.type == "cuda":
                _pin(self._memory)
        return needed

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of these, in their shapes.

        Returns when they are made: the tensors may change then, and the copies be read.
        """
        self.reserve(tensors)
        copies, offset = [], 0
        for tensor in tensors:
            copy = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach(), non_blocking=True))
            offset += _aligned(tensor.nbytes)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies


def _aligned(count: int) -> int:
    """Bytes after which a copy of any dtype may begin, in a cache line of its own."""
    return -(-count // 64) * 64


def _pin(memory: Tensor) -> None:
    """Lock the memory's pages for a card until it is freed."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    status = int(runtime.cudaHostRegister(address, memory.nbytes, 1))  # 1: for every context of the process
    if status != 0:
        raise RuntimeError(
            f"{memory.nbytes:,} bytes of host memory for --async-save cannot be pinned: CUDA's error {status}"
        )
    weakref.finalize(memory, lambda: runtime.cudaHostUnregister(address))


class GraphCapture:
    """CUDA graphs of one card that share their memory, captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def on_side_stream(self, work: Callable[[], _Result]) -> _Result:
        """Do the work on the stream of the captures, as torch asks of what comes before one; the current stream waits
        for it.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what the work launches, without running it; the function returned runs it on the current stream.

        Waits for the device, and returns what its allocator holds unused first: a graph's memory is its own. Other
        threads may call CUDA meanwhile (NCCL's watchdog does), therefore thread_local.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
