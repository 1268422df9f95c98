"""What the ranks of a calibration measure: steps of small runs, and rates of the machine.

All ranks do the same at a time, and what counts is the slowest. The first process of ranks measures everything, others
only runs of their own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fused_ops.fp8 import E4M3, empty, fill, product
from fused_ops.native import library
from megazero.calibrate.effort import GROUPS, UNTIMED, Effort, Flags, MeasuredRun, RankMeasurements
from megazero.calibrate.runs import run_of
from megazero.config.schema import Run
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.disk.measure import DiskTrial
from megazero.disk.transports import DiskOptions
from megazero.launch import launch
from megazero.mpu.collectives import all_gather, all_reduce, barrier, reduce_scatter
from megazero.mpu.grid import ProcessGrid, join_group, single_process_grid
from megazero.mpu.meeting import Environment
from megazero.mpu.shared_memory import share_memory
from megazero.pipeline.measured import first_checkpoint
from megazero.system import device as devices
from megazero.train.job import Job, build_job
from megazero.train.measured_rates import Work, measured_rates, per_second
from megazero.train.prepare import prepare

TIMES = 9
"""A message is timed so often; the median counts."""
SMALLEST, LARGER = 1 << 12, 16
"""Bytes of the smallest message, and times the bytes of the next larger one."""
COPIED = ("to_host", "update", "update_host", "read", "write", "beside")
"""Rates that a placement is chosen by, and a plan too."""
DISK_BYTES, DISK_SECONDS = 64 << 20, 0.2
"""Of the file that is written and read, and for how long."""
WOKEN = 1 << 17
"""Elements of a tensor that a kernel divides among threads, and that a cache holds."""
OF_8_BITS = 8192
"""Rows and columns of the matrices of FP8 whose product is timed."""
RunsAndMemory = tuple[list[MeasuredRun], dict[str, float]]
DISKS = "--offload-optimizer", "nvme", "--nvme-path"


class RandomRows:
    """Samples of uniformly drawn ids."""

    def __init__(self, run: Run) -> None:
        self._length, self._ids = run.model.seq_length, run.model.vocab_size

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, self._ids, self._length + 1)


def measurements(environment: Environment, process: int, folder: Path, effort: Effort) -> RankMeasurements:
    """What this process of each rank measures. A collective of all ranks. folder: for the trial of a disk."""
    ranks, kind = environment.world_size, devices.kind("auto")
    first, *others = effort.runs[process]
    together = run_of(first, ranks, kind)
    with launch(together, environment) as grid:
        timed, memory = WITH_MEMORY[kind](_timed_runs(first, together, others, grid, effort), grid, process == 0)
        known = RankMeasurements(ranks, torch.get_num_threads(), {}, {}, memory, (), (), tuple(timed))
        if process:
            return known
        flops, rates = _rates(grid, folder, effort)
        messages = (tuple(_collectives(grid, effort)), tuple(_stages(grid, effort))) if ranks > 1 else ((), ())
    return replace(known, flops=flops, rates=rates, collectives=messages[0], stages=messages[1])


def _timed_runs(
    first: Flags, together: Run, others: Sequence[Flags], grid: ProcessGrid, effort: Effort
) -> Iterator[MeasuredRun]:
    """The first run, of all ranks together, and then the others, of each rank alone. Each is made when it is asked
    for.
    """
    yield _timed(first, together, grid, grid, effort)
    alone = single_process_grid(grid.device)
    for words in others:
        yield _timed(words, run_of(words, 1, grid.device.type), alone, grid, effort)


def on_cpu(timed: Iterator[MeasuredRun], grid: ProcessGrid, is_first: bool) -> RunsAndMemory:
    """The runs, and bytes beside tensors by name. Only the first run tells its memory: a process that makes another one
    has what was there before. is_first: whether this is the first process of each rank, which measures the bytes.
    """
    group = _group_bytes(grid) if is_first else 0
    whole = next(timed)
    memory = {"compiler": float(_compiler_bytes(grid)), "group": float(group)} if is_first else {}
    first = replace(whole, memory=(whole.memory or 0) - GROUPS * group)
    return [first, *(replace(other, memory=None, free=None) for other in timed)], memory


def on_card(timed: Iterator[MeasuredRun], grid: ProcessGrid, is_first: bool) -> RunsAndMemory:
    """The same of a GPU, which tells the memory of each run. The context has the kernels of all of them."""
    runs = [*timed]
    return runs, {"context": float(devices.context_bytes(grid.device))} if is_first else {}


WITH_MEMORY: Mapping[str, Callable[[Iterator[MeasuredRun], ProcessGrid, bool], RunsAndMemory]] = MappingProxyType(
    {"cpu": on_cpu, "cuda": on_card}
)
"""By kind of device: what makes the runs of a process, and measures the bytes that it takes beside tensors."""


def _group_bytes(grid: ProcessGrid) -> int:
    """Bytes that a process takes of a CPU's memory for a group of ranks beside the world, for as long as it lives: its
    threads, each with an arena of the heap. Measured before any run, whose threads leave their arenas to later ones.
    """
    if grid.world.handle is None or not grid.world.is_on_host:
        return 0
    before, world = devices.memory_bytes(grid.device), grid.world
    for _ in range(GROUPS):
        handle = join_group(world.ranks, grid.timeout)
        kernels, timeout = library.host_library(library.choice()), grid.timeout or dist.default_pg_timeout
        share_memory(handle, world.index, world.size, kernels, timeout)  # as for the groups of a run
    (added,) = _largest([devices.memory_bytes(grid.device) - before], grid)
    return int(added / GROUPS)


def _compiler_bytes(grid: ProcessGrid) -> int:
    """The same for torch's compiler, which the first recomputation imports."""
    devices.return_free_memory(grid.device)  # what is there already is not what it takes
    before = devices.memory_bytes(grid.device)
    first_checkpoint()
    (added,) = _largest([devices.memory_bytes(grid.device) - before], grid)
    return int(added)


