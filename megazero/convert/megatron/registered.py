"""Megatron-LM's checkpoints as a format: both kinds are read, torch's own files are written."""

from __future__ import annotations

from pathlib import Path

from megazero.convert.formats import Format
from megazero.convert.megatron.dist import open_torch_dist
from megazero.convert.megatron.folders import checkpoint_folder, is_torch_dist, recognises
from megazero.convert.megatron.source import open_torch
from megazero.convert.megatron.writer import write_megatron
from megazero.convert.source import Source


def open_megatron(path: Path) -> Source:
    """The checkpoint in this folder, or the one that its tracker names. Raises ConversionError."""
    folder = checkpoint_folder(path)
    return open_torch_dist(folder) if is_torch_dist(folder) else open_torch(folder)


FORMAT = Format("megatron", recognises, open_megatron, write_megatron, has_layout=True)
