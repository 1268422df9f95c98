"""What the tables of `bench/peers.py` are made of: models, and contestants on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.workload import TUNED, Entry, Workload
from megazero.system import allocator

W1 = Workload("W1")
W2 = replace(W1, name="W2", vocabulary=50304)
TWO = replace(W1, name="W1 on two ranks", ranks=2, threads=1)
PIPELINE = replace(TWO, micro_batches=4)
WIDE = replace(TWO, name="wide", hidden=1024, heads=16, micro_batch=1)
"""Few tokens for its 110 million parameters, so that gathers and reductions count."""
FEW = replace(WIDE, name="wide, few tokens", sequence=128)
"""The same with a quarter of the tokens: what is not a matrix product counts more."""
UNIT = 12 * WIDE.hidden**2 + 13 * WIDE.hidden
"""Parameters of a block of it."""
TWO_BLOCKS = {
    "stage3_max_live_parameters": 2 * UNIT,
    "stage3_max_reuse_distance": 2 * UNIT,
    "stage3_prefetch_bucket_size": UNIT,
}
"""At most two blocks of it are gathered at a time, as entries of DeepSpeed's `zero_optimization`."""
ALONE = replace(WIDE, name="wide, one process", ranks=1, threads=2)
"""The same in one process, whose model state rests in host memory or on disks."""


@dataclass(frozen=True)
class Table:
    """A table: megazero and several rivals on one workload."""

    name: str
    title: str
    work: Workload
    ours: Entry
    rivals: tuple[Entry, ...]

    def __hash__(self) -> int:
        return hash(self.name)

    def in_precision(self, precision: str) -> Table:
        """The same table with other products, which its title names."""
        if precision == self.work.precision:
            return self
        return replace(self, title=f"{self.title}, {precision}", work=replace(self.work, precision=precision))

    def tiny(self) -> Table:
        """The same table with a tiny model and without compilation."""
        work = replace(self.work, layers=2, hidden=64, heads=2, sequence=32, vocabulary=256, micro_batch=2, threads=1)

        def eager(rival: Entry) -> Entry:
            compiles = "compile" in rival.settings
            return replace(rival, settings=rival.settings | ({"compile": False} if compiles else {}))

        return replace(self, work=work, rivals=tuple(map(eager, self.rivals)))


def megazero(name: str, *layout: str, replicas: int = 1) -> Entry:
    """megazero, with the allocator's settings that the program sets for itself."""
    given = {"layout": list(layout), "replicas": replicas}
    return Entry(name, "megazero_", given, {allocator.VARIABLE: allocator.settings()}, replicas=replicas)


def own_model(name: str, replicas: int = 1, **run: Any) -> Entry:
    """transformers' BLOOM in megazero, blocks compiled."""
    environment = {allocator.VARIABLE: allocator.settings()}
    return Entry(name, "megazero_own", {"run": run, "compile": True}, environment, replicas, "blocks compiled")


def own_layers(name: str, replicas: int = 1, **run: Any) -> Entry:
    """megazero's own layers as a user's modules in its engine."""
    return replace(megazero(name, replicas=replicas), module="megazero_layers", settings={"run": run})


def adapters(name: str, *layout: str) -> Entry:
    """megazero's adapters of rank 16 on a frozen BLOOM."""
    return replace(megazero(name, "--lora-rank", "16", *layout), module="megazero_adapters")


def bloom(name: str, note: str = "", tuned: bool = True, **settings: Any) -> Entry:
    return Entry(name, "transformers_", {"shape": "bloom", **settings}, TUNED if tuned else {}, note=note)


def gpt2(name: str, note: str = "", **settings: Any) -> Entry:
    return Entry(name, "transformers_", {"shape": "gpt2", **settings}, note=note)


def plain(name: str, note: str = "", **settings: Any) -> Entry:
    return Entry(name, "plain_gpt", settings, note=note)


def deepspeed(stage: int, note: str = "", name: str = "", replicas: int = 2, **settings: Any) -> Entry:
    note = f"blocks compiled, its own CPU Adam{note}"
    settings = {"stage": stage, "compile": True, **settings}
    return Entry(name or f"DeepSpeed ZeRO-{stage}", "deepspeed_", settings, replicas=replicas, note=note)


def torch_parallel(name: str, kind: str, note: str = "", replicas: int = 1, **settings: Any) -> Entry:
    return Entry(name, "torch_parallel", {"kind": kind, **settings}, replicas=replicas, note=note)
