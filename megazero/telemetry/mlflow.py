"""MLflow as a service of metrics. The package mlflow, or its smaller part mlflow-skinny, is optional."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.telemetry.record import Ending, NoSink
from megazero.telemetry.services import RunId, StepNumbers, name_of

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""State of an `Ending` -> status of a run at MLflow."""
MOST_PARAMS, MOST_METRICS, LONGEST_PARAM = 100, 1000, 6000
"""Of one message; characters of a value."""


def needs_database() -> bool:
    """Whether metrics go to a database that this process opens, which takes further packages: MLflow's default."""
    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    return not address or address.startswith(("sqlite:", "postgresql", "mysql", "mssql"))


class Mlflow:
    """The run at MLflow: a `Service`. MLFLOW_TRACKING_URI says where; without it, a database in the working folder.

    Raises NoSink with what to do if mlflow is missing, or does not know such an address.
    """

    def __init__(self, run: Run, run_id: RunId, tell: Callable[[str], None]) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise NoSink(f"MLflow cannot be imported ({error}): pip install 'megazero[mlflow]'") from error
        self._mlflow: Any = mlflow
        self._run, self._kept, self._tell = run, run_id, tell
        self._client: Any = None
        self._open = ""
        if not needs_database():  # opening a database takes seconds, which its thread has
            self._connect()

    def begin(self) -> None:
        self._connect()
        name = self._run.trainer.mlflow or ""
        before = self._kept_run()
        if before is None:
            title = os.environ.get("MLFLOW_RUN_NAME") or name_of(self._run)
            self._open = self._client.create_run(self._experiment(name), run_name=title).info.run_id
        else:
            self._open = before.info.run_id
            self._client.update_run(self._open, status="RUNNING")
        self._kept.keep(self._open, self._tell)
        self._log_params({} if before is None else before.data.params)
        self._tell(f"MLflow: run {self._open} of {name} at {self._mlflow.get_tracking_uri()}")

    def send(self, rows: Sequence[StepNumbers]) -> None:
        for metrics in _batches([metric for row in rows for metric in self._metrics(row)], MOST_METRICS):
            self._client.log_batch(self._open, metrics=metrics)

    def end(self, ending: Ending) -> None:
        self._client.set_tag(self._open, "ended", ending.words())
        self._client.set_terminated(self._open, STATES[ending.state])

    def _connect(self) -> None:
        if self._client is None:
            try:
                self._client = self._mlflow.MlflowClient()
            except self._mlflow.MlflowException as error:
                raise NoSink(str(error)) from error

    def _kept_run(self) -> Any:
        """The run that goes on; None: there is none yet, or somebody has deleted it."""
        if self._kept.known is None:
            return None
        try:
            before = self._client.get_run(self._kept.known)
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return before if before.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str) -> str:
        """The id of an experiment, which is made if it is not there."""
        there = self._client.get_experiment_by_name(name)
        return there.experiment_id if there is not None else self._client.create_experiment(name)

    def _log_params(self, before: dict[str, str]) -> None:
        """Log the run's settings as params. MLflow changes no param, so a setting that a resumed run has changed
        becomes a tag of the same name.
        """
        settings = {
            f"{section}.{field}": str(value)[:LONGEST_PARAM]
            for section, values in run_dict(self._run).items()
            for field, value in values.items()
        }
        new = [self._mlflow.entities.Param(key, value) for key, value in settings.items() if key not in before]
        for params in _batches(new, MOST_PARAMS):
            self._client.log_batch(self._open, params=params)
        for key, value in settings.items():
            if before.get(key, value) != value:
                self._client.set_tag(self._open, key, value)

    def _metrics(self, row: StepNumbers) -> Iterator[Any]:
        for name, value in row.values.items():
            key = re.sub(r"[^\w\-. :/]", "_", name)  # MLflow refuses other characters, which a file's name may have
            yield self._mlflow.entities.Metric(key, value, int(row.seconds * 1000), row.iteration)


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]
