"""What --placement auto measures at the start: how fast the ranks compute, copy, update, read and write, and which part
of the device matrix products take for themselves.

That workspace is oneDNN's scratch or cuBLAS's buffers. It depends on the library, the processor and the shapes, so no
plan has it (`pipeline.measured`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.adam import AdamRange, adam_steps, sgd_step
from fused_ops.attention.selection import Body, choose
from fused_ops.blocks import HALVES
from fused_ops.linear import input_gradient, linear
from fused_ops.products import lacks_products
from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.config.derive import ffn_width, padded_vocab
from megazero.config.dtypes import compute_dtype, state_dtype
from megazero.config.inventory import linears
from megazero.config.layers.kinds import kinds
from megazero.config.schema import OptimizerConfig, Run
from megazero.disk.measure import folder_rates
from megazero.disk.transports import DiskOptions
from megazero.mpu.collectives import all_reduce, barrier
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.head_loss import blocks_of
from megazero.pipeline.build import attention_support, attention_workload
from megazero.plan.step_times import MachineRates
from megazero.system import device as devices
from megazero.system.copy_thread import CopyThread
from megazero.system.streams import host_tensor
from megazero.train.logs import as_config_error

SECONDS = 0.05
"""For each of the `TRIALS` of a measurement, the fastest of which counts."""
TRIALS = 3
ELEMENTS = 1 << 23
"""Of a tensor that is copied or updated: more than a processor's cache holds, as the state of a model is."""
HOST_ELEMENTS = 1 << 26
"""The same of a host with GPUs, whose processors' caches hold that: an H200's host updated 25 GB of gradients a second
of 2^23 elements, and 15 GB of 2^26.
"""
SENT = 1 << 20
"""Elements of a tensor that is sent."""
MOST_ROWS = 4096
"""Rows of the measured product at most."""


def measured_rates(run: Run, grid: ProcessGrid) -> MachineRates:
    """The rates of the slowest rank, each while all ranks measure the same. A collective of the world: barriers and
    all-reduces; between replicas all-reduces of 4 MiB. Takes about a second, another for each folder of --nvme-path,
    and less than a step for `product_workspace`. Raises ConfigError on all ranks where one of these folders fails.
    """
    rates = {"workspace": -float(product_workspace(run, grid.device))}  # the largest counts, of all else the smallest
    barrier(grid.world)  # before each measurement: it counts while all ranks make it
    product = _product(run, grid.device)
    rates["flops"] = per_second(product, grid.device)
    rates |= _copies(grid.device)
    barrier(grid.world)
    update, host = _updates(run.optimizer, grid.device), torch.device("cpu")
    rates["update"] = rates["update_host"] = per_second(update, grid.device)
    barrier(grid.world)
    if grid.device.type == "cpu":
        rates["beside"] = _beside(product, rates["flops"], update, rates["update_host"])
    else:
        rates["update_host"] = per_second(_updates(run.optimizer, host, HOST_ELEMENTS), host)
    if run.offload.nvme_path:
        rates |= _disks(run, grid)
    if grid.replicas.size > 1:
        rates["messages"] = _messages(grid)
    slowest = torch.tensor([*rates.values()], dtype=torch.float64, device=grid.device)  # in one order on all ranks
    all_reduce(slowest, grid.world, "min").wait()
    common = dict(zip(rates, slowest.tolist(), strict=True))
    return MachineRates(**{**common, "workspace": -common["workspace"]})


class Work(NamedTuple):
    """Work that is measured: a call, and how much it does."""

    call: Callable[[], object]
    amount: float


def per_second(work: Work, device: torch.device) -> float:
    """How much is done in a second: in the fastest of a few trials."""
    work.call()  # not timed: it may compile, and it allocates
    fastest = float("inf")
    for _ in range(TRIALS):
        devices.synchronize(device)
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < SECONDS:
            work.call()
            devices.synchronize(device)
            calls += 1
        fastest = min(fastest, (time.perf_counter() - start) / calls)
    return work.amount / fastest


