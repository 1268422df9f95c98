"""tools/generate_text.py as a user runs it: alone, through a pipe, under torchrun; what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch

import megazero.convert.loading
from megazero.cli.generate import parser
from megazero.cli.generation import check, generate_on
from megazero.config.schema import ModelConfig
from megazero.config.source import ConfigError
from megazero.data.indexed import DataError
from megazero.data.tokenizer import build_tokenizer
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import encoded
from megazero.inference.sampling import Sampling
from megazero.mpu.grid import single_process_grid
from tests.evaluation.hf_folder import folder_of
from tests.test_structure import ROOT

TOOL = str(ROOT / "tools" / "generate_text.py")
PROMPTS = ["Zürich", "a", "the end", "a"]
SELECTS = ("72", "73") if platform.machine() == "aarch64" else ("7", "23", "270", "271")
"""Numbers of the system's calls that wait for input: poll and select, and those of them that take a set of signals."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BLOOM's shape over bytes, with weights large enough that it says something."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BloomConfig(
        vocab_size=260, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4, bos_token_id=None, eos_token_id=None
    )
    path = tmp_path_factory.mktemp("model") / "bloom"
    transformers.BloomForCausalLM(config).save_pretrained(path)
    return path


def run(*words: str, text: str = "", ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, TOOL, *words]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env=environment, timeout=280
    )


def expected(model: Path, sampling: Sampling, count: int, samples: int = 1) -> list[list[int]]:
    opened = megazero.convert.loading.load(model)
    prompts = [list(prompt.encode()) for prompt in PROMPTS for _ in range(samples)]
    return generate(Pipeline.of([opened.stage]), prompts, count, sampling, vocabulary=257)


