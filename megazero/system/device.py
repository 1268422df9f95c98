"""The device of a rank. Outside `fused_ops` only this file and streams.py use `torch.cuda`.

Peak rates are dense (without sparsity) tensor-core rates from NVIDIA's data sheets, in FLOP/s.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from megazero.system.host_memory import machine_bytes

_T = 1e12

# Words that must all occur in the card's name (as `torch.cuda.get_device_name` gives it), then the rates in bf16, fp16,
# fp32 (in torch's default mode, without TF32) and fp64. The first row that matches counts.
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
    """--device (auto, cpu or cuda) resolved on this machine: "cpu" or "cuda". cuda is not checked."""
    return "cuda" if asked == "cuda" or (asked == "auto" and cuda_available()) else "cpu"


def shares_host_memory(kind: str) -> bool:
    """Whether a device of this kind ("cpu" or "cuda") computes in the memory of the host."""
    return kind == "cpu"


def resolve(device: str, local_rank: int) -> torch.device:
    """The device of a rank. device: auto (cuda if there is a GPU), cpu or cuda.

    Ranks of a machine take its GPUs in turn, so more ranks than GPUs share them (useful for tests; NCCL refuses it,
    gloo does not). The GPU becomes the current one. cuBLAS is set to sum the parts of split 16-bit products in fp32
    (torch's default is 16 bits). Raises ValueError when cuda is asked for and there is none.
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
    """Number of devices of this kind on this machine; 1 for the CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def generators(device: torch.device) -> list[torch.Generator]:
    """Torch's generators of the host, and of a device where that has one of its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def card_facts(device: torch.device) -> dict[str, str | int | float]:
    """Properties of a CUDA device, and the versions of torch's CUDA libraries. Keys with _gib and _mib are in those
    units.
    """
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
"""The setting with which cuBLAS is deterministic: fixed workspaces. torch accepts this value or :16:8. cuBLAS reads it
when its first handle is created.
"""


def use_deterministic_algorithms() -> None:
    """Make runs on the same devices and layout give the same bits. Ops that cannot do that raise errors.

    Must be called before the first product on a device: cuBLAS's setting is read then.
    """
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no op here reads what it has not written
    torch.backends.cudnn.benchmark = False


def why_not_deterministic() -> str | None:
    """The setting in the environment with which --deterministic would fail on CUDA, in words; None if it is fine."""
    name, value = CUBLAS_WORKSPACE
    given = os.environ.get(name, value)
    return None if given in (value, ":16:8") else f"{name}={given}: cuBLAS is deterministic with {value} or :16:8"


def _status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where there is none."""
    try:
        for line in Path("/proc/self/status").read_text(errors="surrogateescape").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated by torch on CUDA, the resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    high_water = _status_bytes("VmHWM")
    # Outside Linux getrusage gives it (in bytes on macOS, in KiB elsewhere).
    return high_water if high_water is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_bytes(device: torch.device) -> int:
    """Memory of this process now: allocated by torch on CUDA, the resident set on the CPU (0 if it is not known)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") or 0


def context_bytes(device: torch.device) -> int:
    """What a CUDA device has in use beside the memory of torch's allocator: the driver's context with its kernels, and
    whatever other processes have there. 0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def peak_reserved_bytes(device: torch.device) -> int:
    """The most that torch's allocator has had of a CUDA device, with what it could not use. 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def forget_peaks(device: torch.device) -> None:
    """Give unused memory of a CUDA device back, and count its peaks from now on. Nothing on a CPU, where the peak of a
    process is the system's.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def total_memory_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or for the CPU that of the machine, which all its ranks share; None if it is not known."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_bytes("MemTotal")


def room_bytes(device: torch.device) -> int | None:
    """Bytes that tensors of this process may take of a device: what torch's allocator has of it, and what is free. On a
    CPU the machine's memory; None if it is not known.
    """
    if device.type != "cuda":
        return total_memory_bytes(device)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Let torch's allocator take no more than this of a CUDA device in this process: it raises torch.OutOfMemoryError.

    The limit is of whole segments, spare ones and cuBLAS's workspaces included. Nothing on a CPU.
    """
    total = total_memory_bytes(device)
    if device.type == "cuda" and total:
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def return_free_memory(device: torch.device) -> None:
    """Return free memory of the host's allocator to the system. It takes a few milliseconds; only glibc can do it.

    Tensors that are not freed in the reverse order of their allocation (messages that a peer receives late) fragment
    glibc's heap, which then grows. A fixed mmap threshold would keep the heap small too, but fresh pages for every
    tensor double the time of a step.
    """
    trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None)
        if device.type == "cpu" and sys.platform.startswith("linux")
        else None
    )
    if trim is not None:
        trim(0)


def name(device: torch.device) -> str:
    """The name of the device for the banner: the GPU's, or the processor's model."""
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
    """Peak dense rate of matrix products in this dtype, in FLOP/s; None where it is not known (every CPU)."""
    return card_peak_flops(name(device), dtype) if device.type == "cuda" else None


def card_peak_flops(card: str, dtype: torch.dtype) -> float | None:
    """`peak_flops` of a GPU by its name, as NVIDIA's driver gives it."""
    words = card.replace("-", " ").lower()
    for needed, bf16, fp16, fp32, fp64 in _PEAKS:
        if all(f" {word.lower()} " in f" {words} " for word in needed):
            return {torch.bfloat16: bf16, torch.float16: fp16, torch.float32: fp32, torch.float64: fp64}.get(dtype)
    return None
