"""Hugging Face folders as a format."""

from __future__ import annotations

from megazero.convert.formats import Format
from megazero.convert.hf.reader import open_hf, recognises
from megazero.convert.hf.writer import write_hf

FORMAT = Format("hf", recognises, open_hf, write_hf, has_companions=True)
