"""Whether the CUDA kernels run on a card, found before anything depends on them.

The library holds a CUDA runtime of the compiler's version. It loads under any driver; under one of an older major
version every launch fails, which would be in the middle of a step. A library for another kind of card fails likewise.
"""

from __future__ import annotations

import torch

from fused_ops.known import disagreement, known_numbers
from fused_ops.native.cuda import CudaLibrary

ELEMENTS = (1 << 17) + 5
"""More than a block of the kernel sums, and no whole number of packs."""


def card_refusal(library: CudaLibrary, device: torch.device) -> str:
    """Why the kernels do not run on a device; empty: they do.

    Compares versions, launches one kernel and compares its number with float64. Waits for the device.
    """
    try:
        driver, runtime = library.versions()
        if driver // 1000 < runtime // 1000:
            runs = f"the driver runs CUDA {_spelled(driver)} at most" if driver else "no driver was found"
            older = f", or name an nvcc of CUDA {driver // 1000} in CUDACXX" if driver else ""
            return f"they are linked to CUDA {_spelled(runtime)}, and {runs}: install a newer driver{older}"
        x = known_numbers(ELEMENTS, seed=1, dtype=torch.bfloat16, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        library.call("sum_of_squares_bf16", x.numel(), x, total)
        off = disagreement(total, x.double().square().sum(), 1e-12)
    except RuntimeError as error:  # of the launch, or of torch, which waits for it
        return f"a trial launch failed on {device}: {str(error).splitlines()[0]}"
    return f"a trial launch on {device} is wrong: {off}" if off else ""


def _spelled(version: int) -> str:
    """12090 -> 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"
