"""Activations of a user's model in host memory and in files, kept or computed again, beside plain torch in fp64."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from megazero.disk.swap_file import DiskError
from megazero.pipeline.kept import KeptTensors
from megazero.pipeline.kept_disks import GrowingDisks
from tests.own.models import Batch, Case, Trained, Words, plainly_trained
from tests.own.test_step_memory import FULL, held_on_rank
from tests.own.training import RULE, model_of, require_equal, trained_with
from tests.ranks import run_ranks

ROOM = 1_000_000
STEPS, WIDTH = 4, 12


class Ragged(Case):
    """Sentences of a step have one length, those of the next step another one."""

    def micro_batch(self, step: int, number: int) -> Batch:
        draw = torch.Generator().manual_seed(1000 * step + number)
        length = 4 + 3 * (step % 3)
        return {"x": torch.randint(0, 11, (2, length), generator=draw)}


class Start(nn.Module):
    """Hands on masks of whole numbers and of truths, a tensor without elements, and a hidden state that is turned."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        ids = batch["x"]
        hides = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        hidden = self.words(ids).transpose(0, 1)
        return {"hidden": hidden, "counts": (ids > 0).long(), "hides": hides, "none": hidden.new_empty(0, 3)}


class Block(nn.Module):
    """Attention with dropout, of which the masks are saved, and a view of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, hidden: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.norm(hidden["hidden"].transpose(0, 1))
        scores = (x @ x.transpose(1, 2)).masked_fill(hidden["hides"], float("-inf")).softmax(-1)
        made = self.out(F.dropout(scores, 0.2, self.training) @ (x * self.table[1])) * hidden["counts"].unsqueeze(-1)
        return {**hidden, "hidden": hidden["hidden"] + made.transpose(0, 1) + hidden["none"].sum()}


class Spectrum(nn.Module):
    """Saves a complex tensor and its conjugate, which is a view of it; takes a dict and hands on a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: dict[str, Tensor]) -> tuple[Tensor, ...]:
        waves = torch.fft.fft(self.mix(hidden["hidden"]), dim=0)
        power = (waves.conj() * waves * (1 + 2j)).real
        return hidden["hidden"] + 0.1 * torch.tanh(power), hidden["counts"], hidden["hides"], hidden["none"]


class Again(nn.Module):
    def forward(self, hidden: tuple[Tensor, ...]) -> dict[str, Tensor]:
        made, counts, hides, none = hidden
        return {"hidden": made.sin(), "counts": counts, "hides": hides, "none": none}


class End(Words):
    def forward(self, hidden: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        scores, labels = F.linear(hidden["hidden"].transpose(0, 1)[:, :-1], self.words.weight), batch["x"][:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def ragged() -> list[nn.Module]:
    """The table of the first unit is that of the last; one block is used twice."""
    words, twice = nn.Embedding(11, WIDTH), Block()
    return [Start(words), twice, Block(), Spectrum(), Again(), Block(), twice, Block(), Block(), End(words)]


RAGGED = Ragged(ragged, None, lambda draw: {}, steps=STEPS)
plain = cache(plainly_trained)


class Left(NamedTuple):
    """What is trained, how many copies there were to host memory and back, and bytes that were written to files."""

    made: Trained
    copies: int
    written: int


def left_behind(rank: int, layout: Mapping[str, Any]) -> Left:
    with pytest.MonkeyPatch.context() as patch:
        copies, copy_of, files, opens = list[Any](), KeptTensors._copy_of, list[GrowingDisks](), GrowingDisks.__init__

        def counted(kept: KeptTensors, piece: Any) -> Tensor:
            copies.append(piece)
            return copy_of(kept, piece)

        def opened(disks: GrowingDisks, *rest: Any) -> None:
            files.append(disks)
            opens(disks, *rest)

        patch.setattr(KeptTensors, "_copy_of", counted)
        patch.setattr(GrowingDisks, "__init__", opened)
        made = trained_with(RAGGED, {**RULE, "nvme_buffer_bytes": ROOM, **layout}, evaluates_each=True)
        return Left(made, len(copies), sum(disks.bytes_written for disks in files))


PLACES = ("cpu", "cpu:0.5", "nvme", "nvme:0.5")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"pipeline_schedule": "gpipe"},
    {"pipeline_schedule": "zb-h1"},
    {"virtual_stages": 2},
    {"virtual_stages": 2, "pipeline_schedule": "zb-v"},
)


