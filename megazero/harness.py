"""`megazero` as a model of the LM Evaluation Harness. Importing this module registers it there.

    from megazero.harness import MegazeroLM
    lm_eval.simple_evaluate(model=MegazeroLM("runs/bloom"), tasks=["lambada_openai"])

`python -m megazero.harness` is the same as `megazero harness`. Needs the package lm_eval.
"""

import sys

if __name__ == "__main__":
    from megazero.cli.harness import main

    sys.exit(main(sys.argv[1:]))

from megazero.evaluation.harness import MegazeroLM

__all__ = ["MegazeroLM"]
