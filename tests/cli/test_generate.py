"""`megazero generate`: what it writes, alone and on ranks, at a terminal and through a pipe; what it refuses."""

from __future__ import annotations

import fcntl
import io
import json
import os
import platform
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero.convert.loading
from megazero.cli.generate import check, generate_on, parser, prompt_count
from megazero.cli.shared_flags import require_same_flags
from megazero.config.schema import ModelConfig
from megazero.config.source import ConfigError
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import encoded, read_prompts
from megazero.inference.sampling import Sampling
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid, build_grid, single_process_grid
from tests.evaluation.hf_folder import folder_of
from tests.ranks import run_ranks
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


def answered(grid: ProcessGrid, *words: str, typed: str = "") -> tuple[str, str]:
    """What the program writes on this rank: (answers, remarks). typed: its standard input."""
    args, answers, remarks = parser().parse_args(words), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(answers), redirect_stderr(remarks):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        check(args, grid.axes.world_size)
        generate_on(args, grid)
    return answers.getvalue(), remarks.getvalue()


def started(*words: str, **streams: Any) -> subprocess.Popen[bytes]:
    """The program as a user starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, TOOL, *words], env=environment, **streams)


def expected(model: Path, sampling: Sampling, count: int, samples: int = 1) -> list[list[int]]:
    opened = megazero.convert.loading.load(model)
    prompts = [list(prompt.encode()) for prompt in PROMPTS for _ in range(samples)]
    return generate(Pipeline.of([opened.stage]), prompts, count, sampling, vocabulary=257)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_standard_input_in_another_encoding_names_the_command(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the locale's stdin refuses bytes or escapes them."""
    data = io.BytesIO("once upon".encode(encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, encoding="utf-8", errors=errors))
    with pytest.raises(DataError, match=rf"--prompt-file -: .* iconv -f {encoding.replace('-le', 'le')} -t utf-8"):
        read_prompts([], "-")


