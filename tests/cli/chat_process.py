"""`megazero generate FOLDER --chat --interactive` once for each folder, each in a process that is forked off one which
has imported torch and the program: `python -m tests.cli.chat_process FOLDER...`.

The command reads FOLDER/stdin and writes FOLDER/stdout. FOLDER/questions gets the ids that the model is given, a line
of JSON for each question.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.cli.main import load_program, main
from megazero.convert import loading as imported  # what the command imports while it runs
from megazero.inference import text_generator

LENGTH = 9
FLAGS = f"--chat --interactive --greedy --precision fp64 --max-new-tokens {LENGTH} --json"
generate = text_generator.generate


def command(folder: Path) -> int:
    """The command with the files of a folder as its standard streams. It may end the process itself."""

    def kept(pipeline: Any, prompts: Sequence[Sequence[int]], *more: Any, **named: Any) -> list[list[int]]:
        with open(folder / "questions", "a") as file:
            file.writelines(json.dumps(list(prompt)) + "\n" for prompt in prompts)
        return generate(pipeline, prompts, *more, **named)

    text_generator.generate = kept
    for name, flags, number in (("stdin", os.O_RDONLY, 0), ("stdout", os.O_WRONLY | os.O_CREAT, 1)):
        os.dup2(os.open(folder / name, flags, 0o644), number)
    return main(["generate", str(folder), *FLAGS.split()])


def run(folders: Sequence[str]) -> int:
    """The sum of the commands' exit statuses."""
    assert imported is not None and load_program("generate") is not None
    total = 0
    for folder in folders:
        child = os.fork()
        if child == 0:
            os._exit(command(Path(folder)))
        total += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return total


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
