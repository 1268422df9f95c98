"""A run whose every step is skipped ends, says what is not finite, and loses no checkpoint."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.folder import list_checkpoints
from megazero.config.schema import OptimizerConfig
from megazero.config.source import ConfigError
from megazero.mpu.parameter import spec_of
from megazero.train.job import Job
from megazero.train.standstill import SkippedSteps
from tests.parity.training import data_flags, job_on_rank, train
from tests.ranks import run_ranks

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 1003 --eval-iters 0"
LENGTH = "--global-batch-size 4 --micro-batch-size 1 --train-iters 12"


def test_only_steps_at_the_least_scale_count() -> None:
    counted = SkippedSteps.of(OptimizerConfig(precision="fp16", max_skipped_steps=3), torch.device("cpu"))
    yes, no = torch.tensor(True), torch.tensor(False)
    seen = []
    for skipped, scale in ((yes, 4.0), (yes, 1.0), (yes, 1.0), (no, 1.0), (yes, 1.0), (yes, 1.0), (yes, 1.0)):
        counted.add(skipped, torch.tensor(scale))
        seen.append((int(counted.in_a_row), counted.are_too_many()))
    assert seen == [(0, False), (1, False), (2, False), (0, False), (1, False), (2, False), (3, True)]
    never = SkippedSteps.of(OptimizerConfig(precision="bf16", max_skipped_steps=0), torch.device("cpu"))
    for _ in range(50):
        never.add(yes, torch.tensor(1.0))
    assert int(never.in_a_row) == 50 and not never.are_too_many()


def spoil(job: Job, what: str, value: float) -> None:
    """Set one number of a weight, on the rank that has it."""
    with torch.no_grad():
        for portion in job.state.optimizer.portions({"weight"}):
            for fragment in portion:
                if fragment.spec.name == what and fragment.start == 0:
                    fragment.weight.view(-1)[0] = value
        job.state.optimizer.after_load()


def spoilt(rank: int, size: int, words: list[str], what: str, value: float, after: int = 0) -> str:
    """Train with one number of a weight set after so many steps; what the run ends with."""
    job, _ = job_on_rank(rank, size, words)
    if not after:
        spoil(job, what, value)
    with pytest.raises(ConfigError) as said:
        for step in job.trainer.steps():
            if step.iteration == after:
                spoil(job, what, value)
        job.trainer.at_the_end()
    return str(said.value)


CASES: dict[str, tuple[str, str, float, str]] = {
    "a weight beyond fp16": (
        "--precision fp16 --initial-loss-scale 1",
        "blocks.1.mlp.up.weight",
        1e5,
        r"blocks\.1\.mlp\.up\.weight holds 100000, and torch\.float16 ends at 65504; nearest: --precision bf16$",
    ),
    "a weight that is none": (
        "--precision bf16",
        "blocks.0.attention.qkv.weight",
        math.nan,
        r"blocks\.0\.attention\.qkv\.weight holds nan$",
    ),
    "a sum beyond fp16": (
        "--precision fp16 --initial-loss-scale 1",
        "blocks.1.mlp.up.weight",
        6.5e4,
        r"weights are finite, and blocks\.1\.mlp[.a-z]* is the first module whose output is not \(fp16 ends at 6\.55e",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_named(case: str, corpus: Path, tmp_path: Path) -> None:
    flags, what, value, message = CASES[case]
    words = f"{MODEL} {LENGTH} {flags} --max-skipped-steps 3"
    words += f" --save {tmp_path / 'saved'} --save-interval 1 --keep-last-k 1"
    for layout, ranks in (("", 1), ("--tp 2 --pp 2 --zero-stage 1", 4)):
        folder = tmp_path / str(ranks)
        line = [*words.replace("saved", f"saved{ranks}").split(), *layout.split(), *data_flags(corpus, folder)]
        said = spoilt(0, 1, line, what, value) if ranks == 1 else run_ranks(ranks, spoilt, ranks, line, what, value)[3]
        assert "--max-skipped-steps 3: the last 3 steps were skipped" in said
        assert re.search(message, said.splitlines()[1]), said
        assert [number for number, _ in list_checkpoints(tmp_path / f"saved{ranks}")] == [], "nothing was learned"


@pytest.mark.parametrize("layout", ["", "--tp 2 --pp 2 --zero-stage 1"])
@pytest.mark.parametrize(("after", "left"), [(0, []), (4, [2, 4, 7])])
def test_a_run_that_ends_in_skipped_steps_fails_and_keeps_its_checkpoints(
    after: int, left: list[int], layout: str, corpus: Path, tmp_path: Path
) -> None:
    """Fewer of them than end a run. Those at an interval are not saved; the end is, where anything was learned."""
    words = f"{MODEL} {LENGTH} --precision bf16 --train-iters 7 --save {tmp_path / 'saved'} --save-interval 2 {layout}"
    line, ranks = [*words.split(), *data_flags(corpus, tmp_path)], 4 if layout else 1
    what = line, "blocks.1.mlp.up.weight", math.nan, after
    said = run_ranks(ranks, spoilt, ranks, *what)[0] if layout else spoilt(0, 1, *what)
    number = 7 - after
    assert f"--max-skipped-steps 20: the last {number} steps were skipped, and nothing was learned: blocks.1." in said
    assert [number for number, _ in list_checkpoints(tmp_path / "saved")] == left


def test_weights_are_looked_at_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    words = [*f"{MODEL} {LENGTH}".split(), *data_flags(corpus, tmp_path)]
    job, _ = job_on_rank(0, 1, [*words, "--precision", "fp32", "--train-iters", "1", "--save", str(tmp_path / "start")])
    (first,) = [p for s in job.stages for p in s.parameters() if spec_of(p).name == "blocks.0.mlp.up.weight"]
    with torch.no_grad():
        first.view(-1)[-5] = -7e4
    job.fit()
    again = [*words, "--precision", "fp16", "--init-from", str(tmp_path / "start")]
    with pytest.raises(ConfigError, match=r"--init-from .*: blocks\.0\.mlp\.up\.weight holds -69\d+, and torch"):
        job_on_rank(0, 1, again)
    job_on_rank(0, 1, [*words, "--precision", "bf16", "--init-from", str(tmp_path / "start")])


@pytest.mark.parametrize("flags", ["", "--lora-base-bits 8", "--zero-stage 3"])
def test_frozen_weights_are_looked_at_too(flags: str, corpus: Path, tmp_path: Path) -> None:
    """They have no master weight, and the number would be infinite on every step."""
    words = [*f"{MODEL} {LENGTH}".split(), *data_flags(corpus, tmp_path)]
    job, _ = job_on_rank(0, 1, [*words, "--precision", "fp32", "--train-iters", "1", "--save", str(tmp_path / "start")])
    (last,) = [p for s in job.stages for p in s.parameters() if spec_of(p).name == "blocks.1.mlp.up.weight"]
    with torch.no_grad():
        last.view(-1)[-5] = -7e4
    job.fit()
    again = [*words, "--lora-rank", "2", "--init-from", str(tmp_path / "start"), *flags.split()]
    for said in run_ranks(4, refused, 4, [*again, "--precision", "fp16", "--tp", "2"]):
        assert re.search(
            r"--init-from .*: blocks\.1\.mlp\.up\.weight holds 69\d+, and .* --precision bf16 or fp32", said
        )
    job_on_rank(0, 1, [*again, "--precision", "bf16"])


def refused(rank: int, size: int, words: list[str]) -> str:
    with pytest.raises(ConfigError) as said:
        job_on_rank(rank, size, words)
    return str(said.value)


def test_a_run_that_learns_is_not_ended(corpus: Path, tmp_path: Path) -> None:
    """An overflow while the scale falls is none of them, and the run goes to its end."""
    flags = f"{MODEL} {LENGTH} --precision fp16 --initial-loss-scale 1e7 --hysteresis 1 --max-skipped-steps 1"
    train(1, [*flags.split(), *data_flags(corpus, tmp_path)])
