"""The files of --memory-trace: the memory of a step at every instruction, on a rank of every stage, as JSON and as
pictures.

The JSON is also a trace in the Trace Event Format of Chrome, which Perfetto (https://ui.perfetto.dev) opens: a process
for each rank with a thread for each lane, and a counter for each tier of memory. Its readers skip keys that they do not
know, so one file serves both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megazero.config.schema.trainer import TRACE_SUFFIXES
from megazero.program.memory import MemoryColumn, Sample, UnitKey
from megazero.program.times import Span
from megazero.program.trace import LANES, MemoryTrace, TimedStep
from megazero.report.memory_picture import html, svg
from megazero.report.tier_picture import TIERS
from megazero.system.writable import why_not_replaced

KIND = "megazero memory trace"
"""Stands in the first line of every file of a trace: such a file may be written again."""
_HEAD = 512
"""Bytes in which `KIND` is looked for."""


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of a trace: a picture and the JSON beside it, or the JSON alone."""
    beside = path.with_suffix(".json")
    return (path,) if path == beside else (path, beside)


def why_not_a_trace(path: Path) -> str | None:
    """Why a trace may not be written to this path, as `system.writable.why_not_replaced` says it."""
    return why_not_replaced(path, KIND, _HEAD, "memory trace")


def write(traces: Sequence[MemoryTrace], path: Path) -> tuple[Path, ...]:
    """Write traces as JSON, or as a picture with the JSON beside it; returns the paths.

    traces  those of all stages, that with the largest peak first. The SVG shows this one alone
    path    its suffix is one of `TRACE_SUFFIXES`. Its folder is made if it is missing

    Raises OSError where it cannot be written, and FileExistsError rather than replace a file of another kind.
    """
    assert path.suffix in TRACE_SUFFIXES, path
    files = files_of(path)
    for file in files:
        if (wrong := why_not_a_trace(file)) is not None:
            raise FileExistsError(f"{file}: {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files[-1].write_text(as_json(traces), encoding="utf-8")
    if path.suffix == ".svg":
        path.write_text(svg(traces[0], KIND), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(html(traces, KIND), encoding="utf-8")
    return files


def as_json(traces: Sequence[MemoryTrace]) -> str:
    """The traces as JSON, a line for each instruction. Sizes are in bytes.

    columns        by column, without those that are 0; their sum without host memory is `bytes`
    micro_batches  by micro-batch, without those that are 0: activations and hidden states
    units          in the order of the rank's "units": activations, and what there is of a unit's buckets. A bucket
                   counts for the first unit that reads it
    traceEvents    the step in time, in microseconds, where rates are known: see `trace_events`
    """
    columns, ranks = _text([column.value for column in MemoryColumn]), ",\n".join(map(_rank, traces))
    events = ",\n".join(
        _text(event)
        for process, trace in enumerate(traces)
        if trace.timed is not None
        for event in trace_events(process, trace.rank, trace.timed)
    )
    return f'{{"kind": "{KIND}",\n"columns": {columns},\n"ranks": [\n{ranks}\n],\n"traceEvents": [\n{events}\n]}}\n'


def trace_events(process: int, rank: str, step: TimedStep) -> Iterator[dict[str, Any]]:
    """The events of a rank's step in the Trace Event Format.

    M names the process and its threads, which are lanes; X is an instruction with its start and its length; C is the
    number of bytes in a tier from then on. A tier that never holds anything has no counter.
    """

    def named(what: str, thread: int, **arguments: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}

    yield named("process_name", 0, name=rank)
    yield named("process_sort_index", 0, sort_index=process)
    rows = [(lane, row) for lane, spans in step.lanes.items() for row in rows_without_overlap(spans)]
    for thread, (lane, row) in enumerate(rows, 1):
        yield named("thread_name", thread, name=LANES[lane])
        yield named("thread_sort_index", thread, sort_index=thread)
        for span in row:
            start, end = _microseconds(span.start), _microseconds(span.end)  # both rounded, so that neighbours touch
            times = {"ts": start, "dur": round(end - start, 3)}
            # Perfetto colours by name: all forwards are alike, and which one it is stands in the arguments.
            event = {"ph": "X", "name": span.instruction.op.value, "cat": LANES[lane], "pid": process, "tid": thread}
            yield {**event, **times, "args": {"of": span.instruction.where}}
    for tier, (name, _) in TIERS.items():
        before = None
        for moment in step.moments if getattr(step.peaks, tier) else ():
            nbytes = getattr(moment.held, tier)
            if nbytes != before:
                counter = {"ph": "C", "name": name, "pid": process, "ts": _microseconds(moment.start)}
                yield {**counter, "args": {"bytes": nbytes}}
            before = nbytes


def rows_without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of a lane in rows in which none overlaps another: messages to and from two stages are on one lane."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _rank(trace: MemoryTrace) -> str:
    lines = ",\n".join(_text(_described(sample, trace.units)) for sample in trace.samples)
    names, peak = _text(list(trace.units.values())), _text(_described(trace.peak, trace.units))
    return f'{{"rank": {_text(trace.rank)},\n"units": {names},\n"peak": {peak},\n"instructions": [\n{lines}\n]}}'


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _described(sample: Sample, units: Iterable[UnitKey]) -> dict[str, Any]:
    return {
        "number": sample.number,
        "instruction": str(sample.instruction),
        "bytes": sample.total,
        "columns": {column.value: size for column, size in sample.columns.items()},
        "micro_batches": {str(number): size for number, size in sorted(sample.micro_batches.items())},
        "units": [sample.units.get(unit, 0) for unit in units],
    }
