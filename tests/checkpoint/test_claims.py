"""Manifests and fragments whose hashes are right and whose claims are not."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.decoding import decode
from megazero.checkpoint.format import CheckpointError, Damaged, seal
from megazero.checkpoint.manager import find
from megazero.checkpoint.resume_changes import run_from
from megazero.config.schema import Run
from tests.checkpoint.fakes import write_tensors

GOOD: dict[str, Any] = {
    "version": 1,
    "progress": {
        "iteration": 3,
        "consumed_samples": 6,
        "consumed_tokens": 48,
        "optimizer_steps": 3.0,
        "loss_scale": {},
        "fp8": None,
        "data_plans": [[1, 2]],
        "data_contents": [[5, 70, 12]],
        "probe": {"loss": 2.5, "precision": "fp32", "seq_length": 8},
    },
    "layout": {"tp": 1},
    "run": {},
    "files": [{"name": "fragments-00001-of-00001.safetensors", "bytes": 100, "header_sha256": "0"}],
    "tensors": {"a": {"shape": [2, 3], "columns": {"weight": "F32"}, "fragments": [[0, [[0, 2], [0, 3]], 0, 6]]}},
}


def sealed(document: Any) -> bytes:
    content = json.dumps(document).encode().removesuffix(b"}")
    return content + seal(content)


def test_a_manifest_that_holds() -> None:
    manifest = decode(sealed(GOOD))
    assert not manifest.missing_elements() and manifest.progress["iteration"] == 3
    diverged = copy.deepcopy(GOOD)
    diverged["progress"]["probe"]["loss"] = math.nan
    decode(sealed(diverged))


WRONG: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no number of iterations": (("progress", "iteration"), "3"),
    "half an iteration": (("progress", "iteration"), 2.5),
    "negative samples": (("progress", "consumed_samples"), -1),
    "loss scale": (("progress", "loss_scale"), {"scale": None}),
    "probe": (("progress", "probe"), ["x"]),
    "fp8": (("progress", "fp8"), {"a": {"x": {"amax": 3}}}),
    "plans": (("progress", "data_plans"), [3]),
    "contents": (("progress", "data_contents"), [["3"]]),
    "layout": (("layout", "tp"), [1]),
    "run": (("run",), []),
    "files": (("files",), {"a": 1}),
    "size": (("files", 0, "bytes"), -5),
    "shape": (("tensors", "a", "shape"), [10**12, 10**12]),
    "no shape": (("tensors", "a", "shape"), None),
    "dtype": (("tensors", "a", "columns", "weight"), "I8"),
    "column": (("tensors", "a", "columns"), {"other": "F32"}),
    "file of a fragment": (("tensors", "a", "fragments", 0, 0), 7),
    "range of a fragment": (("tensors", "a", "fragments", 0, 3), 10**12),
    "box of a fragment": (("tensors", "a", "fragments", 0, 1, 0), [0, 5]),
    "fragments": (("tensors", "a", "fragments"), [[0]]),
    "version": (("version",), None),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_of_wrong_types(case: str, tmp_path: Path) -> None:
    path, value = WRONG[case]
    document = copy.deepcopy(GOOD)
    inside: Any = document
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(CheckpointError, match=r"iter_0000003 is damaged: manifest\.json"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"model": {"num_layers": "three"}}, "num_layers: 'three' is not a whole number"),
        (
            {"model": []},
            r"model: \[\] "
            r"is no section",
        ),
        ({"model": {"num_layers": 3_000_000}}, "num_layers 3000000: must be at most"),
        ({"data": {"data_path": 7.5, "split": None}}, "split"),
    ],
)
def test_a_run_of_wrong_types(record: dict[str, Any], message: str) -> None:
    with pytest.raises(Damaged, match=f"manifest.json holds a run with impossible values: .*{message}"):
        run_from(record)
    assert run_from({}) == Run()


def test_a_fragment_that_claims_more_than_it_has(tmp_path: Path) -> None:
    """211 bytes that say they hold 10^12."""
    header = {
        "__metadata__": {"block_bytes": str(10**12), "sha256 a": "0" * 64},
        "a": {"dtype": "F32", "shape": [10**12 // 4], "data_offsets": [0, 10**12]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(Damaged, match=r"x\.safetensors"), BlockFile(tmp_path / "x.safetensors") as file:
        file.read("a", 0)
    header["__metadata__"]["block_bytes"] = str(1 << 29)  # type: ignore[index]
    header["__metadata__"]["sha256 a"] = " ".join(["0" * 64] * -(-(10**12) // (1 << 29)))  # type: ignore[index]
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with BlockFile(tmp_path / "x.safetensors") as file, pytest.raises(Damaged, match="is truncated"):
        file.read("a", 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "F8"),
        ("shape", [3]),
        ("shape", "x"),
        ("data_offsets", [0, "x"]),
        ("data_offsets", [8, 0]),
        ("data_offsets", None),
    ],
)
def test_a_header_of_wrong_types(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, [("a", torch.arange(4.0))])
    data = path.read_bytes()
    count = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + count])
    header["a"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + count :])
    with pytest.raises(Damaged, match=r"x\.safetensors has no readable header"):
        BlockFile(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"x" * 100_000])
def test_a_latest_that_names_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(Damaged, match=str(tmp_path / "latest")):
        folders.newest_checkpoint(tmp_path)
