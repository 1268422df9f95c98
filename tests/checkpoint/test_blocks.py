"""The file format: the safetensors library's, read and written block by block."""

import hashlib
import json

import pytest
import torch

from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.format import Damaged
from tests.checkpoint.fakes import write_tensors


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    dtypes = {"a": torch.float64, "b": torch.float32, "c": torch.bfloat16, "d": torch.float16}
    return [
        (key, torch.randn(50 + i, generator=generator, dtype=torch.float64).to(dtype))
        for i, (key, dtype) in enumerate(dtypes.items())
    ]


def test_the_library_opens_what_is_written(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("safetensors.torch")
    write_tensors(tmp_path / "f.safetensors", tensors(), 64)
    with safetensors.safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["a", "b", "c", "d"]
        for key, tensor in tensors():
            assert torch.equal(file.get_tensor(key), tensor)
        digests = file.metadata()["sha256 b"].split()
    payload = bytes(dict(tensors())["b"].view(torch.uint8).numpy())
    assert digests == [hashlib.sha256(payload[i : i + 64]).hexdigest() for i in range(0, len(payload), 64)]


@pytest.mark.parametrize("block_bytes", [8, 64, 200, 1024])
def test_blocks_put_together_are_the_tensor(tmp_path, block_bytes):
    write_tensors(tmp_path / "f", tensors(), block_bytes)
    with BlockFile(tmp_path / "f") as file:
        for key, tensor in tensors():
            ranges = file.block_ranges(key)
            assert ranges[0][0] == 0 and ranges[-1][1] == tensor.numel()
            blocks = [file.read(key, i) for i in range(len(ranges))]
            assert [b.numel() for b in blocks] == [stop - start for start, stop in ranges]
            assert torch.equal(torch.cat(blocks), tensor)


def test_an_existing_file_is_not_written_over(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", tensors())
    assert (tmp_path / "f").read_text() == "mine"


def test_an_empty_tensor_has_no_blocks(tmp_path):
    write_tensors(tmp_path / "f", [("none", torch.empty(0))])
    with BlockFile(tmp_path / "f") as file:
        assert file.block_ranges("none") == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 40,
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        (7).to_bytes(8, "little") + b"garbage",
    ],
)
def test_what_is_no_such_file_is_named(tmp_path, content):
    (tmp_path / "f.safetensors").write_bytes(content)
    with pytest.raises(Damaged, match=r"f\.safetensors"):
        BlockFile(tmp_path / "f.safetensors")


def test_no_digest_is_left_blank(tmp_path):
    write_tensors(tmp_path / "f", tensors(), 64)
    raw = (tmp_path / "f").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert all("0" * 64 not in text for key, text in header["__metadata__"].items() if key.startswith("sha256"))


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/some\.safetensors"):
        write_tensors(tmp_path / "some.safetensors", [("x", torch.zeros(3))])
