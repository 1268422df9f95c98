"""A short program for compute-sanitizer: it runs every CUDA kernel on odd shapes, without checking the results.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    python -m tests.gpu.sanitize --emulated            # the same kernels on the CPU

Inputs are made on the host, so that nearly all kernels are ours. Rows take one warp, several warps or a whole block.
Some lengths are not a multiple of a pack, and some tensors begin at an address that is not aligned.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from fused_ops import coded, fp8
from fused_ops.activation import ACTIVATIONS
from fused_ops.adam import adam_step, sgd_step
from fused_ops.cross_entropy import row_statistics, write_gradient
from fused_ops.dropout import bias_dropout_residual, dropout
from fused_ops.gated import GATED
from fused_ops.head_norm import norm_heads
from fused_ops.layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fused_ops.linear import add_bias_gradient
from fused_ops.native import library
from fused_ops.native.binding import Argument
from fused_ops.native.cuda import CudaLibrary
from fused_ops.norm import sum_of_squares
from fused_ops.quantise import dequantise, quantise, sum_dequantised
from fused_ops.rotary import apply_rotary, rotary_tables
from fused_ops.softmax import scaled_causal_alibi_softmax
from megazero.config.rotary import RotarySettings
from megazero.system import device as devices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (7, 264, 1023, 4104)


class Draw:
    """Tensors of one dtype on the device, drawn on the host. offset: elements between an aligned
    place and their begin.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, offset: int) -> None:
        self.device, self.dtype, self.offset = device, dtype, offset
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, gradient: bool = False) -> Tensor:
        values = torch.randn(shape, generator=self.generator).to(dtype or self.dtype)
        memory = torch.empty(values.numel() + self.offset, dtype=values.dtype, device=self.device)[self.offset :]
        return memory.copy_(values.view(-1)).view(shape).requires_grad_(gradient)

    def integers(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(stop, shape, generator=self.generator).to(self.device)


def backward(*results: Tensor) -> None:
    """From gradients of ones, made on the host."""
    torch.autograd.backward(
        results, [torch.ones(result.shape, dtype=result.dtype).to(result.device) for result in results]
    )


def softmax(draw: Draw) -> None:
    for keys in LENGTHS:
        b, n, queries = 2, 3, min(keys, 5)
        documents = (torch.arange(keys) // 100).repeat(b, 1).to(draw.device)
        for slopes, own in ((draw(n, dtype=torch.float32), documents), (None, None)):
            backward(scaled_causal_alibi_softmax(draw(b, n, queries, keys, gradient=True), 0.3, slopes, documents=own))


def norms(draw: Draw) -> None:
    for h in LENGTHS:
        x, residual, weight, bias = (
            draw(5, h, gradient=True),
            draw(5, h, gradient=True),
            draw(h, gradient=True),
            draw(h, gradient=True),
        )
        backward(layer_norm(x, weight, bias, 1e-5))
        backward(rms_norm(x, weight, 1e-5))
        backward(rms_norm(x, weight, 1e-5, 1.0))
        backward(*add_layer_norm(x, residual, weight, bias, 1e-5))
        backward(*add_rms_norm(x, residual, weight, 1e-5))
    if draw.dtype == torch.bfloat16:  # more rows than groups of threads: a group's second row comes after its first
        backward(rms_norm(draw(130, 2056, gradient=True), draw(2056, gradient=True), 1e-5))


def head_norms(draw: Draw) -> None:
    for d in (6, 34, 128):
        weights = draw(d, gradient=True), draw(d, gradient=True)
        backward(norm_heads(draw(3, 2, 2 * 4 * d, gradient=True), 2, 2, *weights, 1e-5, 1.0))
        backward(norm_heads(draw(3, 2, 2 * 3 * d, gradient=True), 2, 1, None, None, 1e-5))
    if draw.dtype == torch.bfloat16:  # more bundles than warps that go through them
        weights = draw(8, gradient=True), draw(8, gradient=True)
        backward(norm_heads(draw(1030, 1, 2 * 3 * 8, gradient=True), 2, 1, *weights, 1e-5))


def activations(draw: Draw) -> None:
    for width in LENGTHS[:3]:
        for function in ACTIVATIONS.values():
            backward(function(draw(37, width, gradient=True), draw(width, gradient=True)))
            backward(function(draw(3, width, gradient=True), None))
        for gated in GATED.values():
            backward(gated(draw(37, width, gradient=True), draw(37, width, gradient=True)))


def dropouts(draw: Draw) -> None:
    for width in LENGTHS[:3]:
        keys = draw.integers(2**62, 37)
        backward(dropout(draw(37, width, gradient=True), keys, 0.1))
        for bias in (draw(width, gradient=True), None):
            for own, p in ((keys, 0.1), (None, 0.0)):
                backward(
                    bias_dropout_residual(draw(37, width, gradient=True), bias, draw(37, width, gradient=True), own, p)
                )


def rotary(draw: Draw) -> None:
    for d in (2, 34, 128):
        cos, sin = (
            table[:, None, None].to(draw.device)
            for table in rotary_tables(torch.arange(5), d, RotarySettings(), draw.dtype)
        )
        backward(apply_rotary(draw(5, 2, 3, d, gradient=True), cos, sin))
        backward(apply_rotary(draw(5, 2, 3, d, gradient=True), cos, sin, interleaved=True))
        # Heads of which these tables turn a part.
        for interleaved in (False, True):
            backward(apply_rotary(draw(5, 2, 3, 2 * d + 8, gradient=True), cos, sin, interleaved=interleaved))


def losses(draw: Draw) -> None:
    for columns in (7, 4099, 9000):
        logits, target = draw(3, columns), draw.integers(columns - 1, 3)
        largest, _ = row_statistics(logits, target, columns - 1, summed=True)
        row_statistics(logits, target, columns - 1, summed=False)
        ones = torch.ones(3).to(draw.device)
        write_gradient(logits, target, columns - 1, largest, ones, ones, ones)
        write_gradient(logits, target, columns - 1, largest, ones, ones)


def sums(draw: Draw) -> None:
    for n in (1, 4099, 200_003):
        sum_of_squares(draw(n))
    for rows, columns in ((3, 7), (300, 130)):
        add_bias_gradient(draw(rows, columns), draw(columns, dtype=torch.float32), True)


def embeddings(draw: Draw) -> None:
    """Of the kernels themselves: the order of the tokens, which the op sorts on the device, is made on the host."""
    for tokens, rows, h in ((1, 1, 1), (50, 7, 130), (200, 3, 40)):
        ids, order = torch.sort(torch.randint(rows, (tokens,), generator=draw.generator), stable=True)
        kernels, grad = library.kernels(draw(1)), draw(tokens, h)
        assert kernels is not None
        for name, dtype in (("sorted", torch.float32), ("rounded", draw.dtype)):
            if name == "rounded" and dtype == torch.float32:
                continue
            function, into = f"embedding_gradient_{name}_{library.suffix(draw.dtype)}", draw(rows, h, dtype=dtype)
            kernels.call(function, tokens, rows, h, into, ids.to(draw.device), order.to(draw.device), grad)


def steps(draw: Draw) -> None:
    """Every dtype of the parameter beside this one of the gradient."""
    for n in (1, 5001):
        state = [draw(n, dtype=torch.float32) for _ in range(3)]
        scalars = {
            "multiplier": torch.tensor(0.7, dtype=torch.float64).to(draw.device),
            "skip": torch.tensor(False).to(draw.device),
        }
        number = torch.tensor(3.0, dtype=torch.float64).to(draw.device)
        for out in (None, draw(n, dtype=torch.bfloat16), draw(n, dtype=torch.float16)):
            w, m, v = state[0], state[1], state[2].abs()
            adam_step(
                out,
                w,
                draw(n),
                m,
                v,
                lr=1e-3,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                decoupled=True,
                step=number,
                **scalars,
            )
            sgd_step(out, w, draw(n), m, lr=0.1, momentum=0.9, weight_decay=0.1, **scalars)


def copies(draw: Draw) -> None:
    """In FP8, of 16-bit tensors; with transposes that are written in whole runs and byte by byte, and without."""
    if draw.dtype == torch.float32:
        return
    for rows, columns in ((3, 7), (129, 264), (144, 272)):
        x = draw(rows, columns)
        fp8.transpose(draw.integers(256, rows, columns).to(torch.uint8))
        for form in (fp8.E4M3, fp8.E5M2):
            for transposed in (True, False):
                fp8.fill("input", x, fp8.empty(x, form, transposed))
                scale = fp8.scale_of(fp8.measure(x), fp8.LARGEST[form])
                fp8.fill("input", x, fp8.empty(x, form, transposed), scale=scale)


def blocks(draw: Draw) -> None:
    """Of int8 and int4, with what quantisation loses and without; rows that are whole packs and others."""
    for rows, n in ((1, 7), (3, 264), (2, 1023)):
        x, out = draw(rows, n), draw(rows, n)
        for bits in (8, 4):
            packed = quantise(x, bits, draw(rows, n, dtype=torch.float32))
            dequantise(packed, bits, out)
            sum_dequantised(quantise(x, bits), bits, out[0])


def codes(draw: Draw) -> None:
    """Of 4 and 8 bits: boxes of whole packs, and boxes that begin at odd elements and within a block."""
    for shape, box in (
        ((9, 272), ((0, 9), (0, 272))),
        ((9, 272), ((0, 9), (16, 264))),
        ((7, 101), ((3, 6), (0, 101))),
        ((7, 101), ((0, 7), (13, 40))),
    ):
        matrix = torch.randn(shape, generator=draw.generator)
        for bits in (4, 8):
            lies = coded.CodedBox.of(shape, box, bits)
            packed = torch.empty(lies.nbytes, dtype=torch.uint8, device=draw.device)
            coded.pack(coded.encode(matrix, bits), lies, packed)
            coded.decode(packed, lies, draw(lies.runs, lies.length))


PARTS: tuple[Callable[[Draw], None], ...] = (
    softmax,
    norms,
    head_norms,
    activations,
    dropouts,
    rotary,
    losses,
    sums,
    embeddings,
    steps,
    copies,
    blocks,
    codes,
)


def run(device: torch.device) -> Counter[str]:
    """Names of the functions that were called, with how often."""
    found = library.kernels(torch.ones(1, device=device))
    assert isinstance(found, CudaLibrary), "no CUDA kernels on this machine"
    called: Counter[str] = Counter()
    call = found.call

    def counted(name: str, *arguments: Argument) -> None:
        called[name] += 1
        call(name, *arguments)

    found.call = counted  # type: ignore[method-assign]
    try:
        for dtype in DTYPES:
            for offset in (0, 1):
                for part in PARTS:
                    part(Draw(device, dtype, offset))
        devices.synchronize(device)
    finally:
        del found.call  # the class's own again; `call` may be what a test has put into the class for a while
    return called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the CPU")
    if parser.parse_args().emulated:
        os.environ["MEGAZERO_FUSED"] = library.EMULATED
        called = run(torch.device("cpu"))
    else:
        called = run(devices.resolve("cuda", 0))
    print(f"{len(called)} functions, {sum(called.values())} launches")


if __name__ == "__main__":
    main()
