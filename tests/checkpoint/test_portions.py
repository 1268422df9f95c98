"""A state that is in memory a portion at a time: the same files, the same values, and one portion held at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.blocks import BlockFile, BlockWriter
from megazero.checkpoint.format import COLUMNS, CheckpointError
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import read_manifest, read_portions
from megazero.checkpoint.save_plan import stored_to_write, values_to_write
from megazero.checkpoint.writer import write_fragments
from megazero.mpu.parameter import ParameterKind, ParameterSpec
from megazero.zero.layout import Fragment
from tests.checkpoint.fakes import Layout, fragments_of, global_values, save
from tests.checkpoint.resting import RestingState, checkpoints_of, files_of, rest_of
from tests.checkpoint.runs import names, open_run, save_at, values_at
from tests.forks import fork

BEFORE = Path(__file__).parent / "before_2026_11" / "iter_0000005"
HOME = Layout(tp=2, dp=2, pp=2, bucket=150, divisor=8)
AWAY = [
    Layout(),
    Layout(tp=3, dp=2, bucket=100),
    Layout(dp=5, bucket=400),
    Layout(pp=4, dp=3, tied=True),
    Layout(dp=4, shard_size=2, tp=2, bucket=300, divisor=4),
]
SIZES = (1, 37, 512, 10**9)
"""Elements of a portion: less than a block of 16, parts of fragments, several of them, all."""


def resting(
    layout: Layout, rank: int, iteration: int | None, most: int, dtype: torch.dtype = torch.float32
) -> RestingState:
    """The state of a rank with the values of an iteration; None: NaN."""
    values = None if iteration is None else values_at(iteration)
    fragments = fragments_of(layout, rank, values, dtype)
    return RestingState(layout.fragments(rank), rest_of(fragments), most)


@pytest.mark.parametrize("most", SIZES)
def test_the_files_are_those_of_a_resident_state(tmp_path: Path, most: int) -> None:
    resident, state = open_run(tmp_path / "resident", "t")
    resident.claim()
    save_at(resident, state, 3)
    mine = resting(Layout(), 0, 3, most)
    checkpoints = checkpoints_of(tmp_path / "resting", mine, Layout().all_fragments)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3, "consumed_samples": 72})
    assert files_of(tmp_path / "resting" / "iter_0000003") == files_of(tmp_path / "resident" / "iter_0000003")
    assert mine.most_alive == 1 and mine.closed == 1


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("most", SIZES)
def test_every_rank_writes_the_bytes_of_whole_fragments(tmp_path: Path, most: int) -> None:
    """In blocks of 64 bytes, so that portions end within blocks, and tp ranks write parts of portions."""
    values = global_values(HOME, torch.float32, seed=1)
    save(tmp_path / "whole", HOME, values, torch.float32)
    (tmp_path / "parts").mkdir()
    for rank in range(HOME.axes.world_size):
        state = resting(HOME, rank, None, most)
        state.rest = rest_of(fragments_of(HOME, rank, values, torch.float32))
        written = stored_to_write(state.stored(), HOME.axes.coordinates(rank).tp, HOME.tp)
        write_fragments(tmp_path / "parts", rank, 8, written, values_to_write(state.portions(), written), 64)
        assert state.most_alive == 1
    wanted = files_of(tmp_path / "whole")
    assert wanted.pop("manifest.json") and len(wanted) == 8
    assert files_of(tmp_path / "parts") == wanted


def fragments_in(file: Path) -> list[Fragment]:
    """The fragments of a file, as its keys name them."""
    found: dict[tuple[str, tuple[tuple[int, int], ...], int, int], dict[str, torch.Tensor]] = {}
    with BlockFile(file) as old:
        for key in old.keys():  # noqa: SIM118 - not a mapping
            name, column, boxed, flat = key.split("|")
            box = tuple((int(i), int(j)) for i, j in (bounds.split(":") for bounds in boxed.split(",")))
            start, stop = map(int, flat.split(":"))
            blocks = [old.read(key, block) for block in range(len(old.block_ranges(key)))]
            found.setdefault((name, box, start, stop), {})[column] = torch.cat(blocks)
    return [
        Fragment(ParameterSpec(name, (), box, (), ParameterKind.MATRIX), start, stop, columns)
        for (name, box, start, stop), columns in found.items()
    ]


def test_the_bytes_are_those_of_before(tmp_path: Path) -> None:
    """What an earlier version wrote, written again in portions of 100 elements, has every byte."""
    files = sorted(BEFORE.glob("*.safetensors"))
    for index, file in enumerate(files):
        fragments = fragments_in(file)
        state = RestingState(fragments, rest_of(fragments), 100)
        write_fragments(tmp_path, index, len(files), stored_to_write(state.stored(), 0, 1), state.portions())
        assert len(state.parts) > 2 and (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "c"
    save(folder, HOME, values_at(5), torch.float32, block_bytes=256)
    return folder


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("layout", AWAY, ids=str)
@pytest.mark.parametrize("most", SIZES[1:])
def test_any_layout_reads_portion_by_portion(saved: Path, layout: Layout, most: int) -> None:
    manifest = read_manifest(saved)
    for rank in range(layout.axes.world_size):
        state = resting(layout, rank, None, most, torch.float64)
        with OpenFiles(saved, manifest) as files:
            read_portions(files, state.stored(), state.portions(COLUMNS), COLUMNS)
        wanted = rest_of(fragments_of(layout, rank, values_at(5), torch.float64))
        assert state.rest.keys() == wanted.keys()
        assert all(torch.equal(values, wanted[where]) for where, values in state.rest.items())
        assert state.most_alive == 1 and state.closed == 1


def test_weights_alone_leave_the_moments(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(tmp_path, resting(Layout(), 0, 3, 100), Layout().all_fragments)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3})
    state = resting(Layout(), 0, 8, 100)
    reader = checkpoints_of(tmp_path, state, Layout().all_fragments, no_load_optim=True)
    found = reader.find()
    assert found is not None
    reader.load(found)
    then, now = (rest_of(fragments_of(Layout(), 0, values_at(i), torch.float32)) for i in (8, 3))
    for (name, column), values in state.rest.items():
        assert torch.equal(values, (now if column == "weight" else then)[name, column])
    assert state.loaded == 1 and state.most_alive == 1


def test_weights_alone_are_written_rounded_and_are_not_resumed_from(tmp_path: Path) -> None:
    """--no-save-optim: what is loaded are the weights of a run in bf16, to the bit."""
    mine = resting(Layout(), 0, 3, 100)
    checkpoints = checkpoints_of(tmp_path, mine, Layout().all_fragments, weights=torch.bfloat16)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3})
    assert mine.most_alive == 1 and mine.closed == 1
    tensors = read_manifest(tmp_path / "iter_0000003").tensors
    assert tensors and all(stored.columns == {"weight": "BF16"} for stored in tensors.values())
    state = resting(Layout(), 0, 8, 100)
    found = checkpoints.find()
    assert found is not None
    with pytest.raises(ValueError, match=r"without exp_avg in the checkpoint \(of --no-save-optim.*--no-load-optim"):
        checkpoints_of(tmp_path, state, Layout().all_fragments).load(found)
    checkpoints_of(tmp_path, state, Layout().all_fragments, no_load_optim=True).load(found)
    then, now = (rest_of(fragments_of(Layout(), 0, values_at(i), torch.float32)) for i in (8, 3))
    rounded = 0
    for (name, column), values in state.rest.items():
        wanted = now[name, column].bfloat16().float() if column == "weight" else then[name, column]
        assert torch.equal(values, wanted)
        rounded += int((wanted != now[name, column]).sum()) if column == "weight" else 0
    assert rounded > 100


def test_a_portion_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    state = resting(Layout(), 0, 3, 100)
    checkpoints = checkpoints_of(tmp_path, state, Layout().all_fragments)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3})

    def fails(number: int) -> None:
        if number == 4:
            raise OSError(5, os.strerror(5), "swap file")

    state.before = fails
    with pytest.raises(OSError, match="swap file"):
        checkpoints.save(4, {"iteration": 4})
    assert state.closed == 2 and names(tmp_path) == ["iter_0000003", "latest", "run_token"]
    found = checkpoints.find()
    assert found is not None and found.progress["iteration"] == 3
    with pytest.raises(OSError, match="swap file"):
        checkpoints.load(found)
    assert state.closed == 3 and state.loaded == 0


def test_a_file_that_fails_ends_the_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the error is looked at, nothing of the state is held."""
    state = resting(Layout(), 0, 3, 100)
    checkpoints = checkpoints_of(tmp_path, state, Layout().all_fragments)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3})
    found = checkpoints.find()
    assert found is not None

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    for owner, name, action in (
        (BlockWriter, "write", lambda: checkpoints.save(4, {"iteration": 4})),
        (BlockFile, "read", lambda: checkpoints.load(found)),
    ):
        closed = state.closed
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as told:
            patch.setattr(owner, name, full)
            action()
        assert state.closed == closed + 1 and told.value is not None
    assert state.loaded == 0 and names(tmp_path) == ["iter_0000003", "latest", "run_token"]


