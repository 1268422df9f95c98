"""What is found out before any process group exists: folders that cannot be used, and what is validated on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megazero.checkpoint.format import seal
from megazero.config.derive import validation_samples
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.schema import CheckpointConfig, Run
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from megazero.convert.registry import format_table
from megazero.data.inspect import first_samples
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from megazero.system.writable import closed
from megazero.train import prepare as preparation
from megazero.train.checked import dry_run_text
from megazero.train.init_from import model_source
from megazero.train.path_checks import check_paths
from megazero.train.prepare import Prepared, prepare
from tests.convert.sources import made
from tests.parity.training import job_on_rank, small_model
from tests.reference import REFERENCE, needs_reference

SHAPE = [*small_model(2, heads=4), "--seq-length", 16, "--train-iters", 2]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    return [*SHAPE, "--data-path", corpus, "--data-cache-path", tmp_path / "cache"]


def prepared_for(words: Iterable[object]) -> Prepared:
    """What the start prepares for a run on one process."""
    return prepare(parse_run([*map(str, words)], 1), 1, silent)


def problems(words: Iterable[object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as wrong:
        prepared_for(words)
    return wrong.value.problems


def test_every_place_that_cannot_be_used_is_named_at_once(flags: list[object], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    places = ["--save", file / "runs", "--tensorboard-dir", file, "--metrics-file", tmp_path, "--load", file]
    assert set(problems([*flags, *places])) == {
        f"--save {file}/runs: {file} is no folder",
        f"--tensorboard-dir {file} is no folder",
        f"--metrics-file {tmp_path}: is a folder; name a file",
        f"--load {file}: is a file; name a folder of checkpoints",
    }
    assert not (tmp_path / "cache").exists(), "nothing is prepared for a run that could not keep its results"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="circle: is a link, and nothing is where it leads"):
        prepared_for([*flags, "--metrics-file", tmp_path / "circle"])


def test_no_run_is_saved_into_a_checkpoint(flags: list[object], tmp_path: Path) -> None:
    write_native(made(), tmp_path / "run", TargetOptions(), lambda count: None)
    shutil.copytree(tmp_path / "run" / "iter_0000007", tmp_path / "best")
    for place, told in (
        ("run/iter_0000007", f"is a checkpoint; name a folder of checkpoints, such as {tmp_path}/run"),
        ("best", f"is a checkpoint; name a folder of checkpoints, such as {tmp_path}"),
        ("best/x", f"lies in the checkpoint {tmp_path}/best; name"),
        ("new/iter_0000001", f"has the name of a checkpoint; name a folder of checkpoints, such as {tmp_path}/new"),
    ):
        (problem,) = (each for each in problems([*flags, "--save", tmp_path / place]) if "name a folder" in each)
        assert problem.startswith(f"--save {tmp_path / place}: {told}")


def test_a_memory_trace_replaces_nothing_but_another(flags: list[object], tmp_path: Path) -> None:
    kept, folder = tmp_path / "step.json", tmp_path / "folder.html"
    kept.write_text("[1]")
    folder.mkdir()
    for file, said in (
        (tmp_path / "step.svg", f"{kept} is there already and is no memory trace; name another file"),
        (folder, f"{folder}: is a folder; name a file"),
        (kept / "step.svg", f"{kept} is no folder"),
        (tmp_path / "m.html", "is the file of --metrics-file"),
    ):
        (problem,) = problems([*flags, "--metrics-file", tmp_path / "m.json", "--memory-trace", file])
        assert said in problem
    assert kept.read_text() == "[1]"


def test_all_that_is_missing_is_named_at_once(corpus: Path, tmp_path: Path) -> None:
    """Prefixes, a tokenizer, a damaged checkpoint: not one after the other, each behind the preparation of what is
    before it.
    """
    broken = tmp_path / "runs" / "iter_0000003"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{")
    (broken.parent / "latest").write_text(broken.name)
    (tmp_path / "tokenizer").mkdir()
    data = ["--data-path", 0.5, tmp_path / "one", 0.3, corpus, 0.2, tmp_path / "two"]
    more = ["--valid-data-path", "held-out", tmp_path / "three", "--load", broken.parent, "--save", corpus.parent]
    words = [*SHAPE, *data, *more, "--tokenizer", "hf", "--tokenizer-path", tmp_path / "tokenizer"]
    told = problems(words)
    expected = "--data-path /one", "--data-path /two", "--valid-data-path /three", "tokenizer", "--load damaged"
    for problem, parts in zip(told, expected, strict=True):
        assert all(part in problem for part in parts.split()), told


def test_a_model_of_another_format_is_not_passed_over(flags: list[object], tmp_path: Path) -> None:
    """A run would start from scratch, and its user take it for one that goes on."""
    convert(made(), format_table()["hf"], tmp_path / "model", TargetOptions(), silent)
    (problem,) = problems([*flags, "--load", tmp_path / "model"])
    assert problem.startswith(f"--load {tmp_path}/model: is a checkpoint of the format hf") and "--init-from" in problem


def test_data_of_another_tokenizer_are_seen_without_reading_them(tmp_path: Path) -> None:
    """By --validate-only too, and beside what else is wrong."""
    (tmp_path / "in.txt").write_text("some text, twice; some text")
    preprocess([tmp_path / "in.txt"], tmp_path / "own", PreprocessJob("byte", None), workers=1, report=silent)
    train_bpe(["some text, twice; " * 40], 270, tmp_path / "bpe", silent)
    data = ["--data-path", tmp_path / "own", "--valid-data-path", "held-out", tmp_path / "nothing"]
    words = [*SHAPE[:8], "--train-iters", 2, *data, "--tokenizer", "gpt2", "--tokenizer-path", tmp_path / "bpe"]
    missing, other = check_paths(parse_run([str(word) for word in words], 1)).problems
    assert missing.startswith(f"--valid-data-path: no file {tmp_path}/nothing")
    assert other.startswith(f"--data-path: {tmp_path}/own.bin was made with another tokenizer (byte of 257 tokens")


def test_a_metrics_file_of_another_kind_is_refused_and_left_as_it_is(flags: list[object], tmp_path: Path) -> None:
    foreign = tmp_path / "thesis.txt"
    foreign.write_text("first chapter\nthe last line, without an end")
    with pytest.raises(ConfigError, match=r"--metrics-file .*thesis.txt: is no metrics file .*name another file"):
        prepared_for([*flags, "--metrics-file", foreign])
    assert foreign.read_text() == "first chapter\nthe last line, without an end"


def test_a_folder_without_permission_to_write_is_refused(
    flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root, who may run tests, may write anywhere
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert problems([*flags, "--save", tmp_path / "a" / "b", "--metrics-file", tmp_path / "m"]) == (
        f"--save {tmp_path}/a/b: {tmp_path} may not be written in",
        f"--metrics-file {tmp_path} may not be written in",
    )


CLOSED = (
    ("/proc/x", "/proc takes no folders, as a place of the system's own (No such file or directory)"),
    ("/dev/null/x", "/dev/null is no folder"),
    ("a" * 300, " has 300 bytes, and at most 255 can be written"),
    ("file", "file is no folder"),
    ("file/x", "file is no folder"),
)


@pytest.mark.parametrize(("place", "told"), CLOSED)
def test_a_place_that_takes_no_folder_is_told_before_the_data_are_prepared(
    place: str, told: str, flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    (problem,) = problems([*flags, "--save", place])
    assert problem.startswith(f"--save {place}") and told in problem
    both = problems([*flags, "--save", place, "--load", place])
    assert problem in both


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({"f_flag": os.ST_RDONLY}, "the file system of {} is mounted read-only"),
        ({"f_bavail": 0}, "the file system of {} is full: 0 of its bytes are free"),
        ({"f_blocks": 0, "f_bavail": 0}, None),  # a file system in memory without a limit
    ],
)
def test_a_file_system_says_that_nothing_can_be_written(
    says: dict[str, int], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {name: getattr(os.statvfs(tmp_path), name) for name in ("f_flag", "f_namemax", "f_blocks", "f_bavail")}
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(**system | says))
    assert closed(f"{tmp_path}/a") == (told and told.format(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_places_that_are_still_to_be_made_are_fine(flags: list[object], tmp_path: Path) -> None:
    both = tmp_path / "a" / "b c"
    places = ["--save", both, "--load", both, "--metrics-file", tmp_path / "d" / "m", "--tensorboard-dir"]
    prepared = prepared_for([*flags, *places, tmp_path / "t"])
    assert len(prepared.datasets.train) >= 48
    assert not (tmp_path / "a").exists(), "looked at, not made"


def test_a_split_without_validation_is_fine_beside_named_sets(flags: list[object], corpus: Path) -> None:
    words = [*flags, "--split", "1,0,0"]
    with pytest.raises(ConfigError, match=r"its valid split is empty.*--eval-iters 0"):
        prepared_for(words)
    prepared = prepared_for([*words, "--valid-data-path", "held-out", corpus])
    assert len(prepared.datasets.valid) == 0
    assert len(prepared.datasets.named_valid["held-out"]) >= validation_samples(prepared.run)


def test_kernels_that_do_not_exist_are_refused(flags: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", "avx1024")
    with pytest.raises(ConfigError, match="MEGAZERO_FUSED=avx1024: choose one of auto, reference"):
        prepared_for(flags)


@needs_reference
def test_data_are_built_for_the_samples_that_were_asked(tmp_path: Path) -> None:
    """Megatron-LM's own order for 20,000 samples.

    Of them 18,000 are used here, for which the second epoch would be shuffled apart.
    """
    assert REFERENCE is not None
    record = REFERENCE / "orders" / "owt-seq128-seed1234-two-epochs.json"
    settings = json.loads(record.read_text())
    words = ["--data-path", REFERENCE / settings["blend"][0][0], "--data-cache-path", tmp_path, "--vocab-size", 5000]
    words += ["--split", settings["split"], "--seed", settings["seed"], "--seq-length", settings["sequence_length"]]
    words += ["--train-samples", settings["requested_samples"][0], "--eval-iters", 0]
    words += ["--global-batch-size", 9000, "--micro-batch-size", 9000]
    datasets = prepared_for([*SHAPE[:6], *words]).datasets
    expected = np.load(record.with_suffix(".npz"))["train"]
    assert len(datasets.train) == settings["lengths"][0] and len(expected) > 10
    assert np.array_equal(first_samples(datasets.train, len(expected)), expected)


@pytest.fixture
def prepared(flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The training samples of a run of so long that resumes from a checkpoint."""
    saved = tmp_path / "saved"
    saved.mkdir()

    def build(length: list[object], found: Any = None) -> Any:
        monkeypatch.setattr("megazero.train.path_checks.find", lambda folder: found)
        monkeypatch.setattr("megazero.train.checked.resume_problems", lambda *arguments: [])
        monkeypatch.setattr(preparation, "compare", lambda *arguments: SimpleNamespace(problems=(), changes=()))
        words = [*flags[:-4], *length, *flags[-4:], "--load", saved, "--eval-iters", 0]
        shape = words.index("--train-iters")
        words[shape : shape + 2] = []
        if found is not None:
            found.run["data"] = {"data_path": [str(words[words.index("--data-path") + 1])]}
        return prepared_for(words).datasets.train

    return build


