"""The device a rank computes on. Outside `fused_ops` only this file and streams.py touch `torch.cuda`.

Peak rates are dense (no sparsity) tensor-core rates from the makers' data sheets, in FLOP/s.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from megazero.system.limits import limits

_T = 1e12

# Words of the card's name (all of them must occur, as `torch.cuda.get_device_name` writes it), then bf16, fp16, and
# what fp32 matmuls reach in torch's default mode (no TF32), and fp64. The first row that matches counts.
_PEAKS: tuple[tuple[tuple[str, ...], float | None, float, float, float], ...] = (
    (("B200",), 2250 * _T, 2250 * _T, 80 * _T, 40 * _T),
    (("H200", "NVL"), 835.5 * _T, 835.5 * _T, 60 * _T, 60 * _T),
    (("H200",), 989 * _T, 989 * _T, 67 * _T, 67 * _T),
    (("GH200",), 989 * _T, 989 * _T, 67 * _T, 67 * _T),
    (("H100", "NVL"), 835.5 * _T, 835.5 * _T, 60 * _T, 60 * _T),
    (("H100", "PCIe"), 756 * _T, 756 * _T, 51 * _T, 51 * _T),
    (("H100",), 989 * _T, 989 * _T, 67 * _T, 67 * _T),
    (("H800", "PCIe"), 756 * _T, 756 * _T, 51 * _T, 0.8 * _T),
    (("H800",), 989 * _T, 989 * _T, 67 * _T, 1 * _T),
    (("A100",), 312 * _T, 312 * _T, 19.5 * _T, 19.5 * _T),
    (("A800",), 312 * _T, 312 * _T, 19.5 * _T, 9.7 * _T),
    (("A40",), 149.7 * _T, 149.7 * _T, 37.4 * _T, 0.58 * _T),
    (("A30",), 165 * _T, 165 * _T, 10.3 * _T, 10.3 * _T),
    (("A10",), 125 * _T, 125 * _T, 31.2 * _T, 0.49 * _T),
    (("L40S",), 362 * _T, 362 * _T, 91.6 * _T, 1.4 * _T),
    (("L40",), 181 * _T, 181 * _T, 90.5 * _T, 1.4 * _T),
    (("L4",), 121 * _T, 121 * _T, 30.3 * _T, 0.47 * _T),
    (("RTX 4090",), 165.2 * _T, 165.2 * _T, 82.6 * _T, 1.3 * _T),
    (("RTX 3090",), 71 * _T, 71 * _T, 35.6 * _T, 0.56 * _T),
    (("V100",), None, 125 * _T, 15.7 * _T, 7.8 * _T),
    (("T4",), None, 65 * _T, 8.1 * _T, 0.25 * _T),
)


def cuda_available() -> bool:
    """Whether this machine has a CUDA device that torch can use."""
    return torch.cuda.is_available()


def kind(asked: str) -> str:
    """What --device (auto, cpu or cuda) comes to on this machine: "cpu" or "cuda"; cuda stays cuda
    where there is none.
    """
    return "cuda" if asked == "cuda" or (asked == "auto" and cuda_available()) else "cpu"


def resolve(device: str, local_rank: int) -> torch.device:
    """The device of a rank: `device` is auto, cpu or cuda; auto takes cuda where there is any.

    Ranks of a machine take its cards in turn, so more ranks than cards share them (useful for tests; NCCL refuses it,
    gloo does not). The card is made current, and sums of 16-bit products that cuBLAS splits are kept in fp32 (torch's
    default adds the parts up in 16 bit). Raises ValueError when cuda is asked for and there is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and not cuda_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if kind(device) == "cpu":
        return torch.device("cpu")
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return chosen


def device_count(device: torch.device) -> int:
    """Devices of this kind on this machine; 1 for the CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def card_facts(device: torch.device) -> dict[str, str | int | float]:
    """Of a CUDA device: what it is, and the versions of the libraries that torch brought."""
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "capability": f"sm_{card.major}{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "l2_mib": round(getattr(card, "L2_cache_size", 0) / 2**20, 1),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
    }


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""With one workspace per stream cuBLAS sums in one order.

Read when its first handle is made; torch takes this value or :16:8.
"""


