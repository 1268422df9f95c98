"""PEFT's adapters as a format. They are read together with the base model and merged; they are written alone."""

from __future__ import annotations

from megazero.convert.formats import Format
from megazero.convert.lora.peft import adapters_of, write_peft
from megazero.convert.lora.peft_reader import open_peft, recognises

FORMAT = Format("peft", recognises, open_peft, write_peft, part=adapters_of)