def checkpoint(plans: Any, iteration: int = 0, consumed: int = 0) -> Any:
    progress = {"data_plans": [list(plan) for plan in plans], "iteration": iteration, "consumed_samples": consumed}
    manifest = SimpleNamespace(tensors={})
    return SimpleNamespace(progress=progress, run={}, layout={}, path=Path("runs/a"), manifest=manifest)


def test_a_checkpoint_of_data_built_for_the_samples_used_goes_on_with_these(prepared: Callable[..., Any]) -> None:
    """Versions before built them for whole batches of --train-samples."""

    def of(samples: int, found: Any = None) -> Any:
        return prepared(["--train-samples", samples, "--global-batch-size", 500], found)

    asked, used = of(1499), of(1000)
    assert asked.plans != used.plans, "the test has to tell them apart"
    for then in (asked, used):
        assert of(1499, checkpoint(then.plans)).plans == then.plans
    with pytest.raises(ConfigError, match=r"1,499 samples take .* epochs of the data in another order"):
        of(1499, checkpoint([(99, 0)]))


def test_data_are_built_for_what_a_resumed_run_still_takes(prepared: Callable[..., Any]) -> None:
    """Batches of another size follow a checkpoint: neither its samples nor the run's own are those of this size from
    the first step on.
    """

    def of(iterations: int, batch: int, found: Any = None) -> Any:
        return prepared(["--train-iters", iterations, "--global-batch-size", batch, "--micro-batch-size", 1], found)

    once = of(1, 1)
    epoch = len(once)
    assert epoch > 600 and [plan[0] for plan in once.plans] == [1]
    then = checkpoint(once.plans, 10, 10 * (epoch // 20))  # half of the epoch
    with pytest.raises(ConfigError, match=f"{10 * (epoch // 20) + 12 * (epoch // 23):,} samples take 2 epochs"):
        of(22, epoch // 23, then)  # smaller batches, which 22 steps from the first sample on would have room for
    assert of(14, epoch // 10, then).plans == once.plans  # and larger ones, which they would not
    with pytest.raises(
        ConfigError, match=r"1 sample takes 1 epoch of the data in another order than the checkpoint's 2, so"
    ):
        of(1, 1, checkpoint([(2, 0)]))


def test_a_checkpoint_of_an_impossible_run_is_a_problem_like_others(tmp_path: Path) -> None:
    """Its manifest has the right hash, so only the values show it."""
    before = Path(__file__).parents[1] / "checkpoint" / "before_2026_11"
    saved = shutil.copytree(before, tmp_path / "saved")
    (manifest,) = saved.glob("iter_*/manifest.json")
    content = manifest.read_bytes()[: -len(seal(b""))].replace(b'"num_layers": 3', b'"num_layers": "three"')
    manifest.write_bytes(content + seal(content))
    run = Run(checkpoint=CheckpointConfig(load=str(saved)))
    (problem,) = check_paths(run).problems
    assert problem.startswith(f"--load {saved}: ") and "num_layers: 'three' is not a whole number" in problem


@pytest.fixture
def saved(flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A run with a checkpoint in runs/a, in the present folder; the flags with which it was made."""
    monkeypatch.chdir(tmp_path)

    def save(*more: object) -> list[str]:
        words = [str(word) for word in [*flags, "--eval-iters", 0, "--lr-decay-style", "constant", *more]]
        job, _ = job_on_rank(0, 1, [*words, "--save", "runs/a"], keep_log=True)
        job.fit()
        return words

    return save


def validated(words: Iterable[object]) -> str:
    """What --validate-only says."""
    return dry_run_text(parse_arguments([*map(str, words), "--validate-only"], 1), 1)


def test_a_checkpoint_without_optimizer_says_which_flags_go_with_it(saved: Callable[..., list[str]]) -> None:
    words = [*saved("--no-save-optim")[:-1], "--train-iters", "4"]
    (problem,) = problems([*words, "--load", "runs/a"])
    assert problem.startswith("--load runs/a: runs/a/iter_0000002 is without the optimizer's exp_avg and exp_avg_sq")
    with pytest.raises(ConfigError) as refused:
        validated([*words, "--load", "runs/a"])
    assert refused.value.problems == (problem,)
    for ways in (["--no-load-optim"], ["--finetune"]):
        assert ways[0] in problem
        assert prepared_for([*words, "--load", "runs/a", *ways]).resumed is not None
        assert validated([*words, "--load", "runs/a", *ways]).startswith("OK")
    assert (told := "--init-from runs/a/iter_0000002") + " in place of --load" in problem
    assert prepare(parse_run([*words, *told.split()], 1, model_source), 1, silent).resumed is None
    (other,) = (line for line in problems([*words, "--load", "runs/a", "--optimizer", "sgd"]) if "exp_avg" in line)
    assert "the optimizer's exp_avg (saved" in other


def test_a_check_alone_finds_a_file_that_was_cut(saved: Callable[..., list[str]]) -> None:
    words = [*saved(), "--load", "runs/a", "--train-iters", "4"]
    assert validated(words).startswith("OK")
    (file,) = Path("runs/a").glob("iter_0000002/*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 8)
    with pytest.raises(ConfigError, match=f"runs/a/iter_0000002 is damaged: {file.name} has {size - 8} bytes instead"):
        validated(words)
    file.unlink()
    with pytest.raises(ConfigError, match=f"is damaged: {file.name}: No such file"):
        validated(words)


def test_a_damaged_checkpoint_is_one_problem(saved: Callable[..., list[str]]) -> None:
    """It is not told of its folder, too, that it holds no checkpoint."""
    words = [*saved(), "--load", "runs/a", "--train-iters", "4"]
    (manifest,) = Path("runs/a").glob("iter_0000002/manifest.json")
    manifest.unlink()
    with pytest.raises(ConfigError) as raised:
        validated(words)
    (problem,) = raised.value.problems
    assert "iter_0000002 is damaged: manifest.json is missing" in problem and raised.value.status == 1


def test_forgotten_settings_are_in_a_file(saved: Callable[..., list[str]], corpus: Path) -> None:
    words = saved()
    names = ["--data-path", corpus, "--data-cache-path", "cache", "--eval-iters", 0, "--vocab-size", 1003]
    places = ["--load", "runs/a", "--save", "runs/a"]
    for length in (["--train-iters", 4], ["--epochs", 3]):
        *others, last = problems([*names, *places, *length])
        assert len(others) > 3 and last == "to go on with all settings of that run: --config runs/a/run.yaml"
    flags = last.partition(": ")[2].split()
    assert prepared_for([*flags, *places, "--train-iters", 4]).resumed is not None
    assert len(problems([*words, *places, "--num-layers", 3])) == 1


def test_a_checkpoint_beyond_the_end_is_told_with_both_numbers(
    saved: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """SHAPE trains 2 iterations of 24 samples."""
    words = saved()
    for length, told in (
        (["--train-iters", "2"], "iteration 2 is the run's last"),
        (["--train-iters", "1"], "iteration 2 is reached, which is beyond --train-iters 1"),
        (["--train-samples", "30"], "48 samples are trained, which is more than --train-samples 30"),
        (["--train-samples", "50"], "iteration 2 is the run's last"),
    ):
        others = [
            word for place, word in enumerate(words) if "--train-iters" not in words[max(0, place - 1) : place + 1]
        ]
        capsys.readouterr()
        job_on_rank(0, 1, [*others, *length, "--load", "runs/a"], keep_log=True)[0].fit()
        said = " ".join(capsys.readouterr().out.split())
        assert f"nothing left to train: {told}" in said and " 48 of 30 samples" not in said