def _beside(product: Work, flops: float, update: Work, updates: float) -> float:
    """What two kinds of work get done on the same processors at a time, above what one of them does alone
    (`MachineRates.beside`). flops, updates: their rates alone.
    """
    products_end, start = threading.Event(), time.perf_counter()

    def rate_until(work: Work, is_over: Callable[[], bool]) -> float:
        begin, calls = time.perf_counter(), 0
        while not is_over():
            work.call()
            calls += 1
        return calls * work.amount / (time.perf_counter() - begin)

    with ThreadPoolExecutor(max_workers=1) as pool:
        updating = pool.submit(rate_until, update, products_end.is_set)
        try:
            product_rate = rate_until(product, lambda: time.perf_counter() - start >= TRIALS * SECONDS)
        finally:  # also where a product fails: the pool waits for the updates, which go on beside all products
            products_end.set()
        together = product_rate / flops + updating.result() / updates
    return min(max(together - 1.0, 0.0), 1.0)


def _product(run: Run, device: torch.device) -> Work:
    """The product of a micro-batch with an MLP's matrix, in operations."""
    rows = min(run.schedule.micro_batch_size * run.model.seq_length, MOST_ROWS)
    hidden, width = run.model.hidden_size, max(1, ffn_width(run.model) // run.parallel.tp)
    dtype = compute_dtype(run.optimizer.precision)
    left = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.randn(width, hidden, device=device).to(dtype)
    return Work(torch.no_grad()(lambda: linear(left, weight, None)), 2.0 * rows * hidden * width)


def _copies(device: torch.device) -> dict[str, float]:
    """Bytes to the host and back, by the threads that will copy."""
    on_device = torch.randn(ELEMENTS, device=device)
    on_host = host_tensor(ELEMENTS, on_device.dtype, device, "--placement auto")
    thread = CopyThread(device, "rates")
    copies = {
        "to_host": Work(lambda: thread.copy(on_host, on_device).result(), on_host.nbytes),
        "to_device": Work(lambda: thread.copy(on_device, on_host).result(), on_host.nbytes),
    }
    with closing(thread):
        return {name: per_second(copy, device) for name, copy in copies.items()}


def _updates(cfg: OptimizerConfig, device: torch.device, elements: int = ELEMENTS) -> Work:
    """Updates of master weights, moments and parameters, in bytes of gradients that they use up."""
    dtype = state_dtype(cfg.precision)
    weights, gradient, first, second = (torch.rand(elements, dtype=dtype, device=device) for _ in range(4))
    parameters = torch.zeros(elements, dtype=compute_dtype(cfg.precision), device=device)
    one, skip = torch.ones((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def update() -> None:
        if cfg.optimizer == "sgd":
            rule = {"lr": 1e-9, "momentum": cfg.sgd_momentum, "weight_decay": 0.0}
            sgd_step(parameters, weights, gradient, first, **rule, multiplier=one, skip=skip)
            return
        adam_steps(
            [AdamRange(parameters, weights, gradient, first, second, 0.0)],
            lr=1e-9,
            beta1=cfg.adam_beta1,
            beta2=cfg.adam_beta2,
            eps=cfg.adam_eps,
            decoupled=cfg.optimizer == "adamw",
            step=one,
            multiplier=one,
            skip=skip,
        )

    return Work(update, gradient.nbytes)


def _disks(run: Run, grid: ProcessGrid) -> dict[str, float]:
    """Bytes that this rank reads and writes in all folders together, which share a piece by their speed."""
    rates = {"read": 0.0, "write": 0.0}

    def measure() -> None:
        for folder in run.offload.nvme_path:
            measured = folder_rates(Path(folder), DiskOptions())
            rates["read"] += measured.read
            rates["write"] += measured.write

    with as_config_error(f"--nvme-path {' '.join(run.offload.nvme_path)}"):
        attempt_on_all_ranks(grid.world, grid.device, measure)
    return rates


def _messages(grid: ProcessGrid) -> float:
    """Bytes of an all-reduce among the replicas, which counts twice as in `program.traffic`."""
    tensor = torch.zeros(SENT, device=grid.device)
    all_reduce(tensor, grid.replicas).wait()
    devices.synchronize(grid.device)
    start = time.perf_counter()
    for _ in range(TRIALS):
        all_reduce(tensor, grid.replicas).wait()
    devices.synchronize(grid.device)
    return 2.0 * tensor.nbytes * TRIALS / (time.perf_counter() - start)


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
    with ThreadPoolExecutor(max_workers=1) as other_thread:  # this thread may have a profiler already
        return max(other_thread.submit(_given_back, call).result() for call in _products(run, device))


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
    """(outputs, inputs) of the blocks' products on a rank. Layers with one input are one product (`Linear.product`)."""
    for kind in kinds(run.model):
        for _, of_product in groupby(linears(kind), lambda linear: linear.product):
            shapes = [linear.on_rank(run.parallel.tp) for linear in of_product]
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
