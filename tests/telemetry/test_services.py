"""Services of metrics get every number of a run, and a run neither waits nor ends for them."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import megazero
from megazero.checkpoint.fence import FenceLost
from megazero.config.dump import run_dict
from megazero.config.schema import CheckpointConfig, Run, TrainerConfig
from megazero.config.source import ConfigError
from megazero.telemetry import services
from megazero.telemetry.record import FINISHED, Ending, StepRecord
from megazero.telemetry.services import RunId, ServiceSink, StepNumbers
from tests.telemetry.services import wandb_runs


def record(iteration: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(iteration, 8, 64, loss, 0.1, 1e-3, 1.0, iteration == 2, 8, 1.5, 64.0, 2.0, 7)


class Fake:
    """A service that fails as often as it is told, and can be made to wait."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.calls, self.rows = failures, list[str](), list[StepNumbers]()
        self.answers = threading.Event()
        self.answers.set()
        self.sent, self.failed = threading.Event(), threading.Event()

    def begin(self) -> None:
        self.calls.append("begin")

    def send(self, rows: Sequence[StepNumbers]) -> None:
        self.answers.wait()
        if self.failures:
            self.failures -= 1
            self.failed.set()
            raise ConnectionError("nobody is there")
        self.rows += rows
        self.sent.set()

    def end(self, ending: Ending) -> None:
        self.calls.append(ending.words())


def test_rows_come_in_order_and_the_run_ends_as_it_says() -> None:
    service, told = Fake(), list[str]()
    sink = ServiceSink("--here", service, told.append)
    for iteration in (1, 2):
        sink.step(record(iteration, 1 / iteration))
    sink.evaluation(2, {"valid_loss": 0.25})
    sink.ended(Ending("stopped", "SIGTERM"))
    sink.close()
    assert [row.iteration for row in service.rows] == [1, 2, 2]
    expected = {key: value for key, value in record(2).as_json().items() if key != "iteration"}
    assert service.rows[1].values == expected | {"skipped": 1.0} and service.rows[2].values == {"valid_loss": 0.25}
    assert service.calls == ["begin", "stopped: SIGTERM"] and told == []


def test_a_run_without_a_step_leaves_nothing() -> None:
    service = Fake()
    sink = ServiceSink("--here", service, print)
    sink.ended(FINISHED)
    sink.close()
    assert service.calls == []


def test_a_run_that_ends_without_a_word_has_failed() -> None:
    service = Fake()
    sink = ServiceSink("--here", service, print)
    sink.step(record(1))
    sink.close()
    assert service.calls == ["begin", "failed"]


def test_rows_wait_for_a_service_that_fails() -> None:
    service, told = Fake(failures=3), list[str]()
    sink = ServiceSink("--here", service, told.append, retry=0.001)
    sink.step(record(1))
    assert service.sent.wait(60)
    sink.step(record(2))
    sink.ended(FINISHED)
    sink.close()
    assert [row.iteration for row in service.rows] == [1, 2] and service.calls == ["begin", "finished"]
    first, last = told
    assert first.startswith("WARNING: --here: ConnectionError: nobody is there. The run goes on") and "again" in last


def test_a_service_that_never_works_loses_rows_and_says_so() -> None:
    service, told = Fake(failures=10**9), list[str]()
    sink = ServiceSink("--here", service, told.append)
    sink.step(record(1))
    assert service.failed.wait(60)
    sink.step(record(2))
    sink.ended(FINISHED)
    sink.close()
    assert len(told) == 2 and told[1] == "WARNING: --here: 2 rows of numbers did not reach the service"


