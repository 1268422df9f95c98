"""What a launch of a CUDA kernel costs the host: `fused_ops.native.cuda`, beside one that prepares everything anew.

    python -m bench.launches              # on a GPU, else with the emulated kernels

The functions are called with sizes of 0, for which they launch nothing. So this is the time of Python and ctypes alone,
which is the same for every size.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.native import library
from fused_ops.native.binding import Argument, as_c_argument
from fused_ops.native.cuda import CudaLibrary, _Launch
from megazero.system.device import cuda_available

CALLS, ROUNDS = 2000, 15


def prepared_anew(found: CudaLibrary, function: Any, arguments: Sequence[Argument]) -> None:
    """A launch as one writes it down first: torch's stream object, a structure, and an object for every argument.

    function: one whose argument types are not declared.
    """
    devices = [argument.device for argument in arguments if isinstance(argument, Tensor)]
    assert not any([device != devices[0] for device in devices])  # noqa: C419 - a generator takes twice as long
    if devices[0].type == "cuda":
        torch.accelerator.current_stream(devices[0])
    given = [as_c_argument(argument) for argument in arguments]
    (scratch, *_), *_ = found._scratch.values()
    launch = _Launch(0, scratch.data_ptr(), scratch.numel(), 0)
    failed = function(ctypes.byref(launch), *given)
    assert not failed


def microseconds(body: Callable[[], object]) -> float:
    """The time of a call in the fastest of the rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            body()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times)


def cases(device: torch.device) -> dict[str, tuple[Argument, ...]]:
    """Launchers with few arguments and with many, each with a size of 0."""
    x, number = torch.zeros(64, device=device), torch.ones((), dtype=torch.float64, device=device)
    flag = torch.zeros((), dtype=torch.bool, device=device)
    return {
        "column_sums_f32": (0, 0, 0, x, x),
        "softmax_backward_f32": (0, 1, 1, 1, x, x, 1.0),
        "adam_on_device_f32_f32": (0, (x, x, x, x, x, 0, 1.0, 0.0), number, number, flag, *[0.5] * 7),
    }


def main() -> None:
    """Print a table."""
    device = torch.device("cuda", 0) if cuda_available() else torch.device("cpu")
    found = library.cuda_library("auto", 0) if device.type == "cuda" else library.cpu_library(library.EMULATED)
    assert isinstance(found, CudaLibrary), "no kernels"
    print(f"{found.level}: microseconds of a call that launches nothing")
    print(f"{'function':24} {'arguments':>9} {'prepared anew':>13} {'ours':>6} {'ratio':>6}")
    for name, arguments in cases(device).items():
        found.call(name, *arguments)
        ours = microseconds(lambda name=name, given=arguments: found.call(name, *given))  # type: ignore[misc]
        fresh = ctypes.CDLL(str(found.path))[name]
        anew = microseconds(lambda fresh=fresh, given=arguments: prepared_anew(found, fresh, given))  # type: ignore[misc]
        print(f"{name:24} {len(arguments):9} {anew:13.2f} {ours:6.2f} {ours / anew:6.2f}")


if __name__ == "__main__":
    main()
