"""What a process of a CPU has beside its tensors, counted by hand, and its groups beside those of a real grid."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import pytest

from megazero.mpu.axes import axes_of
from megazero.mpu.grid import assembled, single_rank_group
from megazero.plan.cluster.beside_tensors import allowance_of_run, groups_of
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.shared_pages import shared_bytes
from megazero.plan.step_memory import LARGE_PAGE
from megazero.system.host_memory import KEPT_HOLES
from tests.plan.test_activations import parsed
from tests.plan.test_cluster_times import DESK, DEVICE, MODEL, desk

MIB = 1 << 20
WORDS = f"{MODEL} --device cpu --micro-batch-size 1 --seq-length 256 --hidden-size 512"
"""Hidden states of 256 KiB."""


@pytest.mark.parametrize(
    ("words", "ranks", "shared", "groups"),
    [
        ("", 1, 0, 0),
        ("", 2, 16 * 2, 0),  # the world itself
        ("--tp 2", 2, 16 * 2 // 4, 0),
        ("--tp 2", 4, 16 * 2 // 4 + 16 * 2, 2),
        ("", 4, 16 + 3 * 16 // 2, 0),  # of the others it reads its part of a sum, and theirs
        ("--zero-stage 2", 4, 16 * 4, 0),  # it gathers all of them
        ("--pp 2", 4, 16 * 2 + 16 + 3 * 16 // 2, 2),  # a tied embedding's are those of both stages
        ("--tp 2 --sequence-parallel", 2, 16 * 3 // 8, 0),  # half of what it writes is in no gather
        ("--pp 2 --no-shared-memory", 4, 0, 2),
    ],
)
def test_shared_memory_and_groups(words: str, ranks: int, shared: int, groups: int) -> None:
    run = parsed(f"{WORDS} {words}", ranks)
    axes = axes_of(run, ranks)
    assert shared_bytes(run, axes) == shared * MIB and len(groups_of(axes)) == groups
    made = list[tuple[int, ...]]()

    def make(ranks_of):
        made.append(ranks_of(axes.coordinates(0)))
        return replace(single_rank_group(), ranks=made[-1])

    assembled(axes, 0, "cpu", make)
    assert {each for each in made if 1 < len(each) < ranks} == groups_of(axes)


def holed(words: str, holes: float) -> ClusterStep:
    """A step on a processor whose heap has such a share of holes."""
    device = replace(DESK, constants=MappingProxyType({**DESK.constants, "holes": holes}))
    return ClusterStep(parsed(f"{WORDS} {words}"), replace(desk(1), device=device))


@pytest.mark.parametrize("words", ["", "--recompute-granularity full", "--offload-optimizer cpu"])
def test_what_comes_and_goes_leaves_holes(words: str) -> None:
    step = holed(words, 0.5)
    memory = step.memory(0)
    state = memory.state.total + memory.state.elsewhere.memory
    kept = memory.fullest.nbytes - state - step.passing
    assert kept > 0 and kept == sum(
        each for column, each in memory.peaks.device.items() if column in ("logits", "spare buffers", "whole gradients")
    )
    assert step.memory_bytes - holed(words, 0.0).memory_bytes == round(0.5 * step.passing) > 0
    assert sum(step.peaks[0].device.values()) + sum(step.peaks[0].host.values()) == step.memory_bytes


def test_slots_that_nothing_fills_have_no_pages() -> None:
    """A slot is as large as the largest part, and the parts, of which there are no more than slots, are not. Of a large
    page all is there.
    """
    words = "--offload-optimizer nvme --nvme-path x --vocab-size 2000"
    step = holed(words, 0.0)
    memory, off = step.memory(0), step.memory(0).state.elsewhere
    shape = memory.steps.of(0).shape
    parts = [part.state_bytes for bucket in shape.buckets for part in bucket.parts]
    assert len(parts) <= shape.slots and off.slots == shape.slots * max(parts)
    pages = [min(max(parts), math.ceil(part / LARGE_PAGE) * LARGE_PAGE) for part in parts]
    assert memory.unused_slots == off.slots - sum(pages) > 0 and sum(pages) > sum(parts)
    assert step.tensors == memory.peaks.total_bytes - memory.unused_slots
    assert holed(words, 0.01).tensors > step.tensors
    kept = holed(words, 1e6).tensors / memory.peaks.total_bytes - 1
    assert kept == pytest.approx(KEPT_HOLES, rel=1e-6), "what is above its account by more is returned"


def test_an_allowance_is_of_the_run() -> None:
    constants = {**DESK.constants, "context": 3e8, "fragmentation": 0.1, "group": 2e7, "compiler": 5e7, "narrow": 7e6}
    device = replace(DESK, constants=MappingProxyType(constants))
    run = parsed(f"{WORDS} --tp 2 --recompute-granularity full", 4)
    allowance = allowance_of_run(replace(desk(4), device=device), run, axes_of(run, 4))
    assert allowance.fixed == 3e8 + 2 * 2e7 + 40 * MIB + 5e7 + 7e6
    for precision, kernels in (("bf16", 7e6), ("fp16", 7e6), ("fp32", 0.0)):
        other = parsed(f"{WORDS} --tp 2 --precision {precision}", 4)
        beside = allowance_of_run(replace(desk(4), device=device), other, axes_of(other, 4)).fixed
        assert beside == 3e8 + 2 * 2e7 + shared_bytes(other, axes_of(other, 4)) + kernels
    assert allowance.of(1e9) == pytest.approx(1.1e9 + allowance.fixed) and allowance.room(2e9) < 2e9 / 1.1
    card = replace(DEVICE, constants=device.constants)
    assert allowance_of_run(replace(desk(4), device=card), run, axes_of(run, 4)).fixed == 3e8
