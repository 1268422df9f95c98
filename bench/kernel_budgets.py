"""What each hot CUDA kernel may cost, as its machine code shows it, and the rate that follows.

The budgets are in kernel_budgets.csv, a row for each kernel. `tests/fused_ops/test_cuda_sources.py` holds the kernels
to them.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from bench.machine_code import Instruction, Kernel, kernels_of

COPY_SHARE, SLOT_SHARE = 0.85, 0.60
"""At this share of a copy's bandwidth a kernel may take this share of the issue slots."""
WARP, REGISTERS, RESIDENT, BLOCKS = 32, 65536, 2048, 32
"""Threads of a warp; what a multiprocessor has: registers, most threads, most blocks."""
MEMORY_SECONDS, EXCHANGE_CYCLES = 0.8e-6, 25
"""How long a thread waits for memory under load, and for each shuffle, barrier or read of shared memory."""


@dataclass(frozen=True)
class Card:
    """A kind of card. Each of its multiprocessors has four schedulers, which issue an instruction for a warp a cycle.

    copy   bytes that a copy reads and writes per second: measured on an H100, on an A100 85% of its memory's rate
    costs  cycles for which an instruction keeps its unit, by unit
    """

    name: str
    capability: str
    multiprocessors: int
    hertz: float
    copy: float
    costs: dict[str, int]

    def slot_share(self, per_byte: float) -> float:
        """Share of the issue slots at COPY_SHARE of the copy, from instructions of a thread per byte."""
        issued = self.multiprocessors * 4 * self.hertz * WARP
        return per_byte * COPY_SHARE * self.copy / issued


H100 = Card("H100", "90", 132, 1.7e9, 3.04e12, {"float": 1, "integer": 2, "special": 8})
A100 = Card("A100", "80", 108, 1.41e9, 1.73e12, {"float": 2, "integer": 2, "special": 8})
CARDS = {card.capability: card for card in (H100, A100)}

UNITS = {
    "float": {"FFMA", "FADD", "FMUL"},
    "integer": {"CS2R", "F2FP", "FMNMX", "FSEL", "FSETP", "HADD2", "HFMA2", "IABS", "IADD3", "IMNMX", "ISETP", "LEA"}
    | {"LOP3", "MOV", "P2R", "PLOP3", "PRMT", "SEL", "SHF", "VIADD", "VIMNMX", "VIMNMX3"},
    "special": {"MUFU", "F2F", "F2I", "I2F", "FRND"},
}
"""The units whose rate may be below one instruction a cycle, and their instructions. IMAD has a unit of its own."""


@dataclass(frozen=True)
class Limits:
    """The most registers, the most instructions of a thread per counted byte in the main loop, and the least bytes of
    loads that are under way when the first of them is used. The least estimate of the share of a copy's bandwidth.
    """

    registers: int
    slots: float
    in_flight: int
    estimate: float


