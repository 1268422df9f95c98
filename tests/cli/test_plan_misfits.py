"""Mistakes of people whose run does not fit: each is refused, and what the message names fits when it is done."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megazero.cli.main import main
from megazero.plan.cluster.hardware import known_hardware
from megazero.plan.cluster.kernels import Constants

BF16 = "--precision bf16 --position-embedding learned --data-path x --eod-id 0"
SMALL = f"--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257 --seq-length 2048 {BF16}"
SEVEN = f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 2048 {BF16}"
THIRTEEN = f"--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --vocab-size 32000 --seq-length 2048 {BF16}"
SEVENTY = f"--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --vocab-size 32000 --seq-length 2048 {BF16}"
WIDE = f"--num-layers 4 --hidden-size 20480 --num-attention-heads 160 --vocab-size 32000 --seq-length 2048 {BF16}"
STAYS = "--offload-optimizer none --offload-params none --offload-gradients none --offload-activations none"
FRUGAL = "--micro-batch-size 1 --recompute-granularity full"
PLAIN = "--pipeline-schedule 1f1b"

MISTAKES = {
    "7B on each of eight cards": (
        f"{SEVEN} --gpus 8 --gpu a100-40gb --global-batch-size 64 --tp 1 --pp 1 --zero-stage 0 {FRUGAL} {STAYS}",
        "model state alone takes 110 GiB of each rank at least, and a100-40gb has 39.4 GiB: ",
    ),
    "a micro-batch of 64": (
        f"{SMALL} --gpus 1 --gpu a100-40gb --global-batch-size 64 --micro-batch-size 64 "
        f"--recompute-granularity selective {STAYS}",
        "its fullest rank takes",
    ),
    "a long sequence that recomputes nothing": (
        f"{SMALL.replace('--seq-length 2048', '--seq-length 131072')} --gpus 4 --gpu h100 --global-batch-size 8 --tp 1 "
        f"--pp 1 --micro-batch-size 1 --recompute-granularity none {STAYS}",
        "none recompute: its fullest rank takes",
    ),
    "13B without sharding": (
        f"{THIRTEEN} --gpus 8 --gpu a100-80gb --global-batch-size 64 --tp 1 --pp 1 --zero-stage 0 {FRUGAL} {STAYS}",
        "model state alone takes",
    ),
    "all micro-batches at once": (
        f"{SEVEN} --gpus 8 --gpu a100-40gb --global-batch-size 256 --tp 1 --pp 8 --pipeline-schedule gpipe "
        f"--recompute-granularity none --micro-batch-size 1 --zero-stage 0 {STAYS}",
        "none recompute: its fullest rank takes",
    ),
    "70B of which no layer is shared": (
        f"{SEVENTY} --gpus 16 --gpu a100-80gb --global-batch-size 64 --tp 1 --pp 1 --zero-stage 1 {FRUGAL} {PLAIN} "
        f"{STAYS}",
        "model state alone takes",
    ),
    "13B on one card, and nothing may leave it": (
        f"{THIRTEEN} --gpus 1 --gpu h100 --global-batch-size 16 {FRUGAL} {STAYS}",
        "and h100 has 79.1 GiB: ",
    ),
    "21B in the memory of one host": (
        f"{WIDE} --gpus 1 --gpu h100 --global-batch-size 2 --tp 1 --zero-stage 3 {FRUGAL} {PLAIN} "
        "--offload-optimizer cpu --offload-params cpu --offload-gradients cpu --offload-activations none",
        "of host memory too much of 238 GiB a rank",
    ),
    "an old card": (
        f"{SMALL.replace('bf16', 'fp16')} --gpus 8 --gpu v100 --global-batch-size 64 --tp 1 --pp 1 --zero-stage 0 "
        f"--micro-batch-size 8 --recompute-granularity none {STAYS}",
        "more than v100 has",
    ),
    "a head for a million words": (
        f"{SMALL.replace('50257', '1000000')} --gpus 2 --gpu a100-40gb --global-batch-size 64 --tp 1 --pp 2 "
        f"--micro-batch-size 2 --zero-stage 0 --recompute-granularity full {PLAIN} {STAYS}",
        "more than a100-40gb has",
    ),
    "BLOOM on sixteen cards": (
        f"--preset bloom-176b --gpus 16 --gpu a100-80gb --tp 8 --zero-stage 1 {FRUGAL} {PLAIN} {STAYS}",
        "model state alone takes 123 GiB",
    ),
    "21B that may share nothing, on one card": (
        f"{WIDE} --gpus 1 --gpu h100 --global-batch-size 16 --tp 1 --pp 1 --zero-stage 0 {FRUGAL} {PLAIN} {STAYS}",
        "model state alone takes",
    ),
    "seven cards": (
        f"{SMALL} --gpus 7 --gpu h100 --global-batch-size 16 --pp 1 --zero-stage 1 {FRUGAL}",
        "no layout of 7 ranks",
    ),
}
"""What somebody did -> the words of the command, and words of its message."""


def plan(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["plan", *shlex.split(words), "--json"])
    return status, capsys.readouterr().err


def changed(words: str, change: str) -> str:
    """A command after the change that a message names."""
    removed, _, flags = change.rpartition(": ") if change.startswith("in place of ") else ("", "", change)
    for flag in removed.removeprefix("in place of ").split(", ") if removed else ():
        assert f" {flag} " in f"{words} ", flag
        words = f"{words} ".replace(f" {flag} ", " ", 1).strip()
    return f"{words} {flags.split(' (')[0].replace(':', '')}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_change_that_a_message_names_fits(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = MISTAKES[mistake]
    status, err = plan(words, capsys)
    assert status == 1 and "Nothing fits" in err and said in err
    change = err.strip().split("\nFits: ")[1]
    status, err = plan(changed(words, change), capsys)
    assert status == 0, f"{change}\n{err}"


LAPTOP = """
sources: {me: "measured on my desk"}
gpus:
  laptop:
    kind: cpu
    memory: [16e9, me]
    flops: {bf16: [1e12, me]}
    bandwidth: [50e9, me]
    processors: [8, me]
    inside: [10e9, me]
    host: [10e9, me]
    host_memory: [16e9, me]
    watts: [30, me]
    interconnect: [1xeth10, me]
    constants: {CONSTANTS}
"""


def test_a_laptop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What leaves a CPU's memory for the host's is in the same memory, and helps nothing."""
    constants = known_hardware().device("a100-40gb").constants
    names = [name for name in Constants.__dataclass_fields__ if name in constants]
    fitted = ", ".join(f"{name}: [{constants[name]}, me]" for name in names)
    file = tmp_path / "laptop.yaml"
    file.write_text(LAPTOP.replace("{CONSTANTS}", f"{{{fitted}}}"))
    words = f"{SMALL} --hardware {file} --gpu laptop --gpus 1 --global-batch-size 8 {FRUGAL}"
    status, err = plan(words, capsys)
    assert status == 1 and "and laptop has 14.9 GiB: " in err
    change = err.strip().split("\nFits: ")[1]
    assert change.startswith("--gpus 2: ") and plan(changed(words, change), capsys)[0] == 0
