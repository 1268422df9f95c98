"""The model state of one chunk: parameters in buckets, and which rank keeps what of them under each ZeRO stage."""

from __future__ import annotations

import torch

from docs.extension.svg import COLOURS, Picture, shade
from megazero.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, Run
from megazero.mpu.parameter import ParameterSpec, StateGroup
from megazero.plan.rank_state import specs_of
from megazero.zero.layout import BucketLayout, Packing, pack
from megazero.zero.sharding import SHARDINGS, Sharding, columns

_WIDTH, _LEFT, _BAR, _ROW = 760, 92, 34, 20


def buckets(layers: int = 2, dp: int = 4, bucket_size: int = 12_000) -> str:
    """Above: the buckets of a tiny model and the cut into a part per rank. Below: the columns by ZeRO stage."""
    model = ModelConfig(num_layers=layers, hidden_size=32, num_attention_heads=4, vocab_size=256, seq_length=32)
    run = Run(model=model, parallel=ParallelConfig())
    layouts = pack(specs_of(run, 0, 0), dict.fromkeys(StateGroup, dp), Packing(bucket_size))
    top = 30.0
    height = top + len(layouts) * (_BAR + 30) + 44 + len(SHARDINGS) * (5 * _ROW + 48)
    picture = Picture(_WIDTH, height, f"Buckets of a model of {layers} blocks on {dp} ranks")
    picture.text(0, 16, "Buckets in forward order, each cut into one part per rank", at="start", bold=True, size=13)
    scale = (_WIDTH - _LEFT) / max(layout.numel for layout in layouts)
    for number, layout in enumerate(layouts):
        _bucket(picture, number, layout, dp, top, scale)
        top += _BAR + 30
    picture.text(0, top + 16, "What each rank keeps of a bucket", at="start", bold=True, size=13)
    top += 30
    for stage in SHARDINGS:
        _table(picture, stage, dp, top)
        top += 5 * _ROW + 48
    return picture.svg()


def _unit(spec: ParameterSpec) -> int:
    """A colour for each block, and one for what is outside of them."""
    parts = spec.name.split(".")
    return 1 + int(parts[1]) if parts[0] == "blocks" else 0


def _bucket(picture: Picture, number: int, layout: BucketLayout, dp: int, top: float, scale: float) -> None:
    picture.text(0, top + 22, f"bucket {number}", at="start")
    for entry in layout.entries:
        x, width = _LEFT + entry.offset * scale, entry.spec.local_numel * scale
        big = entry.spec.kind.decays
        picture.box(x, top, max(width - 0.6, 0.6), _BAR, shade(COLOURS[_unit(entry.spec)], 0.1 if big else 0.45))
        label = ".".join(entry.spec.name.split(".")[-3 if _unit(entry.spec) else 0 : -1])
        if width > 6.4 * len(label):
            picture.text(x + width / 2, top + 21, label, size=11, fill="#fff")
    for member in range(dp):
        start, stop = (_LEFT + place * scale for place in layout.shard(member, dp))
        picture.line(start, top - 4, start, top + _BAR + 6)
        picture.text((start + stop) / 2, top + _BAR + 15, f"rank {member}", size=10.5)
    picture.line(_LEFT + layout.numel * scale, top - 4, _LEFT + layout.numel * scale, top + _BAR + 6)


def _table(picture: Picture, stage: int, dp: int, top: float) -> None:
    dtypes = columns(torch.bfloat16, torch.float32, OptimizerConfig().columns)
    picture.text(0, top + 12, f"ZeRO-{stage}", at="start", bold=True)
    part = (_WIDTH - _LEFT - 40) / dp
    top += 20
    for row, (column, dtype) in enumerate(dtypes.items()):
        y = top + row * _ROW
        whole = SHARDINGS[stage][column] is Sharding.REPLICATED
        picture.text(_LEFT - 6, y + 12, column.value, at="end", size=10.5)
        for member in range(dp):
            x = _LEFT + member * (part + 10)
            picture.box(x, y, part, _ROW - 5, "none", line=COLOURS[7])
            held = (x, part) if whole else (x + member * part / dp, part / dp)
            picture.box(held[0], y, held[1], _ROW - 5, COLOURS[0] if whole else COLOURS[2])
            if whole:
                picture.text(x + part / 2, y + 11.5, str(dtype).removeprefix("torch."), size=9.5, fill="#fff")
    for member in range(dp):
        x = _LEFT + member * (part + 10)
        picture.text(x + part / 2, top + 5 * _ROW + 8, f"rank {member}", size=10.5)
