"""`python -m tests.fuzz`: every reader gets its corpus and random files, once or for some minutes; status 1 if a fault
is found.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.fuzz.search import corpus, search, tried, within_bounds
from tests.fuzz.targets import all_targets
from tests.repeats import fix_examples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", nargs="*", help="readers to try; all without it")
    parser.add_argument("--examples", type=int, default=100, help="files drawn for a reader in each round")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="rounds with new seeds until then; one round without it"
    )
    parser.add_argument("--seed", type=int, help="of the first round; a random one without it")
    parser.add_argument("--found", type=Path, default=Path("tests/fuzz/found"), help="where what is found is put")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.found.mkdir(parents=True, exist_ok=True)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    fix_examples(seed)
    end, findings, drawn = time.monotonic() + 60 * args.minutes, 0, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, within_bounds():
        targets = {
            name: target for name, target in all_targets(Path(folder)).items() if not args.target or name in args.target
        }
        print(f"{len(targets)} readers, {args.examples} files each, seed {seed}", flush=True)
        for name, target in targets.items():
            for data in corpus(name):
                tried(name, target, data, args.found / f"last-{name}")
        while True:
            for name, target in targets.items():
                told = search(name, target, args.examples, seed, args.found)
                drawn += max(1, args.examples // target.dear)
                if told is not None:
                    findings += 1
                    print(f"FOUND {told}", flush=True)
                (args.found / f"last-{name}").unlink(missing_ok=True)
            seed += 1
            if time.monotonic() > end:
                break
    print(f"{drawn} files, {findings} findings", flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
