"""Universal checkpoints and consolidated weights as formats."""

from __future__ import annotations

from megazero.convert.formats import Format
from megazero.convert.universal import consolidated
from megazero.convert.universal.folders import recognises
from megazero.convert.universal.reader import open_universal
from megazero.convert.universal.writer import write_universal

UNIVERSAL = Format("universal", recognises, open_universal, write_universal, has_optimizer=True)
CONSOLIDATED = Format("consolidated", consolidated.recognises, consolidated.open_consolidated, consolidated.write_torch)
CONSOLIDATED_SAFETENSORS = Format(
    "consolidated-safetensors",
    consolidated.recognises,
    consolidated.open_consolidated,
    consolidated.write_state_safetensors,
)
FORMATS = (UNIVERSAL, CONSOLIDATED, CONSOLIDATED_SAFETENSORS)
