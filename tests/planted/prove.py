"""`python -m tests.planted.prove NAME ...`: prove layouts of the table one by one, until one differs.

Prints a JSON object for each: its name, and what differs as `megazero verify-layout` says it; null if all is equal.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from megazero.cli.verify_layout import verdict
from megazero.config.parse import parse_run
from megazero.config.schema import LoraConfig
from megazero.verify.proof import CannotRun, prove
from tests.planted.layouts import LAYOUTS


def main(names: list[str]) -> None:
    for name in names:
        layout = LAYOUTS[name]
        run = parse_run(layout.words, layout.ranks)
        if layout.adapters:  # without a checkpoint of a base: a proof makes its own
            run = replace(run, lora=LoraConfig(lora_rank=4, lora_dropout=0.1))
        try:
            proof = prove(run, layout.ranks)
        except CannotRun as error:
            print(json.dumps({"layout": name, "refused": str(error)}), flush=True)
            continue
        told = None if proof.equal else verdict(proof)
        print(json.dumps({"layout": name, "differs": told}), flush=True)
        if told is not None:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
