"""Of what a search over layouts changes a check reads no field but those that it names: others are left out there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from megazero.config.checks import Check, CheckContext
from megazero.config.idle_flags import effect_checks
from megazero.config.placement import applied
from megazero.config.schema import OffloadConfig, ParallelConfig, Run, ScheduleConfig
from megazero.config.validate import CHECKS, problems_of

RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 3, "pp": 4, "virtual_stages": 2, "micro_batch_size": 3, "sequence_parallel": True, "zero_stage": 3},
    {"pp": 3, "pipeline_schedule": "zb-v", "zero_stage": 2, "zero_shard_size": 5, "offload_optimizer": "cpu"},
    {"tp": 2, "num_attention_heads": 7, "num_query_groups": 3, "vocab_size": 1001, "recompute_granularity": "full"},
    {"pp": 2, "pipeline_schedule": "gpipe", "offload_params": "cpu", "cuda_graphs": True, "precision": "fp16"},
    {"lora_rank": 4, "fp8": "current", "late_update": True, "global_batch_size": 7, "micro_batch_size": 2},
    {"pp": 2, "partition": (3, 9), "activation_memory_budget": 10, "device_memory_budget": 20},
)


CHANGED = {field.name for section in (ParallelConfig, ScheduleConfig, OffloadConfig) for field in fields(section)}


class _Section:
    """A section of a run that remembers which fields were read."""

    def __init__(self, section: object, seen: set[str]) -> None:
        self._section, self._seen = section, seen
        self._names = {field.name for field in fields(section)}  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self._seen.add(name)
        return getattr(self._section, name)

    def __hash__(self) -> int:
        raise TypeError("nothing that is kept by its fields may be asked for: it would hide what is read")


class _Watched:
    """A run whose sections are watched."""

    def __init__(self, run: Run, seen: set[str]) -> None:
        for field in fields(run):
            setattr(self, field.name, _Section(getattr(run, field.name), seen))


def checks() -> Iterator[Check]:
    yield from (*CHECKS, *effect_checks())


@pytest.mark.parametrize("settings", RUNS, ids=range(len(RUNS)))
def test_a_check_reads_what_it_names(settings: dict[str, Any]) -> None:
    run = applied(Run(), settings)
    read = set[str]()
    for check in checks():
        seen = set[str]()
        context = CheckContext(_Watched(run, seen), 8, frozenset(settings), False, frozenset())  # type: ignore[arg-type]
        try:
            list(check.find(context))
        except TypeError as reason:
            assert "hide what is read" in str(reason)
        assert seen & CHANGED <= check.reads, check
        read |= seen
    assert len(read) > 40, "checks were run"


@pytest.mark.parametrize("settings", RUNS, ids=range(len(RUNS)))
def test_problems_of_some_fields_are_those_of_all_that_read_them(settings: dict[str, Any]) -> None:
    plain, run = problems_of(Run(), 8), applied(Run(), settings)
    every, some = problems_of(run, 8), problems_of(run, 8, looked_at={*settings})
    assert [problem for problem in every if problem not in plain] == [each for each in some if each not in plain]
