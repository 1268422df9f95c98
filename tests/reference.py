"""The folder of reference data from other programs: `MEGAZERO_REFERENCE`, else `../shared/reference`."""

import os
from pathlib import Path

import pytest

_place = Path(
    os.environ.get("MEGAZERO_REFERENCE") or Path(__file__).resolve().parents[1].parent / "shared" / "reference"
)
REFERENCE: Path | None = _place if _place.is_dir() else None
needs_reference = pytest.mark.skipif(
    REFERENCE is None, reason=f"no reference data at {_place} (set MEGAZERO_REFERENCE)"
)
