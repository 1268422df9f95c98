"""Runs as they lie on disks, written by what writes those of trainings, without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import exp, nan, sin
from pathlib import Path

from megazero.checkpoint.folder import folder_name
from megazero.checkpoint.format import MANIFEST
from megazero.config.dump import RUN_FILE, dump
from megazero.config.parse import parse_run
from megazero.telemetry.metrics import MetricsFile
from megazero.telemetry.record import StepRecord

BATCH, SEQUENCE = 8, 64


def loss_of(iteration: int) -> float:
    return 2.0 + 6.0 * exp(-iteration / 40) + 0.05 * sin(iteration)


def step(iteration: int, seed: int = 0) -> StepRecord:
    """The record of a step, the same whenever it is asked for."""
    seconds = 0.5 + 0.01 * sin(3 * iteration + seed)
    samples = iteration * BATCH
    return StepRecord(
        iteration=iteration,
        consumed_samples=samples,
        consumed_tokens=samples * SEQUENCE,
        loss=loss_of(iteration) + 0.1 * seed,
        grad_norm=0.4 + 3.0 / iteration,
        lr=1e-3 * min(1.0, iteration / 10),
        loss_scale=1.0,
        skipped=False,
        global_batch_size=BATCH,
        step_seconds=seconds,
        tokens_per_second=BATCH * SEQUENCE / seconds,
        model_tflops_per_rank=0.25 / seconds,
        peak_memory_bytes=500_000_000 + 1000 * iteration,
    )


def skipped(record: StepRecord) -> StepRecord:
    return replace(record, loss=nan, grad_norm=nan, skipped=True)


def write_metrics(path: Path, records: Sequence[StepRecord], evaluate_every: int = 0) -> Path:
    """Append steps to a metrics file, with an evaluation behind every so many of them."""
    file = MetricsFile(path)
    for record in records:
        file.step(record)
        if evaluate_every and record.iteration % evaluate_every == 0:
            losses = {"valid_loss": record.loss + 0.2, "valid_loss/code": record.loss - 0.5}
            file.evaluation(record.iteration, losses)
    file.close()
    return path


def write_run(folder: Path, last: int, flags: str = "", seed: int = 0, saved: Sequence[int] = ()) -> Path:
    """A folder of --save with run.yaml, checkpoints that have an empty manifest, and the metrics beside them."""
    save, metrics = folder / "saved", folder / "metrics.jsonl"
    save.mkdir(parents=True)
    write_metrics(metrics, [step(i, seed) for i in range(1, last + 1)], evaluate_every=20)
    words = [*flags.split(), "--save", str(save), "--metrics-file", str(metrics), "--train-iters", str(last)]
    (save / RUN_FILE).write_text(dump(parse_run(words, 1)))
    for iteration in saved:
        (save / folder_name(iteration)).mkdir()
        manifest = save / folder_name(iteration) / MANIFEST
        manifest.write_text("{}")
        os.utime(manifest, (1_700_000_000 + iteration,) * 2)
    return save
