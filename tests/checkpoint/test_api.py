"""Checkpoints as other programs read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.checkpoint.api import Checkpoint
from megazero.checkpoint.format import CheckpointError
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from tests.convert.sources import made


def test_what_it_says_and_any_part_of_it(tmp_path):
    source = made(moments=True)
    write_native(source, tmp_path, TargetOptions(), lambda count: None)
    there = Checkpoint(tmp_path)
    assert (
        there.path == tmp_path / "iter_0000007"
        and there.progress["iteration"] == 7
        and there.run["model"]["hidden_size"] == 24
    )
    assert there.tensors["head.norm.bias"].columns == dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), torch.float32)
    for name in there.tensors:
        assert torch.equal(there.read(name), source.read(name))
    part = there.read("embedding.word.weight", "exp_avg", box=((10, 97), (3, 5)))
    assert torch.equal(part, source.read("embedding.word.weight", "exp_avg")[10:97, 3:5])
    assert there.read("head.norm.bias", box=((4, 4),)).shape == (0,)


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        Checkpoint(tmp_path)
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(FileNotFoundError, match="text is a file, and holds no checkpoint"):
        Checkpoint(tmp_path / "text")
    paths: dict[Any, type[Exception]] = {None: TypeError, 3: TypeError, b"x": TypeError, "": ValueError}
    for wrong, error in paths.items():
        with pytest.raises(error, match=r"^path is "):
            Checkpoint(wrong)
    write_native(made(), tmp_path / "run", TargetOptions(), lambda count: None)
    there = Checkpoint(tmp_path / "run")
    boxes: tuple[Any, ...] = (3, "ab", (3,), ((0, 1, 2),), (("a", "b"),))
    for box in boxes:
        with pytest.raises(TypeError, match=r"^box is .*: one \(start, stop\) for each dimension is needed; all of"):
            there.read("head.norm.bias", "weight", box)
    with pytest.raises(CheckpointError, match="no exp_avg"):
        there.read("head.norm.bias", "exp_avg")
    with pytest.raises(ValueError, match="does not lie"):
        there.read("head.norm.bias", box=((0, 25),))
