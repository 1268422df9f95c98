"""`python -m tests.explore`: the tests again and again for some hours, each round with cases of another seed; status 1
if a test failed. `make explore` runs this.

    python -m tests.explore --hours 2 -n auto tests/zero

What is not a flag of this program is given to pytest. The commands that repeat the failures of all rounds stand at the
end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.repeats import HASH_SEED

PASSED, FAILED = 0, 1
"""Statuses of pytest after which there is another round; after others, as no test or Ctrl-C, there is none."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__, allow_abbrev=False)
    parser.add_argument("--hours", type=float, default=0.0, help="rounds with new seeds until then; else one round")
    parser.add_argument("--seed", type=int, help="of the first round; a random one without it")
    args, words = parser.parse_known_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the round, whose status ends the rounds
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    end, rounds, status = time.monotonic() + 3600 * args.hours, 0, PASSED
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"
        failures.touch()
        while rounds == 0 or (status in (PASSED, FAILED) and time.monotonic() < end):
            status = one_round(seed + rounds, failures, words)
            rounds += 1
        commands = failures.read_text()
    print(f"\nrounds: {rounds}, from seed {seed}; failures: {len(commands.splitlines())}", flush=True)
    print(commands, end="", flush=True)
    return status if status not in (PASSED, FAILED) else FAILED if commands else PASSED


def one_round(seed: int, failures: Path, words: list[str]) -> int:
    """Run pytest on the cases of a seed, and return its status."""
    # A path in a word of its own would decide, with the tests' paths, which configuration pytest reads.
    command = [sys.executable, "-m", "pytest", f"--seed={seed}", f"--failures={failures}", *words]
    return subprocess.run(command, env={**os.environ, HASH_SEED: str(seed % 2**32)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
