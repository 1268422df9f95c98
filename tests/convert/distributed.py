"""Files of torch.distributed.checkpoint. Import this where they are written: with torch's module comes its compiler,
which takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Cut(DefaultSavePlanner):
    """Saves every tensor in pieces, as its ranks would: `cuts[name]` are the parts along each axis."""

    def __init__(self, cuts: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if item.tensor_data is None or item.index.fqn not in self.cuts:
                items.append(item)
                continue
            size = item.tensor_data.size
            sizes = [n // cut for n, cut in zip(size, self.cuts[item.index.fqn], strict=True)]
            for number, at in enumerate(product(*(range(0, n, step) for n, step in zip(size, sizes, strict=True)))):
                chunk = ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(sizes))
                data = TensorWriteData(chunk=chunk, properties=item.tensor_data.properties, size=size)
                items.append(
                    WriteItem(MetadataIndex(item.index.fqn, at, number), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type != WriteItemType.SHARD:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[write_item.index.fqn][where].detach()


def save(values: Mapping[str, Any], folder: Path, cuts: Mapping[str, tuple[int, ...]]) -> None:
    """Write the values without a process group."""
    dcp.save(dict(values), checkpoint_id=str(folder), planner=Cut(cuts), no_dist=True)
