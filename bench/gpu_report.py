"""The report of a run of `bench/gpu.py`: tables, and for each target whether it was reached, or by how much not.

`found` is the content of the file of results: "facts", "ops" (a list of items) and "training" (a list of runners with
their results).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from bench import results
from megazero.system.device import card_peak_flops

BANDWIDTH, MFU, EAGER, COMPILED, FP8 = 0.85, 0.50, 1.5, 1.15, 1.25
H100 = 989e12
"""Dense bf16 FLOP/s of an H100, for which the targets are defined. Other known GPUs have their own peak."""
BANDWIDTH_OPS = ("softmax", "layernorm", "residual + layernorm", "rmsnorm", "adam", "bias + tanh gelu", "cross-entropy")

OP_HEADINGS = (
    "op",
    "dtype",
    "part",
    "shape",
    "ms",
    "GB/s",
    "of the copy",
    "torch ms",
    "times faster",
    "compiled ms",
    "times faster",
)
TRAIN_HEADINGS = ("model", "contestant", "micro-batch", "s a step", "tokens/s", "MFU", "peak GiB", "first step s")


def op_rows(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One comparison for each part of each measured op: medians in seconds, of ours and of the other contestants."""
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for item in found["ops"]:
        name, dtype, who = item["item"]
        by_case.setdefault((name, dtype), {})[who] = item
    for (name, dtype), contestants in by_case.items():
        mine = contestants.get("ours", {})
        for part, seconds in mine.get("seconds", {}).items():
            others = {
                who: c["seconds"][part]
                for who, c in contestants.items()
                if who != "ours" and part in c.get("seconds", {})
            }
            row = {"name": name, "dtype": dtype, "part": part, "shape": mine["shape"], "bytes": mine["bytes"][part]}
            yield row | {
                "ours": statistics.median(seconds),
                **{who: statistics.median(times) for who, times in others.items()},
            }


def share(row: dict[str, Any], found: dict[str, Any]) -> float | None:
    """The rate at which the op moves its bytes, as a fraction of a copy's rate."""
    rate = found.get("facts", {}).get("copy_bytes_per_second")
    return row["bytes"] / row["ours"] / rate if rate else None


def mfu(run: dict[str, Any], found: dict[str, Any]) -> float:
    """Model FLOPs utilisation: the model's FLOP/s as a fraction of the GPU's peak."""
    return float(
        run["flops_per_second"] / (card_peak_flops(str(found["card"].get("card", "")), torch.bfloat16) or H100)
    )