def _timed(words: Flags, run: Run, grid: ProcessGrid, machine: ProcessGrid, effort: Effort) -> MeasuredRun:
    """The steps of a run on a grid, which is that of all ranks of the machine or this rank alone. Its memory is what
    its tensors take on a GPU, and what the process has on a CPU.
    """
    gc.collect()  # a run that has ended lies in cycles
    devices.forget_peaks(grid.device)
    prepared = prepare(run, grid.axes.world_size, silent, OwnData(RandomRows(run)))
    with closing(build_job(prepared, grid)) as job:
        _turn(job, UNTIMED)
        barrier(machine.world)
        seconds = statistics.median(_turn(job, effort.turn) for _ in range(effort.steps))
        memory = devices.peak_reserved_bytes(grid.device) or devices.peak_memory_bytes(grid.device)
        job.trainer.batches.close()
        barrier(machine.world)  # until all have ended, none goes on
        free = _free_bytes(grid.device)
    slowest, most, largest = _largest([seconds, float(memory), float(free)], machine)
    return MeasuredRun(words, grid.axes.world_size, slowest, int(most), int(largest))


def _free_bytes(device: torch.device) -> int:
    """Bytes of the heap that are of no use to anybody. They are given back to the system."""
    before = devices.memory_bytes(device)
    devices.return_free_memory(device)
    return before - devices.memory_bytes(device)


def _turn(job: Job, steps: int) -> float:
    """The seconds of each of so many steps, between which a GPU's host does not wait."""
    began = time.perf_counter()
    for _ in range(steps):
        job.trainer.train_step(stop=False)
        job.trainer.after_step()
    devices.synchronize(job.grid.device)
    return (time.perf_counter() - began) / steps


def _largest(values: Sequence[float], grid: ProcessGrid) -> list[float]:
    """Each value of the rank where it is largest."""
    packed = torch.tensor(values, dtype=torch.float64, device=grid.device)
    all_reduce(packed, grid.world, "max").wait()
    numbers: list[float] = packed.tolist()
    return numbers


def _rates(grid: ProcessGrid, folder: Path, effort: Effort) -> tuple[dict[str, float], dict[str, float]]:
    """(operations of products in a second by precision, other amounts in a second)."""
    flops, rates = dict[str, float](), dict[str, float]()
    for precision in effort.precisions:
        if precision == "fp8":
            flops[precision] = _flops_of_8_bits(grid)
            continue
        disks = [] if rates else [*DISKS, str(folder)]  # once
        words = [*effort.product, "--precision", precision, *disks]
        run = run_of(words, grid.axes.world_size, grid.device.type)
        measured = measured_rates(run, grid).plain()
        flops[precision] = measured["flops"]
        if not rates:
            rates = {name: measured[name] for name in COPIED if name in measured}
    barrier(grid.world)
    source = torch.ones(effort.largest, device=grid.device)  # four times its bytes: more than caches hold
    target = torch.empty_like(source)
    own = per_second(Work(lambda: target.copy_(source), 2.0 * source.nbytes), grid.device)
    barrier(grid.world)
    bandwidth, carried, waking = _largest([-own, -_carried(folder), _waking(grid.device)], grid)
    return flops, {**rates, "bandwidth": -bandwidth, "carried": -carried, "waking": waking}


