"""What autograd saves goes to host memory and comes back: what leaves, when, and what happens if a copy fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.kept import HostActivations, KeptTensors
from megazero.system import host_copies
from megazero.system.host_copies import CopyError
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.plan.meter import metered
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PATIENCE = 60.0
"""Seconds after which a test fails instead of waiting for ever."""


class Several(torch.autograd.Function):
    """x [n, n] and a weight [n, n] -> x * weight, with several views of x saved and one of what is made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.sin(x)
        ctx.save_for_backward(x, x.t(), x[1:, 2:], x.view(torch.int32), weight, weight[2:], y)
        return y * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, turned, part, bits, weight, rows, y = ctx.saved_tensors
        first = x.data_ptr()
        assert turned.data_ptr() == bits.data_ptr() == first and part.data_ptr() == first + 4 * (x.shape[1] + 2)
        assert torch.equal(turned, x.t()) and torch.equal(part, x[1:, 2:]) and torch.equal(bits, x.view(torch.int32))
        assert rows.data_ptr() == weight[2:].data_ptr()
        return grads[0] * torch.cos(x) * weight, grads[0] * y


def kept(host: HostActivations, x: Tensor, weight: Tensor) -> tuple[KeptTensors, Any]:
    """The graph of `Several`, which alone has its input, and where its backward starts."""
    graph = host.graph("micro-batch 0")
    with graph.recording():
        return graph, get_gradient_edge(Several.apply(x * 1.0, weight))


def test_a_piece_of_memory_leaves_once_and_parameters_stay() -> None:
    host, n = HostActivations(CPU), 24
    whole = torch.randn(n * n + 8)
    weight = whole[8:].view(n, n).requires_grad_()
    x = torch.randn(n, n, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for leaves in (False, True):
        graph, edge = kept(host, x, weight)
        if leaves:
            graph.leave()
            assert host.buffers.nbytes == 2 * 4 * n * n, "its input and what it made of it"
            graph.free()
            values = whole.detach().clone()
            whole.untyped_storage().resize_(0)  # what a release does to gathered parameters, and a gather
            whole.untyped_storage().resize_(values.nbytes)
            whole.data.copy_(values)  # autograd compares versions, and gathers make none
            graph.come_back()
            graph.ready()
            assert [buffer.nbytes for buffer in host.buffers.free] == [2 * 4 * n * n]
        torch.autograd.backward([edge], [torch.ones(n, n)])
        found.append((x.grad.clone(), weight.grad.clone()))  # type: ignore[union-attr]
        x.grad = weight.grad = None
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after) and before.abs().sum() > 0


def test_memory_is_free_on_the_device_and_again_after_backward() -> None:
    """The meter sees the host buffer too, which stays. Each sine saves what it reads; the first reads x."""
    n = 64
    one = 4 * n * n
    x = torch.randn(n, n, requires_grad=True)

    holds: list[Any] = []

    def sequence(acts: tuple[str, ...]) -> None:
        graph = HostActivations(CPU).graph("")
        with graph.recording():
            edge = get_gradient_edge(torch.sin(torch.sin(torch.sin(x))).sum())
        for act in acts:
            getattr(graph, act)()
        if "ready" in acts:
            torch.autograd.backward([edge], [torch.ones(())])
        holds.append((graph, edge))

    for acts, bytes_ in (
        ((), 2 * one),
        (("leave",), 4 * one),
        (("leave", "free"), 2 * one),
        (("leave", "free", "come_back"), 4 * one),
        (("leave", "free", "come_back", "ready"), 3 * one),  # the buffer, and the gradient of x
    ):
        holds.clear()
        x.grad = None
        _, taken = metered(partial(sequence, acts))
        assert taken.left == bytes_, acts


def test_what_something_else_holds_stays() -> None:
    """A hidden state that waits for its message, and a constant of a layer."""
    constant = torch.randn(16, 16)
    x = torch.randn(16, 16, requires_grad=True)
    for held, moved in ((True, 0), (False, 16 * 16 * 4)):
        host = HostActivations(CPU)
        graph = host.graph("")
        with graph.recording():
            hidden = torch.sin(x * constant)
            edge = get_gradient_edge((hidden * hidden).sum())
        travelling = hidden.detach()
        del hidden
        if not held:
            del travelling
        graph.leave()
        graph.free()
        # What the sine has saved leaves in any case.
        assert host.buffers.nbytes == 16 * 16 * 4 + moved
        graph.come_back()
        graph.ready()
        torch.autograd.backward([edge], [torch.ones(())])


def test_a_buffer_is_used_again() -> None:
    host = HostActivations(CPU)
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    for _ in range(3):
        graphs = [kept(host, x, weight) for _ in range(2)]
        for graph, _ in graphs:
            graph.leave()
            graph.free()
        for graph, edge in reversed(graphs):
            graph.come_back()
            graph.ready()
            torch.autograd.backward([edge], [torch.ones(8, 8)])
    assert host.buffers.nbytes == 2 * 2 * 8 * 8 * 4


