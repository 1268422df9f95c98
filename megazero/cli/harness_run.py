"""What `megazero harness` does."""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stdout
from typing import NoReturn

import megazero.cli.harness_model  # noqa: F401
from megazero.cli.exit_status import end_rank
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.launch import Environment

# Imported after the adapter, whose import names the package to install if lm_eval is missing, and registers the model.
from lm_eval.__main__ import cli_evaluate  # isort: skip


def run() -> NoReturn:
    """Run lm_eval's command line as this rank, and end the process. All ranks compute the same; only rank 0 prints and
    writes.
    """

    def work(here: Environment) -> None:
        with ExitStack() as stack:
            if here.rank:
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            cli_evaluate()

    end_rank(work, (ConversionError, DataError))
