"""megazero's adapters on a frozen base, which is BLOOM of `transformers` in a folder as `save_pretrained` writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.contestants import megazero_
from bench.contestants.transformers_ import model_of
from bench.workload import Workload

PRECISIONS = megazero_.PRECISIONS


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> megazero_.JobStep:
    base = Path(os.environ["BENCH_FOLDER"]) / "base"
    model: Any = model_of(work, "bloom", "eager")
    model.save_pretrained(base)
    return megazero_.build(work, ("--init-from", str(base), *layout), replicas)
