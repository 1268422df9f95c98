"""Bytes alive at every instruction, beside sums by hand; and what a trace says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megazero.pipeline.schedule import make_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.memory import MemoryColumn, Sample, StepBytes, UnitSizes
from megazero.program.memory_walk import peak, samples, spare_buffers
from megazero.program.scope import Scope
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.program.step import StepOptions, training_step
from megazero.program.trace import MemoryTrace, trace
from megazero.report.trace_files import write

UNIT = UnitSizes(input=0, kept=50, forward=80, backward=120, deferred=20)
HIDDEN, OPTIMIZER = 10, 1000
ACTIVATIONS, GATHERED = MemoryColumn.ACTIVATIONS, MemoryColumn.GATHERED


def model(zero: int) -> RankShape:
    """One chunk of three units with a bucket each: 100 bytes of parameters, 200 of gradients, 4 shards."""
    bucket = BucketShape(0, 100, 200, True, zero == 3, zero >= 2, zero >= 1, 4)
    return RankShape((tuple(UnitShape((n,), (n,), (n,)) for n in range(3)),), (bucket,) * 3)


def step(zero: int, schedule: str = "1f1b", micro_batches: int = 2, unit: UnitSizes = UNIT) -> MemoryTrace:
    """The first of two stages."""
    shape = model(zero)
    own = make_schedule(schedule, 2, micro_batches)[0]
    listed = training_step(own, shape, StepOptions(reduce_every=zero >= 2, overlap=zero > 0))
    sizes = StepBytes(HIDDEN, ((unit,) * 3,), OPTIMIZER)
    return trace("stage 0", listed, Scope(shape, 2), sizes, {(0, n): f"unit {n}" for n in range(3)})


def at(found: MemoryTrace, text: str, nth: int = 0) -> Sample:
    return [sample for sample in found.samples if str(sample.instruction).startswith(text)][nth]


def _reduces(sample: Sample) -> bool:
    return sample.instruction.op is Op.REDUCE


def test_columns_that_last_are_those_of_the_zero_stage():
    lasting = {
        0: {MemoryColumn.PARAMETERS: 300, MemoryColumn.GRADIENTS: 600},
        1: {MemoryColumn.PARAMETERS: 300, MemoryColumn.GRADIENTS: 600},
        2: {MemoryColumn.PARAMETERS: 300, MemoryColumn.GRADIENTS: 150},
        3: {MemoryColumn.PARAMETERS: 75, MemoryColumn.GRADIENTS: 150},
    }
    for zero, columns in lasting.items():
        found = step(zero).samples
        for column, size in columns.items():
            assert {sample.columns[column] for sample in found} == {size}
        assert all(sample.columns[MemoryColumn.OPTIMIZER] == OPTIMIZER for sample in found)


def test_activations_live_from_forward_to_backward():
    """Whole chunks: the first unit reads tokens, so it keeps 50, the two others as much; the last one's input is 10."""
    found = step(0)
    first, second = at(found, "forward (micro-batch 0"), at(found, "forward (micro-batch 1")
    assert first.columns[ACTIVATIONS] == 150 and second.columns[ACTIVATIONS] == 300
    assert first.columns[MemoryColumn.WORKING] == 80 - 50 + HIDDEN and MemoryColumn.HIDDEN not in first.columns
    last = at(found, "backward (micro-batch 1")
    assert last.columns[ACTIVATIONS] == 150 and last.columns[MemoryColumn.HIDDEN] == HIDDEN
    assert last.columns[MemoryColumn.WORKING] == 120 - 50
    assert ACTIVATIONS not in found.samples[-1].columns


