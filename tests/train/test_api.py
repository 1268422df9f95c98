"""`megazero.pretrain` and `megazero.training`: a run inside a program, which goes on after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megazero
from megazero.config.parse import ConfigError, parse_run
from megazero.data.progress import silent
from megazero.mpu.meeting import Environment
from megazero.system import threads
from megazero.telemetry.record import StepRecord
from megazero.train import embedded
from megazero.train.prepare import prepare
from tests.parity.training import Outcome, data_flags, job_on_rank
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 1003}
SCHEDULE = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 4, "lr": 0.01}
RUN: dict[str, Any] = {
    "model": MODEL,
    "schedule": SCHEDULE,
    "optimizer": {"precision": "fp64"},
    "trainer": {"eval_iters": 1},
}


def rows_of(number: int, seed: int = 1) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 1003, (number, 9)))


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    """RUN with other values."""
    return {name: {**RUN.get(name, {}), **sections.get(name, {})} for name in {**RUN, **sections}}


@dataclass
class Heard:
    """What callbacks were told."""

    records: list[StepRecord] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    checkpoints: list[tuple[str, int]] = field(default_factory=list)

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_step": self.records.append,
            "on_evaluation": lambda iteration, losses: self.evaluations.append((iteration, losses)),
            "on_checkpoint": lambda folder, iteration: self.checkpoints.append((folder.name, iteration)),
        }

    @property
    def numbers(self) -> list[tuple[int, float, float]]:
        return [(record.iteration, record.loss, record.grad_norm) for record in self.records]


@pytest.fixture(scope="module")
def flags(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """RUN as a command line."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (MODEL | SCHEDULE).items()]
    return [*words, "--precision", "fp64", *data_flags(corpus, tmp_path_factory.mktemp("cache"))]


@pytest.fixture(scope="module")
def ours(flags: list[str]) -> Outcome:
    """What the command line makes of it on one process."""
    job, recorder = job_on_rank(0, 1, flags)
    job.fit()
    return Outcome(recorder.records, recorder.losses, {})


def numbers_of(outcome: Outcome) -> list[tuple[int, float, float]]:
    return [(record.iteration, record.loss, record.grad_norm) for record in outcome.records]


@pytest.mark.parametrize("form", ["mapping", "file", "run"])
def test_a_program_trains_what_the_command_line_trains(
    form: str, flags: list[str], ours: Outcome, corpus: Path, tmp_path: Path
) -> None:
    """To the bit, whatever form the configuration has; and it is told all that a metrics file is."""
    run = parse_run(flags, 1)
    data = {"data_path": [str(corpus)], "data_cache_path": run.data.data_cache_path, "split": "90,10,0"}
    settings = changed(data=data, checkpoint={"save": str(tmp_path / "s"), "save_interval": 3})
    heard = Heard()
    given: Any = settings
    if form == "file":
        given = tmp_path / "run.yaml"
        given.write_text(json.dumps(settings))
    elif form == "run":
        given = run
    result = megazero.pretrain(given, **heard.callbacks())
    assert heard.numbers == numbers_of(ours) and len(heard.numbers) == 4
    assert heard.evaluations == [(4, ours.losses)] and result.evaluations == ours.losses
    assert (result.iteration, result.consumed_samples, result.consumed_tokens) == (4, 16, 128)
    assert result.finished and result.stopped_by is None and result.loss == ours.records[-1].loss
    if form != "run":
        assert heard.checkpoints == [("iter_0000003", 3), ("iter_0000004", 4)]
        assert result.checkpoint == tmp_path / "s" / "iter_0000004"


def test_data_that_are_handed_in_are_trained_on_in_their_order(flags: list[str], ours: Outcome) -> None:
    """The samples of the corpus, handed in as a list of arrays, give the corpus's losses to the bit."""
    datasets = prepare(parse_run(flags, 1), 1, silent).datasets
    train, valid = (
        [np.asarray(part[i]) for i in range(count)] for part, count in ((datasets.train, 16), (datasets.valid, 4))
    )
    heard = Heard()
    result = megazero.pretrain(RUN, train_data=train, valid_data=valid, **heard.callbacks())
    assert heard.numbers == numbers_of(ours) and result.evaluations == ours.losses


