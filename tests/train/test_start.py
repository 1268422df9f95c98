"""How a run starts: what it says, and what it refuses once it writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import megazero
from megazero.cli.pretrain import train
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from megazero.mpu.meeting import Environment
from megazero.telemetry.units import size
from megazero.train.job import build_job
from megazero.train.prepare import prepare
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks
from tests.train.starts import resolved_for

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
MODEL += ["--vocab-size", "1003"]
BATCH = ["--global-batch-size", "4", "--micro-batch-size", "2", "--train-iters", "3", "--precision", "fp32"]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[str]:
    return [*MODEL, *BATCH, "--data-path", str(corpus), "--data-cache-path", str(tmp_path / "cache")]


def refused(rank: int, words: list[str], world_size: int) -> str:
    """What building the job on this rank is refused with, for a place whose file system says nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.train.path_checks.closed", lambda place: None)
        prepared = prepare(parse_run(words, world_size), world_size, silent)
    with pytest.raises(ConfigError) as caught:
        build_job(prepared, build_grid(axes_of(prepared.run, world_size), "cpu"))
    return str(caught.value)


@pytest.mark.parametrize("flag", ["--save", "--metrics-file"])
def test_what_looks_usable_and_is_not_is_one_line_on_every_rank(flag: str, flags: list[str]) -> None:
    """/proc says that root may write into it, and takes nothing."""
    place = "/proc/self/fdinfo/x"
    for told in run_ranks(2, refused, [*flags, flag, place], 2):
        assert told.startswith(f"1 problem in the configuration:\n  1. {flag} {place}: ")
        assert len(told.splitlines()) == 2


def started(words: list[str], capsys: pytest.CaptureFixture[str], *, trains: bool = False) -> str:
    """What a run prints until its first step, or its end."""
    parsed = parse_arguments(words, 1)
    prepared = prepare(parsed.run, 1, print)
    job = build_job(prepared, build_grid(axes_of(prepared.run, 1), "cpu"), parsed=parsed)
    if trains:
        job.fit()
    return capsys.readouterr().out


