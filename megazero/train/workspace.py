"""What matrix products take for themselves on the device, measured at the start: oneDNN's scratch, cuBLAS's workspaces.
It depends on the library, the processor and the shapes, so no plan has it (`plan.layer_tapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from fused_ops.attention.selection import Body, choose
from fused_ops.blocks import HALVES
from fused_ops.linear import input_gradient, linear
from fused_ops.products import lacks_products
from megazero.config.derive import padded_vocab
from megazero.config.dtypes import compute_dtype
from megazero.config.inventory import linears
from megazero.config.schema import Run
from megazero.mpu.head_loss import blocks_of
from megazero.pipeline.build import attention_support, attention_workload
from megazero.system import device as devices


def product_workspace(run: Run, device: torch.device) -> int:
    """The most bytes that the products of a rank's layers take for themselves. Each is executed once, which takes less
    than a step. On a CPU they give it back. On CUDA it stays, until workspaces are cleared. Communicates nothing.
    """
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        before = devices.memory_bytes(device)
        _execute(_products(run, device))
        devices.synchronize(device)
        return devices.memory_bytes(device) - before
    narrow = torch.empty(0, dtype=compute_dtype(run.optimizer.precision))
    if narrow.dtype not in HALVES or lacks_products(narrow):
        return 0  # no product of oneDNN
    with ThreadPoolExecutor(max_workers=1) as own:  # this thread may have a profiler already
        return max(own.submit(_given_back, call).result() for call in _products(run, device))


def _products(run: Run, device: torch.device) -> Iterator[Callable[[], Tensor]]:
    """For each matrix of a rank its product with a micro-batch and that of its backward, and on a CPU those of
    attention where no kernel computes it. The gradients of matrices, for which there are kernels, take less than both.
    """
    rows, dtype = run.schedule.micro_batch_size * run.model.seq_length, compute_dtype(run.optimizer.precision)
    head = padded_vocab(run.model, run.parallel.tp) // run.parallel.tp, run.model.hidden_size

    def made(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    for outputs, inputs in dict.fromkeys((*_matrices(run), head)):
        x, weight = made(rows, inputs), made(outputs, inputs)
        if (outputs, inputs) == head:
            x = x[blocks_of(x, weight)[0]]
        yield partial(linear, x, weight, None)
        yield partial(input_gradient, made(x.shape[0], outputs), weight)
    work = attention_workload(run)
    if device.type != "cpu" or choose(work.case(device), attention_support(run, device)).body is Body.KERNEL:
        return
    heads, length, size = work.samples * work.groups * work.repeats, work.length, work.head_dim
    x, scores = made(heads, length, size), made(heads, length, length)
    yield partial(torch.baddbmm, scores, x, x.transpose(1, 2), beta=0)
    yield partial(torch.bmm, scores, x)
    yield partial(torch.bmm, scores.transpose(1, 2), x)


def _matrices(run: Run) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of a block's products on a rank. Layers with one input are one product (`Linear.product`)."""
    for _, layers in groupby(linears(run.model), lambda layer: layer.product):
        shapes = [layer.on_rank(run.parallel.tp) for layer in layers]
        yield sum(outputs for outputs, _ in shapes), shapes[0][1]


@torch.no_grad()
def _execute(calls: Iterator[Callable[[], Tensor]]) -> None:
    """A function, so that no name holds the tensors of the last call."""
    for call in calls:
        call()


@torch.no_grad()
def _given_back(call: Callable[[], Tensor]) -> int:
    """The most bytes that a call has allocated in this thread, without its result."""
    # Torch's own interfaces, and no public ones: a torch without them must not break a run that searches nothing.
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

    # Shapes, memory, stacks, FLOPs, modules: memory alone.
    memory = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(memory)  # the newer one writes a line to the terminal for each of its starts and ends
    try:
        kept = call()
    finally:
        records = _disable_profiler_legacy()
    del kept
    events = (event for thread in records for event in thread)
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return max(accumulate(sizes, initial=0)) - sum(sizes)
