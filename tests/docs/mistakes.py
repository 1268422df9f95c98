"""The page of mistakes: what was typed, and what megazero answers. `python -m tests.docs.mistakes` writes the page.

Each command line runs as a user's does, in a fork of a process that has imported the program, in a folder with the
files that the lines name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from megazero.cli.main import main
from tests.docs.pages import ROOT
from tests.forks import fork

PAGE = ROOT / "docs" / "reference" / "mistakes.md"
SECONDS = 60
"""After this time a command that should have been refused is ended by SIGALRM."""
MODEL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64"
STEPS = "--data-path my-data --tokenizer byte --global-batch-size 4 --eval-iters 0"
MINE = f"megazero pretrain {MODEL} {STEPS} --data-cache-path cache"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Names of commands and flags": (
        "megazero train",
        "megazero chat runs/mine",
        "megazero preprocess-data",
        "megazero pretrain --num-layer 4",
        "megazero pretrain --learning-rate 1e-3",
        "megazero pretrain --batch-size 8",
        "megazero pretrain data.txt",
        "megazero pretrain --train-iters",
        "megazero pretrain --dp 2",
    ),
    "Values": (
        "megazero pretrain --lr fast",
        "megazero pretrain --lr -1",
        "megazero pretrain --precision float16",
        "megazero pretrain --device gpu",
        "megazero pretrain --optimizer adam8bit",
        "megazero pretrain --zero-stage 4",
        "megazero pretrain --preset gpt3-14b",
        "megazero pretrain --config none.yaml",
        "megazero pretrain --config notes.txt",
    ),
    "Numbers that do not fit": (
        "megazero pretrain --tp 2",
        "megazero pretrain --tp 2 --pp 3",
        "megazero pretrain --tp 2 --validate-only --world-size 3",
        "megazero pretrain --world-size 4",
        "megazero pretrain --hidden-size 100 --num-attention-heads 3",
        "megazero pretrain --global-batch-size 7 --micro-batch-size 2",
        "megazero generate runs/mine --prompt a --tp 2",
    ),
    "Data and tokenizers": (
        "megazero pretrain --data-path notes.txt --tokenizer byte",
        "megazero pretrain --data-path texts --tokenizer byte",
        "megazero pretrain --data-path nothing --tokenizer byte",
        "megazero pretrain --data-path my-data.bin --tokenizer byte",
        "megazero pretrain --data-path my-data",
        "megazero pretrain --data-path my-data --tokenizer hf",
        "megazero pretrain --data-path my-data --tokenizer hf --tokenizer-path gpt2",
        "megazero pretrain --data-path my-data --vocab-size 50 --data-cache-path cache",
        "megazero pretrain --data-path tiny --tokenizer byte --epochs 2",
        "megazero pretrain --data-path tiny --tokenizer byte --data-cache-path cache",
        "megazero pretrain --instruction-data chats.jsonl",
        "megazero pretrain --instruction-data broken.jsonl --tokenizer byte",
        "megazero prepare-data --input none.txt --output-prefix x --tokenizer byte",
        "megazero prepare-data --input notes.txt --output-prefix my-data --tokenizer byte",
        "megazero prepare-data --input broken.jsonl --output-prefix x --tokenizer byte",
        "megazero prepare-data --input chats.jsonl --output-prefix x --tokenizer byte",
        "megazero train-tokenizer --input notes.txt --output t --vocab-size 100",
    ),
    "Places to save, checkpoints to load": (
        "megazero pretrain --save /proc/x",
        "megazero pretrain --save /dev/null/x",
        "megazero pretrain --save notes.txt",
        "megazero pretrain --load runs/none",
        "megazero pretrain --load notes.txt",
        f"{MINE} --train-iters 4 --save runs/mine",
        f"{MINE} --train-iters 8 --save runs/mine --load runs/mine",
        f"{MINE} --num-layers 2 --train-iters 4 --load runs/mine",
        f"{MINE} --train-iters 4 --lr 2e-3 --load runs/mine",
        "megazero pretrain --init-from someone/model",
        "megazero pretrain --init-from texts",
        "megazero pretrain --lora-rank 8",
        "megazero inspect runs/none",
    ),
    "Use of a model": (
        "megazero generate --prompt a",
        "megazero generate gpt2 --prompt a",
        "megazero generate runs/ids --prompt a",
        "megazero generate runs/mine a",
        "megazero generate runs/mine --prompt a --top-p 2",
        "megazero generate runs/mine --prompt-file none.txt",
        'megazero generate runs/mine --ids --prompt "3 1000"',
        "megazero generate runs/mine --chat --prompt a",
        "megazero evaluate runs/mine",
        "megazero evaluate runs/mine --input notes.txt --stride 1000",
        "megazero convert runs/mine --output out --to huggingface",
    ),
}
"""Command lines by the heading under which they stand."""


HEAD = """# Fifty mistakes

