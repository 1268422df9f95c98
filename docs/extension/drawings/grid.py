"""The grid of ranks: a box per rank, who shares what with whom."""

from __future__ import annotations

from docs.extension.svg import COLOURS, Picture, shade
from megazero.mpu.axes import Axes, Coordinates

_BOX, _GAP, _MARGIN, _TOP = 56, 10, 84, 44


def grid(tp: int = 2, pp: int = 2, dp: int = 3) -> str:
    """Stages below each other, replicas beside each other, tensor-parallel ranks side by side in one frame."""
    axes = Axes(pp=pp, dp=dp, tp=tp)
    cell = tp * _BOX + (tp - 1) * 4 + 2 * 8
    row = _BOX + 2 * 8 + 26
    width, height = _MARGIN + dp * (cell + _GAP), _TOP + pp * row + 40
    picture = Picture(width, height, f"{axes.world_size} ranks: tp {tp}, pp {pp}, dp {dp}")
    for replica in range(dp):
        x = _MARGIN + replica * (cell + _GAP)
        picture.text(x + cell / 2, 18, f"dp {replica}", bold=True)
        picture.text(x + cell / 2, 34, "its own samples", size=11)
    for stage in range(pp):
        y = _TOP + stage * row
        picture.text(0, y + 34, f"stage {stage}", at="start", bold=True)
        picture.text(0, y + 50, "its own layers", at="start", size=11)
        for replica in range(dp):
            _cell(picture, axes, stage, replica, _MARGIN + replica * (cell + _GAP), y)
    picture.text(
        _MARGIN, height - 22, "A frame: one tensor-parallel group. An arrow: the pipeline.", at="start", size=11
    )
    picture.text(_MARGIN, height - 6, "A colour: ranks that hold the same parameters.", at="start", size=11)
    return picture.svg()


def _cell(picture: Picture, axes: Axes, stage: int, replica: int, x: float, y: float) -> None:
    cell = axes.tp * _BOX + (axes.tp - 1) * 4 + 16
    picture.frame(x, y, cell, _BOX + 16, COLOURS[7])
    for index in range(axes.tp):
        at = Coordinates(stage, replica, 0, index)
        owners = axes.replica_ranks(at)
        fill = shade(COLOURS[(stage * axes.tp + index) % 7], 0.1)
        left = x + 8 + index * (_BOX + 4)
        assert axes.rank(at) in owners
        picture.box(left, y + 8, _BOX, _BOX, fill)
        picture.text(left + _BOX / 2, y + 34, str(axes.rank(at)), size=18, fill="#fff", bold=True)
        picture.text(left + _BOX / 2, y + 52, f"tp {index}", size=11, fill="#fff")
    if stage + 1 < axes.pp:
        picture.line(x + cell / 2, y + _BOX + 18, x + cell / 2, y + _BOX + 38, arrow=True)