def drawn(seed: int = 37) -> list[tuple[int, dict[str, Any]]]:
    """Ranks and layouts: each place, computed again and kept, on one stage and on two, by all schedules."""
    draw, layouts = random.Random(seed), list[tuple[int, dict[str, Any]]]()
    for number, (pp, place, again) in enumerate(product((1, 2), PLACES, ({}, FULL))):
        layout: dict[str, Any] = {"offload_activations": place, "pp": pp, **again}
        layout |= {"zero_stage": draw.choice((0, 1, 3)), "bucket_size": draw.choice((100, 100_000))}
        layout |= SCHEDULES[number % len(SCHEDULES)] if pp > 1 else draw.choice(({}, {"micro_batch_order": "vertical"}))
        layouts.append((pp * draw.choice((1, 2)), layout))
    return layouts


@pytest.mark.parametrize(("ranks", "layout"), drawn(), ids=str)
def test_a_layout_trains_as_plain_torch(ranks: int, layout: dict[str, Any]) -> None:
    """On all ranks something leaves, however the micro-batches of steps and evaluations differ in length."""
    for rank, left in enumerate(run_ranks(ranks, left_behind, layout)):
        require_equal(left.made, plain(RAGGED), f"{layout}, rank {rank}")
        assert left.copies > 0
        assert (left.written > 0) == layout["offload_activations"].startswith("nvme")


