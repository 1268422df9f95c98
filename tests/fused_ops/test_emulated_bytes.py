"""CUDA kernels move the bytes that the benchmarks count for them, no more and no less: emulated, with every access to
memory seen (`accesses.cpp`).

A matrix here is an argument with as many elements as the largest of its call, or of bytes that are codes of one. Of it
every byte is counted, once for each launch that fetches or stores it: that sum is equal to what `bench/op_cases.py`
claims. Vectors, statistics and
scratch memory are not claimed; what they may be is tested apart. What a launch accesses again, a cache serves: the
tables below have all of it that concerns matrices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.case import BothWays, Case, Sizes
from bench.gpu_ops import LARGE, TIMED
from bench.op_cases import CASES, PARTS
from fused_ops.native import compile as compiling
from fused_ops.native import library
from fused_ops.native.cuda import MORE_SCRATCH, CudaLibrary
from fused_ops.quantise import BLOCK, code_bytes, packed_bytes
from tests.fused_ops.watched import Call, Traffic, watched_kernels, watched_sources, watching
from tests.gpu import sanitize
from tests.gpu.sanitize import DTYPES, Draw

pytestmark = pytest.mark.slow


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CudaLibrary:
    """The ops run these emulated kernels."""
    try:
        found = watched_kernels()
    except compiling.CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    monkeypatch.setattr(library, "cpu_library", lambda asked: found)
    return found


def matrices(call: Call) -> list[tuple[Tensor, Traffic]]:
    pairs = [(a, of) for a, of in zip(call.arguments, call.of, strict=True) if isinstance(a, Tensor) and of is not None]
    numbers = [tensor.numel() for tensor, _ in pairs if tensor.dtype != torch.uint8]
    largest = max(numbers or [tensor.numel() for tensor, _ in pairs])
    return [(tensor, of) for tensor, of in pairs if tensor.numel() == largest or tensor.dtype == torch.uint8]


def moved(calls: list[Call]) -> int:
    return sum(of.moved for call in calls for _, of in matrices(call))


def accessed(calls: list[Call]) -> int:
    return sum(of.accessed for call in calls for _, of in matrices(call))


# What a call reads again of its matrices, in bytes.


def label(z: Sizes) -> int:
    """The logit of the label, which the first thread of a row reads on its own."""
    return z.tokens * z.dtype.itemsize


def shared_scales(z: Sizes) -> int:
    """The scale of a block, which 16 threads read at once."""
    return 15 * 4 * PARTS * -(-z.parameters // BLOCK)


AGAIN: dict[str, Callable[[Sizes], int]] = {"cross-entropy": label, "sum of int4 blocks": shared_scales}
"""Case -> what it accesses more than once; all others nothing."""

ONES = tuple(name for name in TIMED if ", torch" not in name and " against " not in name)
ONES += tuple(name for name in CASES if name.endswith("blocks"))
"""Those of the benchmark that are not another's rival only, and those of messages."""
SIZES = {
    "packs": Sizes(b=2, s=40, n=3, d=32, f=136, v=1000, parameters=10_000),
    "tails": Sizes(b=2, s=37, n=3, d=10, f=75, v=1003, parameters=10_001),
}