def test_nobody_waits_for_a_service_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the oldest rows go where too many wait."""
    monkeypatch.setattr(services, "CLOSING_SECONDS", 0.05)
    monkeypatch.setattr(services, "MOST_ROWS", 3)
    service, told = Fake(), list[str]()
    service.answers.clear()
    sink = ServiceSink("--here", service, told.append)
    for iteration in range(1, 9):
        sink.step(record(iteration))
    sink.ended(FINISHED)
    sink.close()
    assert told == ["WARNING: --here: the run ends, although the service has not answered for 0.05 s"]
    assert service.rows == [] and len(sink._rows) <= 3
    service.answers.set()


def test_an_id_belongs_to_the_run_that_goes_on_in_its_folder(tmp_path: Path) -> None:
    def id_of(save: str, load: str | None, first: int, place: str = "p") -> RunId:
        loaded = None if load is None else str(tmp_path / load)
        run = Run(checkpoint=CheckpointConfig(save=str(tmp_path / save), load=loaded))
        return RunId.of("wandb", place, run, first, None)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    id_of("a", None, 1).keep("abc", print)
    assert id_of("a", "a", 5).known == "abc" and id_of("a", "a/iter_0000004", 5).known == "abc"
    others = id_of("a", "a", 1), id_of("b", "a", 5), id_of("a", "b", 5), id_of("a", "a", 5, "q"), id_of("a", None, 5)
    assert [other.known for other in others] == [None] * 5
    (tmp_path / "a" / ".wandb-run").write_text("{")
    assert id_of("a", "a", 5).known is None


def test_a_job_that_has_lost_its_folder_writes_no_id(tmp_path: Path) -> None:
    def lost() -> None:
        raise FenceLost("another job has it")

    told: list[str] = []
    RunId(tmp_path / ".wandb-run", "p", None, lost).keep("abc", told.append)
    assert not list(tmp_path.iterdir()) and "another job has it" in told[0]


RUN: dict[str, Any] = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 1003},
    "schedule": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 4, "lr": 0.01},
    "optimizer": {"precision": "fp32"},
}
"""Of the layers of a run."""


def trained(folder: Path, corpus: Path, trainer: dict[str, Any], steps: int = 4, **checkpoint: Any) -> Any:
    settings = RUN | {
        "schedule": RUN["schedule"] | {"train_iters": steps},
        "data": {"data_path": [str(corpus)], "data_cache_path": str(folder / "cache"), "num_workers": 0},
        "trainer": {"eval_iters": 1, "metrics_file": str(folder / "metrics.jsonl")} | trainer,
        "checkpoint": {"save": str(folder / "saved"), "save_interval": 2} | checkpoint,
    }
    return megazero.pretrain(settings)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics file as services get it: booleans are numbers."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: float(v) if isinstance(v, bool) else v for key, v in line.items()} for line in lines]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which W&B and MLflow keep what they would send."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    yield tmp_path
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it keeps the folder that it has read


@pytest.mark.slow
def test_wandb_has_every_metric_and_a_resumed_run_goes_on_there(offline: Path, corpus: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    places = {"wandb": "us/poems", "wandb_group": "small"}
    trained(offline, corpus, places | {"exit_interval": 2})
    trained(offline, corpus, places, load=str(offline / "saved"))
    first, second = wandb_runs(offline)
    assert first.rows + second.rows == lines_of(offline)
    assert {"loss", "grad_norm", "lr", "tokens_per_second", "valid_loss"} <= {key for row in second.rows for key in row}
    started = first.started
    assert (started.entity, started.project, started.run_group) == ("us", "poems", "small")
    assert started.run_id == second.started.run_id and started.display_name == "saved"
    assert (first.exit_code, first.summary["ended"]) == (0, "stopped: --exit-interval 2")
    assert (second.exit_code, second.summary["ended"]) == (0, "finished")
    run = megazero.Run()
    assert first.config.keys() >= run_dict(run).keys() and first.config["model"]["hidden_size"] == 16
    assert (first.config["trainer"]["exit_interval"], second.config["trainer"]["exit_interval"]) == (2, None)


@pytest.mark.slow
def test_mlflow_has_every_metric_and_a_resumed_run_goes_on_there(offline: Path, corpus: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    client = mlflow.MlflowClient()

    def the_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("poems").experiment_id])
        return run

    trained(offline, corpus, {"mlflow": "poems", "exit_interval": 2})
    stopped = the_run()
    assert (stopped.info.status, stopped.data.tags["ended"]) == ("KILLED", "stopped: --exit-interval 2")
    trained(offline, corpus, {"mlflow": "poems"}, load=str(offline / "saved"))
    run, expected = the_run(), lines_of(offline)
    assert (run.info.run_name, run.info.status, run.data.tags["ended"]) == ("saved", "FINISHED", "finished")
    keys = {key for line in expected for key in line} - {"iteration"}
    assert run.data.metrics.keys() == keys and "valid_loss" in keys
    for key in keys:
        history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
        assert sorted(history) == sorted((line["iteration"], line[key]) for line in expected if key in line), key
    params = run.data.params
    assert params["model.hidden_size"] == "16" and len(params) == sum(map(len, run_dict(megazero.Run()).values()))
    assert (params["trainer.exit_interval"], run.data.tags["trainer.exit_interval"]) == ("2", "None")


@pytest.mark.slow
def test_a_run_that_fails_is_failed_there(offline: Path, corpus: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    settings = RUN | {
        "data": {"data_path": [str(corpus)], "data_cache_path": str(offline / "cache"), "num_workers": 0},
        "trainer": {"eval_iters": 0, "wandb": "poems", "mlflow": "poems"},
    }
    with pytest.raises(ZeroDivisionError), megazero.training(settings) as run:
        for _ in run.steps():
            raise ZeroDivisionError
    (kept,) = wandb_runs(offline)
    assert (kept.exit_code, kept.summary["ended"], len(kept.rows)) == (1, "failed", 1)
    client = mlflow.MlflowClient()
    (other,) = client.search_runs([client.get_experiment_by_name("poems").experiment_id])
    assert (other.info.status, other.data.tags["ended"]) == ("FAILED", "failed")


@pytest.mark.slow
def test_numbers_that_are_not_finite_and_names_with_signs_arrive(offline: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    from megazero.telemetry.mlflow import Mlflow

    service = Mlflow(Run(trainer=TrainerConfig(mlflow="e")), RunId(None, "e", None, None), print)
    service.begin()
    service.send([StepNumbers(1, 5.0, {"loss": math.nan}), StepNumbers(1, 5.0, {"valid_loss/a+b": 2.5})])
    service.end(FINISHED)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert math.isnan(run.data.metrics["loss"]) and run.data.metrics["valid_loss/a_b"] == 2.5


@pytest.mark.slow
def test_who_is_not_logged_in_is_told_before_the_run(
    offline: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(offline))  # without a .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"wandb.* poems: nobody is logged in: `wandb login` or WANDB_API_KEY"):
        trained(offline, corpus, {"wandb": "poems"})


@pytest.mark.slow
def test_an_address_that_mlflow_does_not_know_is_told_before_the_run(
    offline: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://there")
    with pytest.raises(ConfigError, match=r"mlflow.* poems: .*gopher"):
        trained(offline, corpus, {"mlflow": "poems"})