@pytest.mark.parametrize("again", [{}, FULL], ids=["whole", "again"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_the_device_holds_less(place: str, again: dict[str, Any], tmp_path: Path) -> None:
    """Of what units keep more than half is gone at the fullest moment, as torch's profiler sees it."""
    fields = {"nvme_buffer_bytes": 4_000_000, "micro_batch_order": "vertical", **again}
    gone = {"offload_activations": place, **({"nvme_path": [str(tmp_path)]} if place == "nvme" else {})}
    before, after = (run_ranks(1, held_on_rank, "transformer", 1, {**fields, **more})[0] for more in ({}, gone))
    kept = before.planned.device["activations"]
    assert before.measured - after.measured > kept / 2, (before, after)


def engine_in(folder: Path, case: Case = RAGGED, **fields: Any) -> megazero.Engine:
    run = {**RULE, "offload_activations": "nvme", "nvme_path": [str(folder)], "nvme_buffer_bytes": ROOM, **fields}
    return megazero.engine(model_of(case), "adamw", 1e-2, run)


def batches(step: int) -> list[Batch]:
    return [RAGGED.micro_batch(step, number) for number in range(4)]


def require_usable(folder: Path) -> None:
    """Another engine trains with the same folder, and leaves nothing there."""
    with engine_in(folder) as engine:
        loss = float(engine.step(batches(0)).loss)
        assert len([*folder.iterdir()]) == 1, "one file, of now"
    assert loss == pytest.approx(plain(RAGGED).numbers[0][0], rel=1e-9)
    assert not [*folder.iterdir()]


def test_an_error_in_the_midst_of_a_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, forward = list[int](), End.forward

    def fails(unit: End, hidden: dict[str, Tensor], batch: Batch) -> Any:
        forwards.append(1)
        if len(forwards) == 3:
            raise ArithmeticError("no")
        return forward(unit, hidden, batch)

    monkeypatch.setattr(End, "forward", fails)
    with pytest.raises(ArithmeticError, match="no"), engine_in(tmp_path) as engine:
        engine.step(batches(0))
    assert not [*tmp_path.iterdir()]
    require_usable(tmp_path)


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with (
            pytest.raises(DiskError, match=r"offload-activations: activations of .*: .*No space left"),
            engine_in(tmp_path) as engine,
        ):
            engine.step(batches(0))
    assert not [*tmp_path.iterdir()]
    require_usable(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.own import test_activations as here
forward = here.End.forward
count = []
def killed(unit, hidden, batch):
    count.append(1)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(unit, hidden, batch)
here.End.forward = killed
here.engine_in(Path(sys.argv[1])).step(here.batches(0))
"""


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL and [*tmp_path.iterdir()]
    require_usable(tmp_path)


FORGOTTEN = """
import sys
from pathlib import Path
from tests.own import test_activations as here
engine = here.engine_in(Path(sys.argv[1]))
engine.step(here.batches(0))
assert [*Path(sys.argv[1]).iterdir()]
"""


def test_an_engine_that_nobody_closes_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(tmp_path)], check=True)
    assert not [*tmp_path.iterdir()]


def test_there_is_one_file_of_the_largest_pieces(tmp_path: Path) -> None:
    """Behind steps of growing, shrinking and more micro-batches."""
    with engine_in(tmp_path) as engine:
        for step, number in ((0, 4), (2, 4), (0, 4), (1, 6), (2, 2)):
            engine.step([RAGGED.micro_batch(step, at) for at in range(number)])
        engine.step(batches(0))
        (only,) = tmp_path.iterdir()
        disks = engine._activations.disks if engine._activations is not None else None
        assert isinstance(disks, GrowingDisks) and disks.store is not None
        assert only.stat().st_size == disks.store.file_bytes  # type: ignore[attr-defined]


def test_buffers_that_are_too_small_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme_buffer_bytes 40000 does not hold 4 buffers.*nearest: .* 49152"):
        engine_in(tmp_path, nvme_buffer_bytes=40_000)
    with (
        pytest.raises(
            DiskError, match=r"keeps [\d,]+ bytes of a micro-batch: .*50000 does not hold 4 times that; near"
        ),
        engine_in(tmp_path, nvme_buffer_bytes=50_000) as engine,
    ):
        engine.step(batches(2))
    run = {
        "precision": "fp64",
        "offload_activations": "nvme",
        "nvme_path": [str(tmp_path)],
        "nvme_buffer_bytes": 50_000,
    }
    with pytest.raises(ConfigError, match=r"a unit keeps up to .*nvme_buffer_bytes 50000 does not hold 4 times"):
        megazero.engine(model_of(RAGGED), run=run, example=batches(2))
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_is_one_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone: there is no such folder"):
        engine_in(tmp_path / "gone")


class Changes(nn.Module):
    """Changes in place what it has saved for its backward: plain torch refuses the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.linear(hidden)
        squared = made * made
        made.mul_(2)
        return squared


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_what_is_changed_behind_its_forward_is_refused_as_by_torch(place: str, tmp_path: Path) -> None:
    units = [*(nn.Linear(5, 5) for _ in range(2)), Changes(), *(nn.Linear(5, 5) for _ in range(4))]
    batch = {"x": torch.randn(3, 5)}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.Sequential(*units)(batch["x"]).sum().backward()
    model = megazero.Model(units, lambda made, batch: (made.sum(), len(made)), input="x")
    run = {"offload_activations": place, **({"nvme_path": [str(tmp_path)]} if place == "nvme" else {})}
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        megazero.engine(model, run=run) as engine,
    ):
        engine.step([batch] * 2)


def trained_by_the_loop(**fields: Any) -> tuple[list[float], dict[str, Tensor]]:
    data = [{name: tensor[0] for name, tensor in RAGGED.micro_batch(1, number).items()} for number in range(24)]
    run = {**RULE, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": STEPS, "lr": 1e-2, **fields}
    with megazero.training(model=model_of(RAGGED), data=data, run=run) as training:
        losses = [float(step.loss) for step in training.steps()]
        return losses, training.engine.state_dict()


@pytest.mark.parametrize("again", [{}, FULL], ids=["whole", "again"])
def test_the_loop_of_megazero_trains_the_same_from_files(again: dict[str, Any], tmp_path: Path) -> None:
    written = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        end = GrowingDisks.close

        def closed(disks: GrowingDisks) -> None:
            end(disks)
            written.append(disks.bytes_written)

        patch.setattr(GrowingDisks, "close", closed)
        files = {"offload_activations": "nvme", "nvme_path": [str(tmp_path)], "nvme_buffer_bytes": ROOM}
        losses, values = trained_by_the_loop(**files, **again)
    expected, right = trained_by_the_loop()
    assert losses == pytest.approx(expected, rel=1e-9) and written[0] > 0 and not [*tmp_path.iterdir()]
    assert all((value - right[name]).abs().max() < 1e-9 for name, value in values.items())
