"""What an installed package adds: a learning-rate schedule and a sink, by entry points and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.checkpoint.format import Damaged
from megazero.checkpoint.resume_changes import record_of, run_from
from megazero.cli.plan_schedule import main as plan
from megazero.cli.pretrain import train
from megazero.config.dump import dump
from megazero.config.help import help_text
from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.schema import ScheduleConfig
from megazero.config.source import ConfigError
from megazero.mpu.meeting import Environment
from megazero.optim.lr_schedule import STYLES, LearningRate
from megazero.system.extensions import LR_DECAY_STYLES, SINKS
from megazero.telemetry.sinks import BY_FIELD
from tests.train.test_start import BATCH, MODEL

CODE = '''
from pathlib import Path

def sawtooth(at):
    """Two teeth: at the half of the decay it is back at the highest rate."""
    return at.between(1.0 - (2 * at.ratio) % 1.0)

def below_zero(at):
    return -1.0

def none(at):
    return None

def not_a_number(at):
    return float("nan")

def of_two(at, more):
    return 0.1

number = 7

class Half:
    def __init__(self, of):
        pass
    def step(self, record):
        pass
    note = "this is no method"

def half(of):
    return Half(of)

class Told:
    def __init__(self, of):
        self.file = Path(of.run.data.data_cache_path) / "told"
        self.lines = [f"from {of.first_iteration}"]
    def note(self, text):
        pass
    def step(self, record):
        self.lines.append(f"{record.iteration} {record.lr!r}")
    def evaluation(self, iteration, losses):
        self.lines.append(f"{iteration} {sorted(losses)}")
    def flush(self, durable):
        pass
    def close(self):
        self.file.write_text("\\n".join(self.lines))
'''
ENTRY_POINTS = f"""
[{LR_DECAY_STYLES}]
sawtooth = added_by_a_test:sawtooth
below-zero = added_by_a_test:below_zero
broken = added_by_a_test:nothing_of_this_name
linear = added_by_a_test:sawtooth
none = added_by_a_test:none
not-a-number = added_by_a_test:not_a_number
of-two = added_by_a_test:of_two
number = added_by_a_test:number

[{SINKS}]
told = added_by_a_test:Told
half = added_by_a_test:Half
made-half = added_by_a_test:half
number = added_by_a_test:number
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip installs it."""
    folder = tmp_path / "site-packages"
    (folder / "added_by_a_test-1.0.dist-info").mkdir(parents=True)
    (folder / "added_by_a_test.py").write_text(CODE)
    (folder / "added_by_a_test-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: added-by-a-test\nVersion: 1.0\n"
    )
    (folder / "added_by_a_test-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))


def words(corpus: Path, tmp_path: Path, *more: str) -> list[str]:
    place = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path), "--eval-iters", "0"]
    return [*MODEL, *BATCH, *place, "--train-iters", "6", *more]


@pytest.mark.usefixtures("package")
def test_a_run_takes_both(corpus: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--lr-decay-style", "sawtooth", "--lr", "1.0", "--min-lr", "0.5", "--sinks", "told"]
    lengths = ["--lr-warmup-iters", "1", "--lr-decay-iters", "5", "--metrics-file", str(metrics)]
    train(words(corpus, tmp_path, *flags, *lengths), Environment(0, 0, 1, 1))
    expected = [0.0, 1.0, 0.75, 1.0, 0.75, 1.0]  # after the warm-up of 1: ratios 0, 1/4, 2/4, 3/4 and 1
    assert [json.loads(line)["lr"] for line in metrics.read_text().splitlines()] == expected
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["from 1", *(f"{number} {rate!r}" for number, rate in enumerate(expected, 1))]


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_help_messages_and_files_know_what_is_added(tmp_path: Path) -> None:
    text = help_text(everything=True)
    assert (
        "inverse-square-root,wsd,below-zero,broken,none," in text and "--sinks {half,made-half,number,told} ..." in text
    )
    run = parse_run(["--lr-decay-style", "sawtooth"], 1)
    (tmp_path / "run.yaml").write_text(dump(run))
    assert parse_run(["--config", str(tmp_path / "run.yaml")], 1) == run
    with pytest.raises(ConfigError, match=r"'sawtoth' is not one of .*, sawtooth; did you mean sawtooth\?"):
        parse_run(["--lr-decay-style", "sawtoth"], 1)


def test_without_the_package_a_run_is_refused_and_its_checkpoint_opens() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(["--lr-decay-style", "sawtooth", "--sinks", "told"], 1)
    assert caught.value.problems == (
        "--lr-decay-style: 'sawtooth' is not one of constant, linear, cosine, inverse-square-root, wsd",
        f"--sinks: 'told' is not one of any, for no installed package adds to {SINKS}",
    )
    record = json.loads(json.dumps(record_of(parse_run([], 1))))
    record["schedule"]["lr_decay_style"], record["trainer"] = "sawtooth", {"sinks": ["told"]}
    opened = run_from(record)
    assert (opened.schedule.lr_decay_style, opened.trainer.sinks) == ("sawtooth", ("told",))
    record["model"]["activation"] = "of a later version"
    with pytest.raises(Damaged, match="activation"):
        run_from(record)


@pytest.mark.usefixtures("package")
def test_what_cannot_be_loaded_is_a_mistake_in_the_configuration(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lr-decay-style broken: broken of .* \(added_by_a_test:nothing_of"):
        train(words(corpus, tmp_path, "--lr-decay-style", "broken"), Environment(0, 0, 1, 1))
    for style, rate in (("below-zero", r"-1\.0"), ("none", "None"), ("not-a-number", "nan")):
        with pytest.raises(ValueError, match=f"--lr-decay-style {style} gives a rate of {rate} at 0"):
            LearningRate(ScheduleConfig(lr_decay_style=style, train_length=Length(4, Measure.ITERATIONS))).at(0, 0)


LACKS = r"is Half, which lacks note, evaluation, flush, close: a sink has note, step, evaluation, flush, close"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--lr-decay-style number",
            "--lr-decay-style number: .*: a function or class of one argument is .*this is int",
        ),
        ("--lr-decay-style of-two", "--lr-decay-style of-two: .*cannot be called so .missing .*'more'"),
        ("--sinks number", "--sinks number: .*this is int"),
        ("--sinks half", f"--sinks half: half of megazero.sinks {LACKS}"),
        ("--sinks made-half", f"--sinks made-half: made-half of megazero.sinks {LACKS}"),
        (
            "--lr-decay-style linear",
            "linear: megazero has its own linear, and an installed package another .added_by_a_",
        ),
    ],
)
def test_what_cannot_be_used_is_told_before_the_banner(
    flags: str, told: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        train(words(corpus, tmp_path, *flags.split()), Environment(0, 0, 1, 1))
    assert len(caught.value.problems) == 1 and "tp 1 x pp 1" not in capsys.readouterr().out


@pytest.mark.usefixtures("package")
def test_a_plan_says_what_is_wrong_with_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--lr-decay-style", "linear", "--train-iters", "4"]) == 2
    assert "error: megazero has its own linear" in capsys.readouterr().err


def test_tables_and_flags_name_the_same() -> None:
    assert run_options()["lr_decay_style"].choices == ("constant", *STYLES)
    assert all(run_options()[field].section == "trainer" for field in BY_FIELD)