def beyond_the_diagonal(z: Sizes, pack: int) -> float:
    """Bytes that rows of scores have in packs up to their own key, beyond the claimed half of the matrix."""
    rows = sum(-(-(own + 1) // pack) * pack for own in range(z.s))
    return z.b * z.n * (rows - z.s * z.s / 2) * z.dtype.itemsize


def claims(name: str, z: Sizes, bytes_: float, halves: int) -> list[float]:
    """What must be moved if a case claims this. Softmax claims half of a matrix `halves` times, for what is on and
    under its diagonal: up to the last key that a row sees, or up to the end of its pack.
    """
    if name != "softmax":
        return [bytes_]
    return [bytes_ + halves * beyond_the_diagonal(z, pack) for pack in (1, 16 // z.dtype.itemsize)]


def run_apart(case: Case, kernels: CudaLibrary) -> tuple[list[Call], list[Call]]:
    """The calls of forward, and of backward; nothing for the second if there is none."""
    tensors = case.prepare()
    if not isinstance(case.ours, BothWays):
        with watching(kernels) as whole:
            case.ours(*tensors)
        return whole.calls, []
    with watching(kernels) as forward:
        out = case.ours.forward(*tensors[:-1])
    with watching(kernels) as backward:
        out.backward(tensors[-1].view(out.shape).to(out.dtype))
    return forward.calls, backward.calls


@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ONES)
def test_the_bytes_of_the_benchmark_are_those_that_kernels_move(kernels, name, sizes, dtype):
    z = replace(SIZES[sizes], dtype=dtype)
    torch.manual_seed(1)
    case = CASES[name](z)
    forward, backward = run_apart(case, kernels)
    calls = forward + backward
    assert calls
    if backward:
        assert moved(forward) in claims(name, z, case.forward_bytes, 1)
        assert moved(backward) in claims(name, z, case.bytes - case.forward_bytes, 3)
    else:
        assert moved(calls) == case.bytes
    assert accessed(calls) - moved(calls) == AGAIN.get(name, lambda z: 0)(z)
    for call in calls:
        matrix = matrices(call)[0][0].numel()
        for tensor, of in zip(call.arguments, call.of, strict=True):
            if isinstance(tensor, Tensor) and of is not None and tensor.numel() < matrix:
                assert of.moved <= tensor.nbytes, (call.name, of)


def weights(z: Sizes) -> int:
    """The 16-bit weights, of which Adam writes four at once, as many as of the rest."""
    return 2 * z.parameters


def codes_and_scales(z: Sizes) -> int:
    """Of parts in int4: a thread reads 8 codes' bytes at once, and 16 threads a scale."""
    return PARTS * (code_bytes(z.parameters, 4) + 16 * 4 * -(-z.parameters // BLOCK))


NARROW: dict[str, Callable[[Sizes], int]] = {
    "cross-entropy": label,
    "adam": weights,
    "int8 blocks": lambda z: packed_bytes(z.parameters, 8),
    "int4 blocks": lambda z: packed_bytes(z.parameters, 4),
    "sum of int4 blocks": codes_and_scales,
}
"""Case -> bytes of matrices that are not moved 16 at once where shapes allow it; all others none."""


@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in ONES if name != "softmax"])  # its rows end anywhere
def test_matrices_are_moved_in_the_widest_accesses(kernels, name, dtype):
    z = replace(SIZES["packs"], dtype=dtype)
    forward, backward = run_apart(CASES[name](z), kernels)
    ways = [of for call in forward + backward for _, of in matrices(call)]
    wide = sum(16 * (of.loads[-1] + of.stores[-1]) for of in ways)
    assert sum(of.accessed for of in ways) - wide == NARROW.get(name, lambda z: 0)(z)


SCRATCH = 0.05
"""Of a case's claim at the sizes that are timed: what its sums over rows may move beside it."""
ANYWHERE = 1 << 20
"""An address that is aligned, and that nobody reads."""


@pytest.mark.parametrize("name", ONES)
def test_scratch_memory_is_little_at_the_timed_sizes(kernels, name):
    """The launchers are asked again, for more rows and columns. With no scratch memory at all they launch nothing and
    say what they need. Each part is written once and read once.
    """
    small, needed = SIZES["packs"], 0
    larger = {getattr(small, size): getattr(LARGE, size) for size in ("tokens", "h", "f", "v", "parameters")}
    forward, backward = run_apart(CASES[name](small), kernels)
    for call in forward + backward:
        rest = call.rest
        assert rest.read == rest.fetched == rest.written == rest.stored
        if rest.stored:
            given = [ANYWHERE if isinstance(a, Tensor) else larger.get(a, a) for a in call.arguments]
            launch = (ctypes.c_int64 * 4)()  # stream, scratch memory, its bytes, needed bytes
            assert kernels.function(call.name)(ctypes.byref(launch), *given) == MORE_SCRATCH
            needed += launch[3]
    if needed:
        with torch.device("meta"):
            claim = CASES[name](LARGE).bytes
        assert 2 * needed <= SCRATCH * claim, f"{2 * needed / claim:.3f}"


TIMES = {"layer_norm": 3, "layer_norm_backward": 3, "rms_norm": 2, "rms_norm_backward": 3} | {
    "softmax": 3,
    "softmax_backward": 2,
}
"""Function -> how often it reads a matrix whose rows are too long to be kept: unaligned ones of 4,104 elements here."""
TWO_LAUNCHES = {"quantise_e4m3": 2, "quantise_e5m2": 2}
"""The same, where a first launch finds the scale of a 16-bit matrix."""
SCALES = {"dequantise_int8": 2, "dequantise_int4": 2}
"""The same, of short rows of blocks: 16 threads read a scale at once."""
BYTES_OF_A_BLOCK = {"decode_4_bits": 64}
"""The same at most, where scales are bytes as codes are: all threads of a block read its scale."""


@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_odd_shapes_nothing_races_and_nothing_is_moved_twice(kernels, dtype, offset):
    """Every kernel, on the shapes that compute-sanitizer gets on a card."""
    with watching(kernels) as record:
        for part in sanitize.PARTS:
            part(Draw(torch.device("cpu"), dtype, offset))
    assert len(record.calls) > 100 and all(call.kernels for call in record.calls)
    assert record.faults == []
    again: dict[str, int] = {}
    for call in record.calls:
        function = call.name.removesuffix(f"_{library.suffix(dtype)}")
        assert call.rest.read == call.rest.fetched == call.rest.written == call.rest.stored, (call.name, call.rest)
        assert all(of.written == of.stored for of in call.of if of is not None), (call.name, call.of)
        times = max(round(of.read / tensor.nbytes) for tensor, of in matrices(call))
        if times > 1 and matrices(call)[0][0].numel() > 1:
            again[function] = max(times, again.get(function, 0))
    assert all(again.pop(function) <= most for function, most in BYTES_OF_A_BLOCK.items())
    assert again == (TIMES if offset else {}) | (TWO_LAUNCHES if dtype != torch.float32 else {}) | SCALES


PLANTED = {
    "copy": ("store<4>(y + i, load<4>(x + i));", ""),
    "reads twice": ("store<4>(y + i, load<4>(x + i) + load<4>(x + i));", "again"),
    "writes zeros over what is zero": ("store<4>(y + i, load<4>(x + i)); store<4>(y + n + i, all_of<4>(0));", "moved"),
    "writes twice": ("store<4>(y + i, all_of<4>(0)); store<4>(y + i, load<4>(x + i));", "again"),
    "reads what it does not need": ("store<4>(y + i, load<4>(x + i) + load<4>(x + n + i));", "moved"),
    "leaves out the last": ("if (i + 4 < n) store<4>(y + i, load<4>(x + i));", "moved"),
}
"""What a kernel does that should copy n of 2 n numbers, and what of it is found."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    folder = tmp_path_factory.mktemp("planted")
    lines = ['#include "launch.h"', '#include "numbers.h"', "using namespace mz;"]
    for number, (body, _) in enumerate(PLANTED.values()):
        lines.append(f"static __global__ void kernel_{number}(float* y, const float* x, int n) {{")
        lines.append(f"  int i = (blockIdx.x * 64 + threadIdx.x) * 4; {body}\n}}")
        lines.append(f"MZ_API int run_{number}(Launch* to, float* y, const float* x, int64_t n) {{")
        lines.append(f"  return launch(*to, kernel_{number}, dim3((unsigned)(n / 256)), dim3(64), y, x, (int)n);\n}}")
    (folder / "planted.cu").write_text("\n".join(lines))
    return watched_sources(folder)


@pytest.mark.parametrize("name", PLANTED)
def test_bytes_that_nobody_needs_are_found(planted, name):
    n, found = 512, PLANTED[name][1]
    with watching(planted) as record:
        planted.call(f"run_{list(PLANTED).index(name)}", torch.zeros(2 * n), torch.ones(2 * n), n)
    assert (moved(record.calls) != 2 * 4 * n) == (found == "moved")
    assert (accessed(record.calls) != moved(record.calls)) == (found == "again")


def test_accesses_are_told_by_their_width(planted):
    with watching(planted) as record:
        planted.call("run_0", torch.zeros(1024), torch.ones(1024), 512)
    to, of, _ = record.calls[0].of
    assert to == Traffic(written=2048, stored=2048, stores=(0, 0, 0, 0, 128))
    assert of == Traffic(read=2048, fetched=2048, loads=(0, 0, 0, 0, 128))