def test_the_loop_is_the_callers_and_a_resumed_run_goes_on_with_its_samples(tmp_path: Path) -> None:
    """A loop that is left is a run that stopped: saved, and gone on with to what an undivided run has."""

    class Asked(list[np.ndarray]):
        def __getitem__(self, index: Any) -> Any:
            parsed.append(index)
            return super().__getitem__(index)

    parsed: list[int] = []
    rows, run = Asked(rows_of(10)), changed(data={"num_workers": 0}, trainer={"eval_iters": 0})
    whole = Heard()
    megazero.pretrain(run, train_data=rows, **whole.callbacks())
    known = parsed[:10]
    assert sorted(known) == list(range(10)), "the checksum reads some, here all"
    assert parsed[10:] == [index % 10 for index in range(16)]

    halves: list[tuple[int, float]] = []
    for stop in (2, 9):
        parsed.clear()
        folder = {"save": str(tmp_path), "load": str(tmp_path)}
        with megazero.training({**run, "checkpoint": folder}, train_data=rows) as training:
            for step in training.steps():
                halves.append((step.iteration, float(step.loss)))
                if step.iteration == stop:
                    break
    assert parsed[10:] == [index % 10 for index in range(8, 16)]
    assert halves == [(record.iteration, record.loss) for record in whole.records]
    assert training.result.finished and training.result.checkpoint == tmp_path / "iter_0000004"
    with pytest.raises(
        megazero.ConfigError, match="train_data holds other samples than when the checkpoint was written"
    ):
        megazero.pretrain({**run, "checkpoint": folder}, train_data=rows_of(10, seed=2))


@pytest.mark.parametrize("number", [int, np.int64], ids=["bool", "numpy's bool"])
def test_who_is_told_may_ask_for_the_end(number: type, tmp_path: Path) -> None:
    result = megazero.pretrain(
        changed(checkpoint={"save": str(tmp_path)}, trainer={"eval_iters": 0}),
        train_data=rows_of(5),
        on_step=lambda record: number(record.iteration) == 2,
        on_evaluation=lambda iteration, losses: iteration,  # a number is no request
    )
    assert (result.iteration, result.finished, result.stopped_by) == (3, False, "on_step asked for it")
    assert result.checkpoint == tmp_path / "iter_0000003"


def test_all_that_is_wrong_is_one_exception(tmp_path: Path) -> None:
    wrong = changed(schedule={"global_batch_size": 3, "micro_batch_size": 2, "lr": -1.0}, model={"hidden_size": 18})
    with pytest.raises(megazero.ConfigError) as caught:
        megazero.pretrain(wrong, train_data=rows_of(5))
    assert len(caught.value.problems) >= 3
    for settings, data, told in (
        ({"trainer": {"test_iters": 1, "eval_iters": 1}}, {"train_data": rows_of(5)}, "no test part"),
        ({"data": {"data_path": ["x"]}}, {"train_data": rows_of(5)}, "data.data_path x names other data"),
        ({}, {"train_data": [[1] * 8]}, r"train_data\[0\] is int64 of shape \[8\], not 9 integers"),
        ({}, {"train_data": [[1, 2, 3, 4, 5, 6, 7, 8, 1003]]}, "token id 1003, outside the vocabulary of 1003"),
        ({}, {"train_data": []}, "train_data holds no samples"),
        ({}, {"train_data": rows_of(5), "valid_data": {"few": rows_of(3)}}, r"valid_data\['few'\] holds 3 samples;"),
        ({"model": {"vocab_size": None}}, {"train_data": rows_of(5)}, "model.vocab_size is needed with train_data"),
        ({"nonsense": 1}, {}, "the run: there is no nonsense"),
    ):
        with pytest.raises(megazero.ConfigError, match=told):
            megazero.pretrain(changed(**settings) if "nonsense" not in settings else settings, **data)
    assert list(tmp_path.iterdir()) == []


