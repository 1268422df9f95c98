"""Whether a model can be split over a number of ranks, by the rules of a training run."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.lengths import Length, Measure
from megazero.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, Run, ScheduleConfig
from megazero.config.validate import problems_of


def layout_problems(model: ModelConfig, *, tp: int, pp: int, dp: int = 1) -> list[str]:
    """The reasons why it cannot, which are problems of a run's validation; empty if it can."""
    parallel = ParallelConfig(tp=tp, pp=pp)
    asked = Run(
        replace(model, document_mask=False),
        parallel,
        OptimizerConfig(precision="fp32"),
        ScheduleConfig(1, dp, train_length=Length(1, Measure.ITERATIONS)),
    )
    return problems_of(asked, tp * pp * dp)
