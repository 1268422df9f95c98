"""The run of a calibration: from its flags to a `Run` whose ranks are replicas."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.parse import ProgramSettings, parse_arguments
from megazero.config.schema import Run
from megazero.config.source import ConfigSource

MICRO_BATCHES = 2
"""Of a step of a run that is timed, on each rank."""


def run_of(words: Sequence[str], ranks: int, kind: str) -> Run:
    """The run of these flags whose ranks are replicas."""
    samples = int(words[words.index("--micro-batch-size") + 1]) if "--micro-batch-size" in words else 1
    lengths = f"--train-iters 1000 --eval-iters 0 --global-batch-size {ranks * samples * MICRO_BATCHES}"
    own = ProgramSettings(ConfigSource("a calibration"), has_data=True)
    return parse_arguments([*words, "--device", kind, *lengths.split()], ranks, program=own).run
