"""Reads the machine code of CUDA kernels (SASS): its blocks and loops, and what a thread issues on the way that it
usually takes.

The way is the one that moves most bytes in wide accesses. Of those it is the longest without calls and accesses of
single 16-bit elements: tails and the slow cases of a division are not on it, and what it counts is no less than what a
thread issues.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^([.$\w]+):\s*$")
TARGET = re.compile(r"`\(([^)]+)\)")
REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
REGISTERS = re.compile(r"EIATTR_REGCOUNT\b.*?index@\((\S+)\)\s.*?\.word\s+0x(\w+)", re.DOTALL)
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
RARE = 10_000
"""Instructions that count against a way for each call and each narrow access on it: slow cases and tails."""


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly. `opcode` has its suffixes: LDG.E.128."""

    predicate: str
    opcode: str
    operands: str

    @cached_property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> str:
        found = TARGET.search(self.operands)
        return found[1] if found else ""

    @property
    def calls(self) -> bool:
        return self.name == "CALL" and not self.leaves

    @property
    def leaves(self) -> bool:
        """Whether it may go on elsewhere. A call of a label within the kernel is a jump."""
        return self.name in ("BRA", "EXIT", "RET", "BRX") or (self.name == "CALL" and self.target.startswith(".L"))

    @property
    def conditional(self) -> bool:
        return bool(self.predicate or (self.name == "BRA" and re.match(r"!?U?P\d", self.operands)))

    @cached_property
    def width(self) -> int:
        """Bytes of a memory access for each thread."""
        return next((WIDTHS[part] for part in self.opcode.split(".") if part in WIDTHS), 4)

    @property
    def loads(self) -> bool:
        return self.name == "LDG"

    @property
    def stores(self) -> bool:
        return self.name == "STG"

    @cached_property
    def written(self) -> frozenset[int]:
        """Registers that a load fills."""
        first = REGISTER.match(self.operands)
        return frozenset(range(int(first[1]), int(first[1]) + max(1, self.width // 4))) if first else frozenset()

    @cached_property
    def mentioned(self) -> frozenset[int]:
        """Registers that the operands name, the second ones of pairs among them where they say so."""
        pairs = {int(n) + 1 for n in re.findall(r"(?<![A-Z])R(\d+)\.64", self.operands)}
        return frozenset(map(int, REGISTER.findall(self.operands))) | pairs


@dataclass
class Block:
    """Instructions that run one after the other, and the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """What a thread issues: through a kernel, or through one round of a loop."""

    instructions: tuple[Instruction, ...]

    def __add__(self, other: Way) -> Way:
        return Way(self.instructions + other.instructions)

    @cached_property
    def wide_bytes(self) -> int:
        """Bytes in loads of 16 and stores of 8 or more."""
        return sum(i.width for i in self.instructions if i.width >= (8 if i.stores else 16) and (i.loads or i.stores))

    @cached_property
    def merit(self) -> tuple[int, int]:
        """Bytes first, then instructions: a way is not made shorter than it may be."""
        rare = sum(i.calls or ((i.loads or i.stores) and i.width < 4) for i in self.instructions)
        return self.wide_bytes, len(self.instructions) - RARE * rare

    @cached_property
    def _fullest(self) -> tuple[int, int]:
        """(bytes of loads of 16 that are under way when the first of them is used, instructions from the last of them
        to that use), where these bytes are most. Loads that are not used on the way are by its end.
        """
        found, outstanding = (0, 0), list[tuple[int, Instruction]]()
        for place, instruction in enumerate((*self.instructions, None)):
            used = [
                at
                for at, (_, load) in enumerate(outstanding)
                if not instruction or load.written & instruction.mentioned
            ]
            if used:
                lead = place - 1 - outstanding[-1][0]
                found = max(found, (sum(load.width for _, load in outstanding), lead))
                outstanding = outstanding[1 + max(used) :]
            if instruction and instruction.loads and instruction.width == 16:
                outstanding.append((place, instruction))
        return found

    @property
    def in_flight(self) -> int:
        """The most bytes of loads of 16 that are under way when the first of them is used."""
        return self._fullest[0]

    @property
    def lead(self) -> int:
        """Instructions that are issued while these loads are under way."""
        return self._fullest[1]


class Kernel:
    """A kernel's machine code."""

    def __init__(self, name: str, registers: int, lines: Iterable[str]) -> None:
        self.name, self.registers, self.lines = name, registers, lines
        self.start = 0

    @cached_property
    def blocks(self) -> list[Block]:
        return _blocks(self.lines)

    @cached_property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """Of each block that can be reached, those that every way to it goes through."""
        reached, waiting = {self.start}, [self.start]
        while waiting:
            for after in self.blocks[waiting.pop()].followers:
                if after not in reached:
                    reached.add(after)
                    waiting.append(after)
        before = defaultdict(set)
        for block in reached:
            for after in self.blocks[block].followers:
                before[after].add(block)
        found = {block: set(reached) for block in reached}
        found[self.start] = {self.start}
        changed = True
        while changed:
            changed = False
            for block in sorted(reached - {self.start}):
                now = {block} | set.intersection(*(found[b] for b in before[block]))
                changed |= now != found[block]
                found[block] = now
        return found

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """The blocks of each loop by its first one, inner loops before outer ones."""
        before, loops = defaultdict(set), defaultdict[int, set[int]](set)
        for block in self.dominators:
            for after in self.blocks[block].followers:
                before[after].add(block)
        for block, over in self.dominators.items():
            for first in set(self.blocks[block].followers) & over:
                body, waiting = {first}, [block]
                while waiting:
                    if (at := waiting.pop()) not in body:
                        body.add(at)
                        waiting += before[at]
                loops[first] |= body
        return dict(sorted(loops.items(), key=lambda loop: len(loop[1])))

    @cached_property
    def _ways(self) -> tuple[Way, dict[int, Way]]:
        """(through the kernel, a round of each loop): each loop in turn becomes one block, which runs a round."""
        ways = {block: Way(tuple(self.blocks[block].instructions)) for block in self.dominators}
        after = {block: set(self.blocks[block].followers) for block in ways}
        ends = {block for block, way in ways.items() if any(i.name == "EXIT" for i in way.instructions)}
        rounds: dict[int, Way] = {}
        for first, loop in self.loops.items():
            body = loop & ways.keys()
            last = {block for block in body if first in after[block]}
            rounds[first] = _best_way(first, {b: ways[b] for b in body}, {b: after[b] - {first} for b in body}, last)
            behind = set().union(*(after.pop(block) for block in body)) - body
            ways = {block: way for block, way in ways.items() if block not in body} | {first: rounds[first]}
            after[first] = behind
            ends |= {first} if ends & body else set()
        return _best_way(self.start, ways, after, ends), rounds

    @property
    def way(self) -> Way:
        """Through the whole kernel, each loop once."""
        return self._ways[0]

    @cached_property
    def _main_loop(self) -> int | None:
        """The first block of the innermost loop that moves most packs."""
        rounds = {first: way for first, way in self._ways[1].items() if way.wide_bytes}
        inner = [first for first in rounds if not (self.loops[first] - {first}) & rounds.keys()]
        return max(inner, key=lambda first: rounds[first].wide_bytes, default=None)

    @property
    def main(self) -> Way:
        """A round of the innermost loop that moves most packs, or where no loop does the way through the kernel."""
        return self.way if self._main_loop is None else self._ways[1][self._main_loop]

    @property
    def within_main(self) -> Sequence[Instruction]:
        """The same with what a round of that loop may take otherwise."""
        if self._main_loop is None:
            return self.way.instructions
        return [instruction for block in self.loops[self._main_loop] for instruction in self.blocks[block].instructions]


def _best_way(first: int, ways: dict[int, Way], after: dict[int, set[int]], ends: set[int]) -> Way:
    """The best way from `first` to one of `ends`, over blocks without a loop among them."""
    best: dict[int, Way] = {}
    inside = {block: followers & ways.keys() for block, followers in after.items()}
    for block in TopologicalSorter(inside).static_order():
        found = [ways[block] + best[follower] for follower in inside[block] if follower in best]
        found += [ways[block]] if block in ends else []
        if found:
            best[block] = max(found, key=lambda way: way.merit)
    return best[first]


def _blocks(lines: Iterable[str]) -> list[Block]:
    blocks, labels, ended = [Block()], dict[str, int](), False
    for line in lines:
        if label := LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]], ended = len(blocks) - 1, False
        elif found := LINE.match(line):
            if ended:
                blocks.append(Block())
            blocks[-1].instructions.append(Instruction(found[2] or "", found[3], found[4]))
            ended = blocks[-1].instructions[-1].leaves
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else Instruction("", "NOP", "")
        jumps = last.leaves and "DIV" not in last.opcode  # of lanes that diverge where all should be together
        if jumps and last.target in labels:
            block.followers.append(labels[last.target])
        if (not jumps or last.conditional) and number + 1 < len(blocks):
            block.followers.append(number + 1)
    return blocks


def disassembler() -> str | None:
    """nvdisasm of pip's packages, of PATH or of the toolkit; None where there is none."""
    found = find_spec("nvidia")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    pips = [str(path) for folder in folders for path in folder.glob("cu*/bin/nvdisasm")]
    return next(filter(None, map(shutil.which, (*pips, "nvdisasm", "/usr/local/cuda/bin/nvdisasm"))), None)


def kernels_of(cubin: Path, tool: str) -> list[Kernel]:
    """All kernels of a file of machine code, with their C++ names."""
    text = subprocess.run([tool, str(cubin)], capture_output=True, text=True, check=True).stdout
    counts = {name: int(count, 16) for name, count in REGISTERS.findall(text)}
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)[1:]
    bodies = zip(parts[::2], demangled(parts[::2]), parts[1::2], strict=True)
    return [Kernel(name, counts[symbol], body.splitlines()) for symbol, name, body in bodies]


def demangled(symbols: Sequence[str]) -> list[str]:
    """C++ names without namespaces and parameters: forward<bf16, Tiling<8, 128, 2> >."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    plain = (re.sub(r"\(anonymous namespace\)::|mz::|^void ", "", line) for line in done.splitlines())
    return [re.sub(r"(?<=>)\(.*|^(\w+)\(.*", r"\1", name) for name in plain]
