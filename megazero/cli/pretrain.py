"""`megazero pretrain`: what happens before torch is imported; `training` is the run."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.train.start import start_process


def main(argv: Sequence[str]) -> int:
    """Never returns where a run starts: its process ends with its status."""
    signals = start_process(argv)
    from megazero.cli.training import run

    run(argv, signals)
