"""Two runs and one folder: the older one stops and writes nothing."""

import pytest
import torch

from megazero.checkpoint import save_phases
from megazero.checkpoint.fence import Fence, FenceLost, new_token
from megazero.mpu.grid import single_rank_group
from tests.checkpoint.runs import names, open_run, resumed_at, save_at


def test_the_last_to_claim_holds(tmp_path):
    path = tmp_path / "folder" / "run_token"
    first, joined = Fence(path).claim("one"), Fence(path).join("one")
    first.check()
    joined.check()
    second = Fence(path).claim("two")
    second.check()
    for fence in (first, joined):
        assert not fence.holds()
        with pytest.raises(FenceLost, match=r"run_token belongs to run two, not to this run \(one\)"):
            fence.check()
    assert names(path.parent) == ["run_token"]


def test_what_is_gone_stops_the_run_and_is_named(tmp_path):
    folder = tmp_path / "saved"
    fence = Fence(folder / "t").claim("one")
    (folder / "t").unlink()
    with pytest.raises(FenceLost, match=f"^{folder / 't'} is gone: it was deleted, moved or unmounted"):
        fence.check()
    folder.rmdir()
    with pytest.raises(FenceLost, match=f"^{folder} is gone: it was deleted, moved or unmounted"):
        fence.check()
    assert not folder.exists()


def test_tokens_differ():
    tokens = {new_token(single_rank_group(), torch.device("cpu")) for _ in range(20)}
    assert len(tokens) == 20 and all(len(token) == 32 for token in tokens)


def test_a_leftover_run_writes_nothing(tmp_path):
    old, old_state = open_run(tmp_path, "old")
    old.claim()
    save_at(old, old_state, 1)
    new, new_state = open_run(tmp_path, "new")
    new.claim()
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)}
    with pytest.raises(FenceLost, match="belongs to run new"):
        save_at(old, old_state, 2)
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)}
    save_at(new, new_state, 2)
    assert resumed_at(tmp_path) == 2


def test_taken_over_in_the_middle_of_a_save(tmp_path, monkeypatch):
    """The new run comes while the old one's ranks write: what they wrote never becomes a checkpoint."""
    old, old_state = open_run(tmp_path, "old")
    old.claim()
    save_at(old, old_state, 1)
    new, new_state = open_run(tmp_path, "new")
    original = save_phases.write_fragments

    def taken_over_before(*args, **kwargs):
        new.claim()
        original(*args, **kwargs)

    def taken_over_after(*args, **kwargs):
        original(*args, **kwargs)
        new.claim()

    for disturbed in (taken_over_before, taken_over_after):
        old.claim()
        monkeypatch.setattr(save_phases, "write_fragments", disturbed)
        with pytest.raises(FenceLost, match="run new"):
            save_at(old, old_state, 2)
        monkeypatch.undo()
        assert resumed_at(tmp_path) == 1
    save_at(new, new_state, 2)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest", "run_token"]


def test_taken_over_between_rename_and_latest(tmp_path, monkeypatch):
    """The checkpoint is whole and stays; `latest` is not the old run's to move any more."""
    from megazero.checkpoint import folder as folders

    old, old_state = open_run(tmp_path, "old")
    old.claim()
    save_at(old, old_state, 1)
    new, new_state = open_run(tmp_path, "new")
    original = folders.sync_folder

    def then_claimed(path):
        original(path)
        new.claim()

    monkeypatch.setattr(folders, "sync_folder", then_claimed)
    with pytest.raises(FenceLost):
        save_at(old, old_state, 2)
    monkeypatch.undo()
    assert resumed_at(tmp_path) == 1
    save_at(new, new_state, 2)
    assert resumed_at(tmp_path) == 2
