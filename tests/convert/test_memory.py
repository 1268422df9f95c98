"""What a conversion takes of memory, measured from outside: the largest tensor decides, not the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.anonymous import run
from bench.convert import SPARE, hollow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_follows_the_largest_tensor(tmp_path):
    """0.9 GB in all, 102 MB in the largest tensor: a converter that held the model would take more than is allowed."""
    largest = hollow(tmp_path / "hf", 1024, 16, 32, vocabulary=50_000)
    total = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert total > 3 * largest + SPARE
    last = "hf"
    for target in ("megazero", "hf"):
        command = [sys.executable, "tools/convert_checkpoint.py", "--input", f"{tmp_path}/{last}", "--to", target]
        last = f"to-{target}"
        ran = run([*command, "--output", f"{tmp_path}/{last}"], ROOT)
        assert ran.status == 0, ran.output
        assert ran.peak > 50e6, "nothing was measured"
        assert ran.peak < 3 * largest + SPARE, (
            f"{target}: {ran.peak / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB"
        )