def test_prompts_from_everywhere_as_json(model: Path, tmp_path: Path) -> None:
    """Flags, then lines of a file; the text is that of the ids, whatever the size of a batch."""
    lines = [json.dumps(PROMPTS[2]), "", json.dumps({"prompt": PROMPTS[3], "more": 1})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--prompt-file", str(tmp_path / "prompts.jsonl")]
    how = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.2", "--seed", "5"]
    size = ["--max-new-tokens", "12", "--num-samples", "2", "--batch-size", "3", "--ignore-eod"]
    named = ["--load", str(model), "--tokenizer", "byte", "--json"]
    answers, remarks = answered(single_process_grid("cpu"), *named, *flags, *how, *size)
    records = [json.loads(line) for line in answers.splitlines()]
    sampling = Sampling(0.9, 40, 0.9, 1.2, 5)
    assert [record["ids"] for record in records] == expected(model, sampling, 12, samples=2)
    assert [record["prompt"] for record in records] == [prompt for prompt in PROMPTS for _ in range(2)]
    for record in records:
        said = bytes(token for token in record["ids"] if token < 256)
        assert record["text"] == said.decode("utf-8", errors="replace")
        assert record["ended"] == "length" and record["stop"] is None
    assert "prompts.jsonl: 2 prompts, one a line\n" in remarks
    assert "96 tokens in" in remarks and "tokens/s" in remarks


def test_a_prompt_of_several_lines_is_told_how_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one prompt\nof two lines\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one prompt\\nof two lines"}\n')
    lines, one = (read_prompts([], str(tmp_path / name)) for name in ("p.txt", "p.jsonl"))
    assert one == ["one prompt\nof two lines"] and lines == one[0].split("\n")
    assert (
        prompt_count("p.txt", 2) == "p.txt: 2 prompts, one a line; a prompt of several lines is a line of a .jsonl file"
    )
    assert prompt_count(
        "-", 2
    ) == "the standard input: 2 prompts, one a line; a prompt of several lines is a line of a " + (".jsonl file")
    assert prompt_count("p.jsonl", 3) == "p.jsonl: 3 prompts, one a line"
    assert prompt_count("p.txt", 1) is prompt_count(None, 3) is None


def test_prompts_that_are_no_text() -> None:
    """Bytes that are not UTF-8, as a terminal or the command line hands them on, and half a surrogate
    pair from JSON.
    """
    for prompt in (b"caf\xe9".decode(errors="surrogateescape"), json.loads('"\\ud83d"')):
        with pytest.raises(DataError, match="not UTF-8"):
            encoded([prompt], build_tokenizer("byte", None), ModelConfig(vocab_size=300), eod_id=None)


@pytest.mark.slow
def test_nobody_reads(model: Path) -> None:
    """`| head -1`: the rest is not written, and nothing complains."""
    words = ["--load", str(model), "--tokenizer", "byte", "--prompt", "a", "--num-samples", "100", "--json"]
    pipe = subprocess.PIPE
    with started(*words, "--max-new-tokens", "4", stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that it cannot have written all by then
        assert process.stdout.readline().startswith(b'{"prompt"')
        process.stdout.close()
        complaints = process.stderr.read().decode()
        assert process.wait(280) == 141 and "Traceback" not in complaints and "Broken" not in complaints


def test_a_conversation_through_a_pipe(model: Path) -> None:
    """A single continuation is streamed; it ends before a stop string that lies over two tokens."""
    ids = expected(model, Sampling(temperature=0), 12)
    texts = [" ".join(map(str, row)) for row in ids[:2]]
    stop = f"{ids[1][5]} {ids[1][6]}"
    words = ["--load", str(model), "--ids", "--interactive", "--greedy", "--max-new-tokens", "12", "--stop", stop]
    prompts = [" ".join(map(str, prompt.encode())) for prompt in PROMPTS[:2]]
    answers, remarks = answered(single_process_grid("cpu"), *words, typed=f"{prompts[0]}\n{prompts[1]}\n\n")
    assert answers.splitlines() == [" " + text[: text.find(stop)] if stop in text else " " + text for text in texts]
    assert "has no tokens" in remarks, "an empty prompt, and nothing to begin with"


def test_the_begin_token_of_a_tokenizer(tmp_path: Path) -> None:
    """LLaMA's tokenizer has transformers put one before every text: the text goes on as there. A training saw none."""
    transformers = pytest.importorskip("transformers")
    prompt = [
        "--prompt",
        "the cat",
        "--max-new-tokens",
        "8",
        "--greedy",
        "--ignore-eod",
        "--json",
        "--precision",
        "fp32",
    ]

    def ids(*words: str) -> tuple[list[int], str]:
        answers, remarks = answered(single_process_grid("cpu"), *words, *prompt)
        return json.loads(answers)["ids"], remarks

    folders = {family: tmp_path / family for family in ("llama", "gpt2")}
    theirs = {}
    for family, folder in folders.items():
        folder_of(family, folder)
        tokens = transformers.AutoTokenizer.from_pretrained(folder)("the cat", return_tensors="pt")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        new = model.generate(**tokens, do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None)
        theirs[family] = new[0, tokens["input_ids"].shape[1] :].tolist()
    for family, put in (("llama", True), ("gpt2", False)):
        mine, remarks = ids(str(folders[family]))
        assert mine == theirs[family] and ("1 is put before every prompt" in remarks) is put
    bare, remarks = ids(str(folders["llama"]), "--no-prefix")
    assert bare != theirs["llama"] and "before every prompt" not in remarks
    assert ids(str(folders["llama"]), "--prefix-id", "1")[0] == theirs["llama"]
    with open_source(folders["llama"]) as source:
        source.position = replace(source.position, iteration=3)
        convert(source, format_table()["megazero"], tmp_path / "trained", TargetOptions(), silent)
    mine, remarks = ids(str(tmp_path / "trained"))
    assert mine == bare and "here nothing is put" in remarks and "--prefix-id 1 does" in remarks


def test_each_of_several_ends_ends_a_text(tmp_path: Path) -> None:
    """Models with an end of text and an end of turn name both in generation_config.json."""
    folder = tmp_path / "gpt2"
    folder_of("gpt2", folder)
    flags = [str(folder), "--prompt", "the cat", "--max-new-tokens", "8", "--greedy", "--json"]

    def ids() -> list[int]:
        found: list[int] = json.loads(answered(single_process_grid("cpu"), *flags)[0])["ids"]
        return found

    (folder / "generation_config.json").write_text("{}")
    whole = ids()
    for ends in ([whole[3], 319], [319, whole[3]]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert ids() == whole[: whole.index(whole[3]) + 1]


def said(folder: Path, file: str, keys: dict[str, Any], *words: str) -> tuple[list[int], str]:
    """The greedy ids of a model whose file of this name says this, and the remarks. The other file says nothing."""
    described = json.loads((folder / "config.json").read_text())
    made = Path(tempfile.mkdtemp(dir=folder.parent)) / "model"
    shutil.copytree(folder, made)
    (made / "generation_config.json").unlink(missing_ok=True)
    (made / file).write_text(json.dumps((described if file == "config.json" else {}) | keys))
    prompt = ["--ids", "--prompt", "1 2 3", "--json", *words]
    answers, remarks = answered(single_process_grid("cpu"), str(made), *prompt)
    found: list[int] = json.loads(answers)["ids"]
    return found, remarks


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_the_models_files_say_of_a_text(file: str, model: Path) -> None:
    """`transformers` takes config.json where there is no generation_config.json; both mean the same here."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    greedy = {"do_sample": False}
    whole, remarks = said(model, file, greedy)
    assert f"as the model's {file} says, since no flag says otherwise: --temperature 0\n" in remarks
    ids, remarks = said(model, file, greedy | {"max_length": 7})
    (made,) = (path for path in model.parent.glob("*/model") if '"max_length": 7' in (path / file).read_text())
    theirs = AutoModelForCausalLM.from_pretrained(made).generate(torch.tensor([[1, 2, 3]]))[0, 3:].tolist()
    assert ids == theirs == whole[:4]
    assert "--temperature 0 max_length 7\n" in remarks or "max_length 7 --temperature 0\n" in remarks
    assert "cut off by the model's max_length 7\n" in remarks and "more than the model's" not in remarks
    assert said(model, file, greedy | {"max_length": 7}, "--max-new-tokens", "6")[0] == whole[:6]
    assert said(model, file, greedy | {"max_length": 7, "max_new_tokens": 5})[0] == whole[:5]
    with pytest.raises(DataError, match=r"3 tokens, and the model's files say max_length 3.*--max-new-tokens"):
        said(model, file, greedy | {"max_length": 3})
    assert said(model, file, greedy | {"repetition_penalty": 1.9})[0] != whole
    keys = {"suppress_tokens": [5], "no_repeat_ngram_size": 2, "num_return_sequences": 3}
    told = "no_repeat_ngram_size 2, num_return_sequences 3, suppress_tokens [5]"
    assert f"{file} changes the text in ways that are not applied here: {told}\n" in said(model, file, keys)[1]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_of_the_models_files_that_are_no_ids(file: str, model: Path) -> None:
    for wrong in ("2", [2, "x"], True, 2.0):
        with pytest.raises(ConversionError, match=f"{file}: eos_token_id is .*: a token id, or a list of them, is"):
            said(model, file, {"eos_token_id": wrong}, "--max-new-tokens", "2")
    for never in (9999, -1, [9999, -1]):
        words = " ".join(map(str, never if isinstance(never, list) else [never]))
        remarks = said(model, file, {"eos_token_id": never}, "--max-new-tokens", "2")[1]
        assert f"{file} ends a text at eos_token_id {words}, which never comes: the model's vocabulary" in remarks
    for fine in (None, [], 3, [3, 4]):
        assert "eos_token_id" not in said(model, file, {"eos_token_id": fine}, "--max-new-tokens", "2")[1]


def test_a_wrong_command_line_is_told_at_once() -> None:
    args = parser().parse_args(["--load", "nowhere", "--tp", "2", "--top-p", "2", "--stop", "", "--prompt", "x"])
    with pytest.raises(ConfigError) as wrong:
        check(args, 1)
    told = ("nowhere: there is no such checkpoint", "2 ranks, but 1 process was started", "--top-p (2.0)")
    assert len(wrong.value.problems) == 4 and "a stop string is empty" in str(wrong.value)
    assert all(words in str(wrong.value) for words in told)


def test_a_folder_of_prompts_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    args = parser().parse_args([str(tmp_path), "--prompt-file", str(tmp_path)])
    with pytest.raises(ConfigError, match=f"--prompt-file {tmp_path}: is a folder; name a file"):
        check(args, 1)


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
        self.process = started(
            *words,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
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
    words = ["--load", str(model), "--tokenizer", "byte", "--interactive", "--ignore-eod", "--temperature", "9"]
    person = Typist(*words, "--max-new-tokens", "1000000")
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


def test_an_empty_standard_input_is_not_called_a_flag(model: Path) -> None:
    with pytest.raises(DataError, match=r"^there is no prompt in the standard input: give one by --prompt TEXT"):
        answered(single_process_grid(), str(model), "--ids", typed="\n")
    with pytest.raises(DataError, match=r"^--prompt-file -: there are no prompts in it"):
        answered(single_process_grid(), str(model), "--ids", "--prompt-file", "-")


def test_a_prompt_longer_than_the_table_of_positions() -> None:
    model = ModelConfig(vocab_size=300, position_embedding="learned", max_position_embeddings=8)
    tokenizer = build_tokenizer("byte", None)
    assert encoded(["x" * 8], tokenizer, model, eod_id=None) == [[120] * 8]
    with pytest.raises(DataError, match="9 tokens, more than the 8 positions"):
        encoded(["x" * 8], tokenizer, model, first=[256], eod_id=None)
    assert encoded([""], tokenizer, model, eod_id=256) == [[256]]


def on_rank(rank: int, words: list[str], typed: str) -> tuple[str, str]:
    return answered(build_grid(Axes(tp=2, pp=2), torch.device("cpu")), *words, typed="" if rank else typed)


@pytest.mark.slow
def test_interactive_through_a_pipe_on_four_ranks(model: Path) -> None:
    """Rank 0 reads line by line; a mistake in one is no end; the end of the input is."""
    lines = [" ".join(map(str, prompt.encode())) for prompt in PROMPTS[:2]]
    words = ["--load", str(model), "--ids", "--interactive", "--greedy", "--max-new-tokens", "10"]
    layout = ["--tp", "2", "--pp", "2", "--precision", "fp64"]
    typed = f"{lines[0]}\nnothing\n{lines[1]}\n"
    (answers, remarks), *others = run_ranks(4, on_rank, [*words, *layout], typed)
    shown = [[int(word) for word in line.split()] for line in answers.splitlines()]
    assert shown == expected(model, Sampling(temperature=0), 10)[:2]
    assert "'nothing' is no token id" in remarks and others == [("", "")] * 3


def problems_on_rank(rank: int, words: list[list[str]]) -> list[str]:
    try:
        require_same_flags(parser().parse_args(words[rank]), build_grid(Axes(tp=2), torch.device("cpu")))
    except ConfigError as error:
        return [*error.problems]
    return []


def test_ranks_have_the_flags_and_the_checkpoint_of_rank_0(model: Path, tmp_path: Path) -> None:
    """Whoever starts ranks by hand may err. A place may have another name on each host, and rank 0 reads the prompt."""
    copied, other = (shutil.copytree(model, tmp_path / name) for name in ("copied", "other"))
    weights = next(other.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    words = ["--load", str(model), "--seed", "1", "--prompt", "a"]
    same = ["--load", str(copied), "--seed", "1"]
    assert run_ranks(2, problems_on_rank, [words, same]) == [[], []]
    seed = "--seed: 2 on rank 1, 1 on rank 0; all ranks need the same"
    assert run_ranks(2, problems_on_rank, [words, [*words, "--seed", "2"]]) == [[seed], [seed]]
    (first,), (second,) = run_ranks(2, problems_on_rank, [words, [*words, "--load", str(other)]])
    assert first == second and first.startswith(f"checksum of the last 65,536 bytes of {weights.name}: ")
