"""What `megazero plan` prints: the best layouts in a table, and the best one in detail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.plan.cluster.beside_tensors import BESIDE
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.explained import is_fragile, memory_words, parts, schedule_words, why_slower
from megazero.plan.cluster.layout_flags import layout_flags
from megazero.plan.cluster.layout_search import BestLayouts
from megazero.plan.cluster.programs import OURS
from megazero.program.memory import MemoryColumn
from megazero.report import text_blocks as blocks
from megazero.system.words import counted
from megazero.telemetry.units import count

DAY = 86_400
SHORT: Mapping[str, str] = MappingProxyType(
    {
        MemoryColumn.OFFLOADED.value: "offloaded",
        MemoryColumn.GATHERED.value: "gathered",
        MemoryColumn.BUFFERS.value: "whole",
        MemoryColumn.TRAVELLING.value: "travelling",
        MemoryColumn.SPARE.value: "spare",
        MemoryColumn.HIDDEN.value: "messages",
        MemoryColumn.WORKING.value: "working",
        BESIDE: "driver",
    }
)
"""Headings of what is alive, where the words above the table are too wide for a terminal."""


@dataclass(frozen=True)
class Costs:
    """What a training takes. tokens: of the whole training; None: nobody said. price: of a device and hour."""

    tokens: float | None
    price: float | None

    def of(self, step: ClusterStep) -> dict[str, float]:
        """Days, kWh and the price of a training, as far as they are known."""
        if self.tokens is None:
            return {}
        days = self.tokens / step.tokens_per_second / DAY
        hours = days * 24 * step.cluster.gpus
        known = {"days": days, "kwh": hours * step.cluster.device.watts / 1000}
        return known if self.price is None else known | {"price": hours * self.price}


def plan_text(layouts: BestLayouts, costs: Costs) -> str:
    """The table of the best layouts, and the first of them in detail. layouts: with steps."""
    best = layouts.steps[0]
    head = f"{of_cluster(best)}; global batch {best.run.schedule.global_batch_size:,}"
    return blocks.sections(
        (head, layouts_table(layouts.steps)),
        ("Why each loses to the first", blocks.bullets([*_losses(layouts.steps)])),
        ("The first", blocks.pairs([*_details(best, costs)])),
        ("Memory of a rank of each stage, in GiB", memory_table(best)),
        ("The search", blocks.bullets([*_search(layouts)])),
    )


def of_cluster(step: ClusterStep) -> str:
    """The cluster, and the program if another one runs on it."""
    return str(step.cluster) + (f", steps of {step.program.name}" if step.program != OURS else "")


def layouts_table(steps: Sequence[ClusterStep]) -> str:
    """A row for each step. A star marks the memory of one that leaves little."""
    headings = ("", "tp", "pp", "dp", "schedule", "batch", "recompute", "seq", "ZeRO", "off", "s a step", "MFU", "GiB")
    rows = [(str(number), *_row(step)) for number, step in enumerate(steps, 1)]
    table = blocks.table(headings, rows)
    if any(map(is_fragile, steps)):
        table += "\n* a few per cent of the memory are left: measure before you rely on it"
    return table


def _row(step: ClusterStep) -> tuple[str, ...]:
    p, off = step.run.parallel, step.run.offload
    away = "".join(
        letter
        for letter, column in (
            ("o", off.offload_optimizer),
            ("g", off.offload_gradients),
            ("p", off.offload_params),
            ("a", off.offload_activations),
        )
        if column
    )
    zero = str(p.zero_stage) + (f"/{p.zero_shard_size}" if p.zero_shard_size else "")
    return (
        *map(str, (p.tp, p.pp, step.axes.dp, schedule_words(step.run) or "-", step.run.schedule.micro_batch_size)),
        p.recompute_granularity,
        "yes" if p.sequence_parallel else "no",
        zero,
        away or "-",
        f"{step.seconds:.3g}",
        f"{step.mfu:.1%}",
        f"{step.memory_bytes / 2**30:.1f}{'*' if is_fragile(step) else ''}",
    )


def _losses(steps: Sequence[ClusterStep]) -> Iterator[str]:
    best = steps[0]
    for number, step in enumerate(steps[1:], 2):
        yield f"{number}: {step.seconds / best.seconds - 1:.1%} slower, {why_slower(step, best)}"


def _details(step: ClusterStep, costs: Costs) -> Iterator[tuple[str, str]]:
    yield "flags", layout_flags(step)
    # what is left of a step behind its other parts may be an error of a sum
    of_step = ", ".join(f"{round(seconds, 9):.3g} s {part}" for part, seconds in parts(step).items())
    yield "step", f"{step.seconds:.4g} s: {of_step}"
    reached = step.hardware_flops / (step.seconds * step.cluster.gpus) / 1e12
    model = step.model_flops / (step.seconds * step.cluster.gpus) / 1e12
    yield "speed", f"{model:.1f} TFLOP/s a device of the model ({step.mfu:.1%}), {reached:.1f} with recompute"
    if step.cluster.device.borrowed:
        yield "constants", f"of {step.cluster.device.borrowed}: no measured step of {step.cluster.device.name} is known"
    yield "tokens", f"{count(step.tokens_per_second)} a second, {count(step.tokens_per_second * DAY)} a day"
    known = costs.of(step)
    if known:
        words = f"{known['days']:.3g} days and {count(known['kwh'])} kWh for {count(costs.tokens or 0)} tokens"
        yield "training", words + (f", {known['price']:,.0f} at {costs.price:g} an hour" if "price" in known else "")
    yield "memory", memory_words(step)


def memory_table(step: ClusterStep) -> str:
    """The peak of each set of equal stages, by what is alive. Stages that follow each other with the same bytes share a
    row.
    """
    peaks = step.peaks
    names = [*dict.fromkeys(name for peak in peaks for name in peak.device)]
    rows = list[tuple[range, tuple[str, ...]]]()
    for stages, peak in zip(step.alike.values(), peaks, strict=True):
        sizes = [*(peak.device.get(name, 0) for name in names), peak.device_bytes, peak.host_bytes]
        words, together = tuple(f"{each / 2**30:.2f}" for each in sizes), stages
        if rows and rows[-1][1] == words and rows[-1][0].stop == stages.start:
            together = range(rows.pop()[0].start, stages.stop)
        rows.append((together, words))
    shown = [(blocks.span(stages), *words) for stages, words in rows]
    return blocks.table(("stage", *(SHORT.get(name, name) for name in names), "together", "host"), shown)


def _search(layouts: BestLayouts) -> Iterator[str]:
    yield f"{layouts.looked_at:,} layouts were looked at, and {counted(layouts.simulated, 'step')} simulated"
    for reason, number in layouts.left_out.most_common():
        if number:
            yield f"{number:,} left out: {reason}"


def plan_json(layouts: BestLayouts, costs: Costs) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "program": layouts.steps[0].program.name,
        "constants_of": layouts.steps[0].cluster.device.borrowed or layouts.steps[0].cluster.device.name,
        "best": [{**layout_json(step, costs), **_why(step, layouts.steps[0])} for step in layouts.steps],
        "looked_at": layouts.looked_at,
        "simulated": layouts.simulated,
        "left_out": dict(layouts.left_out),
    }


def _why(step: ClusterStep, best: ClusterStep) -> Mapping[str, str]:
    return {} if step is best else {"why_slower": why_slower(step, best)}


def layout_json(step: ClusterStep, costs: Costs) -> dict[str, Any]:
    """A layout and what it takes. Bytes and seconds are of the fullest and of every rank."""
    p = step.run.parallel
    return {
        "flags": layout_flags(step),
        "tp": p.tp,
        "pp": p.pp,
        "dp": step.axes.dp,
        "seconds": step.seconds,
        "parts": parts(step),
        "mfu": step.mfu,
        "tokens_per_second": step.tokens_per_second,
        "memory_bytes": step.memory_bytes,
        "host_bytes": step.host_bytes,
        "fits": step.fits,
        "fragile": is_fragile(step),
        "stages": [
            {"stages": [*stages], "device": dict(peak.device), "host": dict(peak.host), "moment": peak.moment}
            for stages, peak in zip(step.alike.values(), step.peaks, strict=True)
        ],
        **costs.of(step),
    }
