"""The page of promises says what composes and what is not built: so do the program's tables and the parity tests."""

from __future__ import annotations

import re
from itertools import product

import pytest

from megazero.config.checks_layout import ZERO_STAGES
from megazero.config.flags import option_called
from megazero.config.foreign_flags import our_flag_for
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.placement import AUTO, ROWS
from megazero.config.tiers import Tier
from megazero.pipeline.schedule import CHUNKS, SCHEDULES
from tests.docs.pages import text_of
from tests.parity.tier_layouts import AXES

PAGE = "docs/reference/promises.md"
CODE = re.compile(r"`([^`]+)`")
TIERS = tuple(tier.value for tier in Tier)
PARITY = {"zero_stage": "zero", "pipeline_schedule": "schedule", "precision": "numbers"}
COLUMNS = [row.field for row in ROWS.values() if row.column]
PARITY |= {column: column.removeprefix("offload_") for column in COLUMNS}
"""Field -> the axis of the layouts that tests/parity trains."""


def rows(heading: str) -> list[list[list[str]]]:
    """The names in code font of each cell of the table below a heading."""
    section = text_of(PAGE).split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    return [[CODE.findall(cell) for cell in line.strip("| ").split(" | ")] for line in table]


VALUES = {flag[2:].replace("-", "_"): tuple(values) for (flag,), values in rows("What composes")}
PLAIN = {field: values[0] for field, values in VALUES.items()} | {"pipeline_schedule": "1f1b"}


def flags(values: dict[str, str]) -> list[str]:
    chunks = {"interleaved": 2}.get(values["pipeline_schedule"]) or CHUNKS[values["pipeline_schedule"]] or 1
    words = ["--data-path", "x", "--vocab-size", "64", "--pp", "2", "--num-layers", "8"]
    words += ["--virtual-stages", str(chunks), "--device", "cpu"]
    words += ["--nvme-path", "."] if Tier.DISK.value in values.values() else []
    words += ["--files-path", "."] if Tier.FILES.value in values.values() else []
    return words + [word for field, value in values.items() for word in (f"--{field.replace('_', '-')}", value)]


def test_the_rows_are_the_programs_own_tables() -> None:
    precisions = run_options()["precision"].choices
    assert {
        "zero_stage": tuple(map(str, ZERO_STAGES)),
        "pipeline_schedule": SCHEDULES,
        "precision": precisions,
        **dict.fromkeys(COLUMNS, TIERS),
    } == VALUES


@pytest.mark.parametrize(("one", "other"), [(a, b) for n, a in enumerate(VALUES) for b in [*VALUES][n + 1 :]])
def test_the_program_accepts_every_two_values(one: str, other: str) -> None:
    """On 8 ranks; whatever is wrong would be a ConfigError that names the flags."""
    for first, second in product(VALUES[one], VALUES[other]):
        parse_run(flags(PLAIN | {one: first, other: second}), 8)


@pytest.mark.parametrize("tier", TIERS)
def test_all_columns_rest_on_a_tier_with_each_schedule_and_zero_stage(tier: str) -> None:
    away = dict.fromkeys(COLUMNS, tier)
    for schedule, stage in product(VALUES["pipeline_schedule"], VALUES["zero_stage"]):
        parse_run(flags(PLAIN | away | {"pipeline_schedule": schedule, "zero_stage": stage}), 8)


@pytest.mark.parametrize("field", VALUES)
def test_layouts_that_are_trained_have_each_value(field: str) -> None:
    trained = {str(value).partition(":")[0] for value in AXES[PARITY[field]]}
    assert set(VALUES[field]) <= trained


def test_what_is_not_built_has_no_flag() -> None:
    """And the program answers that word with the page's sentence."""
    named = [flag for absent, _ in rows("What is not built") for flag in absent]
    assert len(named) >= 3
    for flag in named:
        assert option_called(flag) is None
        answer = our_flag_for(flag)
        assert answer is not None and answer.startswith("not built here"), flag


def test_what_the_page_promises_before_a_run_is_there() -> None:
    assert "`--placement auto`" in text_of(PAGE) and AUTO == "auto"
    assert not re.search(r"Offload of parameters|planner is not built", text_of(PAGE))
