"""Work beside the program is as late as it may be, or as early, and a missing wait is a difference."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.pipeline.kept import KeptTensors
from megazero.verify.lanes import OrderedCopies, OrderedLane
from megazero.verify.proof import Proof, prove
from megazero.zero import mover
from megazero.zero.mover import Mover

OFFLOADED = "--vocab-size 1001 --num-layers 4"


def proof_of(flags: str, world: int) -> Proof:
    return prove(parse_run(f"{OFFLOADED} {flags}".split(), world), world)


@pytest.mark.parametrize("late", [True, False])
def test_work_is_done_in_order_by_who_waits_or_submits(late: bool) -> None:
    lane, done = OrderedLane(late=late), list[int]()
    work = [lane.submit(done.append, number) for number in range(3)]
    assert done == ([] if late else [0, 1, 2])
    work[1].result()
    assert done == ([0, 1] if late else [0, 1, 2])
    lane.shutdown()
    assert work[2].cancelled() is late


def test_an_error_is_told_to_who_waits_for_it() -> None:
    lane = OrderedLane(late=True)
    failed, after = lane.submit(int, "none"), lane.submit(int, "1")
    assert after.result() == 1
    with pytest.raises(ValueError, match="none"):
        failed.result()


def test_a_thread_of_files_may_work_on_a_lane_that_another_waits_for() -> None:
    """The first work waits for a word of the thread that waits for the second one."""
    lane, word = OrderedLane(late=True), threading.Event()
    first = lane.submit(word.wait, 60)
    second = lane.submit(int, "2")
    other = threading.Thread(target=first.result)
    other.start()
    word.set()
    assert second.result() == 2 and first.result() is True
    other.join()


def test_a_copy_is_made_when_it_is_waited_for() -> None:
    copies, source, target = OrderedCopies(late=True), torch.ones(3), torch.full((3,), 2.0)
    over = copies.copy(target, source)
    source[0] = 5.0
    assert target.tolist() == [2, 2, 2]
    over.result()
    assert target.tolist() == [5, 1, 1]
    kept = copies.copy(target, torch.rand(3), wanted=lambda: False)
    kept.result()
    assert target.tolist() == [5, 1, 1]
    ready = copies.start([(target.view(torch.uint8), source.view(torch.uint8))])
    assert target.isnan().all()
    ready()
    assert target.tolist() == [5, 1, 1]


@pytest.mark.slow
def test_parameters_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updated in host memory, and on their way to the device when a forward reads them."""

    def forget(self: Mover, buckets: Iterable[int]) -> None:
        for index in buckets:
            self._updated.pop(index, ())

    monkeypatch.setattr(Mover, "ready", forget)
    proof = proof_of("--zero-stage 1 --offload-optimizer cpu", 2)
    assert not proof.equal


@pytest.mark.slow
def test_activations_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptTensors, "ready", lambda self: self._pieces.clear())
    proof = proof_of("--offload-activations cpu", 2)
    assert proof.difference is not None and proof.difference.instruction.startswith("backward")


@pytest.mark.slow
def test_a_sum_that_takes_a_gradient_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    added = mover._added
    monkeypatch.setattr(mover, "_added", lambda needs, *rest: added((), *rest))
    proof = proof_of("--zero-stage 2 --offload-optimizer cpu --offload-gradients cpu", 2)
    assert proof.difference is not None and proof.difference.column == "gradient"


@pytest.mark.slow
def test_layouts_that_leave_the_device_are_equal(tmp_path: object) -> None:
    proof = proof_of(f"--zero-stage 3 --offload-optimizer nvme --offload-params nvme --nvme-path {tmp_path}", 2)
    assert proof.equal, (proof.difference, proof.failure)