def test_the_banner_tells_what_differs_and_where_all_of_it_is(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sequence-parallel", "--adam-beta2", "0.95", "--z-loss", "0.5"]
    told = started([*flags, "--save", str(tmp_path / "s"), *words], capsys)
    differs = told.split("Other than the defaults")[1].split("Worth knowing")[0]
    assert "z_loss=0.5" in differs and "num_layers=1" in differs and f"{tmp_path / 's'}/run.yaml" in differs
    assert "adam_beta2" not in told and "distributed_timeout" not in told, "a default is not told"
    assert "- --sequence-parallel has no effect without --tp above 1" in told.split("Worth knowing")[1]
    kept = yaml.safe_load((tmp_path / "s" / "run.yaml").read_text())
    assert kept["optimizer"]["z_loss"] == 0.5 and kept["optimizer"]["adam_beta2"] == 0.95
    rows = r"\n  padding +the vocabulary takes 1,024 rows in memory, which the table below counts\n"
    assert re.search(rows, told)
    assert "building" not in told and "order-" not in told, "names of cache folders are nobody's concern"


def test_a_stop_without_a_save_says_that_nothing_is_kept(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = started([*flags, "--exit-interval", "1"], capsys, trains=True)
    assert "stopping: --exit-interval 1; nothing is kept: there is no --save DIR\n" in told
    told = started([*flags, "--exit-interval", "1", "--save", str(tmp_path / "s")], capsys, trains=True)
    assert "stopping: --exit-interval 1\n" in told


def test_checkpoints_that_a_run_would_take_the_place_of_are_told(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who forgets --load, or names another run's folder, is refused; who goes on from an earlier one hears of it."""
    place = tmp_path / "s"
    first = [*flags, "--save", str(place), "--save-interval", "1"]
    sentence = f"--save {place} holds checkpoints up to iter_0000003"
    train([*first, "--log-interval", "9"], Environment(0, 0, 1, 1))
    assert "holds checkpoints" not in capsys.readouterr().out

    def told(*more: str) -> str:
        return " ".join(started([*first, *more], capsys).split())  # long lines are broken

    other, earlier = tmp_path / "other", ["--load", str(place / "iter_0000002")]
    shutil.copytree(place, other)
    for elsewhere in ([], ["--load", str(other)], ["--load", str(other), "--validate-only"]):
        with pytest.raises(ConfigError, match=f"--save {place}: holds checkpoints up to iter_0000003 of another run"):
            train([*first, *elsewhere], Environment(0, 0, 1, 1))
    assert sentence in told(*earlier) and f"; --load {place}/iter_0000003 goes on from there" in told(*earlier)
    assert "--keep-last 1 deletes" in told(*earlier, "--keep-last-k", "1")
    assert "holds checkpoints" not in told("--load", str(place))
    ahead = ["--load", str(place / "iter_0000001"), "--validate-only"]
    assert sentence in " ".join(answered([*first, *ahead], capsys).split())
    assert "holds checkpoints" not in answered([*first, "--load", str(place), "--validate-only"], capsys)


def test_a_load_that_is_not_there_is_no_start_from_scratch(flags: list[str], tmp_path: Path) -> None:
    """A typo would train for days from nothing. An empty folder, or the one that --save makes, is as it was."""
    gone, empty = tmp_path / "gone", tmp_path / "empty"
    empty.mkdir()
    for save in ([], ["--save", str(tmp_path / "mine")]):
        with pytest.raises(ConfigError, match=f"--load {gone}: is not there; .* names the same folder as --save"):
            train([*flags, *save, "--load", str(gone), "--validate-only"], Environment(0, 0, 1, 1))
    for fine in (["--load", str(empty)], ["--load", str(gone), "--save", str(tmp_path / "x" / ".." / "gone")]):
        train([*flags, *fine, "--validate-only"], Environment(0, 0, 1, 1))


def test_a_load_that_holds_other_things_is_no_start_from_scratch(flags: list[str], tmp_path: Path) -> None:
    """The folder of all runs is named easily. What a run without a checkpoint leaves is no other thing."""
    runs = tmp_path / "runs"
    (runs / "first" / "iter_0000002").mkdir(parents=True)
    (runs / "empty").mkdir()
    load = [*flags, "--load", str(runs), "--validate-only"]
    nearest = f"--load {runs}: holds no checkpoint, but empty, first; nearest: --load {runs}/first$"
    with pytest.raises(ConfigError, match=nearest):
        train(load, Environment(0, 0, 1, 1))
    train([*load, "--save", str(runs)], Environment(0, 0, 1, 1))
    for name in ("run.yaml", ".tmp-iter_0000001-x"):
        (runs / "empty" / name).touch()
    train([*flags, "--load", str(runs / "empty"), "--validate-only"], Environment(0, 0, 1, 1))


def test_a_folder_of_another_program_is_neither_gone_on_from_nor_saved_into(flags: list[str], tmp_path: Path) -> None:
    """With checkpoints beside it, the model in it could not be told from them. Names of files say what a folder is."""
    place = tmp_path / "model"
    place.mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / name).touch()
    with pytest.raises(ConfigError, match=f"--save {place}: holds a checkpoint of the format hf"):
        train([*flags, "--save", str(place), "--validate-only"], Environment(0, 0, 1, 1))
    (place / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=f"--load {place} can be read as two things: peft and hf"):
        train([*flags, "--load", str(place), "--validate-only"], Environment(0, 0, 1, 1))


def test_a_long_run_that_keeps_nothing_on_the_way_is_told() -> None:
    """With --save alone only the end is saved."""
    line = ["--train-iters", "5000", "--save", "d"]
    lost = "should these 5,000 iterations fail before their end, nothing of them is kept"
    assert parse_arguments(line, 1).notes == (f"--save without --save-interval: {lost}",)
    for fine in ([*line, "--save-interval", "100"], ["--save", "d"]):
        assert parse_arguments(fine, 1).notes == ()
    assert "no --save DIR" in parse_arguments(["--preset", "bloom-560m"], 1).notes[0]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--lr 1000", "--lr 1000: Adam moves each weight by about that much in a step; usual are 1e-5 to 1e-2"),
        ("--lr 0", "--lr 0: no weight changes"),
    ],
)
def test_a_learning_rate_that_learns_nothing_is_worth_knowing(words: str, note: str) -> None:
    assert parse_arguments([*words.split(), "--train-iters", "2"], 1).notes == (note,)
    for fine in ("--lr 0.1", "--lr 1e-5"):
        assert parse_arguments([*fine.split(), "--train-iters", "2"], 1).notes == ()