@contextmanager
def copying(by: Callable[[int, int, int], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "copy_bytes", by)
        yield


def test_a_copy_that_fails_is_an_error_where_it_is_waited_for() -> None:
    host = HostActivations(CPU)
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    graph, _ = kept(host, x, weight)

    def fails(*where: int) -> None:
        raise OSError("the bus is gone")

    with copying(fails):
        graph.leave()
        with pytest.raises(CopyError, match=r"^activations of micro-batch 0: a copy of 512 bytes to host memory has"):
            graph.free()
    graph, edge = kept(host, x, weight)
    graph.leave()
    graph.free()
    with copying(fails):
        graph.come_back()
        with pytest.raises(CopyError, match=r"bytes to the device has failed: the bus is gone$"):
            graph.ready()
    del edge
    graph, edge = kept(host, x, weight)
    for act in (graph.leave, graph.free, graph.come_back, graph.ready):
        act()
    torch.autograd.backward([edge], [torch.ones(8, 8)])  # the lanes go on


def test_what_is_copied_lives_until_then_whoever_drops_it() -> None:
    """A step that fails drops its graphs and all that takes their activations."""
    gate, n = threading.Event(), 64
    x, weight = torch.randn(n, n, requires_grad=True), torch.randn(n, n)

    def dropped() -> None:
        graph, _ = kept(HostActivations(CPU), x, weight)
        graph.leave()

    def copy(*where: int) -> None:
        assert gate.wait(PATIENCE)

    with copying(copy):
        _, taken = metered(dropped)
        gate.set()
    assert taken.left == 2 * 2 * 4 * n * n, "both ends of both copies"


class Gated:
    """A lane whose copies are made once the next computation has begun: if none begins before the program waits for
    the copy, that fails. `begun` is called at the begin of each.
    """

    def __init__(self) -> None:
        self.begun_so_far, self.changed, self.count = 0, threading.Condition(), 0

    def begun(self, *_: object) -> None:
        with self.changed:
            self.begun_so_far += 1
            self.changed.notify_all()

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        after, told = self.begun_so_far, list[bool]()
        self.count += 1
        values = [source.clone() for _, source in pairs]
        for to, _ in pairs:
            to.fill_(255)  # NaN to whoever reads it too early

        def copy() -> None:
            with self.changed:
                told.append(self.changed.wait_for(lambda: self.begun_so_far > after, PATIENCE))
            for (to, source), value in zip(pairs, values, strict=True):
                told.append(torch.equal(source, value))
                to.copy_(source)

        thread = threading.Thread(target=copy)
        thread.start()

        def wait() -> None:
            thread.join()
            assert all(told), "no computation has begun beside the copy, or its source was written to"

        return wait


def beside_on_rank(rank: int, size: int, flags: list[str]) -> tuple[float, float, int]:
    """The loss and norm of a step, and the number of copies, which are all made beside computations."""
    job, _ = job_on_rank(rank, size, flags)
    engine, lane = job.trainer.engine, Gated()
    assert isinstance(engine, PipelineEngine)
    if isinstance(engine.parts.host, HostActivations):
        engine.parts.host.to_host = engine.parts.host.to_device = lane  # type: ignore[assignment]
    for stage in job.stages:
        stage.register_forward_pre_hook(lane.begun)
    reducer = job.state.model.reducer
    before = reducer.before_backward

    def before_backward(defer: Any) -> None:
        lane.begun()  # what it needs has come back
        before(defer)

    reducer.before_backward = before_backward  # type: ignore[method-assign]
    values = job.trainer.train_step(stop=False)
    return float(values.loss), float(values.grad_norm), lane.count


def test_copies_travel_beside_computations(corpus: Path, tmp_path: Path) -> None:
    """Every one: no copy is waited for before another computation has begun."""
    flags = [*small_model(4, heads=4), *data_flags(corpus, tmp_path), "--device", "cpu", "--pp", "2"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "3", "--train-iters", "2"]
    stays, leaves = (
        run_ranks(2, beside_on_rank, 2, [*flags, "--offload-activations", words]) for words in ("none", "cpu")
    )
    assert [found[:2] for found in stays] == [found[:2] for found in leaves]
    assert all(count == 0 for *_, count in stays) and leaves[0][2] >= 2 * 3 * 3


def failing_on_rank(rank: int, size: int, flags: list[str]) -> str:
    """What a step says if copies fail. It ends before a second one has begun."""
    job, _ = job_on_rank(rank, size, flags)
    copies = 0

    def copy(*where: int) -> None:
        nonlocal copies
        copies += 1
        raise OSError("the bus is gone")

    with copying(copy), pytest.raises(CopyError) as failed:
        job.trainer.train_step(stop=False)
    assert copies == 1
    return str(failed.value)


def test_a_step_whose_copy_fails_names_what_it_was(corpus: Path, tmp_path: Path) -> None:
    flags = [*small_model(4, heads=4), *data_flags(corpus, tmp_path), "--device", "cpu", "--global-batch-size", "1"]
    flags += ["--micro-batch-size", "1", "--train-iters", "2", "--offload-activations", "cpu"]
    (said,) = run_ranks(1, failing_on_rank, 1, flags)
    assert said.startswith("activations of micro-batch 0, chunk 0, unit 0: a copy of ")
    assert said.endswith(" bytes to host memory has failed: the bus is gone")
