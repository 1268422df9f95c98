"""The JSON of --memory-trace as a trace that Perfetto and Chrome open: their Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.step_lists import StageLists
from megazero.plan.step_times import MachineRates, timed_traces
from megazero.report.trace_files import write

RATES = MachineRates(1e9, to_host=2e7, to_device=3e7, update=4e7, update_host=5e6, read=6e6, write=7e6, messages=8e6)
MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --data-path x "
    "--micro-batch-size 1 --global-batch-size 8 --precision bf16 --device cuda"
)
DISKS = "--offload-optimizer nvme --offload-params nvme --nvme-path d --nvme-buffer-bytes 4MB"


def written(flags: str, ranks: int, folder: Path) -> tuple[dict[str, Any], StageLists]:
    run = parse_run(f"{MODEL} {flags}".split(), ranks)
    steps = StageLists(run, axes_of(run, ranks), nccl=False)
    (path,) = write(timed_traces(steps, "cuda", RATES), folder / "step.json")
    return json.loads(path.read_text()), steps


def by_process(document: dict[str, Any], phase: str) -> dict[int, list[dict[str, Any]]]:
    events = defaultdict[int, list[dict[str, Any]]](list)
    for event in document["traceEvents"]:
        if event["ph"] == phase:
            events[event["pid"]].append(event)
    return events


BOTH_WAYS = "--pp 2 --virtual-stages 2 --pipeline-schedule zb-v --num-layers 4"


@pytest.mark.parametrize(
    ("flags", "ranks"), [("", 1), ("--pp 2 --offload-optimizer cpu", 2), (DISKS, 1), (BOTH_WAYS, 2)]
)
def test_a_process_is_a_rank_and_a_thread_a_lane(flags: str, ranks: int, tmp_path: Path) -> None:
    document, _ = written(flags, ranks, tmp_path)
    names = {
        process: [event["args"]["name"] for event in events if event["name"] == "process_name"]
        for process, events in by_process(document, "M").items()
    }
    assert names == {number: [rank["rank"]] for number, rank in enumerate(document["ranks"])}
    for process, events in by_process(document, "X").items():
        threads = {
            e["tid"]: e["args"]["name"] for e in by_process(document, "M")[process] if e["name"] == "thread_name"
        }
        assert {event["tid"] for event in events} == set(threads), "each thread has a name, and each name a thread"
        assert all(event["cat"] == threads[event["tid"]] for event in events)
        if flags == BOTH_WAYS:  # a receive may travel beside a send
            assert list(threads.values()).count("stages") == 2
        for thread in threads:
            times = [(event["ts"], event["dur"]) for event in events if event["tid"] == thread]
            assert all(start + length <= later + 1e-6 for (start, length), (later, _) in pairwise(times))


def test_computations_are_those_of_the_list_and_last_as_their_operations(tmp_path: Path) -> None:
    """A forward and a backward for each of 8 micro-batches, in microseconds: a backward is two forwards."""
    document, _ = written("", 1, tmp_path)
    compute = [event for event in document["traceEvents"] if event["ph"] == "X" and event["cat"] == "compute"]
    seconds = {name: sum(e["dur"] for e in compute if e["name"] == name) / 1e6 for name in ("forward", "backward")}
    assert [event["args"]["of"] for event in compute if event["name"] == "forward"] == [
        f"micro-batch {number}, chunk 0" for number in range(8)
    ]
    # 12 h^2 products a layer and the head, twice for a multiply-add: 64 tokens x 2 x (3 x 12 x 64^2 + 500 x 64) of a
    # forward; attention adds a few per cent.
    assert seconds["forward"] == pytest.approx(8 * 64 * 2 * (3 * 12 * 64**2 + 500 * 64) / 1e9, rel=0.15)
    assert seconds["backward"] == pytest.approx(2 * seconds["forward"])


def test_counters_have_the_bytes_of_every_tier(tmp_path: Path) -> None:
    """What never holds anything has no counter. The largest of the device is the largest of the instructions."""
    document, _ = written("", 1, tmp_path)
    (counters,) = by_process(document, "C").values()
    assert {event["name"] for event in counters} == {"device"}
    (rank,) = document["ranks"]
    assert max(event["args"]["bytes"] for event in counters) == rank["peak"]["bytes"]
    document, steps = written(DISKS, 1, tmp_path)
    (counters,) = by_process(document, "C").values()
    largest = {name: max(e["args"]["bytes"] for e in counters if e["name"] == name) for name in ("device", "disks")}
    assert {event["name"] for event in counters} == {"device", "host memory", "disks"}
    state = sum(bucket.parameter_bytes for bucket in steps.of(0).shape.buckets)
    assert largest["device"] == document["ranks"][0]["peak"]["bytes"]
    assert largest["disks"] >= 7 * state, "bf16 parameters, and fp32 master weights and two moments"
    for name in largest:
        values = [event["args"]["bytes"] for event in counters if event["name"] == name]
        assert all(one != other for one, other in pairwise(values)), "an event is a change"


def test_a_trace_without_times_has_no_events(tmp_path: Path) -> None:
    run = parse_run(MODEL.split(), 1)
    (timed,) = timed_traces(StageLists(run, axes_of(run, 1), nccl=False), "cuda", RATES)
    (path,) = write([replace(timed, timed=None)], tmp_path / "step.json")
    assert json.loads(path.read_text())["traceEvents"] == []