@dataclass(frozen=True)
class Budget:
    """A hot kernel and what it may cost.

    op, dtype, part  as in the tables of measurements
    source, name     its file in fused_ops/csrc/cuda, and its name there
    share            of the bytes that the main loop moves, those that bench/op_cases.py counts: not weights and tables,
                     which stay in the cache
    limits           by capability; none where the op is not used on such a card
    threads          of a block
    most             threads that the launch has for a multiprocessor of an H100, where they are few
    excuse           why it takes more slots than SLOT_SHARE, or is estimated below COPY_SHARE; empty: it may not
    measured         the op, dtype and part of the measurements that are of this kernel
    """

    op: str
    dtype: str
    part: str
    source: str
    name: str
    share: Fraction
    limits: dict[str, Limits]
    threads: int
    most: int = RESIDENT
    excuse: str = ""
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the machine code of a kernel shows."""

    kernel: Kernel
    budget: Budget
    card: Card

    @property
    def main(self) -> tuple[Instruction, ...]:
        return self.kernel.main.instructions

    @property
    def bytes(self) -> float:
        """That count, of a thread in a round of the main loop."""
        return float(self.budget.share) * self.kernel.main.wide_bytes

    @property
    def slots(self) -> float:
        """Instructions of a thread per byte in the main loop."""
        return len(self.main) / self.bytes if self.bytes else math.inf

    @property
    def resident(self) -> int:
        """Threads of a multiprocessor at the same time: as many blocks as its registers hold."""
        registers = math.ceil(self.kernel.registers / 8) * 8
        blocks = min(BLOCKS, REGISTERS // (registers * self.budget.threads), RESIDENT // self.budget.threads)
        return min(self.budget.most, blocks * self.budget.threads)

    @property
    def estimate(self) -> float:
        """Share of a copy's bandwidth. In a round all resident threads take the slots, or the busiest unit. Each waits
        for memory once, as far as what is issued meanwhile does not cover it, and for every exchange.
        """
        busy = {unit: sum(i.name in names for i in self.main) * self.card.costs[unit] for unit, names in UNITS.items()}
        warps = self.resident / WARP / 4
        exchanges = sum(i.name in ("SHFL", "BAR", "LDS") for i in self.main)
        waits = max(0.0, MEMORY_SECONDS * self.card.hertz - self.kernel.main.lead * warps)
        seconds = (max(len(self.main), *busy.values()) * warps + waits + EXCHANGE_CYCLES * exchanges) / self.card.hertz
        return min(1.0, self.resident * self.bytes / seconds * self.card.multiprocessors / self.card.copy)

    def faults(self) -> Iterator[str]:
        """What breaks the rules and the budget."""
        limits, registers = self.budget.limits[self.card.capability], self.kernel.registers
        local = sorted({i.opcode for i in self.kernel.instructions if i.name in ("LDL", "STL")})
        wide = sorted({i.opcode for i in self.main if re.match(r"I2F\S*\.[SU]64", i.opcode)})
        called = sorted({i.target for i in self.kernel.within_main if re.search("(div|rem)_[su]64", i.target)})
        sizes = [i.width for i in self.main if i.loads or i.stores]
        share, under_way = self.card.slot_share(self.slots), self.kernel.main.in_flight
        found = (
            (local, f"keeps registers in local memory ({', '.join(local)})"),
            (wide, f"converts 64-bit integers to floats ({', '.join(wide)})"),
            (called, f"divides 64-bit integers ({', '.join(called)})"),
            (max(sizes, default=0) < 16, f"moves {max(sizes, default=0)} bytes at once, not 16"),
            (registers > limits.registers, f"{registers} registers, {limits.registers} at most"),
            (self.slots > limits.slots, f"{self.slots:.2f} instructions per byte, {limits.slots} at most"),
            (
                self.estimate < (0.0 if self.budget.excuse else COPY_SHARE),
                f"is estimated at {self.estimate:.0%} of the copy, {COPY_SHARE:.0%} at least",
            ),
            (
                self.estimate < limits.estimate,
                f"{self.estimate:.2f} of the copy is estimated, {limits.estimate} at least",
            ),
            (
                under_way < limits.in_flight,
                f"{under_way} bytes of loads under way when the first is used, {limits.in_flight} at least",
            ),
            (
                share > SLOT_SHARE and not self.budget.excuse,
                f"{share:.0%} of the issue slots at {COPY_SHARE:.0%} of the copy, {SLOT_SHARE:.0%} at most",
            ),
        )
        yield from (words for fault, words in found if fault)


LIMITS = ("registers", "slots", "in flight", "estimate")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def _budget(row: dict[str, str]) -> Budget:
    limits = {}
    for capability in CARDS:
        registers, slots, in_flight, estimate = (row[f"{what} {capability}"] for what in LIMITS)
        if slots:
            limits[capability] = Limits(int(registers), float(slots), int(in_flight), float(estimate))
    op, dtype, part, source, name = (row[word] for word in ("op", "dtype", "part", "source", "kernel"))
    share, threads, most = Fraction(row["share"]), int(row["threads"]), int(row["most"] or RESIDENT)
    measured = row["measured"].split("/") if row["measured"] else (op, DTYPES[dtype], part)
    return Budget(op, dtype, part, source, name, share, limits, threads, most, row["excuse"], tuple(measured))


BUDGETS = tuple(map(_budget, csv.DictReader(Path(__file__).with_suffix(".csv").read_text().splitlines())))


def found_in(cubins: Iterable[Path], capability: str, tool: str) -> list[Found]:
    """Every kernel of the table in files of machine code, each named after its source. ValueError where a name is
    missing or not clear.
    """
    kernels = {cubin.name.split(".")[0]: cubin for cubin in cubins}
    read = {
        source: kernels_of(kernels[source], tool) for source in {budget.source for budget in BUDGETS} & kernels.keys()
    }
    found = []
    for budget in BUDGETS:
        if budget.source in read and capability in budget.limits:
            there = [kernel for kernel in read[budget.source] if kernel.name == budget.name]
            if len(there) != 1:
                names = ", ".join(sorted(kernel.name for kernel in read[budget.source]))
                raise ValueError(f"{budget.source}.cu has {len(there)} kernels {budget.name}, of {names}")
            found.append(Found(there[0], budget, CARDS[capability]))
    return found
