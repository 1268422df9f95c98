"""The six commands of docs/data.md, one after the other, with a smaller model."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [line.strip() for line in (ROOT / "docs" / "data.md").read_text().splitlines() if line.startswith("    ")]
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --global-batch-size 4 --eval-iters 0 "
    "--lr 3e-3"
)


@pytest.mark.slow
def test_from_a_folder_of_text_to_a_model_that_talks(tmp_path: Path) -> None:
    """On one rank each: what torchrun adds is other tests' matter."""
    pytest.importorskip("jinja2")
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number} is about the {number} times table. " * 20)
    (tmp_path / "texts" / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    records = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}!"} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(COMMANDS) == 6
    said = []
    for line in COMMANDS:
        words = shlex.split(line.replace("--vocab-size 32000", "--vocab-size 300"))
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        cache = ["--data-cache-path", "cache"] if "pretrain_gpt.py" in line else []
        shape = (
            shlex.split(SMALL)
            if "runs/base --load" in line
            else ["--global-batch-size", "4"]
            if "talk --load" in line
            else []
        )
        done = subprocess.run(
            [sys.executable, str(ROOT / words[script]), *words[script + 1 :], *cache, *shape],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            input="Say 7.\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    assert (
        "20 documents" in said[1]
        and "20 documents in 20 sequences" in said[2]
        and "made with: hf of 300 tokens" in said[2]
    )
    assert "; 2 epochs" in said[3] and "3 epochs" in said[4] and "40 conversations" in said[4]
    assert said[5].strip()
