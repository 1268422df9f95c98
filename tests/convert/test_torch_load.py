"""What docs/torch-files.md says of torch.load: why files of torch.save are read by a machine of ours."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.convert.files.torch_file import read_torch_file, read_torch_rows
from megazero.convert.files.torch_globals import torch_table
from megazero.convert.files.unpickle import Record, unpickle
from megazero.convert.source import ConversionError
from tests.convert.test_torch_file import archive, globally, tensor_pickle, text
from tests.forks import fork

the_torch_of_the_page = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="docs/torch-files.md is about torch 2.13"
)
DATA = torch.arange(1.0, 7.0)
REBUILD = globally("torch._utils", "_rebuild_tensor_v2")
TENSOR = tensor_pickle(6, 0, (6,), (1,)).removeprefix(b"\x80\x02").removesuffix(b".")
ARGUMENTS = TENSOR.removeprefix(REBUILD).removesuffix(b"R")
PAIR = tensor_pickle(3, 0, (3,), (1,)).removeprefix(b"\x80\x02").removesuffix(b".").replace(b"Float", b"Double")


def by_torch(path: Path) -> Any:
    return torch.load(path, weights_only=True, mmap=True)


def uses_methods(found: Any) -> None:
    with pytest.raises(TypeError, match="'int' object is not callable"):
        found.items() if isinstance(found, dict) else found.numel()


@dataclass(frozen=True)
class Difference:
    """A pickle; what our reader says of it, None where it reads it; what is wrong with what torch.load makes of it."""

    pickled: bytes
    refused: str | None
    wrong: Callable[[Any], object]


def is_true(holds: bool) -> None:
    assert holds


DIFFERENCES = {
    "a storage longer than its entry": Difference(
        tensor_pickle(9, 0, (9,), (1,)),
        "storage 0 has 24 bytes, too few for 9 elements",
        lambda found: is_true(found.shape == (9,) and torch.equal(found[:6], DATA)),
    ),
    "one storage under two dtypes": Difference(
        b"\x80\x02](" + TENSOR + PAIR + b"e.",
        None,
        lambda found: is_true(found[1].dtype == torch.float32 and torch.equal(found[1], DATA[:3])),
    ),
    "strides of 0": Difference(
        tensor_pickle(6, 0, (1 << 40,), (0,)), "repeats a storage", lambda found: is_true(found.numel() == 1 << 40)
    ),
    "as many bytes as a number says": Difference(
        b"\x80\x02" + globally("builtins", "bytearray") + b"J\0\0\0\1\x85R.",
        "names 'builtins.bytearray'",
        lambda found: is_true(len(found) == 1 << 24),
    ),
    "a codec": Difference(
        b"\x80\x02" + globally("_codecs", "encode") + text("a") + text("punycode") + b"\x86R.",
        "a string of bytes",
        lambda found: is_true(found == b"a-"),
    ),
    "methods of a dictionary": Difference(
        b"\x80\x02" + globally("collections", "OrderedDict") + b")R}" + text("items") + b"K\x01sb.", None, uses_methods
    ),
    "methods of a tensor": Difference(
        b"\x80\x02"
        + globally("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + REBUILD
        + globally("torch", "Tensor")
        + ARGUMENTS
        + b"}"
        + text("numel")
        + b"K\x01stR.",
        None,
        uses_methods,
    ),
}


def made(folder: Path, pickled: bytes) -> Path:
    return archive(folder / "file.pt", pickled, {"0": DATA.numpy().tobytes()})


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_what_torch_reads_wrongly_is_refused_or_read_rightly(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, DIFFERENCES[name].pickled)
    if DIFFERENCES[name].refused is not None:
        with pytest.raises(ConversionError, match=DIFFERENCES[name].refused):
            read_torch_file(path)
        return
    found = read_torch_file(path)
    if isinstance(found, list):
        assert torch.equal(found[0], DATA) and torch.equal(found[1], DATA.view(torch.float64))
    else:
        assert list(found.items()) == [] if isinstance(found, dict) else found.numel() == 6


@the_torch_of_the_page
@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_torch_reads_them_as_the_page_says(tmp_path: Path, name: str) -> None:
    DIFFERENCES[name].wrong(by_torch(made(tmp_path, DIFFERENCES[name].pickled)))


@the_torch_of_the_page
@pytest.mark.slow
def test_a_deep_key_ends_the_process_that_loads_it(tmp_path: Path) -> None:
    """In a child, whose stack is as large as Linux makes it by default."""
    path = made(tmp_path, b"\x80\x02}N" + b"\x85" * 200_000 + b"Ns.")
    child = fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        try:
            by_torch(path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    with pytest.raises(ConversionError, match="tuples inside tuples"):
        read_torch_file(path)


@the_torch_of_the_page
def test_protocols_and_shards_that_torch_does_not_read(tmp_path: Path) -> None:
    """`.metadata` is of protocol 4, and a shard is an archive inside a file, which torch maps only as a whole."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    path = tmp_path / "file.pt"
    torch.save({"weight": DATA}, path, pickle_protocol=4)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand"), pytest.warns(UserWarning):
        by_torch(path)
    assert torch.equal(read_torch_file(path)["weight"], DATA)

    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))
    found = unpickle(pickle.dumps(chunk, 4), ".metadata", torch_table(), ["torch.distributed.*"])
    assert isinstance(found, Record) and found.get("sizes") == (6,)

    inner = io.BytesIO()
    torch.save(DATA, inner)
    inner.seek(0)
    with pytest.raises(ValueError, match="f must be a file path"):
        torch.load(inner, weights_only=True, mmap=True)
    (tmp_path / "outer").write_bytes(b"x" * 13 + inner.getvalue())
    assert torch.equal(read_torch_rows(tmp_path / "outer", 2, 5, 13, len(inner.getvalue())), DATA[2:5])
