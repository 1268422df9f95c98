"""`megazero harness`: the command line of the LM Evaluation Harness, which knows the model `megazero`."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megazero.cli.exit_status import end_rank, say, status_of
from megazero.cli.parser import command_parser

if TYPE_CHECKING:
    from megazero.mpu.meeting import Environment

DESCRIPTION = """
`megazero` as a model of the LM Evaluation Harness: from a checkpoint of any format, alone or under torchrun. Needs the
package lm_eval, whose own flags follow.

In a program:

  from megazero.harness import MegazeroLM
  lm_eval.simple_evaluate(model=MegazeroLM("runs/bloom"), tasks=["lambada_openai"])
"""
EXAMPLES = (
    "megazero harness run --model megazero --model_args path=runs/bloom --tasks lambada_openai",
    "torchrun --nproc-per-node 4 -m megazero harness run --model megazero \\",
    "    --model_args path=hub/bloom-7b1,tp=2,pp=2 --tasks hellaswag",
    "python -m megazero.harness run --model megazero --model_args path=runs/bloom --tasks lambada_openai",
)
MODEL = Path(__file__).parents[1] / "evaluation" / "harness.py"


def model_arguments() -> str:
    """The docstring of `MegazeroLM`. It is parsed from the source, since an import would import torch."""
    classes = {node.name: node for node in ast.parse(MODEL.read_bytes()).body if isinstance(node, ast.ClassDef)}
    return cleandoc(ast.get_docstring(classes["MegazeroLM"]) or "")


def main(argv: Sequence[str]) -> int:
    """Run lm_eval's command line. The help is ours, followed by lm_eval's where the package is installed."""
    sys.argv = ["megazero harness", *argv]  # lm_eval reads it
    if argv and argv[0] not in ("-h", "--help"):
        run()
    ours = command_parser("harness", DESCRIPTION, EXAMPLES).format_help()
    say(f"{ours}\nWhat --model_args may name:\n\n{model_arguments()}\n\nAll else is lm_eval's:\n")
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        say("(The package is not installed here: pip install 'lm_eval>=0.4.9')\n")
        return 0

    def show_theirs() -> None:
        with suppress(SystemExit):  # status 0, after the help
            cli_evaluate()

    return status_of(show_theirs)


def run() -> NoReturn:
    """Run lm_eval's command line as this rank, and end the process. All ranks compute the same; only rank 0 prints and
    writes.
    """
    # The import registers the model. It is the first, because its error names the package to install.
    import megazero.evaluation.harness  # noqa: F401
    from megazero.convert.source import ConversionError
    from megazero.data.indexed import DataError

    from lm_eval.__main__ import cli_evaluate  # isort: skip

    def work(environment: Environment) -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if environment.rank else sys.stdout):
            cli_evaluate()

    end_rank(work, (ConversionError, DataError))
