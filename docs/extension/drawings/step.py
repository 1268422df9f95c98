"""A whole step as it runs: for each stage a row of computations, and one for each lane on which it communicates."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from docs.extension.svg import Picture, shade
from megazero.config.tiers import Tier
from megazero.pipeline.schedule import CHUNKS, chunk_map, make_schedule
from megazero.program.example import GRADIENT_BYTES, PARAMETER_BYTES, STATE_BYTES, ExampleModel
from megazero.program.instruction import (
    READ_LANES,
    UPDATE,
    UPDATE_HOST,
    WRITE_LANES,
    Kind,
    Lane,
    Op,
    Piece,
    moves_of,
)
from megazero.program.passes.vertical import VerticalOrder
from megazero.program.simulate import SimulationReport, simulate
from megazero.program.step import StepOptions, training_step
from megazero.program.times import Span, uniform_times

COLOURS: dict[Kind, str] = {
    Op.FORWARD: "#4878a8",
    Op.BACKWARD: "#c87f3e",
    Op.BACKWARD_INPUT: "#c87f3e",
    Op.BACKWARD_WEIGHT: "#5d9a6b",
    Op.GATHER: "#4d9a9a",
    Op.REDUCE: "#b85c66",
    Op.REDUCE_ACROSS: "#9a6fb0",
    UPDATE: "#7a7f8c",
    UPDATE_HOST: "#7a7f8c",
    Op.ADD_GRADIENT: "#9a8fae",
    Op.COUNT_GRADIENT: "#9a8fae",
}
PIECES = {
    Piece.PARAMETERS: "#8fae7a",
    Piece.UPDATED: "#6f8f5a",
    Piece.STATE: "#a58b6f",
    Piece.GRADIENTS: "#b8925a",
    Piece.REDUCED: "#b8925a",
    Piece.SUMS: "#a08a72",
    Piece.ACTIVATIONS: "#c9b458",
}
COLOURS |= {move: colour for piece, colour in PIECES.items() for move in moves_of(piece)}
WORDS: dict[Kind, str] = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    UPDATE: "update",
    Op.GATHER: "gather",
    Op.REDUCE: "reduction",
    Op.REDUCE_ACROSS: "reduction across",
    UPDATE_HOST: "update there",
    Op.ADD_GRADIENT: "addition there",
    Op.COUNT_GRADIENT: "count",
}
WORDS |= {move: piece.value for piece in PIECES for move in moves_of(piece)}
_LANES = {
    Lane.SHARDS: "shards",
    Lane.ACROSS: "across",
    **READ_LANES,
    Lane.TO_HOST: "to host",
    Lane.HOST: "host",
    Lane.TO_DEVICE: "to device",
    **WRITE_LANES,
}
_ROW, _GAP, _MARGIN, _TOP, _WIDTH = 22, 3, 96, 26, 780
_LEAST = 1.6
"""Width of the shortest copies, which could not be seen at their own."""
_GATHER_TIME, _UPDATE_TIME, _HOST_TIME, _DISK_TIME, _COPY_TIME = 0.12, 0.08, 1.2, 1.0, 0.2
"""Of one unit; a chunk's forward takes 1, its backward 2."""