def _flops_of_8_bits(grid: ProcessGrid) -> float:
    """Operations of a product of copies in FP8 in a second, of the slowest rank."""
    matrix = torch.randn(OF_8_BITS, OF_8_BITS, device=grid.device, dtype=torch.bfloat16)
    copied = empty(matrix, E4M3, transposed=False)
    fill("weight", matrix, copied)
    a, inverse = copied.values, copied.inverse
    work = Work(lambda: product(a, a, inverse, inverse, torch.bfloat16), 2.0 * OF_8_BITS**3)
    barrier(grid.world)
    (slowest,) = _largest([-per_second(work, grid.device)], grid)
    return -slowest


def _waking(device: torch.device) -> float:
    """Seconds by which a small kernel takes longer while another thread has threads of its own to compute with: GNU's
    OpenMP then has a rank's threads sleep between two kernels, where they else watch for the next one.
    """
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return 0.0
    tensor = torch.ones(WOKEN)
    add = Work(lambda: tensor.add_(1.0), 1.0)
    alone = per_second(add, device)
    with ThreadPoolExecutor(max_workers=1) as other:
        other.submit(torch.ones(WOKEN).add_, 1.0).result()  # its threads stay as long as it does
        beside = per_second(add, device)
    return max(0.0, 1 / beside - 1 / alone)


def _carried(folder: Path) -> float:
    """Bytes that a disk reads and writes while processors work on them for a second: they copy and sum them."""
    with DiskTrial(folder, DiskOptions(), DISK_BYTES, DISK_BYTES // 8) as trial:
        trial.fill()
        began, worked = time.perf_counter(), time.process_time()
        rates = [trial.rates(writes, seconds=DISK_SECONDS)[0] for writes in (True, False)]
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
    return statistics.fmean(rates) * seconds / max(worked, 1e-6)


def _collectives(grid: ProcessGrid, effort: Effort) -> Iterator[tuple[float, float]]:
    """(bytes by the convention of `Group.traffic`, seconds) of collectives of all ranks."""
    nbytes = SMALLEST
    while nbytes <= effort.largest:
        whole = torch.ones(nbytes // 4 // grid.world.size * grid.world.size, device=grid.device)
        piece = torch.empty(whole.numel() // grid.world.size, device=grid.device)
        yield 2.0 * whole.nbytes, _seconds(lambda: all_reduce(whole, grid.world).wait(), grid)  # noqa: B023
        yield float(whole.nbytes), _seconds(lambda: reduce_scatter(piece, whole, grid.world).wait(), grid)  # noqa: B023
        yield float(whole.nbytes), _seconds(lambda: all_gather(whole, piece, grid.world).wait(), grid)  # noqa: B023
        nbytes *= LARGER


def _stages(grid: ProcessGrid, effort: Effort) -> Iterator[tuple[float, float]]:
    """(bytes, seconds) of messages from each rank of a pair to the other. A rank without another waits."""
    other = grid.rank ^ 1
    nbytes = SMALLEST
    while nbytes <= effort.largest:
        sent, taken = (torch.ones(nbytes // 4, device=grid.device) for _ in range(2))

        def exchange(sent: Tensor = sent, taken: Tensor = taken) -> None:
            if other < grid.world.size:
                for work in (dist.isend(sent, other), dist.irecv(taken, other)):
                    assert work is not None
                    work.wait()

        yield float(nbytes), _seconds(exchange, grid)
        nbytes *= LARGER


def _seconds(call: Callable[[], object], grid: ProcessGrid) -> float:
    """The median of the seconds of a call, which all ranks begin together, of the slowest rank."""
    call()
    measured = list[float]()
    for _ in range(TIMES):
        barrier(grid.world)
        devices.synchronize(grid.device)
        began = time.perf_counter()
        call()
        devices.synchronize(grid.device)
        measured.append(time.perf_counter() - began)
    return statistics.median(_largest(measured, grid))
