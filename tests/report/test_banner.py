"""What a run says before its first step: every rank in its place, nothing wider than 100 columns."""

import re
from dataclasses import replace

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import Axes, Coordinates, axes_of
from megazero.plan import knapsack
from megazero.plan.rank_state import StageBytes
from megazero.plan.recompute import recompute_choice
from megazero.plan.step_lists import StageLists
from megazero.plan.traffic import Traffic
from megazero.report.banner import (
    graphs_sentence,
    layers_words,
    model_lines,
    ops_table,
    reductions_sentence,
    schedule_lines,
    sets_sentence,
    stage_table,
    zero_words,
)
from megazero.report.run_report import MachineReport, RunReport, gather
from megazero.report.text_blocks import draw_grid, pairs, sections, table
from megazero.telemetry.units import size

SMALL = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 6 --vocab-size 10 --train-iters 1"


def report_of(words: str, ranks: int) -> RunReport:
    run = parse_run(f"{SMALL} --micro-batch-size 1 {words}".split(), ranks)
    return gather(StageLists(run, axes_of(run, ranks), nccl=False))


def cells(drawn: str) -> list[list[str]]:
    """Cells of the rows of a drawing."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in drawn.splitlines() if "|" in row]


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2), (2, 3, 4)])
def test_every_rank_is_where_the_grid_puts_it(pp: int, dp: int, tp: int) -> None:
    axes = Axes(pp, dp, 1, tp)
    drawn = cells(draw_grid(pp, dp, tp))
    assert len(drawn) == dp
    for d, row in enumerate(drawn):
        assert len(row) == pp
        for p, cell in enumerate(row):
            assert [int(word) for word in cell.split()] == [axes.rank(Coordinates(p, d, 0, t)) for t in range(tp)]


def test_the_48_rank_grid_shows_every_stage() -> None:
    drawn = draw_grid(12, 1, 4)
    assert cells(drawn) == [[f"{4 * p}-{4 * p + 3}" for p in range(12)]]
    assert re.findall(r"\d+", drawn.splitlines()[0]) == [str(p) for p in range(12)]


@pytest.mark.parametrize(("pp", "dp", "tp"), [(12, 8, 4), (64, 32, 8), (1, 4096, 4), (48, 1, 1), (2, 2, 64)])
def test_large_grids_are_abbreviated_and_keep_their_corners(pp: int, dp: int, tp: int) -> None:
    drawn = draw_grid(pp, dp, tp)
    assert max(map(len, drawn.splitlines())) <= 98
    assert len(drawn.splitlines()) <= 12
    shown = cells(drawn)
    assert re.split("[- ]", shown[0][0])[0] == "0"
    assert re.split("[- ]", shown[-1][-1])[-1] == str(pp * dp * tp - 1)


def test_context_parallel_replicas_have_rows_of_their_own() -> None:
    drawn = draw_grid(1, 2, 2, cp=2)
    assert cells(drawn) == [["0 1"], ["2 3"], ["4 5"], ["6 7"]]
    assert "dp 1 cp 0" in drawn


def test_stages_that_are_alike_share_a_line() -> None:
    middle = StageBytes(6, 1, False, False, 10, 20, 40, 120)
    first = StageBytes(5, 1, True, False, 11, 22, 44, 132)
    last = StageBytes(1, 2, False, True, 11, 22, 44, 132)
    text = stage_table([first, *[middle] * 10, last])
    assert [row.split()[0] for row in text.splitlines()[2:]] == ["0", "1-10", "11"]
    assert "embedding + 5 blocks" in text and "6 blocks" in text and "1 block in 2 chunks + head" in text
    assert text.splitlines()[3].endswith("180 B")
    assert max(map(len, text.splitlines())) <= 98


def test_traffic_of_zero_2() -> None:
    """Design: per step stage 1 moves (g+p)P bytes over dp, stage 2 (m*g + p)P."""
    batch = "--global-batch-size 16 --precision bf16"
    many = report_of(f"{batch} --zero-stage 2", 2)
    assert many.state_messages.of_zero_1 == (8 * 4 + 2) / (4 + 2)
    assert "at each of the 8 micro-batches" in reductions_sentence(many) and "5.67 times" in reductions_sentence(many)
    breadth_first = "--pp 2 --virtual-stages 2 --pipeline-schedule gpipe"
    assert "reduced once" in reductions_sentence(report_of(f"{batch} --zero-stage 2 {breadth_first}", 4))
    for words in ("--zero-stage 1", "--zero-stage 2 --micro-batch-size 8", "--zero-stage 3"):
        assert reductions_sentence(report_of(f"{batch} {words}", 2)) == ""
    alike = replace(many, state_messages=replace(many.state_messages, of_zero_1=1.0))
    assert reductions_sentence(alike) == ""
    vertical = f"{batch} --zero-stage 2 --micro-batch-order vertical --vertical-group-size 3"
    groups = reductions_sentence(report_of(vertical, 2))
    assert "at each of the 3 groups of micro-batches" in groups and "(one group is reduced once)" in groups


def test_hybrid_shards_are_told() -> None:
    assert zero_words(1, Axes(dp=4)) == "ZeRO-1"
    assert zero_words(3, Axes(dp=4, shard_size=4)) == "ZeRO-3"
    assert zero_words(2, Axes(dp=2, cp=2, shard_size=2)) == "ZeRO-2 in sets of 2 of 4 replicas"
    said = "a rank sends 6 bytes per parameter inside its set in a step, and 4 across the sets"
    assert sets_sentence(1, Traffic(6.0, 4.0)) == said
    assert sets_sentence(3, Traffic(6.0, 4.0)) == said.replace("sends 6", "sends at most 6")
    alone = sets_sentence(3, Traffic(0.0, 8.0))
    assert alone.startswith("none: in a set of one rank") and "sends 8 bytes per parameter across" in alone


def test_buffers_of_whole_gradients_are_told() -> None:
    """Under ZeRO-2 all parameters here are one bucket: the sum of a micro-batch travels while the next one is added."""
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 128 --global-batch-size 8"
    )

    def said(stage: int) -> str:
        run = parse_run([*words.split(), "--zero-stage", str(stage)], 2)
        return dict(schedule_lines(gather(StageLists(run, axes_of(run, 2), nccl=False))))["buffers"]

    most = size(2 * 4 * (128 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 64))
    assert said(1) == ""
    assert said(2) == f"whole gradients on their way take {most} from the second step on, beside the model state"


def test_late_updates_are_told() -> None:
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 6 --vocab-size 10 --train-iters 1"

    def said(*more: str) -> str:
        run = parse_run([*words.split(), "--global-batch-size", "8", *more], 2)
        return dict(schedule_lines(gather(StageLists(run, axes_of(run, 2), nccl=False)))).get("updates", "")

    assert said() == ""
    assert said("--late-update").startswith("late: a unit is updated in the next step") and "stage" not in said(
        "--late-update"
    )
    assert "a stage that waits for its first hidden states updates meanwhile" in said("--late-update", "--pp", "2")


def test_vertical_order_is_told() -> None:
    """Two replicas of eight micro-batches each, and four on each of two stages."""
    words = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 6 --vocab-size 10 --train-iters 1"

    def said(*more: str) -> dict[str, str]:
        flags = [*words.split(), "--global-batch-size", "32", "--zero-stage", "2", "--micro-batch-order", "vertical"]
        run = parse_run([*flags, *more], 4)
        return dict(schedule_lines(gather(StageLists(run, axes_of(run, 4), nccl=False))))

    alone = said("--tp", "2")
    assert alone["pipeline"] == (
        "one stage, no bubble. Vertical order: all 8 micro-batches pass a layer before the next one, forward and "
        "backward"
    )
    assert not alone["gradients"], "they are reduced once, as under ZeRO-1"
    staged = said("--pp", "2")["pipeline"]
    assert "1f1b: 8 micro-batches over 2 stages, bubble 41.7%" in staged and "at most 8 micro-batch activ" in staged
    assert "--vertical-group-size makes the bubble smaller. Vertical order: all 8" in staged
    groups = said("--pp", "2", "--vertical-group-size", "3")
    assert "3 groups of 3 at most pass a layer" in groups["pipeline"] and "bubble 2" in groups["pipeline"]
    assert "at each of the 3 groups of micro-batches" in groups["gradients"]


def test_activations_that_leave_are_told() -> None:
    """Each recomputed block keeps 16 x 8 fp32 numbers, the embedding two statistics of a row as well. On the first
    stage all of that has time to leave, on the last one less. Two micro-batches are on their way.
    """
    words = "--num-layers 6 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --vocab-size 10 --train-iters 1"
    words += " --recompute-granularity full --precision fp32 --embedding-layernorm --device cpu"

    def said(*more: str) -> str:
        run = parse_run([*words.split(), "--global-batch-size", "3", "--micro-batch-size", "1", *more], 2)
        steps = StageLists(run, axes_of(run, 2), nccl=False)
        return dict(schedule_lines(gather(steps))).get("activations", "")

    block = 16 * 8 * 4
    kept = 3 * block + block + 2 * 16 * 4
    assert said("--pp", "2") == ""
    assert said("--pp", "2", "--offload-activations", "cpu") == (
        f"{size(3 * kept)} of the {size(3 * kept)} that a step keeps leave the device and come back; they wait in "
        f"{size(2 * kept)} of host memory on a rank of stage 0"
    )
    half = said("--pp", "2", "--offload-activations", "cpu:0.5")
    assert half.startswith(f"{size(3 * (kept - 3 * block) + 2 * block)} of"), "embeddings first, then first blocks"


def test_layers_that_differ_are_counted() -> None:
    words = [*SMALL.split(), "--layer-pattern", "window:4 x2, full none"]
    assert layers_words(parse_run(words, 1).model) == "3 of window:4, 1 of full none"
    assert layers_words(parse_run(SMALL.split(), 1).model) == ""


@pytest.mark.parametrize(
    ("words", "heads"),
    [("--num-query-groups 1", "2 heads, 1 key-value head,"), ("--num-query-groups 2", "2 heads,"), ("", "2 heads,")],
)
def test_heads_that_share_keys_are_told(words: str, heads: str) -> None:
    shape = dict(model_lines(report_of(words, 1)))["shape"]
    assert shape == f"4 layers, hidden 8, {heads} sequence 6, vocabulary 10"


def test_sentences_and_tables() -> None:
    staged = report_of("--pp 4 --global-batch-size 12", 4)
    staged = replace(staged, schedule=replace(staged.schedule, bubble=0.2, live=4))
    assert dict(schedule_lines(staged))["pipeline"] == (
        "1f1b: 12 micro-batches over 4 stages, bubble 20.0% of the step, at most 4 micro-batch activations alive on a "
        "rank"
    )
    one = dict(schedule_lines(report_of("--global-batch-size 1", 1)))
    assert one["pipeline"] == "one stage: 1 micro-batch, no bubble"
    ops = {"softmax": "reference", "adam": "reference", "gelu": "cpu"}
    machine = MachineReport("a card", "", {}, overlapped=False, ops=ops, about_ops={"attention": "flash"})
    assert ops_table(machine).splitlines() == ["reference  softmax, adam", "cpu        gelu", "attention  flash"]
    assert table(["changed", "saved", "now"], []) == ""


def test_sections_wrap_words_but_not_paths() -> None:
    path = "/" + "x" * 150
    text = sections(("Data", pairs([("corpus", "word " * 60), ("path", path)])), ("Nothing", ""))
    assert "Nothing" not in text
    assert path in text
    assert all(len(line) <= 100 for line in text.splitlines() if path not in line)
    assert text.isascii()


def test_graphs_that_replay_nothing_say_so() -> None:
    assert dict(schedule_lines(report_of("--global-batch-size 8", 1)))["cuda graphs"] == "", "without --cuda-graphs"
    assert graphs_sentence(6, 8) == "replay 6 of a rank's 8 micro-batches a step"
    none = graphs_sentence(0, 2)
    assert none.startswith("change nothing") and "there are 2" in none


@pytest.mark.parametrize(("words", "told"), [("", True), ("--zero-shard-size 2", True), ("--zero-shard-size 1", False)])
def test_gathers_in_blocks_are_told_where_something_is_gathered(words: str, told: bool) -> None:
    line = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 6 --vocab-size 10 --train-iters 1"
    run = parse_run(f"{line} --global-batch-size 8 --zero-stage 1 --zero-quantized-weights {words}".split(), 4)
    text = dict(schedule_lines(gather(StageLists(run, axes_of(run, 4), nccl=False)))).get("messages", "")
    assert ("parameters are gathered in blocks of int8: 1.016 bytes each, not 2" in text) == told


def test_what_is_recomputed_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--num-layers 8 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --vocab-size 10 --train-iters 1 "

    def told(words: str, ranks: int) -> str:
        run = parse_run(f"{line} --device cpu --global-batch-size 8 --micro-batch-size 2 {words}".split(), ranks)
        return dict(schedule_lines(gather(StageLists(run, axes_of(run, ranks), nccl=False))))["recompute"]

    # 8 blocks, 4 micro-batches, 8 KiB each
    shared = told("--tp 2 --recompute-granularity full --shard-recompute-inputs", 2)
    assert shared.endswith("each of the 2 tp ranks keeps a part of their inputs, and gathers 256 KiB of them in a step")
    budget = "--pp 2 --virtual-stages 2 --attention softmax --activation-memory-budget 900KB"
    assert "more than the least" not in told(budget, 2)
    recompute_choice.cache_clear()
    monkeypatch.setattr(knapsack, "FEW", 0)
    monkeypatch.setattr(knapsack, "MOST", 1)
    assert re.search(r"\(at most [\d.]+% of that more than the least\)", told(budget, 2))
    recompute_choice.cache_clear()