def answered(words: list[str], capsys: pytest.CaptureFixture[str], world: int = 1) -> str:
    """What all ranks print when they are only to look."""
    for rank in reversed(range(world)):
        train(words, Environment(rank, rank, world, world))
    return capsys.readouterr().out


def test_the_verdict_is_short_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--preset bloom-176b --data-path x --tp 4 --pp 12 --zero-stage 1 --world-size 384 --save d"
    words = [*layout.split(), "--validate-only", "--skip-files"]
    told = answered(words, capsys, world=3)
    assert told.count("OK: 384 ranks, tp 4 x pp 12 x dp 8; bf16, ZeRO-1, 176B parameters") == 1
    assert len(told.splitlines()) < 25 and "hidden_size" not in told
    assert "bubble 14.1% of the step" in told and "1-10   6 blocks                   3.70B  6.89 GiB" in told
    assert "checkpoints and places to write into: --skip-files" in told and "--save without --save-interval" in told
    other = answered([*words, "--pp", "6", "--micro-batch-size", "1"], capsys)
    assert other.startswith("OK: 384 ranks, tp 4 x pp 6 x dp 16")


def test_the_memory_of_a_step_of_many_ranks_is_written_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On cards too, which are not here."""
    page = tmp_path / "plans" / "step.html"
    model = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --eod-id 0 --train-iters 1"
    layout = "--data-path x --tp 4 --pp 12 --zero-stage 3 --micro-batch-size 1 --global-batch-size 64 --device cuda"
    words = f"{model} {layout} --validate-only --skip-files --world-size 384 --memory-trace {page}".split()
    told = " ".join(answered(words, capsys).split())
    ranks = json.loads(page.with_suffix(".json").read_text())["ranks"]
    peaks = [rank["peak"]["bytes"] for rank in ranks]
    assert len(ranks) == 12 and peaks == sorted(peaks, reverse=True)
    assert f"{size(peaks[0])} at most by arithmetic, on {ranks[0]['rank']} during number" in told
    assert "a card of compute capability 9.0 was assumed" in told and page.read_text().count("<svg") == 24


def test_the_verdict_looks_at_what_is_there(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answered([*flags, "--validate-only"], capsys)
    assert told.startswith("OK: 1 rank, tp 1 x pp 1 x dp 1; fp32, ZeRO-0")
    assert "each token id" in told.split("Not checked")[1]
    assert not (tmp_path / "cache").exists(), "nothing is made"
    data = ["--data-path", "1", str(tmp_path / "a"), "2", str(tmp_path / "b")]
    wrong = [*flags, "--validate-only", *data, "--load", "/dev/null"]
    with pytest.raises(ConfigError) as caught:
        train(wrong, Environment(0, 0, 1, 1))
    assert len(caught.value.problems) == 3
    assert answered([*wrong, "--skip-files", "--load", "c"], capsys).startswith("OK")
    unknown = [*MODEL[:-2], *BATCH, "--data-path", "d", "--tokenizer", "byte", "--validate-only", "--skip-files"]
    with pytest.raises(ConfigError, match=r"--tokenizer byte says how many tokens .* give --vocab-size for this check"):
        answered(unknown, capsys)
    assert answered([*unknown, "--vocab-size", "257"], capsys).startswith("OK")
    with pytest.raises(ConfigError, match="--skip-files goes with --validate-only"):
        parse_arguments([*flags, "--skip-files"], 1)


def test_machines_of_other_ranks_are_not_judged_by_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megazero.system.device.cuda_available", lambda: False)
    with pytest.raises(ConfigError, match="--cuda-graphs: torch finds no CUDA device here"):
        train(["--cuda-graphs", "--validate-only"], Environment(0, 0, 1, 1))
    told = answered(["--cuda-graphs", "--validate-only", "--world-size", "2"], capsys)
    said = "this one would say: --cuda-graphs: torch finds no CUDA device"
    assert told.startswith("OK: 2 ranks") and said in " ".join(told.split())


def test_the_configuration_is_printed_for_a_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*flags, "--z-loss", "0.25"]
    told = answered([*words, "--print-config"], capsys, world=2)
    (tmp_path / "run.yaml").write_text(told)
    printed = parse_run(["--config", str(tmp_path / "run.yaml")], 2)
    assert printed == resolved_for(parse_run(words, 2), 2).run and printed.parallel.device == "cpu"
    both = answered([*words, "--print-config", "--validate-only"], capsys)
    assert both.index("z_loss: 0.25") < both.index("OK: 1 rank")


def test_the_banner_lists_what_was_said_and_not_what_follows(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was said: epochs are not the samples that they turn out to be."""
    (tmp_path / "run.yaml").write_text("model: {norm: rmsnorm}\noptimizer: {clip_grad: 0.5}\n")
    at = flags.index("--train-iters")
    said = [*flags[:at], *flags[at + 2 :], "--epochs", "0.25", "--config", str(tmp_path / "run.yaml"), "--eod-id", "7"]
    told = " ".join(started(said, capsys).split("Other than the defaults")[1].split())
    for word in ("train_length='0.25 epochs'", "norm=rmsnorm", "clip_grad=0.5", "eod_id=7", "num_layers=1"):
        assert word in told
    for derived in ("embedding_layernorm", "samples"):
        assert derived not in told
    assert "eod_id" not in started(flags, capsys).split("Other than the defaults")[1]


