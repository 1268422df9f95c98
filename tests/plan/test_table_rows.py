"""Rows of tables as runs, without the tables."""

from __future__ import annotations

import re

import pytest

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigError, ConfigSource
from megazero.plan.cluster.programs import DEEPSPEED_BF16, MEGATRON
from megazero.plan.cluster.table_rows import COLUMNS, NEEDED, RowRun, run_of_row

PLAIN = {
    "gpus": "16",
    "global_batch": "64",
    "micro_batch": "2",
    "hidden_size": "512",
    "attention_heads": "8",
    "layers": "12",
    "sequence_length": "128",
    "tensor_parallelism": "2",
    "data_parallelism": "4",
    "pipeline_parallelism": "2",
}
FULL = {
    "source": "a paper",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "kv_heads": "4",
    "ffn": "1024",
    "vocab": "1000",
    "seq": "128",
    "gpu": "H100-80GB",
    "gpus": "16",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "virtual_stages": "3",
    "micro_batch": "",
    "global_batch": "32",
    "precision": "bf16 fp32-accumulation",
    "zero_stage": "1",
    "recompute": "selective",
    "sequence_parallel": "1",
}


def runs(row: RowRun) -> list[Run]:
    return [parse_run(words, row.gpus, lambda path: ConfigSource(path, unread=True)) for words in row.choices]


def test_a_row_with_few_columns_is_a_program_of_its_time() -> None:
    row = run_of_row(PLAIN)
    (run,) = runs(row)
    assert (row.gpu, row.gpus, row.interconnect) == ("a100-80gb", 16, "8xedr")
    assert (run.parallel.tp, run.parallel.pp, run.schedule.micro_batch_size) == (2, 2, 2)
    assert run.parallel.partition == (6, 6) and run.parallel.recompute_granularity == "full"
    assert run.model.attention_dropout == run.model.hidden_dropout == 0.1 and run.model.vocab_size == 50257
    assert run.model.make_vocab_size_divisible_by == 128 and run.parallel.zero_stage == 0
    assert run.optimizer.precision == run.parallel.grad_reduce_dtype == "fp16"


def test_a_vocabulary_is_not_padded_on_one_rank() -> None:
    (run,) = runs(run_of_row(PLAIN | {"tensor_parallelism": "1", "data_parallelism": "8"}))
    assert run.model.make_vocab_size_divisible_by == 1


def test_a_row_that_says_more_is_taken_at_its_word() -> None:
    row = run_of_row(FULL)
    assert (row.gpu, row.interconnect) == ("h100", None)
    found = runs(row)
    assert [run.schedule.micro_batch_size for run in found] == [1, 2, 4, 8]
    run = found[0]
    assert (run.model.num_query_groups, run.model.ffn_hidden_size, run.model.vocab_size) == (4, 1024, 1000)
    assert run.parallel.partition == (2,) * 6 and run.parallel.sequence_parallel and run.parallel.zero_stage == 1
    assert (run.optimizer.precision, run.parallel.grad_reduce_dtype) == ("bf16", "fp32")
    assert run.model.attention_dropout == 0.0


def test_an_empty_cell_of_recompute_leaves_virtual_stages_open() -> None:
    row = FULL | {"recompute": "", "virtual_stages": "", "micro_batch": "1"}
    assert [run.parallel.virtual_stages for run in runs(run_of_row(row))] == [1, 2, 3, 6]
    assert {run.parallel.recompute_granularity for run in runs(run_of_row(row))} == {"none"}
    (older,) = runs(run_of_row(row | {"gpu": "A100-80GB", "virtual_stages": "2"}))
    assert older.parallel.recompute_granularity == "selective"


def test_rows_of_the_machine_of_bloom_have_its_links() -> None:
    row = run_of_row(FULL | {"source": "bigscience bloom", "gpu": "A100-80GB", "micro_batch": "1"})
    assert (row.gpu, row.interconnect) == ("a100-80gb-nv4", "4xopa")
    assert runs(row)[0].model.position_embedding == "alibi"
    assert (row.program, run_of_row(FULL).program) == (DEEPSPEED_BF16, MEGATRON)


def test_an_old_program_stores_scores_even_where_nothing_is_computed_again() -> None:
    nothing = FULL | {"recompute": "none", "precision": "fp16", "micro_batch": "1"}
    (old,), (new,) = (runs(run_of_row(nothing | {"gpu": gpu})) for gpu in ("A100-80GB", "H100-80GB"))
    assert (old.parallel.recompute_granularity, new.parallel.recompute_granularity) == ("none", "none")
    assert (old.parallel.attention, old.model.attention_dropout) == ("softmax", 0.1)
    assert (new.parallel.attention, new.model.attention_dropout) == ("auto", 0.0)


def test_an_empty_cell_of_recompute_goes_with_sequence_parallelism() -> None:
    row = FULL | {"recompute": "", "sequence_parallel": "", "micro_batch": "1", "virtual_stages": "1"}
    (open_cells,), (said,) = (runs(run_of_row(each)) for each in (row, row | {"sequence_parallel": "0"}))
    assert open_cells.parallel.sequence_parallel and not said.parallel.sequence_parallel


@pytest.mark.parametrize("name", NEEDED)
def test_a_row_without_what_is_needed_names_its_columns(name: str) -> None:
    row = {column: value for column, value in PLAIN.items() if column not in COLUMNS[name]}
    with pytest.raises(ConfigError, match=f"a row has no {' or '.join(COLUMNS[name])}"):
        run_of_row(row)


def test_replicas_that_contradict_the_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpus 16: tp 2 x pp 2 x dp 8 are 32 ranks"):
        run_of_row(FULL | {"dp": "8"})


def test_a_mistake_names_the_columns_of_the_table() -> None:
    for column, cell, message in (
        ("tensor_parallelism", "two", "^tensor_parallelism two: is not a whole number"),
        ("data_parallelism", "8", "^gpus 16: tensor_parallelism 2 x pipeline_parallelism 2 x data_parallelism 8 are"),
        ("sequence_length", "", "^a row has no sequence_length$"),
    ):
        with pytest.raises(ConfigError) as told:
            run_of_row(PLAIN | {column: cell})
        (problem,) = told.value.problems
        assert re.search(message, problem), problem


def test_numbers_and_words_are_read_as_people_and_programs_write_them() -> None:
    """A column with empty cells has 8.0 for 8 where a program wrote it."""
    written = FULL | {"tp": "2.0", "micro_batch": " 1 ", "global_batch": "32.00", "zero_stage": "1.0"}
    words = {"precision": "BF16 FP32-accumulation", "recompute": "Selective", "sequence_parallel": "0.0"}
    (read,), (plain,) = (
        runs(run_of_row(row)) for row in (written | words, FULL | {"micro_batch": "1", "sequence_parallel": "0"})
    )
    assert read == plain and not read.parallel.sequence_parallel


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("layers", "12.5", "layers 12.5: is not a whole number above 0"),
        ("gpus", "0", "gpus 0: is not a whole number above 0"),
        ("sequence_parallel", "perhaps", "sequence_parallel perhaps: is not one of 0, false"),
        ("precision", "int8", "precision int8: begins with none of fp16, bf16, fp32"),
    ],
)
def test_words_that_say_nothing_are_refused(column: str, cell: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of_row(FULL | {column: cell})
