"""The training loop."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option
from megazero.system import extensions

TRACE_SUFFIXES = (".json", ".svg", ".html")
"""Of --memory-trace: the form of what is written."""


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop: evaluation, stopping and logging."""

    eval_interval: int | None = option(None, derived="at the end only", idle_without="--eval-iters above 0")
    "Iterations between evaluations."
    eval_iters: int = option(10, common=True)
    "Global batches of one evaluation; 0 turns it off."
    eval_at_start: bool = option(False, "--eval-on-start", expert=True, idle_without="--eval-iters above 0")
    "Evaluate before the first step too: what a model that is tuned or resumed can do already."
    test_iters: int = option(0, expert=True)
    "Global batches of the test split on which the finished run is evaluated."
    exit_interval: int | None = option(None, derived="at the end only")
    "Save and stop at the first iteration that is a multiple of this."
    exit_duration_in_mins: float | None = option(None, derived="never; 10 where the run is given no length")
    "Save and stop after so many minutes."
    log_interval: int = option(1)
    "Iterations between log lines."
    metrics_file: str | None = option(None, metavar="PATH", common=True, derived="none")
    "File that gets one JSON object per step."
    tensorboard_dir: str | None = option(None, metavar="DIR", derived="none")
    "Folder for TensorBoard's event files."
    wandb: str | None = option(None, metavar="PROJECT", derived="none", expert=True)
    """Project at Weights & Biases, or TEAM/PROJECT, that gets the metrics of every step. A resumed run goes on there.
    The variables of wandb hold: WANDB_MODE=offline, WANDB_NAME."""
    wandb_group: str | None = option(None, metavar="NAME", derived="none", expert=True, idle_without="--wandb")
    "Group of the run at Weights & Biases."
    mlflow: str | None = option(None, metavar="EXPERIMENT", derived="none", expert=True)
    """Experiment at MLflow that gets the metrics of every step. MLFLOW_TRACKING_URI says where; a resumed run goes on
    there."""
    memory_trace: str | None = option(None, metavar="FILE", derived="none", expert=True)
    """File that gets the predicted memory of a step at every instruction: .json, which Perfetto opens, or a picture
    (.svg, .html) with the .json beside it."""
    report_json: str | None = option(None, metavar="FILE", derived="none")
    """File that gets the run's report as one JSON object before the first step, or from --validate-only: decisions,
    memory, messages, schedule."""
    hardware: str | None = option(
        None, metavar="FILE.yaml", derived="the known entry of the GPU's name, if any", expert=True
    )
    """File with an entry of this run's devices, as --calibrate of megazero plan writes it. By that entry the banner
    predicts the time and the memory of a step. Training does not depend on it."""
    sinks: tuple[str, ...] = option(
        (), many=True, metavar="NAME", choices=(), extended_by=extensions.SINKS, derived="none"
    )
    "Further sinks for the metrics of every step, by their names in installed packages."
    sample_prompt: str | None = option(
        None, metavar="TEXT", derived="the head of a Python function for the default corpus, else none", expert=True
    )
    "Print the model's continuation of this text at the end."
    sample_tokens: int = option(80, expert=True)
    "Number of tokens in that continuation."
    deterministic: bool = option(False, expert=True)
    "Refuse kernels whose results vary from run to run (torch.use_deterministic_algorithms)."
