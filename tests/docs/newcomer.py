"""Runs the commands of README and docs/start as a newcomer does: in another folder, without a home, in the C locale.

    python -m tests.docs.newcomer --bin ~/some-environment/bin     # after pip install -e . or pip install . there
    python -m tests.docs.newcomer --bin ... --uid 54321            # as a user without HOME and without an account

Every command is a process that a shell starts. HOME is a file, so that no folder can be made there; the locale has no
character beyond ASCII; the working folder is no clone, and its name has a space. Flags behind the page's own make
models and runs small.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.docs.pages import ROOT, Command, commands
from tests.docs.place import write_chats, write_texts

PAGES = ("README.md", "docs/start/laptop.md", "docs/start/cluster.md", "docs/start/own-text.md")
NOT_HERE = r"make |pip install|docker |kubectl |(\w+=\S+ )*sbatch |megazero pretrain --config examples/"
"""Commands that install, need a clone's folder or a network, or need a program that is not Python's."""

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 --eval-iters 0"
SMALL: Mapping[str, tuple[str, str]] = {
    r"torchrun --nproc-per-node 48 ": ("--nproc-per-node 48", f"{TINY} --tp 2 --pp 2 --train-iters 2"),
    r"megazero pretrain .*(--data-path|--instruction-data) ": ("", TINY),
    r"megazero pretrain": ("", f"{TINY} --train-iters 2"),
    r"megazero generate runs/first ": ("", "--max-new-tokens 8"),
    r"megazero train-tokenizer ": ("--vocab-size 32000", "--vocab-size 300"),
}
"""Commands, as a regular expression that their beginning matches -> words that are left out, flags that are added."""


def of_the_start() -> list[Command]:
    """The commands that can be run here."""
    return [command for page in PAGES for command in commands(page) if not re.match(NOT_HERE, command.line)]


def made_small(line: str) -> str:
    """The command with flags that make it small; of 48 ranks, four are left."""
    left_out, added = next((change for pattern, change in SMALL.items() if re.match(pattern, line)), ("", ""))
    ranks = "--nproc-per-node 4" if left_out.startswith("--nproc") else ""
    return f"{line.replace(left_out, ranks, 1) if left_out else line} {added}".strip()


def surroundings(folder: Path, programs: Path) -> dict[str, str]:
    """The environment of a newcomer without a home: nothing of this process's but where programs are."""
    home = folder / "home"
    home.write_text("This is a file, and nobody's home.\n")
    return {
        "PATH": f"{programs}:{os.defpath}",
        "HOME": str(home),
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }


def furnish(folder: Path) -> None:
    """What the commands of docs/start/own-text.md begin with."""
    write_texts(folder)
    write_chats(folder / "chats.jsonl")


def run(
    line: str, folder: Path, environment: Mapping[str, str], user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in `folder`; a person types one line and ends the input. user: a number; None is who runs this."""
    small = made_small(line).replace("pretrain_gpt.py", shlex.quote(str(ROOT / "pretrain_gpt.py")))
    return subprocess.run(
        ["bash", "-c", small],
        cwd=folder,
        env=dict(environment),
        input="Say 7.\n",
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        check=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder of the environment's megazero and torchrun")
    parser.add_argument("--loud", action="store_true", help="print what each command says, not only of those that fail")
    parser.add_argument("--uid", type=int, help="run as the user of this number, with HOME unset; only root can")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="newcomer ") as name:
        folder = Path(name)
        environment = surroundings(folder, arguments.bin.resolve())
        furnish(folder)
        if arguments.uid is not None:
            del environment["HOME"]
            os.chown(folder, arguments.uid, -1)
        for command in of_the_start():
            began = time.monotonic()
            done = run(command.line, folder, environment, arguments.uid)
            failed += done.returncode != 0
            print(f"status {done.returncode}  {time.monotonic() - began:5.1f} s  {command}", flush=True)
            if done.returncode or arguments.loud:
                print(done.stdout + done.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
