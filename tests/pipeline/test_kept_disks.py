"""Activations of one graph on their way to disks and back: bytes, buffers, pieces, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.swap_file import DiskError, SwapDamaged
from megazero.pipeline.kept import HostActivations, KeptTensors
from megazero.pipeline.kept_disks import ActivationDisks, GrowingDisks, piece_names

CPU = torch.device("cpu")
BUFFER, SIDE = 64 * 1024, 48
ONE = 4 * SIDE * SIDE
"""Bytes of what a sine saves."""


def opened(folder: Path, pieces: int = 2, buffer: int = BUFFER) -> HostActivations:
    names = piece_names(pieces)
    swap = open_swap([folder], dict.fromkeys(names, buffer), job="activations", slots=1)
    return HostActivations(CPU, disks=ActivationDisks.of(swap, buffer, names))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostActivations]:
    made = opened(tmp_path)
    yield made
    made.close()


def sines(host: HostActivations, x: Tensor, name: str = "unit 3") -> tuple[KeptTensors, Any]:
    graph = host.graph(name)
    with graph.recording():
        return graph, get_gradient_edge(torch.sin(torch.sin(torch.sin(x * 1.0))).sum())


def away(graph: KeptTensors) -> None:
    for act in (graph.leave, graph.free, graph.write, graph.free_host):
        act()


def back(graph: KeptTensors) -> None:
    for act in (graph.read, graph.come_back, graph.ready):
        act()


def test_the_same_bits_come_back_through_one_buffer(host: HostActivations) -> None:
    """Two graphs one behind the other: the second overwrites the buffer in host memory. Pieces are taken in turn."""
    generator = torch.Generator().manual_seed(7)
    xs = [torch.randn(SIDE, SIDE, generator=generator, requires_grad=True) for _ in range(2)]
    wanted = []
    for x in xs:
        torch.sin(torch.sin(torch.sin(x * 1.0))).sum().backward()
        assert x.grad is not None
        wanted.append(x.grad.clone())
        x.grad = None
    assert isinstance(host.disks, ActivationDisks)
    for _ in range(3):
        graphs = [sines(host, x) for x in xs]
        for graph, _ in graphs:
            away(graph)
            assert len(host.buffers.free) == 1 and host.buffers.nbytes == BUFFER
        assert host.disks.free == []
        host.buffers.free[0].fill_(99)
        for (graph, edge), x, expected in zip(graphs, xs, wanted, strict=True):
            back(graph)
            torch.autograd.backward([edge], [torch.ones(())])
            assert x.grad is not None and torch.equal(x.grad, expected) and x.grad.abs().sum() > 0
            x.grad = None
        assert sorted(host.disks.free) == piece_names(2)
    assert host.disks.store.bytes_written == 3 * 2 * BUFFER == host.disks.store.bytes_read


def test_what_does_not_fit_stays_on_the_device(tmp_path: Path) -> None:
    """A buffer has room for two of the three."""
    host = opened(tmp_path, buffer=-(-2 * ONE // 4096) * 4096 + 4096)
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    torch.sin(torch.sin(torch.sin(x * 1.0))).sum().backward()
    assert x.grad is not None
    wanted, x.grad = x.grad.clone(), None
    graph, edge = sines(host, x)
    away(graph)
    assert len(graph._pieces) == 2
    back(graph)
    torch.autograd.backward([edge], [torch.ones(())])
    assert x.grad is not None and torch.equal(x.grad, wanted)
    host.close()


def test_a_graph_of_which_nothing_leaves_takes_no_piece(host: HostActivations) -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)  # which the test holds too
    graph = host.graph("unit 3")
    with graph.recording():
        _edge = get_gradient_edge(torch.sin(x))
    away(graph)
    back(graph)
    assert isinstance(host.disks, ActivationDisks) and len(host.disks.free) == 2 and host.buffers.nbytes == 0


def test_a_graph_for_which_there_is_no_piece_stays(host: HostActivations) -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    graphs = [sines(host, x) for _ in range(3)]
    for graph, _ in graphs:
        away(graph)
    assert [bool(graph._pieces) for graph, _ in graphs] == [True, True, False]
    for graph, edge in graphs:
        back(graph)
        torch.autograd.backward([edge], [torch.ones(())])
    assert isinstance(host.disks, ActivationDisks) and len(host.disks.free) == 2


def test_other_bytes_than_were_written_are_one_clear_error(host: HostActivations) -> None:
    graph, _ = sines(host, torch.randn(SIDE, SIDE, requires_grad=True))
    away(graph)
    assert isinstance(host.disks, ActivationDisks) and isinstance(host.disks.store, SwapSpace)
    (path,) = host.disks.store.paths
    with path.open("r+b") as file:
        file.seek(4096 + 5)
        was = file.read(1)
        file.seek(4096 + 5)
        file.write(bytes([was[0] ^ 1]))
    graph.read()
    with pytest.raises(SwapDamaged, match=r"--offload-activations: activations of unit 3: .*activations 0"):
        graph.come_back()


def test_a_write_that_fails_is_told_before_its_buffer_is_used_again(
    host: HostActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*of: object) -> list[int]:
        raise DiskError("the disk is full")

    monkeypatch.setattr("megazero.disk.swap.run_moves", fails)
    graph, _ = sines(host, torch.randn(SIDE, SIDE, requires_grad=True))
    graph.leave()
    graph.free()
    graph.write()
    with pytest.raises(DiskError, match="--offload-activations: activations of unit 3: the disk is full"):
        graph.free_host()
    assert host.buffers.free == []


def test_files_grow_with_what_leaves_and_what_is_away_comes_back(tmp_path: Path) -> None:
    """A larger graph leaves while a smaller one is away. Behind the pass there are files of the larger pieces alone."""
    opened_so_far = list[SwapSpace]()

    def opens(pieces: Any) -> SwapSpace:
        job = f"grown{len(opened_so_far)}"
        opened_so_far.append(open_swap([tmp_path], pieces, job=job, slots=1))
        return opened_so_far[-1]

    disks = GrowingDisks(opens, 1 << 20)
    host = HostActivations(CPU, disks=disks)
    for number in range(2):
        host.expect(2)
        xs = [torch.randn(side, side, requires_grad=True) for side in (8, 96)]
        graphs = [sines(host, x) for x in xs]
        for graph, _ in graphs:
            away(graph)
        assert len([*tmp_path.iterdir()]) == 2 - number
        for (graph, edge), x in zip(graphs[::-1], xs[::-1], strict=True):
            back(graph)
            torch.autograd.backward([edge], [torch.ones(())])
            once = x.detach().requires_grad_()
            torch.sin(torch.sin(torch.sin(once * 1.0))).sum().backward()
            assert x.grad is not None and once.grad is not None and torch.equal(x.grad, once.grad)
    size = opened_so_far[-1].file_bytes
    assert len(opened_so_far) == 2 and host.buffers.nbytes < size
    host.expect(3)
    assert not [*tmp_path.iterdir()], "made anew with a piece more"
    assert disks.bytes_written == sum(each.bytes_written for each in opened_so_far) > 0
    host.close()
