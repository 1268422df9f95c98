"""What each rank holds of a block's parameters under tensor parallelism, and which part of them it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from docs.extension.svg import COLOURS, Picture, shade
from megazero.checkpoint.save_plan import fragments_to_write
from megazero.config.schema import ModelConfig, ParallelConfig, Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.parameter import ParameterSpec
from megazero.plan.rank_state import specs_of
from megazero.zero.layout import FragmentSpec, Packing, owned_fragments

_LEFT, _ROW = 96, 30
_MODEL = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=256, seq_length=32)


def boxes(tp: int = 2) -> str:
    """Each matrix and bias of a block as a rectangle, rows by columns, cut as its tensor-parallel ranks hold it."""
    run = Run(model=_MODEL, parallel=ParallelConfig(tp=tp))
    ranks = [_of_block(run, index) for index in range(tp)]
    picture = Picture(770, 300, f"The parameters of a block on {tp} tensor-parallel ranks")
    x, y = 0.0, 34.0
    for specs in zip(*ranks, strict=True):
        name = specs[0].name.removeprefix("blocks.0.")
        rows, columns = specs[0].shape[0], math.prod(specs[0].shape[1:])
        width, height = max(8.4 * math.sqrt(columns), 14), max(8.4 * math.sqrt(rows), 14)
        space = max(width, 5.6 * len(name)) + 12
        if x + space > picture.width:
            x, y = 0.0, y + 134
        picture.text(x, y - 20, name, at="start", size=10.5)
        picture.text(x, y - 7, " x ".join(map(str, specs[0].shape)), at="start", size=10)
        for index, spec in enumerate(specs):
            _part(picture, spec, index, (x, y, width, height))
        x += space
    for index in range(tp):
        picture.box(index * 160, picture.height - 16, 14, 12, COLOURS[index])
        picture.text(index * 160 + 20, picture.height - 6, f"tensor-parallel rank {index}", at="start", size=11)
    picture.box(tp * 160, picture.height - 16, 14, 12, COLOURS[7])
    picture.text(tp * 160 + 20, picture.height - 6, "all of them hold it", at="start", size=11)
    return picture.svg()


def _of_block(run: Run, tp_index: int) -> list[ParameterSpec]:
    specs = (spec for chunk in specs_of(run, 0, tp_index) for unit in chunk for spec in unit)
    return [spec for spec in specs if spec.name.startswith("blocks.0.")]


def _part(picture: Picture, spec: ParameterSpec, index: int, whole: tuple[float, float, float, float]) -> None:
    """A rank's box within the whole tensor, whose first dimension goes down and the others across."""
    x, y, width, height = whole
    if not spec.tp_sharded:
        if index == 0:
            picture.box(x, y, width, height, COLOURS[7])
        return
    (top, bottom), *others = spec.box
    left, right = others[-1] if others else (0, 1)
    across = spec.shape[-1] if others else 1
    down = spec.shape[0]
    picture.box(
        x + width * left / across,
        y + height * top / down,
        width * (right - left) / across - 1,
        height * (bottom - top) / down - 1,
        COLOURS[index],
    )


def parts_by_rank(tp: int, dp: int) -> Mapping[int, Sequence[FragmentSpec]]:
    """What each rank of one stage writes."""
    run = Run(model=_MODEL, parallel=ParallelConfig(tp=tp))
    axes = Axes(pp=1, dp=dp, tp=tp)
    written: dict[int, Sequence[FragmentSpec]] = {}
    for replica in range(dp):
        for index in range(tp):
            at = Coordinates(0, replica, 0, index)
            owned = [fragment for _, fragment in owned_fragments(specs_of(run, 0, index), axes, at, Packing(1 << 20))]
            written[axes.rank(at)] = fragments_to_write(owned, index, tp)
    return written


def files(tp: int = 2, dp: int = 2) -> str:
    """What each rank writes of a model of one block: fragments of named tensors, in equal parts."""
    written = parts_by_rank(tp, dp)
    names = list(dict.fromkeys(part.spec.name for parts in written.values() for part in parts))
    most = max(sum(part.numel for part in parts) for parts in written.values())
    picture = Picture(760, len(written) * _ROW + 34, f"What {len(written)} ranks write")
    for row, (rank, parts) in enumerate(sorted(written.items())):
        picture.text(0, row * _ROW + 20, f"file of rank {rank}", at="start", size=11)
        _file(picture, row * _ROW + 4, parts, names, (picture.width - _LEFT) / most)
    picture.text(
        0, picture.height - 8, "Pale: the part of a tensor that tensor-parallel ranks share out.", at="start", size=11
    )
    return picture.svg()


def _file(picture: Picture, y: float, parts: Sequence[FragmentSpec], names: Sequence[str], scale: float) -> None:
    x = float(_LEFT)
    for part in parts:
        width = part.numel * scale
        fill = shade(COLOURS[names.index(part.spec.name) % 7], 0.1 if part.spec.tp_sharded else 0.45)
        picture.box(x, y, max(width - 0.6, 0.4), _ROW - 8, fill)
        label = ".".join(part.spec.name.split(".")[-2:-1])
        if width > 6.6 * len(label):
            picture.text(x + width / 2, y + 15, label, size=10.5, fill="#fff")
        x += width
