"""--epochs is a number of samples that the data say; the banner says how often a run reads its data."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.data.build import train_tokens
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.report.banner import length_words
from megazero.train.prepare import Prepared, prepare
from tests.corpus import write_corpus
from tests.data.chats import write_lines
from tests.docs.pages import commands
from tests.parity.training import train

SHAPE = ["--num-layers", 2, "--hidden-size", 24, "--num-attention-heads", 4, "--seq-length", 16]
SHAPE += ["--global-batch-size", 8, "--micro-batch-size", 1]


def _prepared(*words: object) -> Prepared:
    return prepare(parse_run([str(word) for word in [*SHAPE, "--eval-iters", 0, *words]], 1), 1, silent)


@pytest.fixture
def text(corpus: Path, tmp_path: Path) -> list[object]:
    return ["--data-path", corpus, "--vocab-size", 1003, "--split", "9,1", "--data-cache-path", tmp_path / "cache"]


@pytest.fixture
def answers(tmp_path: Path) -> list[object]:
    records = [{"prompt": f"what is {number}?", "completion": f"it is {number}"} for number in range(90)]
    path = write_lines(tmp_path / "in.jsonl", records)
    given = ["--instruction-data", path, "--tokenizer", "byte", "--seq-length", 64]
    return [*given, "--data-cache-path", tmp_path / "cache"]


def test_a_command_line_leaves_the_length_to_the_data(text: list[object]) -> None:
    parsed = parse_arguments([str(word) for word in [*SHAPE, *text, "--epochs", "1.5"]], 1)
    schedule = parsed.run.schedule
    assert (schedule.epochs, schedule.train_iters, parsed.run.trainer.exit_duration_in_mins) == (1.5, None, None)
    assert not any("iterations" in note for note in parsed.notes)


@pytest.mark.parametrize(("epochs", "told"), [("3", "3 epochs"), ("0.5", "0.5 epochs"), ("1", "1 epoch")])
def test_of_one_pair_they_are_its_tokens(text: list[object], epochs: str, told: str) -> None:
    prepared = _prepared(*text, "--epochs", epochs)
    (tokens,) = train_tokens(prepared.run.data)
    assert prepared.run.schedule.train_samples == (int(float(epochs) * tokens) - 1) // 16
    assert prepared.run.schedule.epochs is None, "the resolved run has one length"
    assert prepared.datasets.train.plans[0][0] == max(1, int(float(epochs)))
    assert prepared.text.endswith(f"words; {told}")


def test_a_line_about_the_data_is_said_once(tmp_path: Path) -> None:
    """--epochs opens them to count them, and again for the run."""
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "what?", "completion": "that", "source": "web"}] * 40)
    words = ["--instruction-data", path, "--tokenizer", "byte", "--seq-length", 64, "--epochs", 3]
    words += ["--data-cache-path", tmp_path / "cache", "--global-batch-size", 1, "--eval-iters", 0]
    said: list[str] = []
    prepare(parse_run([str(word) for word in [*SHAPE, *words]], 1), 1, said.append)
    warnings = [line for line in said if line.startswith("warning")]
    assert warnings == [f"warning: {path}: nothing reads source (40 times, first in line 1)"]


def test_of_conversations_each_is_read_as_often(answers: list[object]) -> None:
    prepared = _prepared(*answers, "--epochs", 3, "--global-batch-size", 1)
    samples = [prepared.datasets.train[number] for number in range(prepared.run.schedule.train_samples or 0)]
    read = Counter(sample.tokens.tobytes() for sample in samples)  # type: ignore[union-attr]
    assert len(read) > 20 and set(read.values()) == {3}
    assert prepared.text.endswith("; 3 epochs")


def test_of_a_blend_they_are_as_many_tokens_as_its_pairs_have(text: list[object], corpus: Path, tmp_path: Path) -> None:
    small = write_corpus(tmp_path / "small", documents=60, seed=6)
    words = ["--data-path", 0.5, corpus, 0.5, small, *text[2:]]
    prepared = _prepared(*words, "--epochs", 2)
    large, little = train_tokens(prepared.run.data)
    assert prepared.run.schedule.train_samples == (2 * (large + little) - 1) // 16
    each = [(prepared.run.schedule.train_samples or 0) * 16 / 2 / tokens for tokens in (large, little)]
    assert prepared.text.endswith(f"; {each[0]:.2g} epochs of {corpus}, {each[1]:.2g} epochs of {small}")
    assert each[1] > 3 * each[0]
    many = ["--data-path", *(word for _ in range(5) for word in (1, corpus)), *text[2:]]
    assert _prepared(*many, "--epochs", 1).text.endswith("; 1 to 1 epoch of 5 pairs")


def test_other_lengths_are_said_in_epochs(text: list[object], answers: list[object]) -> None:
    (tokens,) = train_tokens(_prepared(*text, "--train-iters", 1).run.data)
    assert _prepared(*text, "--train-iters", 900).text.endswith(f"; {900 * 8 * 16 / tokens:.3g} epochs")
    assert _prepared(*answers, "--train-iters", 1, "--global-batch-size", 1).text.endswith(" epochs")


def test_one_length_only(text: list[object]) -> None:
    for other in (["--train-iters", 5], ["--train-samples", 80]):
        with pytest.raises(ConfigError, match=rf"--epochs and {other[0]} say the same thing in two ways"):
            _prepared(*text, "--epochs", 1, *other)
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match=rf"--epochs {wrong}\S* must be more than 0"):
            _prepared(*text, "--epochs", wrong)
    few = r"--epochs 0\.001 of the data are \d samples of 16 tokens, fewer than the first global batch has, 8"
    with pytest.raises(ConfigError, match=few):
        _prepared(*text, "--epochs", 0.001)


def test_too_few_samples_for_a_batch_name_the_numbers_that_are_enough(text: list[object]) -> None:
    words = [*text, "--global-batch-size", 500, "--epochs", 0.2]
    with pytest.raises(ConfigError) as refused:
        _prepared(*words)
    _require_nearest(words, str(refused.value))
    with pytest.raises(ConfigError, match="nearest: a smaller --seq-length"):
        _prepared(*text, "--epochs", 0.0001)


def _require_nearest(words: list[object], told: str) -> tuple[str, str]:
    """Each advice is accepted, and one epoch less, or a batch of one micro-batch more, is not."""
    epochs, batch = told.partition("nearest: ")[2].split(", or ")
    for flags in (epochs, batch):
        assert _prepared(*words, *flags.split()).run.schedule.epochs is None
    less, more = int(epochs.split()[1]) - 1, int(batch.split()[1])
    with pytest.raises(ConfigError):
        _prepared(*words, "--epochs", less)
    step = 1 if f"{MICRO} 1" in batch or MICRO not in words else int(str(words[words.index(MICRO) + 1]))
    with pytest.raises(ConfigError):
        _prepared(*words, *batch.split(), "--global-batch-size", more + step)
    return epochs, batch


MICRO = "--micro-batch-size"


@pytest.mark.parametrize(
    ("conversations", "batch", "micro", "told"),
    [
        (6, 24, 4, ("--epochs 12", "--global-batch-size 4")),  # 3 epochs of 2 samples
        (6, 24, 8, ("--epochs 12", "--global-batch-size 6 --micro-batch-size 1")),
        (3, 24, 2, ("--epochs 24", "--global-batch-size 2")),
    ],
)
def test_few_conversations_name_the_numbers_that_are_accepted(
    tmp_path: Path, conversations: int, batch: int, micro: int, told: tuple[str, str]
) -> None:
    records = [{"prompt": "what is it?", "completion": "it is one"} for _ in range(conversations)]
    data = ["--instruction-data", write_lines(tmp_path / "in.jsonl", records), "--tokenizer", "byte"]
    words: list[object] = [*data, "--seq-length", 64, "--data-cache-path", tmp_path / "cache"]
    words += ["--epochs", 3, "--global-batch-size", batch, MICRO, micro]
    with pytest.raises(ConfigError, match=rf"3 of the data are {conversations} samples of 64") as refused:
        _prepared(*words)
    assert _require_nearest(words, str(refused.value)) == told


def test_what_fills_no_batch_is_not_claimed(answers: list[object], tmp_path: Path) -> None:
    """3 epochs of 2 samples in batches of 4 are one step of 4 samples."""
    records = [{"prompt": "what is it?", "completion": "it is one"} for _ in range(6)]
    words: list[object] = ["--instruction-data", write_lines(tmp_path / "in.jsonl", records), "--tokenizer", "byte"]
    words += ["--seq-length", 64, "--data-cache-path", tmp_path / "cache", "--global-batch-size", 4]
    for length in (["--epochs", 3], ["--train-samples", 6]):
        prepared = _prepared(*words, *length)
        assert prepared.text.endswith("; 2 epochs")
        assert length_words(prepared.run, None) == "4 of 6 samples, in whole batches"
    prepared = _prepared(*words, "--train-samples", 8)
    assert prepared.text.endswith("; 4 epochs") and length_words(prepared.run, 8) == "8 samples"


@pytest.mark.parametrize("size", [3_000, 30_000, 300_000])
def test_the_pages_command_for_a_small_text_fits_each(size: int, tmp_path: Path) -> None:
    """Of bytes; a tokenizer makes a quarter as many, so a quarter of the text is taken here."""
    command = next(c.line for c in commands("docs/start/own-text.md") if "--epochs 20" in c.line)
    words = command.split()
    numbers = [
        word for flag in ("--epochs", "--seq-length", "--global-batch-size") for word in words[words.index(flag) :][:2]
    ]
    (tmp_path / "in.txt").write_text("some words of a text " * (size // 4 // 21))
    preprocess([tmp_path / "in.txt"], tmp_path / "own", PreprocessJob("byte", None), workers=1, report=silent)
    data = ["--data-path", tmp_path / "own", "--tokenizer", "byte", "--data-cache-path", tmp_path / "cache"]
    prepared = _prepared(*data, *numbers)
    assert (prepared.run.schedule.train_samples or 0) >= 8


def test_the_pages_words_for_few_conversations_fit_them(tmp_path: Path) -> None:
    (words,) = re.findall(r"`(--epochs [^`]*)`\nin place", Path("docs/start/own-text.md").read_text())
    records = [{"prompt": f"what is {number}?", "completion": f"it is {number}"} for number in range(10)]
    data = ["--instruction-data", write_lines(tmp_path / "in.jsonl", records), "--tokenizer", "byte"]
    flags = [str(word) for word in [*SHAPE, *data, "--data-cache-path", tmp_path / "cache", "--seq-length", 384]]
    run = parse_run([*flags, "--eval-iters", "0", *words.split()], 2)  # two ranks, as the page has them
    assert (prepare(run, 2, silent).run.schedule.train_samples or 0) >= 4


def _losses(outcome: Any) -> list[tuple[int, float]]:
    return [(record.iteration, record.loss) for record in outcome.records]


@pytest.mark.slow
def test_a_resume_by_the_same_command_goes_on(answers: list[object], tmp_path: Path) -> None:
    """Two epochs at once, and stopped after every fourth iteration."""
    length = ["--eval-iters", 0, "--epochs", 2, "--precision", "fp64", "--lr-warmup-fraction", 0.3]
    flags = [str(word) for word in [*SHAPE, *answers, *length]]
    whole = _losses(train(1, flags))
    assert len(whole) > 5
    parts: list[tuple[int, float]] = []
    while len(parts) < len(whole):
        saves = ["--save", str(tmp_path / "s"), "--load", str(tmp_path / "s"), "--exit-interval", "4"]
        parts += _losses(train(1, [*flags, *saves]))
    assert parts == whole