def refusal(words: list[str]) -> tuple[str, ...]:
    """What the program itself refuses this command line with."""
    with pytest.raises(ConfigError) as caught:
        train(words, Environment(rank=0, local_rank=0, world_size=1, local_world_size=1))
    return caught.value.problems


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["text.txt"], "text.txt is no pair of .bin and .idx, but a file; make a pair from text by"),
        (
            ["someone/texts"],
            "someone/texts: there is no such pair here; if it is a data set of Hugging Face's Hub, make a pair from "
            "text by megazero prepare-data --dataset someone/texts --output-prefix",
        ),
        (["folder"], "folder is a folder without pairs of .bin and .idx; make a pair from text by"),
        (["pair.bin"], "pair.bin: a pair is named without its endings: pair"),
        (["0.7,a,0.3,b"], "0.7,a,0.3,b: weights and prefixes of a blend are words of their own: 0.7 a 0.3 b"),
    ],
)
def test_a_hint_on_data_waits_for_no_tokenizer(
    given: list[str], told: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who names no pair knows yet that it needs a vocabulary, too."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("hello")
    Path("folder").mkdir()
    for ending in (".bin", ".idx"):
        Path("pair" + ending).write_bytes(corpus.with_suffix(ending).read_bytes())
    vocabulary, data = refusal(["--data-path", *given])
    assert vocabulary.startswith("--vocab-size is needed") and f"--data-path: {told}" in data


def test_files_that_are_missing_are_told_beside_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    words = ["--data-path", "nope", "--load", "file", "--tokenizer-path", "x", "--rope", "--save", "file", "--tp", "2"]
    told = refusal(words)
    missing = "no file nope.bin", "--load file: is a file", "--tokenizer-path x is missing", "--save file is no folder"
    for part in missing:
        assert sum(part in problem for problem in told) == 1, (part, told)
    assert all(any(part in problem for problem in told) for part in ("--rope", "--tp 2", "--vocab-size is needed"))
    assert len(told) == 8, told
    for left in (["--validate-only", "--skip-files"], ["--print-config"]):
        assert not [problem for problem in refusal([*words, *left]) if "missing" in problem or "no file" in problem]


def test_a_blend_of_odd_words_and_a_tokenizer_without_its_path_are_told_once(tmp_path: Path) -> None:
    """What the checks of the configuration have said the look at the files does not say again."""
    told = refusal(["--data-path", "0.5", str(tmp_path / "a"), "0.5", "--tokenizer", "hf", "--valid-data-path", "one"])
    assert [problem.split(":")[0] for problem in told] == [
        "--data-path has 3 words",
        "--valid-data-path has 1 word",
        "--tokenizer hf needs --tokenizer-path",
    ]


WAYS: tuple[tuple[list[str], str], ...] = (
    (["--tp", "2"], "to start 2 ranks on this host: --ranks 2, or torchrun --nproc-per-node 2 pretrain_gpt.py and"),
    (["--tp", "2", "--pp", "3"], "to start 6 ranks on this host: --ranks 6, or torchrun --nproc-per-node 6 "),
    (["--tp", "2", "--validate-only", "--world-size", "3"], "nearest world size: 2 or 4; --world-size 4 checks it"),
)


@pytest.mark.parametrize(("words", "told"), WAYS)
def test_a_layout_for_more_ranks_says_how_to_start_them(words: list[str], told: str) -> None:
    """A program that calls `megazero.pretrain` is not told so: it has no flags (tests/train/test_arguments.py)."""
    (problem,) = refusal(words)
    assert told in problem, problem
    with pytest.raises(megazero.ConfigError) as caught:
        megazero.pretrain({"parallel": {"tp": 2}})
    assert "torchrun" not in str(caught.value) and "--" not in str(caught.value)


def test_a_forgotten_tokenizer_is_the_one_that_the_data_record(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some text")
    for kind, files, flags in (
        ("byte", None, "--tokenizer byte"),
        ("gpt2", tmp_path / "bpe", "--tokenizer gpt2 --tokenizer-path and the folder or file of it"),
    ):
        if files is not None:
            train_bpe(["some text, twice; " * 40], 270, files, silent)
        pair = tmp_path / kind
        preprocess(
            [tmp_path / "in.txt"],
            pair,
            PreprocessJob(kind, None if files is None else str(files)),
            workers=1,
            report=silent,
        )
        needed, recorded = refusal(["--data-path", str(pair), "--train-iters", "1"])
        assert needed.startswith("--vocab-size is needed")
        assert recorded.startswith(f"--data-path: {pair} was made with the tokenizer {kind} of ")
        assert recorded.endswith(f": {flags}")


def resumes(rank: int, size: int, flags: list[str], folder: Path) -> int:
    """The iteration at which a run begins, whose rank 1 sees the checkpoint once it has made its checks alone."""
    late = folder / f"rank{rank}"
    late.mkdir()
    if rank == 0:
        late.rmdir()
        late.symlink_to(folder / "saved")
    prepared = prepare(parse_run([*flags, "--load", str(late)], size), size, silent)
    assert (prepared.resumed is None) is (rank == 1)
    if rank == 1:
        late.rmdir()
        late.symlink_to(folder / "saved")
    job = build_job(prepared, build_grid(axes_of(prepared.run, size), "cpu"))
    begins = job.trainer.position.iteration
    job.fit()
    job.close()
    return begins


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_sees_late_is_resumed_by_all(flags: list[str], tmp_path: Path) -> None:
    """A run before it may publish it meanwhile, and a network's file system may show it to one host first."""
    words = [*flags, "--lr-decay-style", "constant"]
    run_ranks(1, trained, 1, [*words, "--save", str(tmp_path / "saved")])
    assert run_ranks(2, resumes, 2, [*words, "--train-iters", "5"], tmp_path) == [3, 3]


def trained(rank: int, size: int, flags: list[str]) -> None:
    job, _ = job_on_rank(rank, size, flags)
    job.fit()
    job.close()
