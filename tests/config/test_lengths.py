"""Lengths of the learning rate's schedule: one value, and names that say what they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.dump import program_source
from megazero.config.flags import fields_for_flags
from megazero.config.lengths import Length, Measure
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from tests.lengths import iterations, samples, share

WRITTEN = {
    "500": iterations(500),
    "500 iterations": iterations(500),
    "2e3iters": iterations(2000),
    "1 iteration": iterations(1),
    "2_000 samples": samples(2000),
    "2000Samples": samples(2000),
    "5%": share(0.05),
    "7 %": share(0.07),
    "1e-3%": share(1e-5),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_what_people_write(text: str) -> None:
    assert Length.parsed(text) == WRITTEN[text]
    words = ["--train-iters", "none", "--train-samples", "9999999"] if "ample" in text else []
    assert (
        parse_run([*words, "--lr-decay-style", "constant", "--lr-warmup", *text.split()], 1).schedule.lr_warmup
        == (WRITTEN[text])
    )


@pytest.mark.parametrize(
    "text", ["", "samples", "5 weeks", "nan epochs", "0.5", "1e400", "nan%", "%", "5%%", "-", "2 2", "1e999999%"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a length, such as 500 \(iterations\), 2000 samples, 2 epochs or 5%"):
        Length.parsed(text)


@pytest.mark.parametrize(
    ("number", "measure"),
    [
        (0.5, Measure.ITERATIONS),
        (True, Measure.SAMPLES),
        (1, Measure.SHARE),
        (2, Measure.EPOCHS),
        (float("inf"), Measure.SHARE),
        (5, "%"),
    ],
)
def test_a_length_holds_no_other_number_and_no_word(number: Any, measure: Any) -> None:
    with pytest.raises(ValueError, match="is no length"):
        Length(number, measure)


def epochs(number: float) -> Length:
    return Length(number, Measure.EPOCHS)


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("--train-length 7", iterations(7)),
        ("--train-length 90 samples", samples(90)),
        ("--train-length 2.5 epochs", epochs(2.5)),
        ("--train-length 1Epoch", epochs(1.0)),
        ("--train-iters 7", iterations(7)),
        ("--train-samples 90", samples(90)),
        ("--epochs 2.5", epochs(2.5)),
        ("--num-train-epochs 2", None),
        ("--preset llama-7b --train-length 4_096 samples", samples(4096)),
        ("--preset bloom-176b --epochs 2", epochs(2.0)),
        ("", iterations(100)),
    ],
)
def test_a_run_has_one_length_in_any_unit(words: str, length: Length | None) -> None:
    if length is None:
        with pytest.raises(ConfigError, match=r"--num-train-epochs.*--epochs"):
            parse_run(words.split(), 1)
        return
    schedule = parse_run([*words.split(), "--lr-warmup", "none", "--lr-decay", "none"], 1).schedule
    assert schedule.train_length == length
    counted = (schedule.train_iters, schedule.train_samples, schedule.epochs)
    measures = Measure.ITERATIONS, Measure.SAMPLES, Measure.EPOCHS
    assert counted == tuple(length.number if length.measure is measure else None for measure in measures)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--train-length 5%", "--train-length: 5% is a share; it takes iterations, samples or epochs"),
        ("--train-length data.txt", "'data.txt' is not a length, such as 500 (iterations), 2000 samples or 2 epochs"),
        ("--train-length 0", "--train-length 0 iterations: must be at least 1"),
        ("--train-length 0 epochs", "--train-length 0 epochs: must be more than 0"),
        ("--train-iters 0", "--train-iters 0: must be at least 1"),
        ("--epochs -1", "--epochs -1: must be more than 0"),
        ("--train-length 1e12 epochs", "--train-length 1000000000000 epochs: must be more than 0 and at most"),
        ("--train-length 5 --epochs 2", "--train-length and --epochs say the same thing in two ways"),
        ("--lr-warmup 2 epochs", "--lr-warmup: 2 epochs counts epochs; it takes iterations, samples or a share"),
        ("--train-length 2 epochs 3", "--train-length: takes one value, not 3 (2 epochs 3)"),
    ],
)
def test_a_mistaken_length_of_a_run_is_one_problem(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(words.split(), 1)
    assert len(caught.value.problems) == 1 and problem in caught.value.problems[0]


@given(
    st.builds(share, st.floats(0, 1))
    | st.builds(iterations, st.integers(0, 10**18))
    | st.builds(epochs, st.floats(1e-300, 1e300))
)
def test_its_words_are_read_to_the_same_number(length: Length) -> None:
    assert Length.parsed(str(length)) == length


@pytest.mark.parametrize(
    ("words", "warmup"),
    [
        ("--lr-warmup-iters 5 --lr-warmup-iters 6", iterations(6)),
        ("--lr-warmup 5 --lr-warmup 10%", share(0.1)),
        ("--lr-warmup-iters 5 --lr-warmup-samples none", iterations(5)),
        ("--lr-warmup-iters none --lr-warmup 5%", share(0.05)),
        ("--lr-warmup-samples 5 --lr-warmup-iters 5 --lr-warmup-samples none", iterations(5)),
        ("--lr-warmup 5 --lr-warmup none", None),
        ("--preset gpt2-124m --train-iters 9000 --lr-warmup-fraction 0.1", share(0.1)),
    ],
)
def test_the_last_of_one_spelling_counts_and_none_in_another_resets_nothing(words: str, warmup: Length | None) -> None:
    assert parse_run(words.split(), 1).schedule.lr_warmup == warmup


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--lr-warmup 5 --lr-warmup-iters 5", "--lr-warmup and --lr-warmup-iters say the same thing in two ways"),
        (
            "--lr-warmup-iters 5 --lr-warmup-samples 9 --lr-warmup-fraction 0.1",
            "--lr-warmup-iters and --lr-warmup-samples and --lr-warmup-fraction say the same thing in two ways",
        ),
        ("--train-samples 999 --lr-warmup 5", "--lr-warmup counts iterations, and --train-samples counts samples"),
        ("--train-iters 9 --lr-warmup 5 samples", "--train-iters counts iterations, and --lr-warmup counts samples"),
        ("--lr-warmup 101", "--lr-warmup 101 iterations is longer than --train-iters 100"),
        ("--lr-warmup-iters 101", "--lr-warmup-iters 101 is longer than --train-iters 100"),
        ("--lr-warmup-iters 9 --lr-decay 8", "--lr-warmup-iters 9 is longer than --lr-decay 8 iterations"),
        ("--lr-warmup 101%", "--lr-warmup 101%: must be 0% to 100%"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5: must be at least 0 and at most 1"),
        ("--lr-decay 0", "--lr-decay 0 iterations: must be at least 1"),
        ("--lr-decay-iters 0", "--lr-decay-iters 0: must be at least 1"),
        ("--lr-decay 5%", "--lr-decay: 5% is a share; it takes iterations or samples"),
        ("--lr-warmup-iters 5%", "--lr-warmup-iters: '5%' is not a whole number"),
        ("--lr-warmup-iters 5 samples", "--lr-warmup-iters: takes one value, not 2"),
        ("--lr-decay 5 --lr-decay-style constant", "--lr-decay 5 iterations has no effect without a --lr-decay-style"),
    ],
)
def test_a_mistake_is_one_problem_that_names_what_was_written(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(words.split(), 1)
    assert len(caught.value.problems) == 1 and problem in caught.value.problems[0]


def test_files_and_programs_have_both_names(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("schedule: {lr_warmup: 5%, lr_decay_iters: 60}\n")
    schedule = parse_run(["--config", str(config)], 1).schedule
    assert (schedule.lr_warmup, schedule.lr_decay) == (share(0.05), iterations(60))
    config.write_text("lr_warmup: 5\nschedule: {lr_warmup_fraction: 0.1, lr-decay-samples: null}\n")
    with pytest.raises(
        ConfigError, match=r"lr_warmup and .*: schedule.lr_warmup_fraction say the same thing in two ways"
    ):
        parse_run(["--config", str(config)], 1)
    for written in (5, "5 iterations", iterations(5)):
        assert program_source({"schedule": {"lr_warmup": written}}, "run").settings == {"lr_warmup": iterations(5)}
    assert program_source({"lr_warmup": False}, "run").problems == ["run: lr_warmup: False is not a length"]
    assert fields_for_flags("--lr-warmup-iters 6 is longer than --lr-decay 5 iterations") == (
        "schedule.lr_warmup_iters 6 is longer than schedule.lr_decay 5 iterations"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--train-length", "-1 epochs"], "--train-length -1 epochs: must be more than 0 and at most 1000000000"),
        (["--train-length", "-1", "epochs"], "--train-length -1 epochs: must be more than 0 and at most 1000000000"),
        (["--train-length", "-5 iterations"], "--train-length -5 iterations: must be at least 1"),
        (["--train-length", "- 5 iterations"], "--train-length: '- 5 iterations' is not a length, such as "),
        (["--train-length", "-5 minutes"], "--train-length: '-5 minutes' is not a length, such as "),
        (["--epochs", "-1 epochs"], "--epochs: '-1 epochs' is not a number"),
        (["--epochs", "-.5"], "--epochs -0.5: must be more than 0"),
        (["--lr-warmup", "-5%"], "--lr-warmup -5%: must be 0% to 100%"),
        (["--lr-warmup-fraction", "-5%"], "--lr-warmup-fraction: '-5%' is not a number"),
        (["--lr-decay", "-2 samples"], "--lr-decay -2 samples: must be at least 1"),
        (["--device-memory-budget", "-5GB"], "--device-memory-budget -5000000000: must be more than 0"),
    ],
)
def test_a_value_below_zero_is_no_flag(words: list[str], problem: str) -> None:
    """It begins with a dash: it was told as a flag without a value, and as an unknown flag."""
    with pytest.raises(ConfigError) as told:
        parse_run(words, 1)
    assert [text[: len(problem)] for text in told.value.problems] == [problem]