def simulated(
    zero: int,
    shard_size: int,
    pp: int,
    micro_batches: int,
    blocks: int,
    late: int,
    vertical: int,
    leaving: int,
    offload: str,
    params: str,
    gradients: str,
    early: int,
) -> SimulationReport:
    """The step of a model with this number of blocks on each stage, on 4 replicas, by 1F1B. late: with the updates of
    the step before, not with its own. early: with updates before the norm. vertical: all micro-batches pass a unit
    together. leaving: percent of the activations that leave the device. offload, params, gradients: as
    --offload-optimizer, --offload-params and --offload-gradients.
    """
    chunks = chunk_map("1f1b", pp, CHUNKS["1f1b"] or 1)
    tiers = Tier(offload), Tier(params), Tier(gradients)
    model = ExampleModel((blocks,) * pp, zero, shard_size, 4 // shard_size, shard_size, *tiers)
    shapes = [model.shape(chunks.of(stage)) for stage in range(pp)]
    shapes = [shape.keeping([[1] * len(units) for units in shape.units]) for shape in shapes]
    order = VerticalOrder() if vertical else None
    options = StepOptions(
        reduce_every=zero >= 2 or tiers[2] is not Tier.DEVICE,
        gathered_bytes=2 * PARAMETER_BYTES * shard_size,
        late=bool(late),
        early=bool(early),
        vertical=order,
        leaving=leaving / 100,
    )
    groups = options.groups(micro_batches)
    schedule = make_schedule("1f1b", pp, micro_batches if groups is None else len(groups))
    lists = [training_step(own, shape, options, groups=groups) for own, shape in zip(schedule, shapes, strict=True)]
    per_byte = dict.fromkeys(_LANES, _GATHER_TIME / (PARAMETER_BYTES * shard_size))
    if leaving:  # a unit's activations count as one byte
        per_byte |= dict.fromkeys((Lane.TO_HOST, Lane.TO_DEVICE), _COPY_TIME)
    per_byte[Lane.HOST] = _HOST_TIME / (GRADIENT_BYTES * shard_size)
    per_byte |= dict.fromkeys((*READ_LANES, *WRITE_LANES), _DISK_TIME / (STATE_BYTES * shard_size))
    update = _UPDATE_TIME / (GRADIENT_BYTES * shard_size)
    times = replace(uniform_times(pp), per_byte=per_byte, update=update)
    return simulate(lists, times, shapes, border=options.border)


def step(
    zero: int = 3,
    shard_size: int = 4,
    pp: int = 2,
    micro_batches: int = 2,
    blocks: int = 2,
    late: int = 0,
    vertical: int = 0,
    leaving: int = 0,
    offload: str = "none",
    params: str = "none",
    gradients: str = "none",
    early: int = 0,
) -> str:
    """The lanes of one step."""
    tiers = offload, params, gradients
    report = simulated(zero, shard_size, pp, micro_batches, blocks, late, vertical, leaving, *tiers, early)
    rows = [row for stage in range(pp) for row in _rows(report, stage)]
    picture = Picture(_WIDTH, _TOP + len(rows) * (_ROW + _GAP) + 8 * pp + 24, f"The lanes of a step under ZeRO-{zero}")
    ends = (span.end for _, spans in rows for span in spans)
    scale = (picture.width - _MARGIN) / max(ends)
    stages, order = f"{pp} stage{'s' * (pp > 1)}", ", vertical order" if vertical else ""
    picture.text(0, 14, f"ZeRO-{zero}, {stages}, {micro_batches} micro-batches{order}", at="start", bold=True, size=13)
    y = float(_TOP)
    for name, spans in rows:
        y += 8 * name.startswith("stage")
        picture.text(0 if name.startswith("stage") else 14, y + 15, name, at="start", size=11)
        for span in spans:
            _block(picture, span, y, scale)
        y += _ROW + _GAP
    _legend(picture, {span.instruction.op for _, spans in rows for span in spans})
    return picture.svg()


def _rows(report: SimulationReport, stage: int) -> list[tuple[str, list[Span]]]:
    messages = sorted(report.messages[stage], key=lambda span: span.instruction.lane.value)
    by_lane = {lane: list(spans) for lane, spans in groupby(messages, key=lambda span: span.instruction.lane)}
    lanes = [(name, by_lane[lane]) for lane, name in _LANES.items() if lane in by_lane]
    return [(f"stage {stage}", list(report.spans[stage])), *lanes]


def _block(picture: Picture, span: Span, y: float, scale: float) -> None:
    """A computation and a copy have the number of the micro-batch, a message that of its bucket."""
    i, x, width = span.instruction, _MARGIN + span.start * scale, (span.end - span.start) * scale
    number = i.buckets[0] if i.buckets else i.micro_batch
    picture.box(x + 0.4, y, max(width - 0.8, _LEAST), _ROW, shade(COLOURS[i.op], -0.14 * (number % 2)))
    if width > 9:
        picture.text(x + width / 2, y + 15, str(number), size=10.5, fill="#fff")


def _legend(picture: Picture, shown: set[Kind]) -> None:
    x, y = float(_MARGIN), picture.height - 8
    for said, colour in dict.fromkeys((said, COLOURS[kind]) for kind, said in WORDS.items() if kind in shown):
        picture.box(x, y - 10, 14, 12, colour)
        picture.text(x + 20, y, said, at="start", size=11)
        x += 46 + 6.2 * len(said)