def use_deterministic_algorithms() -> None:
    """The same bits at every run on the same devices and layout, or an error.

    To be called before the first product on a device: torch looks at cuBLAS's setting then, and never again.
    """
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no op here reads what it has not written
    torch.backends.cudnn.benchmark = False


def why_not_deterministic() -> str | None:
    """What in the environment --deterministic would fail with on CUDA, at the first matrix product."""
    name, value = CUBLAS_WORKSPACE
    given = os.environ.get(name, value)
    return None if given in (value, ":16:8") else f"{name}={given}: cuBLAS is deterministic with {value} or :16:8"


def _status_bytes(field: str) -> int | None:
    """A line of /proc/self/status in bytes, or None where the kernel has none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held since the start or the last reset: the allocator's on CUDA, the resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    high_water = _status_bytes("VmHWM")
    # Outside Linux getrusage knows it (in bytes on macOS, in KiB elsewhere), but cannot be reset.
    return high_water if high_water is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_bytes(device: torch.device) -> int:
    """Memory held now: the allocator's on CUDA, the resident set on the CPU (0 where the kernel does not say)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") or 0


def total_memory_bytes(device: torch.device) -> int | None:
    """Memory of the card, or of the machine for the CPU (all its ranks share it)."""
    return (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _machine_bytes("MemTotal")
    )


def host_memory_is_short() -> bool:
    """Whether less than a quarter of the machine's memory can still be had. False where the kernel does not say."""
    total, available = _machine_bytes("MemTotal"), _machine_bytes("MemAvailable")
    return total is not None and available is not None and 4 * available < total


def available_memory_bytes() -> int | None:
    """Memory that a program can still have: of the machine, or of a control group where that has less; None where the
    kernel does not say.
    """
    left = [_machine_bytes("MemAvailable"), *(_left_of(limit) for limit in limits("memory.max"))]
    found = [number for number in left if number is not None]
    return min(found) if found else None


def _left_of(file: Path) -> int | None:
    """What a group's limit leaves, at least 0; its page cache is given up when memory is asked for.

    None without a limit.
    """
    try:
        limit, used = (int((file.parent / name).read_text()) for name in (file.name, "memory.current"))
        lines = (line.split() for line in (file.parent / "memory.stat").read_text().splitlines())
        cached = sum(int(value) for name, value in lines if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return None
    return max(0, limit - used + cached)


def _machine_bytes(field: str) -> int | None:
    """A line of /proc/meminfo in bytes, or None where there is none."""
    try:
        return int(Path("/proc/meminfo").read_text().split(f"{field}:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None


def return_free_memory(device: torch.device) -> None:
    """Give what the host's allocator holds but nobody uses back to the system; a few milliseconds. Only glibc has a
    call for it.

    Tensors whose life ends in another order than it began (messages that a peer takes late) leave holes in glibc's heap
    that it neither fills nor returns: 48 ranks on one machine grew by 8 MB a step and rank. A fixed mmap threshold
    keeps the heap small too, but fresh pages for every tensor double the time of a step.
    """
    trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None)
        if device.type == "cpu" and sys.platform.startswith("linux")
        else None
    )
    if trim is not None:
        trim(0)


def name(device: torch.device) -> str:
    """What to call the device in a banner: the card's name, or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Highest dense rate of matrix products in this dtype, in FLOP/s; None where it is not known (every CPU)."""
    return card_peak_flops(name(device), dtype) if device.type == "cuda" else None


def card_peak_flops(card: str, dtype: torch.dtype) -> float | None:
    """`peak_flops` of a card by its name, as NVIDIA's driver writes it."""
    words = card.replace("-", " ").lower()
    for needed, bf16, fp16, fp32, fp64 in _PEAKS:
        if all(f" {word.lower()} " in f" {words} " for word in needed):
            return {torch.bfloat16: bf16, torch.float16: fp16, torch.float32: fp32, torch.float64: fp64}.get(dtype)
    return None