class Letters:
    """A tokenizer of a program."""

    vocab_size, eod_id = 1003, 1002

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("named", [False, True], ids=["own data", "data that are named"])
def test_a_tokenizer_that_is_handed_in_says_the_vocabulary_and_writes_the_sample(
    named: bool, flags: list[str], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"data_path": [str(corpus)], "data_cache_path": parse_run(flags, 1).data.data_cache_path} if named else {}
    trainer = {"eval_iters": 0, "sample_prompt": "ab", "sample_tokens": 2}
    run = changed(model={"vocab_size": None}, data=data, trainer=trainer)
    rows = None if named else rows_of(5)
    with megazero.training(run, train_data=rows, tokenizer=Letters()) as training:
        assert (training.run.model.vocab_size, training.run.data.eod_id) == (1003, 1002)
        list(training.steps())
    assert "The model continues 'ab':\n\n97 98 " in capsys.readouterr().out


@pytest.fixture
def three_threads() -> Iterator[None]:
    """A number of threads that no run takes here."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_process_is_as_it_was(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        return *handlers, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    monkeypatch.setenv(threads.VARIABLE, "1")
    before = state()
    run = changed(trainer={"eval_iters": 0, "deterministic": True})
    with megazero.training(run, train_data=rows_of(5), handle_signals=True) as training:
        assert all(now != then for now, then in zip(state(), before, strict=True))
        for _ in training.steps():
            os.kill(os.getpid(), signal.SIGTERM)
    assert training.result.stopped_by == "SIGTERM" and training.result.iteration in (1, 2)
    assert state() == before


def test_signals_are_the_main_threads() -> None:
    with (
        ThreadPoolExecutor(1) as other,
        pytest.raises(megazero.ConfigError, match="handle_signals: only the main thread"),
    ):
        other.submit(megazero.pretrain, RUN, train_data=rows_of(5), handle_signals=True).result()


def test_the_package_is_light_and_names_what_it_gives() -> None:
    words = [sys.executable, "-c", "import sys, megazero; print('torch' in sys.modules, sorted(megazero.__all__))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"False {sorted(megazero.__all__)}\n"
    assert set(megazero.__all__) == set(megazero._PLACES)
    assert all(getattr(megazero, name) for name in megazero.__all__)


def twice(rank: int, size: int, layout: dict[str, int], folder: str, own_groups: bool) -> list[Any]:
    """Two runs in one process, the second gone on from the first; and what the program's own group says after each."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if own_groups:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
            port = [None if store is None else store.port]
            dist.broadcast_object_list(port, 0)
            dist.destroy_process_group()
            words = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0]}
            words |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            for name, word in words.items():
                patch.setenv(name, str(word))
        for iterations in (2, 4):
            heard = Heard()
            given = changed(
                parallel=layout,
                schedule={"train_iters": iterations, "lr_decay_iters": 4},
                checkpoint={"save": folder, "load": folder, "async_save": True},
            )
            data = {"train_data": rows_of(10), "valid_data": rows_of(4, seed=3)}
            result = megazero.pretrain(given, **data, **heard.callbacks())
            mine = torch.tensor(float(rank))
            if own_groups:
                assert not dist.is_initialized()
            else:
                dist.all_reduce(mine)
            found.append((heard.numbers, result.evaluations, result.checkpoint, float(mine)))
        if own_groups:  # for the pool
            dist.init_process_group("gloo", store=dist.FileStore(f"{folder}.store", size), rank=rank, world_size=size)
    return found


@pytest.fixture(scope="module")
def twice_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    (runs,) = run_ranks(1, twice, 1, {"bucket_size": 4096}, str(tmp_path_factory.mktemp("alone") / "s"), False)
    return list(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout", "own_groups"),
    [(2, {"tp": 2}, False), (3, {"pp": 3, "zero_stage": 1}, False), (2, {"pp": 2}, True), (2, {}, True)],
    ids=["beside the program's group", "three stages beside it", "torchrun", "torchrun, dp"],
)
def test_a_layout_is_one_process_and_may_be_called_again(
    size: int, layout: dict[str, int], own_groups: bool, twice_alone: list[Any], tmp_path: Path
) -> None:
    layout = {"bucket_size": 4096, **layout}
    for rank, runs in enumerate(run_ranks(size, twice, size, layout, str(tmp_path / "s"), own_groups)):
        for (numbers, losses, checkpoint, total), alone in zip(runs, twice_alone, strict=True):
            expected, expected_losses, _, _ = alone
            assert [iteration for iteration, *_ in numbers] == [iteration for iteration, *_ in expected]
            np.testing.assert_allclose(numbers, expected, rtol=1e-9)
            assert losses == pytest.approx(expected_losses, rel=1e-9)
            assert checkpoint == tmp_path / "s" / f"iter_000000{numbers[-1][0]}"
            assert total == (rank if own_groups else sum(range(size)))