def test_portions_that_lack_values_are_refused(tmp_path: Path) -> None:
    state = resting(Layout(), 0, 3, 100)
    written = stored_to_write(state.stored(), 0, 1)
    portions = list(state.portions())[:-1]
    with pytest.raises(CheckpointError, match=r"up\.bias\|weight.* got \d+ of 48 elements"):
        write_fragments(tmp_path, 0, 1, written, portions)


def test_killed_between_two_portions(tmp_path: Path) -> None:
    state = resting(Layout(), 0, 3, 100)
    checkpoints = checkpoints_of(tmp_path, state, Layout().all_fragments)
    checkpoints.claim()
    checkpoints.save(3, {"iteration": 3})
    child = fork()
    if child == 0:
        try:
            state.before = lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 20 else None
            checkpoints.save(4, {"iteration": 4})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.stat().st_size > 0 for path in tmp_path.glob(".tmp-*/fragments-*")] == [True]
    again = resting(Layout(), 0, None, 100)
    reader = checkpoints_of(tmp_path, again, Layout().all_fragments)
    found = reader.find()
    assert found is not None and found.progress["iteration"] == 3
    reader.load(found)
    wanted = rest_of(fragments_of(Layout(), 0, values_at(3), torch.float32))
    assert all(torch.equal(values, wanted[where]) for where, values in again.rest.items())
    reader.claim()
    assert not list(tmp_path.glob(".*"))
