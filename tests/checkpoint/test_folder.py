"""The folder of checkpoints: which one is taken, which are kept, what leftovers do."""

import shutil

import pytest

from megazero.checkpoint.fence import FenceLost
from megazero.checkpoint.format import Damaged
from megazero.checkpoint.manager import find
from tests.checkpoint.runs import names, open_run, resumed_at, save_at


def test_names_of_a_saved_run(tmp_path):
    checkpoints, state = open_run(tmp_path / "deep" / "er", "t")
    checkpoints.claim()
    save_at(checkpoints, state, 5)
    assert names(tmp_path / "deep" / "er") == ["iter_0000005", "latest", "run_token"]
    assert (tmp_path / "deep" / "er" / "latest").read_text() == "iter_0000005\n"
    assert names(tmp_path / "deep" / "er" / "iter_0000005") == ["fragments-00001-of-00001.safetensors", "manifest.json"]


@pytest.mark.parametrize("kind", ["missing", "empty", "unfinished", "strangers"])
def test_nothing_complete_is_a_start_from_scratch(tmp_path, kind):
    folder = tmp_path / "saved"
    if kind != "missing":
        folder.mkdir()
    if kind == "unfinished":
        (folder / ".tmp-iter_0000005-x").mkdir()
        (folder / "run_token").write_text("x")
    if kind == "strangers":
        (folder / "iter_final").mkdir()
        (folder / "iter_0000005").write_text("a file")
    assert find(folder) is None


@pytest.mark.parametrize("keep, left", [(0, (1, 2, 3, 4, 5)), (1, (5,)), (3, (3, 4, 5)), (9, (1, 2, 3, 4, 5))])
def test_the_last_k_are_kept(tmp_path, keep, left):
    checkpoints, state = open_run(tmp_path, "t", keep_last=keep)
    checkpoints.claim()
    save_at(checkpoints, state, 1, 2, 3, 4, 5)
    assert names(tmp_path) == [f"iter_{i:07d}" for i in left] + ["latest", "run_token"]
    assert resumed_at(tmp_path) == 5


@pytest.mark.parametrize(
    "keep, interval, left",
    [(1, 2, (2, 4, 6, 7)), (2, 5, (5, 6, 7)), (2, 3, (3, 6, 7)), (1, 100, (7,)), (0, 2, range(1, 8))],
)
def test_multiples_of_the_retain_interval_stay(tmp_path, keep, interval, left):
    checkpoints, state = open_run(tmp_path, "t", keep_last=keep, save_retain_interval=interval)
    checkpoints.claim()
    save_at(checkpoints, state, *range(1, 8))
    assert names(tmp_path) == [f"iter_{i:07d}" for i in left] + ["latest", "run_token"]
    assert resumed_at(tmp_path / f"iter_{left[0]:07d}") == left[0]


def test_more_than_seven_digits_sort_by_number(tmp_path):
    checkpoints, state = open_run(tmp_path, "t", keep_last=2)
    checkpoints.claim()
    save_at(checkpoints, state, 9_999_999, 10_000_000, 10_000_001)
    (tmp_path / "latest").unlink()
    assert resumed_at(tmp_path) == 10_000_001
    assert "iter_9999999" not in names(tmp_path)


def test_going_back_keeps_what_came_after(tmp_path):
    """Resumed from 20 by hand: 40 is another branch, it is neither counted nor deleted nor taken for the newest."""
    checkpoints, state = open_run(tmp_path, "t", keep_last=2)
    checkpoints.claim()
    save_at(checkpoints, state, 20, 40, 25, 30, 35)
    assert names(tmp_path)[:3] == ["iter_0000030", "iter_0000035", "iter_0000040"]
    assert resumed_at(tmp_path) == 35


def test_latest_missing_is_scanned_for(tmp_path):
    checkpoints, state = open_run(tmp_path, "t")
    checkpoints.claim()
    save_at(checkpoints, state, 1, 2)
    (tmp_path / "latest").unlink()
    assert resumed_at(tmp_path) == 2


def test_latest_is_believed_when_it_is_behind(tmp_path):
    """A crash between the rename and `latest`: the one that it names is complete; the run saves the later one again."""
    checkpoints, state = open_run(tmp_path, "t")
    checkpoints.claim()
    save_at(checkpoints, state, 1, 2)
    (tmp_path / "latest").write_text("iter_0000001\n")
    assert resumed_at(tmp_path) == 1
    save_at(checkpoints, state, 2)
    assert resumed_at(tmp_path) == 2
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest", "run_token"]


@pytest.mark.parametrize("text", ["iter_0000009\n", "", "../elsewhere", "\x00\xff", "iter_0000001/../iter_0000002"])
def test_latest_that_names_nothing_is_an_error_with_a_way_out(tmp_path, text):
    checkpoints, state = open_run(tmp_path, "t")
    checkpoints.claim()
    save_at(checkpoints, state, 1, 2)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(Damaged) as error:
        find(tmp_path)
    assert str(tmp_path / "latest") in str(error.value) and f"--load {tmp_path / 'iter_0000002'}" in str(error.value)


def test_latest_alone_is_an_error(tmp_path):
    (tmp_path / "latest").write_text("iter_0000009\n")
    with pytest.raises(Damaged, match=r"remove .*latest to start from scratch"):
        find(tmp_path)


def test_a_checkpoint_under_another_name_opens(tmp_path):
    checkpoints, state = open_run(tmp_path / "saved", "t")
    checkpoints.claim()
    save_at(checkpoints, state, 7)
    shutil.move(tmp_path / "saved" / "iter_0000007", tmp_path / "best")
    assert resumed_at(tmp_path / "best") == 7


def test_leftovers_go_when_a_run_takes_over_and_not_before(tmp_path):
    old, state = open_run(tmp_path, "old")
    old.claim()
    save_at(old, state, 1)
    for name in (".tmp-iter_0000002-old", ".trash-iter_0000000-older"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fragments-00001-of-00001.safetensors").write_text("half")
    (tmp_path / ".latest-old").write_text("iter_00000")
    (tmp_path / ".mine").write_text("the user's")
    assert resumed_at(tmp_path) == 1
    assert ".tmp-iter_0000002-old" in names(tmp_path)  # a reader removes nothing
    new, _ = open_run(tmp_path, "new")
    new.claim()
    assert names(tmp_path) == [".mine", "iter_0000001", "latest", "run_token"]


def test_a_run_that_lost_the_folder_sweeps_nothing(tmp_path):
    from megazero.checkpoint.folder import remove_leftovers

    old, _ = open_run(tmp_path, "old")
    old.claim()
    new, _ = open_run(tmp_path, "new")
    new.claim()
    (tmp_path / ".tmp-iter_0000002-new").mkdir()
    assert old.fence is not None
    with pytest.raises(FenceLost):
        remove_leftovers(tmp_path, old.fence)
    assert ".tmp-iter_0000002-new" in names(tmp_path)


def test_one_that_stepped_aside_counts_until_its_successor_is_there(tmp_path):
    checkpoints, state = open_run(tmp_path, "t")
    checkpoints.claim()
    save_at(checkpoints, state, 1, 2)
    (tmp_path / "iter_0000002").rename(tmp_path / "iter_0000002.replaced")
    assert resumed_at(tmp_path) == 2
    assert resumed_at(tmp_path / "iter_0000002") == 2
    checkpoints.claim()
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest", "run_token"]
