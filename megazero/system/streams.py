"""Timers, copies and graphs on the streams of a device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class Stopwatch:
    """Seconds that the current stream of a device takes between `start` and `stop`; on a CPU, the host's time.

    `start` and `stop` do not wait for the device; `seconds` does.
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


class SideStreamCopies:
    """Copies from host memory to the device on a stream of their own, while the device computes.

    On devices without streams they are plain copies. From pinned memory, no call waits for the device. The caller may
    drop the pinned memory at once: torch's allocator keeps it until a non-blocking copy is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Start copies. Returns a function, to be called once, that makes the current stream wait for the copies and
        returns them in order (None for None).
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
                ):  # its memory belongs to the copies' stream, which must not reuse it before this stream is done
                    copy.record_stream(current)
            return copies

        return take


class WaitedCopies:
    """Copies between host memory and a device on a stream of their own. A thread of the host waits for each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def behind_now(self) -> Callable[[Tensor, Tensor], None]:
        """A function (to, from) for any thread: it copies behind what the current stream was given before this call,
        and returns when the copy is made.
        """
        stream = self._stream
        if stream is None:
            return _copy
        given = torch.cuda.current_stream(self._device).record_event()

        def copy(to: Tensor, source: Tensor) -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(given)
                to.copy_(source, non_blocking=True)
                made = stream.record_event()
            made.synchronize()

        return copy


def reached(device: torch.device) -> Callable[[], None]:
    """A function for any thread: it returns once the device has done what the current stream was given before now. On a
    CPU that is done already.
    """
    if device.type != "cuda":
        return lambda: None
    return torch.cuda.current_stream(device).record_event().synchronize


class SideStream:
    """A stream of a CUDA device for copies in one direction, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Start copies (to, from) behind what the current stream was given before, and behind earlier ones.

        Returns a function that makes the current stream wait for them; the host never waits. The tensors on the device
        must belong to that stream. Then neither end may be freed or changed before that function is called, and both
        may be afterwards.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            over = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(over)


class HostCopies:
    """Copies of a device's tensors in host memory, which is kept and reused by the next copies.

    For a GPU the memory is pinned, so that copies run at the speed of the bus. It is allocated as plain memory and then
    pinned: torch's allocator of pinned memory would round this one large piece up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, sizes: Sequence[int]) -> int:
        """Allocate the memory for copies of tensors of so many bytes, with all its pages; return its size in bytes.

        Raises RuntimeError where it cannot be pinned.
        """
        needed = sum(map(_aligned, sizes))
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new is allocated
            self._memory = host_tensor(needed, torch.uint8, self._device, "--async-save")
        return needed

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of these tensors, of their shapes and dtypes, valid until the next call.

        Returns when the copies are complete; then the tensors may change.
        """
        self.reserve([tensor.nbytes for tensor in tensors])
        copies, offset = [], 0
        for tensor in tensors:
            copy = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach(), non_blocking=True))
            offset += _aligned(tensor.nbytes)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def host_tensor(numel: int, dtype: torch.dtype, device: torch.device, flag: str) -> Tensor:
    """Host memory with all its pages, zeros [numel]. For a GPU it is pinned. Raises RuntimeError where it cannot be.

    flag: what needs it, for the error.
    """
    memory = torch.empty(numel, dtype=dtype).zero_()
    if device.type == "cuda" and numel:
        pin(memory, flag)
    return memory


def _aligned(count: int) -> int:
    """Bytes rounded up to whole cache lines of 64 bytes, so that the next copy is aligned for any dtype."""
    return -(-count // 64) * 64


def pin(memory: Tensor, flag: str) -> None:
    """Pin the memory for CUDA until it is freed. Raises RuntimeError, which names the flag that needs it."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    status = int(runtime.cudaHostRegister(address, memory.nbytes, 1))  # 1: for every context of the process
    if status != 0:
        raise RuntimeError(f"{memory.nbytes:,} bytes of host memory for {flag} cannot be pinned: CUDA's error {status}")
    weakref.finalize(memory, lambda: runtime.cudaHostUnregister(address))


class GraphCapture:
    """CUDA graphs of one device that share a memory pool and are captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def on_side_stream(self, work: Callable[[], _Result]) -> _Result:
        """Run the work on the capture stream, as torch requires of warm-up before a capture; return its result.

        The current stream waits for it.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what the work launches, without running it; return a function that runs it on the current stream.

        It waits for the device and frees unused cached memory first, since a graph's memory is separate. The capture
        mode is thread_local because other threads (NCCL's watchdog) call CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
