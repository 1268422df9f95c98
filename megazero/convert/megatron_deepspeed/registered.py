"""Megatron-DeepSpeed's checkpoints as a format."""

from __future__ import annotations

from megazero.convert.formats import Format
from megazero.convert.megatron_deepspeed.folders import recognises
from megazero.convert.megatron_deepspeed.reader import open_megatron_deepspeed
from megazero.convert.megatron_deepspeed.writer import write_megatron_deepspeed

FORMAT = Format(
    "megatron-deepspeed",
    recognises,
    open_megatron_deepspeed,
    write_megatron_deepspeed,
    has_layout=True,
    has_optimizer=True,
)
