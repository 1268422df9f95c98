"""Messages between stages: what arrives, and what happens when a neighbour does not answer."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from megazero.mpu import grid as grids
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.p2p import Channels, Tag, message_ctas
from tests.ranks import last_words, run_ranks


def ring_body(rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Both directions and wraps at once, receives posted in another order than the sends."""
    grid = build_grid(Axes(pp=3))
    channels = Channels(grid)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    tags = [Tag(backward, k, m) for backward in (False, True) for k in (0, 5) for m in (0, 700)]

    def content(source: int, tag: Tag) -> torch.Tensor:
        return torch.full((4, 3), source * 100 + tags.index(tag), dtype=dtype)

    waiting = []
    for tag in reversed(tags):
        source = after if tag.backward else before
        buffer = torch.empty(4, 3, dtype=dtype)
        waiting.append((buffer, channels.receive(buffer, source, tag), content(source, tag)))
    for tag in tags:
        channels.send(content(rank, tag), before if tag.backward else after, tag)
    for buffer, handle, wanted in waiting:
        handle.wait()
        handle.wait()
        assert torch.equal(buffer, wanted)
    channels.flush()
    return {name: size for (name, _), size in grid.pp.traffic.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_message_reaches_the_buffer_with_its_tag(dtype):
    size = 8 * 12 * dtype.itemsize
    assert run_ranks(3, ring_body, dtype) == [{"send": size, "receive": size}] * 3


def ordered_body(rank: int, axes: Axes) -> None:
    """As on NCCL: a group per channel and no tags. Twelve messages each way round the ring."""
    asked: list[tuple[int | None, ...]] = []
    options = grids.stream_options

    def recorded(backend: str, timeout: timedelta | None, *ctas: int | None) -> Any:
        asked.append(tuple(ctas))
        return options(backend, timeout, *ctas)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "is_on_host", False)
        grid = build_grid(axes)
        patch.setattr(grids, "stream_options", recorded)
        patch.setenv("MEGAZERO_MESSAGE_CTAS", "3")
        channels = Channels(grid)
    assert asked and set(asked) == {(3,)}
    me, stages = grid.at.pp, axes.pp
    arriving = []
    for backward, step in ((False, 1), (True, -1)):
        for m in range(12):
            buffer = torch.empty(2)
            source = (me - step) % stages
            number, tag = m + backward * 50, Tag(backward, 0, m)
            handle = channels.receive(buffer, source, tag)
            arriving.append((buffer, handle, grid.pp.ranks[source] * 100 + number))
            channels.send(torch.full((2,), rank * 100.0 + number), (me + step) % stages, tag)
    for buffer, handle, wanted in arriving:
        handle.wait()
        assert buffer.tolist() == [wanted] * 2
    channels.flush()


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(
    "axes", [Axes(pp=2), Axes(pp=2, dp=2), Axes(pp=3, dp=2), Axes(pp=3, tp=2), Axes(pp=4), Axes(pp=5)]
)
def test_channels_matched_by_order_on_every_grid(axes):
    """Middle stages hold no tied group: the stages must still agree on the names of the channels' groups."""
    run_ranks(axes.world_size, ordered_body, axes)


@pytest.mark.parametrize(("given", "count"), [(None, 4), ("1", 1), ("32", 32), ("0", None)])
def test_a_message_takes_four_thread_blocks_or_what_is_given(given, count, monkeypatch):
    monkeypatch.delenv("MEGAZERO_MESSAGE_CTAS", raising=False)
    if given is not None:
        monkeypatch.setenv("MEGAZERO_MESSAGE_CTAS", given)
    assert message_ctas() == count


@pytest.mark.parametrize("given", ["", "-1", "33", "many", "4.0"])
def test_a_wrong_number_of_thread_blocks_names_the_variable(given, monkeypatch):
    monkeypatch.setenv("MEGAZERO_MESSAGE_CTAS", given)
    with pytest.raises(ValueError, match=f"MEGAZERO_MESSAGE_CTAS={given}: "):
        message_ctas()


def test_tags_are_distinct_numbers():
    numbers = {Tag(b, k, m).number for b in (False, True) for k in range(200) for m in range(0, 3000, 37)}
    assert len(numbers) == 2 * 200 * len(range(0, 3000, 37)) and max(numbers) < 2**31
    assert Tag(True, (1 << 14) - 1, (1 << 16) - 1).number < 2**31


def lonely(rank: int, how: str) -> None:
    """Rank 1 dies, or never answers."""
    channels = Channels(build_grid(Axes(pp=2), timeout=timedelta(seconds=3)))
    if rank == 1:
        if how.endswith("dies"):
            os._exit(7)
        time.sleep(60)
    begin = time.monotonic()
    try:
        if how.startswith("send"):
            channels.send(torch.ones(4), 1, Tag(False, 0, 2))
            channels.flush()
        else:
            channels.receive(torch.empty(4), 1, Tag(True, 0, 2)).wait()
    finally:
        assert time.monotonic() - begin < 20


@pytest.mark.slow
@pytest.mark.parametrize("how", ["send, it dies", "send, it is silent", "receive, it dies", "receive, it is silent"])
def test_a_neighbour_that_fails_is_an_error_with_its_name_and_not_a_hang(how: str):
    what = "sending the hidden states" if how.startswith("send") else "receiving the gradient"
    said = last_words(2, lonely, how)
    assert f"PeerError: {what} of micro-batch 2 at boundary 0" in said and "stage 1 (rank 1) failed" in said
