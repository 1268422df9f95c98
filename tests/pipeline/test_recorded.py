"""The recorded work of a unit beside formulas that share no code with it, and beside what autograd computes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from fused_ops.attention.reach import Reach
from fused_ops.attention.selection import Body
from megazero.config.derive import FULL, NONE, SELECTIVE
from megazero.config.layers.kinds import layers
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.pipeline.measured import MeasuredCase, recorded
from megazero.pipeline.recorded import KernelLog, KernelMode, Sent, UnitWork
from megazero.pipeline.storages import lone_owners, run_backward
from megazero.plan.flops import attention_core_flops, block_flops, head_flops
from tests.plan.test_activations import GEMMA, LLAMA, parsed

MODEL = "--num-layers 4 --hidden-size 96 --num-attention-heads 6 --seq-length 80 --micro-batch-size 3 --bf16"
BLOCK, EMBEDDING, HEAD = (
    StageSpec(range(1, 2), False, False),
    StageSpec(range(0), True, False),
    StageSpec(range(0), False, True),
)


def run_of(words: str) -> Run:
    return parsed(f"{MODEL} {words}", 4)


def work(
    run: Run, spec: StageSpec = BLOCK, again: str = NONE, body: Body = Body.SOFTMAX, kind: str = "cuda"
) -> UnitWork:
    return recorded(MeasuredCase(run, body, kind, spec, again, not spec.has_embedding))


@pytest.mark.parametrize("words", ["", "--tp 2", "--tp 2 --sequence-parallel", f"{LLAMA} --num-query-groups 3", GEMMA])
def test_products_of_a_block_are_those_of_the_formula(words: str) -> None:
    run = run_of(words)
    layer, samples = layers(run.model)[1], 3 / run.parallel.tp
    whole, core = (of(layer, 80) * samples for of in (block_flops, attention_core_flops))
    made = work(run)
    assert made.forward.flops == pytest.approx(whole)
    assert made.backward.flops == pytest.approx(2 * whole)
    assert work(run, again=FULL).backward.flops == pytest.approx(3 * whole)
    # of the core only the scores are needed again, since nothing keeps the context
    assert work(run, again=SELECTIVE).backward.flops == pytest.approx(2 * whole + core / 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("cpu", ""), ("cpu", "--precision fp32"), ("cuda", "--precision fp32"), ("cpu", "--tp 2")],
)
def test_products_of_weight_gradients_are_counted_on_every_device(kind: str, words: str) -> None:
    """They are added to sums of gradients, by a kernel or by torch in place."""
    run = parsed(f"{MODEL.replace('--bf16', '')} {words or '--bf16'}", 4)
    whole = block_flops(layers(run.model)[1], 80) * 3 / run.parallel.tp
    made = work(run, kind=kind)
    assert made.forward.flops == pytest.approx(whole)
    assert made.backward.flops == pytest.approx(2 * whole)


@pytest.mark.parametrize("body", [Body.FLASH, Body.EFFICIENT, Body.FLEX, Body.PACKAGE])
def test_a_fused_body_leaves_out_the_keys_that_no_query_sees(body: Body) -> None:
    run = run_of("--position-embedding rotary")
    plain, fused = work(run), work(run, body=body)
    core = attention_core_flops(layers(run.model)[1], 80) * 3
    seen = 81 / 160
    assert plain.forward.flops - fused.forward.flops == pytest.approx(core * (1 - seen))
    # backward computes the scores again: five products for two of forward
    assert plain.backward.flops - fused.backward.flops == pytest.approx(core * (2 - 2.5 * seen))
    assert fused.forward.moved + fused.backward.moved < plain.forward.moved + plain.backward.moved


def test_a_window_computes_the_pairs_within_it() -> None:
    inside = sum(1 for q in range(80) for k in range(80) if k <= q < k + 13)
    assert Reach(window=13).seen(80) == inside / 80**2
    chunks = sum(1 for q in range(80) for k in range(q + 1) if q // 13 == k // 13)
    assert Reach(chunk=13).seen(80) == chunks / 80**2
    run = run_of("--position-embedding rotary --layer-pattern window:13")
    narrow, wide = (work(each, body=Body.FLEX).forward for each in (run, run_of("--position-embedding rotary")))
    core = 2 * attention_core_flops(layers(run_of("").model)[1], 80) * 3 / 2
    assert wide.flops - narrow.flops == pytest.approx(core * (81 / 160 - inside / 80**2))


@pytest.mark.parametrize("rows", [3, 200])
def test_the_head_multiplies_all_rows_in_its_forward(rows: int) -> None:
    # of 16,000 rows several blocks of logits are made
    run = run_of(f"--micro-batch-size {rows} --global-batch-size {4 * rows}")
    padded = 1000 / run.model.vocab_size if run.model.vocab_size else 1
    made = work(run, HEAD)
    assert made.forward.flops == pytest.approx(3 * rows * head_flops(run.model) * padded)
    assert made.backward.flops == 0


def test_torch_counts_the_same_products() -> None:
    """A block of the same shapes in float32 on the CPU, with torch's own counter."""
    rows, h = 240, 96
    x, weight = torch.randn(rows, h, requires_grad=True), torch.randn(4 * h, h, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (x @ weight.t()).sum().backward()
    products = [p for p in work(run_of("")).forward.products if (p.rows, p.columns, p.depth) == (rows, 4 * h, h)]
    assert len(products) == 1 and counter.get_total_flops() == 3 * products[0].flops


def test_messages_over_tp_are_those_of_the_parallel_layers() -> None:
    whole = 80 * 3 * 96 * 2
    plain, shared = work(run_of("--tp 2")), work(run_of("--tp 2 --sequence-parallel"))
    assert dict(plain.forward.messages) == dict(plain.backward.messages) == {Sent("all_reduce", 2 * whole): 2}
    assert dict(shared.forward.messages) == {Sent("all_gather", whole): 2, Sent("reduce_scatter", whole): 2}
    # inputs of column-parallel layers are gathered again for the gradients of their weights
    assert dict(shared.backward.messages) == {Sent("all_gather", whole): 4, Sent("reduce_scatter", whole): 2}
    assert not work(run_of("")).forward.messages
    again = work(run_of("--tp 2"), again=FULL).backward.messages
    assert dict(again) == {Sent("all_reduce", 2 * whole): 4}


def test_bytes_of_kernels_grow_with_samples_and_launches_do_not() -> None:
    small, large = work(run_of("")), work(run_of("--micro-batch-size 6 --global-batch-size 24"))
    for few, many in ((small.forward, large.forward), (small.backward, large.backward)):
        assert 1.9 * few.moved < many.moved < 2 * few.moved  # weights' part does not double
        assert few.kernels == many.kernels > 10


def test_scores_that_are_stored_move_their_bytes() -> None:
    scores = 3 * 6 * 80 * 80 * 2
    plain, fused = work(run_of("--position-embedding none")), work(run_of("--position-embedding none"), body=Body.FLASH)
    context = 80 * 3 * 96 * 2
    # the softmax reads and writes them, and one copy of the context; flash reads and writes four of its size and norms
    assert plain.forward.moved - fused.forward.moved == 2 * scores + 2 * context - (4 * context + 3 * 6 * 80 * 4)


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    small, large = (work(run_of(f"--vocab-size {size}"), EMBEDDING) for size in (1000, 64000))
    assert small.forward == large.forward and small.backward.moved == large.backward.moved


def test_a_sum_in_place_is_a_kernel_too() -> None:
    """Autograd adds a second gradient to the first one where nobody else has that: a kernel as any other."""
    factor, logs = torch.empty(2, 2, device="meta"), list[KernelLog]()
    for lone in (None, lone_owners()):
        log = KernelLog()
        with torch.enable_grad(), KernelMode(lone, log):
            for _ in range(2):  # what the first use of an operation leaves in cycles may own the first summand too
                log.clear()
                x = torch.empty(2, 2, device="meta", requires_grad=True)
                y = x @ factor
                output = y @ factor + y @ factor
                run_backward(get_gradient_edge(output), torch.empty_like(factor))
        logs.append(log)
    apart, in_place = logs
    assert in_place.work() == apart.work()
    assert in_place.kernels == 8, "three products and a sum there, three products and the sum of gradients back"