def one_is_wrong(rank: int, size: int, what: str) -> str:
    """What each rank is told when only rank 1 has something wrong."""

    class Broken(list[Any]):
        def __len__(self) -> int:
            raise KeyError("no length today")

    data: Any = rows_of(10)
    if rank == 1:
        data = {"configuration": [[1, 2, 3]], "program": Broken(), "rows": rows_of(10, seed=2)}[what]
    try:
        megazero.pretrain(changed(trainer={"eval_iters": 0}), train_data=data)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    whole = torch.ones(())
    dist.all_reduce(whole)
    megazero.pretrain(changed(trainer={"eval_iters": 0}), train_data=rows_of(10))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("what", ["configuration", "program", "rows"])
def test_what_is_wrong_on_one_rank_is_told_on_all(what: str) -> None:
    zero, one = run_ranks(2, one_is_wrong, 2, what)
    if what == "configuration":
        assert one.startswith("ConfigError: ") and "train_data[0] is int64 of shape [3], not 9 integers" in one
        assert zero.startswith("ConfigError: ") and "rank 1: train_data[0] is int64 of shape [3]" in zero
    elif what == "rows":
        told = "another run than that of rank 0: checksum of the program's own training data: "
        assert one.startswith("ConfigError: ") and zero.startswith("ConfigError: ") and told in one and told in zero
    else:
        assert one == "KeyError: 'no length today'"
        assert zero == "RuntimeError: rank 1 could not begin: KeyError: 'no length today'"


def raised(wrong: dict[int, Exception], seconds: float) -> dict[int, tuple[str, float]]:
    """What each of two ranks, as threads, is told when, if the checks of the rank that is not wrong take so long."""
    store, told = dist.HashStore(), dict[int, tuple[str, float]]()

    def rank(number: int) -> None:
        def find() -> None:
            if number in wrong:
                raise wrong[number]
            time.sleep(seconds)

        begin = time.monotonic()
        with pytest.raises((ConfigError, RuntimeError)) as caught:
            embedded.result_on_all_ranks(find, embedded.Rendezvous(Environment(number, number, 2, 2), store, False))
        told[number] = str(caught.value), time.monotonic() - begin

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return told


@pytest.mark.parametrize(
    ("wrong", "torchrun", "soon"), [(1, False, True), (1, True, True), (0, True, True), (0, False, False)]
)
def test_what_is_wrong_on_one_rank_is_raised_there_soon(
    wrong: int, torchrun: bool, soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may prepare data for minutes. Rank 0 waits for them if its process serves their store."""
    monkeypatch.setattr(embedded, "WAIT_AFTER_FAILURE", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(torchrun))
    told = raised({wrong: ConfigError(["--lr 0"])}, 2.0)
    assert (told[wrong][1] < 1.9) is soon and told[wrong][0].endswith("1. --lr 0")
    assert told[1 - wrong][0].endswith(f"1. rank {wrong}: --lr 0")


def stopped_by_one(rank: int, size: int) -> tuple[int, str | None]:
    with megazero.training(changed(trainer={"eval_iters": 0}), train_data=rows_of(10)) as training:
        for step in training.steps():
            if rank == 1 and step.iteration == 1:
                training.stop("rank 1 has seen enough")
    return training.result.iteration, training.result.stopped_by


@pytest.mark.slow
def test_one_rank_may_stop_all() -> None:
    zero, one = run_ranks(2, stopped_by_one, 2)
    assert zero == (2, "another rank was asked to") and one == (2, "rank 1 has seen enough")