@pytest.mark.slow
def test_prompts_from_everywhere_as_json(model: Path, tmp_path: Path) -> None:
    """Flags, then lines of a file; the text is that of the ids, whatever the size of a batch."""
    lines = [json.dumps(PROMPTS[2]), "", json.dumps({"prompt": PROMPTS[3], "more": 1})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--prompt-file", str(tmp_path / "prompts.jsonl")]
    how = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.2", "--seed", "5"]
    size = ["--max-new-tokens", "12", "--num-samples", "2", "--batch-size", "3", "--ignore-eod"]
    done = run("--load", str(model), "--tokenizer", "byte", *flags, *how, *size, "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    sampling = Sampling(0.9, 40, 0.9, 1.2, 5)
    assert [record["ids"] for record in records] == expected(model, sampling, 12, samples=2)
    assert [record["prompt"] for record in records] == [prompt for prompt in PROMPTS for _ in range(2)]
    for record in records:
        assert record["text"] == bytes(token for token in record["ids"] if token < 256).decode(
            "utf-8", errors="replace"
        )
        assert record["ended"] == "length" and record["stop"] is None
    assert "96 tokens in" in done.stderr and "tokens/s" in done.stderr


def test_prompts_that_are_no_text() -> None:
    """Bytes that are not UTF-8, as a terminal or the command line hands them on, and half a surrogate
    pair from JSON.
    """
    for prompt in (b"caf\xe9".decode(errors="surrogateescape"), json.loads('"\\ud83d"')):
        with pytest.raises(DataError, match="not UTF-8"):
            encoded([prompt], build_tokenizer("byte", None), ModelConfig(vocab_size=300), first=None, eod_id=None)


@pytest.mark.slow
def test_nobody_reads(model: Path) -> None:
    """`| head -1`: the rest is not written, and nothing complains."""
    command = [
        sys.executable,
        TOOL,
        "--load",
        str(model),
        "--tokenizer",
        "byte",
        "--prompt",
        "a",
        "--num-samples",
        "100",
        "--json",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--max-new-tokens", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that it cannot have written all by then
        assert process.stdout.readline().startswith(b'{"prompt"')
        process.stdout.close()
        complaints = process.stderr.read().decode()
        assert process.wait(280) == 141 and "Traceback" not in complaints and "Broken" not in complaints


@pytest.mark.slow
def test_a_conversation_through_a_pipe(model: Path) -> None:
    """A single continuation is streamed; it ends before a stop string that lies over two tokens."""
    ids = expected(model, Sampling(temperature=0), 12)
    texts = [" ".join(map(str, row)) for row in ids[:2]]
    stop = f"{ids[1][5]} {ids[1][6]}"
    words = ["--load", str(model), "--ids", "--interactive", "--greedy", "--max-new-tokens", "12", "--stop", stop]
    prompts = [" ".join(map(str, prompt.encode())) for prompt in PROMPTS[:2]]
    done = run(*words, text=f"{prompts[0]}\n{prompts[1]}\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" " + text[: text.find(stop)] if stop in text else " " + text for text in texts]
    assert "has no tokens" in done.stderr, "an empty prompt, and nothing to begin with"


def test_a_begin_token_that_is_not_put_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA's tokenizer has transformers put one before every text."""
    pytest.importorskip("transformers")
    for family, words, told in (("llama", [], True), ("llama", ["--prefix-id", "1"], False), ("gpt2", [], False)):
        path = tmp_path / family
        if not path.exists():
            folder_of(family, path)
        args = parser().parse_args(["--load", str(path), "--prompt", "the cat", "--max-new-tokens", "1", *words])
        generate_on(args, single_process_grid("cpu"))
        assert ("--prefix-id 1 does" in capsys.readouterr().err) is told, (family, words)


@pytest.mark.slow
def test_a_wrong_command_line_is_told_once() -> None:
    done = run("--load", "nowhere", "--tp", "2", "--top-p", "2", "--stop", "")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    for words in (
        "4 problems",
        "nowhere: there is no such checkpoint",
        "top_p (2.0)",
        "a stop string is empty",
        "2 ranks, but 1 process was started",
    ):
        assert words in done.stderr


def test_what_a_chat_excludes() -> None:
    args = parser().parse_args(["--load", ".", "--chat", "--ids", "--prefix-id", "1", "--prompt", "x"])
    with pytest.raises(ConfigError, match=r"--chat and --ids(?s:.*)--chat and --prefix-id 1"):
        check(args, 1)
    args = parser().parse_args(["--load", ".", "--system", "x", "--prompt", "x"])
    with pytest.raises(ConfigError, match="--system: it is a turn of a --chat"):
        check(args, 1)


class Typist:
    """Somebody at a terminal."""

    def __init__(self, *words: str) -> None:
        self.keys, terminal = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, TOOL, *words],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def wait_for_a_prompt(self, number: int) -> None:
        """Until the program waits for keys behind its prompt of this number.

        Before that, keys can be lost. Python's readline takes note of a Ctrl-C behind the prompt and does not look at
        it before the next key. A Ctrl-D from before the prompt, when the terminal still collects lines, is no end any
        more when readline reads it.
        """
        self.see("> ", number)
        while Path(f"/proc/{self.process.pid}/syscall").read_text().split()[0] not in SELECTS:
            assert self.process.poll() is None, self.seen
            time.sleep(0.01)

    def see(self, words: str, times: int = 1) -> str:
        """All that stands on the screen once these words have come so many times."""
        while self.seen.count(words) < times:
            assert select.select([self.keys], [], [], 240)[0], f"{words!r} did not come {times} times:\n{self.seen}"
            try:
                self.seen += os.read(self.keys, 1 << 16).decode("utf-8", errors="replace")
            except OSError:  # the program has ended
                raise AssertionError(f"{words!r} did not come {times} times:\n{self.seen}") from None
        return self.seen

    def status(self) -> int:
        os.close(self.keys)
        return self.process.wait(240)


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_stops_an_answer_and_not_the_program(model: Path) -> None:
    """Prompts go on for ever without it. What is typed meanwhile comes next; the terminal is left as it was."""
    words = [
        "--load",
        str(model),
        "--tokenizer",
        "byte",
        "--interactive",
        "--ignore-eod",
        "--max-new-tokens",
        "1000000",
        "--temperature",
        "9",
    ]
    person = Typist(*words)
    before = termios.tcgetattr(person.keys)
    person.see("> ")
    person.type("one\n")
    person.see("more than the model's")
    person.type("two\n")
    person.type("\x03")
    person.see("tokens/s")
    person.see("> two")
    person.type("\x03")
    person.see("tokens/s", 2)
    person.wait_for_a_prompt(3)
    person.type("taken back\x03")
    person.see("Ctrl-D ends the program")
    person.wait_for_a_prompt(4)
    person.type("\x04")
    person.process.wait(240)
    assert termios.tcgetattr(person.keys) == before
    assert person.status() == 0 and "Traceback" not in person.seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--ids"], "'x' is no token id"),
        (["--prompt", "260", "--ids"], "id 260.*vocabulary has 260"),
        (["--prompt", "3", "--ids", "--stop-id", "260"], "--stop-id 260"),
        (["--prompt", "", "--ids"], "no tokens.*--prefix-id"),
        (["--prompt", "x"], "leads to no tokenizer"),
        (["--prompt", "x", "--tokenizer", "gpt2"], "--tokenizer gpt2 needs --tokenizer-path"),
        (["--prompt-file", os.devnull, "--ids"], "no prompts"),
    ],
)
def test_refuses(model: Path, words: list[str], message: str) -> None:
    args = parser().parse_args(["--load", str(model), *words])
    with pytest.raises(DataError, match=message):
        generate_on(args, single_process_grid())


def test_a_prompt_longer_than_the_table_of_positions() -> None:
    model = ModelConfig(vocab_size=300, position_embedding="learned", max_position_embeddings=8)
    tokenizer = build_tokenizer("byte", None)
    assert encoded(["x" * 8], tokenizer, model, first=None, eod_id=None) == [[120] * 8]
    with pytest.raises(DataError, match="9 tokens, more than the 8 positions"):
        encoded(["x" * 8], tokenizer, model, first=256, eod_id=None)
    assert encoded([""], tokenizer, model, first=None, eod_id=256) == [[256]]


@pytest.mark.slow
def test_interactive_through_a_pipe_on_four_ranks(model: Path) -> None:
    """Rank 0 reads line by line; a mistake in one is no end; the end of the input is."""
    lines = [" ".join(map(str, prompt.encode())) for prompt in PROMPTS[:2]]
    words = ["--load", str(model), "--ids", "--interactive", "--greedy", "--max-new-tokens", "10"]
    done = run(
        *words, "--tp", "2", "--pp", "2", "--precision", "fp64", text=f"{lines[0]}\nnothing\n{lines[1]}\n", ranks=4
    )
    assert done.returncode == 0, done.stderr
    shown = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert shown == expected(model, Sampling(temperature=0), 10)[:2]
    assert "'nothing' is no token id" in done.stderr