def op_cells(row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    reached = share(row, found)
    cells = [
        row["name"],
        row["dtype"],
        row["part"],
        row["shape"],
        f"{row['ours'] * 1e3:.3f}",
        f"{row['bytes'] / row['ours'] / 1e9:,.0f}",
    ]
    cells.append("" if reached is None else f"{reached:.0%}")
    for who in ("torch", "compiled"):
        cells += [f"{row[who] * 1e3:.3f}", f"{row[who] / row['ours']:.2f}"] if who in row else ["", ""]
    return cells


def train_cells(run: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if "skipped" in run:
        return [run["model"], run["name"], "skipped", *[""] * (len(TRAIN_HEADINGS) - 3)]
    numbers = [f"{run['seconds']:.3f}", f"{run['tokens_per_second']:,.0f}", f"{mfu(run, found):.1%}"]
    return [
        run["model"],
        run["name"],
        str(run["micro_batch"]),
        *numbers,
        f"{run['peak_gib']:.1f}",
        f"{run['first_step_seconds']:.1f}",
    ]


def judged(what: str, value: float, target: float, unit: str = "") -> str:
    """One line of the report. A target is a minimum."""
    shown = (f"{value:.1%}", f"{target:.0%}") if unit == "%" else (f"{value:.2f}", f"{target:g}")
    verdict = "reached" if value >= target else f"not reached, {value / target:.2f} of it"
    return f"{what}: {shown[0]} (target {shown[1]}): {verdict}"


def op_verdicts(found: dict[str, Any]) -> Iterator[str]:
    for row in op_rows(found):
        title = f"{row['name']}, {row['dtype']}, {row['part']}"
        reached = share(row, found)
        if row["name"] in BANDWIDTH_OPS and reached is not None:
            yield judged(f"{title}: of the copy's bandwidth", reached, BANDWIDTH, "%")
        for who, words in (("torch", "torch eager"), ("compiled", "torch.compile")):
            if who in row:
                yield judged(f"{title}: speed beside {words}", row[who] / row["ours"], 1.0)


def fastest(runs: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The lines about one model's runs."""
    there = [run for run in runs if run["kind"] == kind and "skipped" not in run]
    return max(there, key=lambda run: float(run["tokens_per_second"]), default=None)


def training_verdicts(found: dict[str, Any]) -> Iterator[str]:
    for model in dict.fromkeys(run["model"] for run in found["training"]):
        runs = [run for run in found["training"] if run["model"] == model]
        ours, eager, compiled, fp8 = (fastest(runs, kind) for kind in ("ours", "eager", "compiled", "fp8"))
        if ours is None:
            yield f"{model}: no result of megazero, so no verdict"
            continue
        yield judged(f"{model}: MFU of {ours['name']}", mfu(ours, found), MFU, "%")
        for rival, target in ((eager, EAGER), (compiled, COMPILED)):
            if rival is not None:
                yield judged(
                    f"{model}: speed beside {rival['name']}",
                    ours["tokens_per_second"] / rival["tokens_per_second"],
                    target,
                )
                yield memory_verdict(model, ours, rival)
        if fp8 is not None:
            yield judged(
                f"{model}: {fp8['name']} beside bf16", fp8["tokens_per_second"] / ours["tokens_per_second"], FP8
            )


def memory_verdict(model: str, ours: dict[str, Any], rival: dict[str, Any]) -> str:
    """Compare memory. A larger micro-batch needs more, so unequal ones are comparable only if the larger needs less."""
    title, more = f"{model}: peak memory of {rival['name']} over ours", rival["peak_gib"] / ours["peak_gib"]
    sizes = ours["micro_batch"], rival["micro_batch"]
    if sizes[0] == sizes[1] or (more >= 1) == (sizes[0] > sizes[1]):
        return judged(title, more, 1.0)
    return f"{title}: {more:.2f}, not compared: micro-batches of {sizes[1]} and {sizes[0]} samples"


def skipped(found: dict[str, Any]) -> Iterator[str]:
    for item in found["ops"]:
        if "skipped" in item:
            yield f"{', '.join(item['item'])}: {item['skipped']}"
    for run in found["training"]:
        if "skipped" in run:
            yield f"{run['model']}, {run['name']}: {run['skipped'].splitlines()[0]}"


def heading(found: dict[str, Any]) -> str:
    """The GPU and its measured bandwidth and FLOP/s."""
    facts = found.get("facts", {})
    card = ", ".join(f"{name} {value}" for name, value in found["card"].items())
    lines = [found["note"]] if found["note"] else []
    lines.append(card)
    if "copy_bytes_per_second" in facts:
        rate = f"{facts['copy_bytes_per_second'] / 1e9:,.1f} GB/s of a copy (read and written)"
        width = facts["matmul_width"]
        lines.append(
            f"measured: {rate}, {facts['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s of a {width} x {width} x "
            f"{width} product in bf16"
        )
    return "\n\n".join(lines)


def as_text(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = [heading(found)]
    if found["ops"]:
        parts.append(results.table(OP_HEADINGS, [op_cells(row, found) for row in op_rows(found)]))
    if found["training"]:
        parts.append(results.table(TRAIN_HEADINGS, [train_cells(run, found) for run in found["training"]]))
        notes = [f"* {run['model']}, {run['name']}: {run['note']}" for run in found["training"] if run["note"]]
        parts += ["\n".join(notes)] if notes else []
    lines = "\n".join(f"* {line}" for line in (*op_verdicts(found), *training_verdicts(found)))
    missing = "\n".join(f"* {line}" for line in skipped(found))
    return "\n\n".join(
        [
            *parts,
            *(
                [f"Targets{', which a rehearsal says nothing about' if found['note'] else ''}:\n\n{lines}"]
                if lines
                else []
            ),
            *([f"Left out:\n\n{missing}"] if missing else []),
        ]
    )


def bars(found: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Tokens per second by model, for the plot."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for run in found["training"]:
        if "skipped" not in run:
            groups.setdefault(f"{run['model']}: tokens per second", []).append((run["name"], run["tokens_per_second"]))
    return groups