def test_units_that_are_cut_keep_their_inputs_and_are_freed_one_by_one():
    for part in (HIDDEN, 4):
        found = step(3, unit=replace(UNIT, input=part))
        forwards = [at(found, f"forward (micro-batch 0, chunk 0, unit {n})") for n in range(3)]
        kept = [50, 100 + part, 150 + 2 * part]
        assert [each.columns[ACTIVATIONS] for each in forwards] == kept, "each unit but the first keeps its input"
        wholes = [each.columns.get(MemoryColumn.HIDDEN, 0) for each in forwards]
        assert wholes == [0, *[0 if part == HIDDEN else HIDDEN] * 2], "it has all of it while it runs"
        freed = [at(found, f"backward (micro-batch 1, chunk 0, unit {n})").columns[ACTIVATIONS] for n in (2, 1, 0)]
        assert freed == kept[::-1]


def test_deferred_parts_replace_activations():
    found = step(0, "zb-h1", 3)
    first = at(found, "backward of the input (micro-batch 0")
    others = sum(size for number, size in first.micro_batches.items() if number)
    assert first.columns[ACTIVATIONS] == 150 + others, "at its begin all is there"
    after = found.samples[first.number + 1]
    assert after.instruction.op is Op.SEND_BACKWARD or after.micro_batches[0] == 3 * 20
    assert ACTIVATIONS not in found.samples[-1].columns


def test_gathered_parameters_are_alive_from_gather_to_release():
    found = step(3)
    assert max(sample.columns.get(GATHERED, 0) for sample in found.samples) == 200, "two units"
    gather = at(found, "gather parameters (bucket 2)")
    assert gather.columns[GATHERED] - found.samples[gather.number - 1].columns[GATHERED] == 0, (
        "bucket 0 is released by the instruction before"
    )
    assert GATHERED not in found.samples[-1].columns


def test_three_buffers_hold_whole_gradients_and_two_of_them_travel():
    found = step(2, micro_batches=3)
    whole = (MemoryColumn.BUFFERS, MemoryColumn.TRAVELLING, MemoryColumn.SPARE)
    held = [sum(sample.columns.get(column, 0) for column in whole) for sample in found.samples]
    assert max(held) == 3 * 200 and held == sorted(held), "the pool frees nothing"
    at_launches = [sample.columns.get(MemoryColumn.TRAVELLING, 0) for sample in found.samples if _reduces(sample)]
    others = [sample.columns.get(MemoryColumn.TRAVELLING, 0) for sample in found.samples if not _reduces(sample)]
    assert max(at_launches) == 3 * 200 and max(others) == 2 * 200, "the oldest is waited for when a third is launched"
    assert found.samples[-1].columns[MemoryColumn.SPARE] == 600


def test_without_overlap_nothing_travels_and_a_cast_copy_takes_the_buffers_place():
    shape, schedule = model(2), make_schedule("1f1b", 2, 3)[0]
    listed = training_step(schedule, shape, StepOptions(reduce_every=True))

    def held(**fields: float) -> list[dict[MemoryColumn, int]]:
        sizes = replace(StepBytes(HIDDEN, ((UNIT,) * 3,)), **fields)  # type: ignore[arg-type]
        return [dict(sample.columns) for sample in samples(listed, Scope(shape, 2), sizes)]

    waits, casts = held(in_flight=0), held(cast=0.5)
    assert max(columns.get(MemoryColumn.TRAVELLING, 0) for columns in waits) == 200
    assert max(columns.get(MemoryColumn.SPARE, 0) for columns in waits) == 200, "one buffer serves all buckets"
    assert max(columns.get(MemoryColumn.TRAVELLING, 0) for columns in casts) == 3 * 100
    assert max(columns.get(MemoryColumn.SPARE, 0) for columns in casts) == 200


def test_received_messages_are_alive_until_they_are_used():
    shape = model(0)
    own = make_schedule("gpipe", 2, 4)[1]
    listed = training_step(own, shape, StepOptions())
    found = list(samples(listed, Scope(shape, 2), StepBytes(HIDDEN, ((UNIT,) * 3,))))
    receives = [sample for sample in found if sample.instruction.op is Op.RECV_FORWARD]
    assert [sample.columns[MemoryColumn.HIDDEN] for sample in receives] == [10, 20, 20, 20], "one is posted ahead"


