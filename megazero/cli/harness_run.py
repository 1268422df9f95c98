"""What `megazero harness` does."""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stdout
from typing import NoReturn

import megazero.cli.harness_model  # noqa: F401
from megazero.cli.ending import end_rank
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.launch import Environment

# Behind the adapter, whose import says what to install where lm_eval is missing, and which tells lm_eval its name.
from lm_eval.__main__ import cli_evaluate  # isort: skip


def run() -> NoReturn:
    """lm_eval's command line as this rank, whose process it ends. Rank 0 prints and writes; the other ranks compute the
    same and keep it for themselves.
    """

    def work(here: Environment) -> None:
        with ExitStack() as stack:
            if here.rank:
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            cli_evaluate()

    end_rank(work, (ConversionError, DataError))
