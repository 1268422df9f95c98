"""What a newcomer types first, `make pretrain` and the bare command: on the corpus that every machine has, with a
smaller model and fewer steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, environment, metrics, run

SHRUNK = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --train-iters 4 --lr-warmup-iters 1 "
    "--eval-iters 1"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus is prepared by the first of the tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_the_bare_command(cache: Path, tmp_path: Path) -> None:
    """No flag says what the data or the tokenizer is, or where anything goes."""
    told = run(1, [*SHRUNK.split(), "--data-cache-path", cache, "--metrics-file", tmp_path / "m"], timeout=900)
    losses = [line["loss"] for line in metrics(tmp_path / "m")]
    assert len(losses) == 4 and all(7.5 < loss < 9 for loss in losses), (
        "4096 tokens, nearly all alike at first: ln 4096 is 8.32"
    )
    assert "standard library" in told


@pytest.mark.slow
def test_make_pretrain(cache: Path, tmp_path: Path) -> None:
    """Trains on four ranks, converts what it saved with proof, and lets it speak."""
    installed = Path(sys.prefix) / ".installed"
    words = ["make", "--assume-old", str(installed), "pretrain", f"VENV={sys.prefix}"]
    words += [f"FLAGS={SHRUNK} --data-cache-path {cache}"]
    place = environment(RUN=str(tmp_path / "run"), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(words, cwd=ROOT, env=place, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert [line["iteration"] for line in metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "checkpoints" / "iter_0000004").is_dir()
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    # The last line that the script prints, which ends with the first command that fails: text was made of the converted
    # model.
    assert f"The model: {tmp_path / 'run' / 'hf'}" in done.stdout