def test_the_peak_is_the_first_of_the_largest():
    shape = model(3)
    found = step(3)
    own = [sample.instruction for sample in found.samples]
    of = own, Scope(shape, 2), StepBytes(HIDDEN, ((UNIT,) * 3,), OPTIMIZER)
    same = peak(*of, spare_buffers(*of))
    assert same == found.peak and same.total == max(sample.total for sample in found.samples)
    assert all(sample.total < same.total for sample in found.samples[: same.number])


def test_the_json_adds_up(tmp_path: Path):
    found = step(3, unit=replace(UNIT, input=HIDDEN))
    (path,) = write([found, step(1)], tmp_path / "step.json")
    text, other = json.loads(path.read_text())["ranks"]
    assert len(text["instructions"]) == len(found.samples) and other["rank"] == "stage 0"
    for entry, sample in zip(text["instructions"], found.samples, strict=True):
        assert sum(entry["columns"].values()) == entry["bytes"] == sample.total
        assert entry["instruction"] == str(sample.instruction)
    forward = next(e for e in text["instructions"] if e["instruction"] == "forward (micro-batch 1, chunk 0, unit 1)")
    assert forward["micro_batches"]["1"] == 50 + 60
    # Of unit 1: its shard of parameters and of gradients, the gathered bucket, activations of both micro-batches.
    assert dict(zip(text["units"], forward["units"], strict=True))["unit 1"] == 25 + 50 + 100 + 2 * 60
    assert text["peak"]["bytes"] == max(entry["bytes"] for entry in text["instructions"])


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_picture_shows_the_columns_and_the_peak(tmp_path: Path, suffix: str):
    found = step(3, micro_batches=6)
    picture, beside = write([found], tmp_path / f"step{suffix}")
    assert beside.suffix == ".json" and json.loads(beside.read_text())["ranks"][0]["rank"] == "stage 0"
    text = picture.read_text()
    drawing = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])  # type: ignore[index]
    areas = drawing.findall("{*}polygon")
    named = [area[0].text for area in areas]
    present = {column for sample in found.samples for column in sample.columns}
    assert sorted(map(str, named)) == sorted(column.value for column in present)
    heights = [float(point.split(",")[1]) for area in areas for point in area.attrib["points"].split()]
    assert min(heights) == pytest.approx(64) and max(heights) == pytest.approx(464), "the peak fills the frame"
    assert f"at number {found.peak.number}" in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    if suffix == ".html":
        assert "Alive at the peak" in text and "optimizer" in text
    assert "by unit" in text and "by micro-batch" in text
    write([found], picture)  # it may replace itself


def test_a_long_list_is_drawn_with_its_peaks(tmp_path: Path):
    found = step(3, micro_batches=80)
    assert len(found.samples) > 1000
    text = write([found], tmp_path / "step.svg")[0].read_text()
    points = re.findall(r'<polygon points="([^"]*)"', text)
    assert max(len(area.split()) for area in points) <= 4000 and len(text) < 1_000_000
    heights = [float(point.split(",")[1]) for area in points for point in area.split()]
    assert min(heights) == pytest.approx(64)


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path):
    beside = tmp_path / "step.json"
    beside.write_text("{}")
    with pytest.raises(FileExistsError, match=r"step\.json: is there already and is no memory trace"):
        write([step(0)], tmp_path / "step.svg")
    assert beside.read_text() == "{}" and not (tmp_path / "step.svg").exists()


def test_a_unit_that_keeps_its_input_counts_it_once():
    """As one graph: the second unit's own input of 10 is kept, the first one reads tokens."""
    keeps = replace(UNIT, input=HIDDEN)
    own = (Instruction(Op.FORWARD, 0, 0, model_chunk=0),)
    (found,) = samples(own, Scope(model(0), 1), StepBytes(HIDDEN, ((keeps,) * 3,)))
    assert found.columns[ACTIVATIONS] == 3 * 50 + 2 * HIDDEN
