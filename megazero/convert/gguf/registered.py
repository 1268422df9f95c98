"""GGUF as a format that is written only."""

from __future__ import annotations

from pathlib import Path

from megazero.convert.formats import Format
from megazero.convert.gguf.writer import write_gguf
from megazero.convert.names import QUANTIZED
from megazero.convert.source import ConversionError, Source


def _not_read(path: Path) -> Source:
    raise ConversionError(f"{path}: gguf is written and not read; keep the checkpoint that it is made of")


FORMAT = Format("gguf", lambda path: False, _not_read, write_gguf, has_companions=True, quantizes=QUANTIZED)