What someone typed, and what megazero answered. Nothing has started then, and the status is 2. All problems are told at
once, here with / between them. A test types each line, and holds that this page is what the program says.

In the folder are `my-data` and `tiny`, made of bytes (`--tokenizer byte`), `texts`, `notes.txt`, `chats.jsonl`, and
two small models: `runs/mine`, and `runs/ids`, trained without a tokenizer. `...` are the flags with which `runs/mine`
was trained.
"""


def furnish(folder: Path) -> None:
    """texts/, notes.txt, chats.jsonl, broken.jsonl; my-data and tiny, pairs of bytes; runs/mine, trained on my-data;
    runs/ids, trained on it without a tokenizer.
    """
    for name in ("convert.loading", "evaluation.scorer", "inference.text_generator", "train.job", "train.checked"):
        import_module(f"megazero.{name}")  # here, so that no fork has to
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"Text {number} is about the {number} times table. " * 20)
    (folder / "notes.txt").write_text("Some notes.\n")
    chats = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}!"} for number in range(4)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    ids = MINE.replace("--tokenizer byte", "--vocab-size 260")
    for line in (
        "megazero prepare-data --input texts --output-prefix my-data --tokenizer byte --append-eod --workers 1",
        "megazero prepare-data --input notes.txt --output-prefix tiny --tokenizer byte --workers 1",
        f"{MINE} --train-iters 4 --save runs/mine",
        f"{ids} --train-iters 4 --save runs/ids",
    ):
        status, said = answer(line, folder)
        assert status == 0, said


def answer(line: str, folder: Path) -> tuple[int, str]:
    """(status, what was printed) of a command line in this folder."""
    with tempfile.TemporaryFile() as printed:
        child = fork()
        if not child:
            _become(line, folder, printed.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        return status, printed.read().decode(errors="replace")


def _become(line: str, folder: Path, output: int) -> None:
    """Run the command in this process, and end the process."""
    status = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        os.environ |= {"MEGAZERO_ALLOCATOR": "system", "COLUMNS": "96", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/hub"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = os.fdopen(number, "w" if number else "r")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        status = main(shlex.split(line)[1:])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def told(said: str) -> str:
    """What the page shows of an answer: the problems, without the usage that argparse prints first."""
    said = re.sub(r"(?s)^usage: .*?\n(?=megazero [\w-]+: error: )", "", said)
    problems = re.findall(r"(?m)^  \d+\. (.*)$", said)
    return " / ".join(problems) if problems else " ".join(said.split())


def page(folder: Path) -> str:
    """The text of the page, from the answers in a furnished folder."""
    lines = HEAD.splitlines()
    for heading, typed in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| typed | answered |", "|---|---|"]
        for line in typed:
            status, said = answer(line, folder)
            assert status == 2, f"{line} ended with status {status}, not 2: {said}"
            shown = line.replace(MINE, "megazero pretrain ...").replace(" --data-cache-path cache", "")
            lines.append(f"| `{shown}` | {_cell(told(said))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text for a cell of a table, as it is."""
    return re.sub(r"([|\\<>*_`\[\]])", r"\\\1", text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        furnish(Path(made))
        text = page(Path(made))
    print(text, end="") if "-" in sys.argv else PAGE.write_text(text)
