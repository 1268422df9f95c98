"""Weights & Biases as a service of metrics. The package wandb is optional."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.telemetry.record import Ending, NoSink
from megazero.telemetry.services import RunId, StepNumbers, name_of

STEP = "iteration"
"""The metric over which all others are drawn. W&B's own counter would refuse steps that a resumed run makes again."""


class Wandb:
    """The run at Weights & Biases: a `Service`. The variables WANDB_* of wandb hold: WANDB_MODE=offline writes files.

    Raises NoSink with what to do if wandb is missing, or nobody is logged in.
    """

    def __init__(self, run: Run, run_id: RunId, tell: Callable[[str], None]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise NoSink(f"Weights & Biases cannot be imported ({error}): pip install wandb") from error
        self._wandb: Any = wandb
        self._run, self._run_id, self._tell = run, run_id, tell
        self._open: Any = None
        # Without this, wandb asks at the terminal, and a run of three weeks waits for a key.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise NoSink("nobody is logged in: `wandb login` or WANDB_API_KEY; WANDB_MODE=offline needs neither")

    def begin(self) -> None:
        *team, project = (self._run.trainer.wandb or "").split("/", 1)
        name = self._run_id.known or uuid4().hex[:12]
        self._open = self._wandb.init(
            entity=team[0] if team else None,
            project=project,
            group=self._run.trainer.wandb_group,
            name=None if "WANDB_NAME" in os.environ else name_of(self._run),
            id=name,
            resume="allow",
            config=run_dict(self._run),
            allow_val_change=True,
            # A run of the calling program stays as it is, and the terminal belongs to the log lines.
            settings=self._wandb.Settings(reinit="create_new", console="off", silent=True),
        )
        self._open.define_metric(STEP)
        self._open.define_metric("*", step_metric=STEP)
        self._run_id.keep(name, self._tell)
        self._tell(f"Weights & Biases: {self._open.dir if self._open.offline else self._open.url}")

    def send(self, rows: Sequence[StepNumbers]) -> None:
        for row in rows:
            self._open.log({STEP: row.iteration} | row.values)

    def end(self, ending: Ending) -> None:
        self._open.summary["ended"] = ending.words()
        self._open.finish(exit_code=int(ending.state == "failed"))
