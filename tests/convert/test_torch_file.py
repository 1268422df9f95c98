"""Files of torch.save: everything torch writes is read, nothing a file names is run, and torch opens what we write."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter, write_torch_file
from megazero.convert.files.unpickle import Record, record_type, unpickle
from megazero.convert.source import ConversionError


class Call:
    """Pickled, a call of anything."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.parts


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.uint16]
DTYPES += [torch.float8_e4m3fn, torch.complex64]


def everything() -> dict[str, Any]:
    base = torch.arange(100.0)
    marked = torch.nn.Parameter(torch.ones(3))
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    plain = torch.ones(3)
    plain.partition_dim = 0  # type: ignore[attr-defined]
    return {
        "args": argparse.Namespace(layers=3, params_dtype=torch.bfloat16, lr=np.float64(2.5)),
        "transposed": base[10:40].view(5, 6).t(),
        "whole": base,
        "expanded": torch.ones(1).expand(7),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        **{str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES},
        "marked": marked,
        "plain": plain,
        "state": torch.nn.Linear(2, 3).state_dict(),
        "ordered": collections.OrderedDict(a=1, b=[2, (3, "four"), None, True, -1, 2**70, -(2**40), 1e300]),
        "size": torch.Size([1, 2]),
        "rng": torch.get_rng_state(),
        "numpy rng": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.0),
        "set": {1, 2},
        "bytes": b"abc\xff",
        "device": torch.device("cpu"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big endian": np.arange(3, dtype=">i4"),
    }


def same(found: Any, made: Any) -> None:
    if isinstance(made, torch.Tensor):
        assert found.dtype == made.dtype and found.shape == made.shape
        assert torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (found, made)))
    elif isinstance(made, np.ndarray):
        assert np.array_equal(found.value, made) and found.value.dtype == made.dtype
    elif isinstance(made, dict):
        assert list(found) == list(made)
        for key in made:
            same(found[key], made[key])
    elif isinstance(made, argparse.Namespace):
        assert isinstance(found, Record) and found.name == "argparse.Namespace" and found.state == vars(made)
    elif isinstance(made, tuple) and not isinstance(made, torch.Size):
        assert isinstance(found, tuple)
        for one, other in zip(found, made, strict=True):
            same(one, other)
    else:
        assert found == (str(made) if isinstance(made, torch.device) else made)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_everything_that_torch_writes_is_read(tmp_path: Path, protocol: int) -> None:
    made = everything()
    torch.save(made, tmp_path / "file.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "file.pt")
    same(found, made)
    assert found["transposed"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()


def test_an_archive_inside_another_file(tmp_path: Path) -> None:
    """At an odd offset, as in torch's distributed checkpoints; elements would not be aligned there."""
    inner = io.BytesIO()
    torch.save({"weight": torch.arange(5.0)}, inner)
    (tmp_path / "outer").write_bytes(b"x" * 13 + inner.getvalue() + b"y" * 100)
    found = read_torch_file(tmp_path / "outer", offset=13, length=len(inner.getvalue()))
    assert torch.equal(found["weight"], torch.arange(5.0))


def run(mark: Path) -> str:
    return f"{sys.executable} -c \"open('{mark}', 'w')\""


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    """Name -> (object, the global that has to be named)."""
    command = run(mark)
    made = argparse.Namespace()
    made.__dict__ = {"inside": Call(os.system, command)}
    return {
        "os.system": (Call(os.system, command), "system"),
        "in a tensor's dictionary": ({"weight": torch.ones(2), "args": [Call(os.system, command)]}, "system"),
        "in a namespace": (made, "system"),
        "eval": (Call(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "exec": (Call(exec, f"open({str(mark)!r}, 'w')"), "builtins.exec"),
        "open": (Call(open, str(mark), "w"), "open"),
        "getattr": (Call(getattr, "text", "upper"), "builtins.getattr"),
        "getattr of a function": (Call(getattr, Call(os.system, command), "text"), "system"),
        "setattr": (Call(setattr, Record, "name", "x"), "setattr"),
        "partial": (Call(functools.partial, os.system, command), "functools.partial"),
        "subprocess": (Call(subprocess.Popen, command), "Popen"),
        "torch.hub": (Call(torch.hub.load, str(mark.parent), "model"), "torch.hub.load"),
        "torch.load": (Call(torch.load, str(mark)), "torch.serialization.load"),
        "frombuffer": (Call(np.frombuffer, b"1234"), "numpy"),
        "numpy.load": (Call(np.load, str(mark)), "numpy"),
    }


@pytest.mark.parametrize("name", list(attacks(Path("mark"))))
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_global_that_is_not_known_is_refused_by_name(tmp_path: Path, name: str, protocol: int) -> None:
    mark = tmp_path / "ran"
    attack, named = attacks(mark)[name]
    torch.save(attack, tmp_path / "file.pt", pickle_protocol=protocol)
    with pytest.raises(ConversionError, match=named) as refusal:
        read_torch_file(tmp_path / "file.pt", known=["megatron.*", "deepspeed.*"])
    assert str(tmp_path / "file.pt") in str(refusal.value) and "nothing of it was run" in str(refusal.value)
    assert not mark.exists()


def archive(
    path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        for name, data in (storages or {}).items():
            file.writestr(f"archive/data/{name}", data)
    return path


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def globally(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


NAMESPACE, ENCODE, BYTES = (
    globally(*name.split()) for name in ("argparse Namespace", "_codecs encode", "builtins bytes")
)
DTYPE, SCALAR = globally("numpy", "dtype"), globally("numpy.core.multiarray", "scalar")
MINUS_ONE = b"J\xff\xff\xff\xff"
CRAFTED = {
    # dotted names reach through a module that may be named
    "dotted name": (b"\x80\x04" + text("argparse") + text("_sys.modules") + b"\x93.", "argparse._sys.modules"),
    "dotted name of torch": (
        b"\x80\x04" + text("torch") + text("os.system") + b"\x93" + text("true") + b"\x85R.",
        "torch.os.system",
    ),
    "an empty name": (b"\x80\x04" + text("") + text("") + b"\x93.", "'.'"),
    # attributes of what lies on the stack
    "attributes of a function": (
        b"\x80\x02" + globally("torch", "Size") + b"}" + text("call") + b"K\x01sb.",
        "sets attributes of a Allowed",
    ),
    "attributes of a class": (
        b"\x80\x02" + NAMESPACE + b"}" + text("__setstate__") + b"K\x01sb.",
        "sets attributes of a type",
    ),
    "attributes of a list": (b"\x80\x02]}" + text("append") + b"K\x01sb.", "sets attributes of a list"),
    "items of a record": (b"\x80\x02" + NAMESPACE + b")\x81" + text("a") + b"K\x01s.", "sets items of a Namespace"),
    "appended to a record": (b"\x80\x02" + NAMESPACE + b")\x81K\x01a.", "appends to a Namespace"),
    # calls of what is no function
    "a call of a number": (b"\x80\x02K\x01)R.", "calls what is not to be called"),
    "a call of a dtype": (b"\x80\x02" + globally("torch", "float32") + b")R.", "calls what is not to be called"),
    "a call without arguments": (b"\x80\x02" + NAMESPACE + b"K\x01R.", "without a list of arguments"),
    "an old instance": (b"\x80\x02(" + text("true") + b"ios\nsystem\n.", "instruction"),
    "an extension": (b"\x80\x02\x82\x01.", "instruction"),
    "a buffer from outside": (b"\x80\x05\x97.", "instruction"),
    # memory and stacks
    "bytes it does not have": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b"x.", "announces"),
    "a deep key": (b"\x80\x02}N" + b"\x85" * 200_000 + b"Ns.", "tuples inside tuples"),
    "a deep key of a set": (b"\x80\x04\x8f(N" + b"\x85" * 200_000 + b"\x90.", "tuples inside tuples"),
    "cut off": (b"\x80\x02}(", "broken"),
    "no mark": (b"\x80\x02u.", "broken"),
    "a memo that is empty": (b"\x80\x02h\x05.", "broken"),
    "not a pickle": (b"hello", "broken"),
    "a persistent id that is none": (b"\x80\x02K\x01Q.", "a storage is described as 1"),
    # numpy
    "an array of objects": (b"\x80\x02" + DTYPE + b"(" + text("O8") + b"K\x00K\x01tR.", "only numbers and text"),
    "a type of parts": (
        b"\x80\x02" + DTYPE + b"(" + text("V8") + b"K\x00K\x01tR(K\x03" + text("|") + b"NNN" + MINUS_ONE * 2 + b"K?tb.",
        "only numbers and text",
    ),
    "an array larger than its bytes": (
        b"\x80\x02" + SCALAR + DTYPE + text("f8") + b"\x85R" + ENCODE + text("abc") + b"\x85R\x86R.",
        "numpy array's shape",
    ),
    "a codec": (b"\x80\x02" + ENCODE + text("a") + text("punycode") + b"\x86R.", "string of bytes"),
    "as many bytes as it says": (b"\x80\x02" + BYTES + b"J\xff\xff\xff\x7f\x85R.", "string of bytes"),
}


@pytest.mark.parametrize("name", list(CRAFTED))
def test_crafted_pickles_are_refused(tmp_path: Path, name: str) -> None:
    pickled, named = CRAFTED[name]
    with pytest.raises(ConversionError) as refusal:
        read_torch_file(archive(tmp_path / "file.pt", pickled))
    assert named in str(refusal.value) and str(tmp_path / "file.pt") in str(refusal.value)


def test_an_instruction_that_is_not_listed_is_refused() -> None:
    """Whatever Python's own unpickler does with it."""
    known = {info.code for info in pickletools.opcodes}
    later = [bytes([code]) for code in range(256) if chr(code) not in known]
    assert later
    for code in [*later, pickle.EXT4, pickle.OBJ, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.PERSID]:
        with pytest.raises(ConversionError, match="instruction that no"):
            unpickle(b"\x80\x04" + code + b"x\n.", "here", {})


def test_known_names_become_records_that_can_do_nothing() -> None:
    """Attributes named like Python's own are dictionary entries; and a known name is never imported."""
    data = b"\x80\x02" + globally("megatron.os", "system") + text("touch it") + b"\x85R}" + text("__class__")
    data += globally("megatron", "x") + b"sb."
    before = set(sys.modules)
    found = unpickle(data, "here", {}, ["megatron.*"])
    assert found.name == "megatron.os.system" and found.args == ("touch it",) and type(found).__mro__[1] is Record
    assert found.state["__class__"].name == "megatron.x" and set(sys.modules) == before
    with pytest.raises(AttributeError):
        found.anything = 1


@pytest.mark.slow
def test_deep_structures_are_read() -> None:
    """The machine has a stack of its own."""
    found = unpickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "here", {})
    assert isinstance(found, list) and isinstance(found[0], list)


def tensor_pickle(numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> bytes:
    """A tensor as torch.save describes it, with any numbers."""
    numbers = lambda values: b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in values) + b"t"  # noqa: E731
    storage = b"(" + text("storage") + globally("torch", "FloatStorage") + text(key) + text("cpu")
    args = storage + b"\x8a\x08" + struct.pack("<q", numel) + b"tQ"
    args += b"\x8a\x08" + struct.pack("<q", offset) + numbers(size) + numbers(stride) + b"\x89N"
    return b"\x80\x02" + globally("torch._utils", "_rebuild_tensor_v2") + b"(" + args + b"tR."


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((7, 0, (7,), (1,)), "too few for 7 elements"),
        ((1 << 60, 0, (7,), (1,)), "too few for"),
        ((6, 1, (6,), (1,)), "beyond its storage of 6"),
        ((6, 0, (2, 3), (4, 1)), "beyond its storage of 6"),
        ((6, 0, (3,), (1 << 55,)), "beyond its storage of 6"),
        ((6, 5, (3,), (-1,)), "size or stride"),
        ((6, -1, (3,), (1,)), "size or stride"),
        ((6, 0, (-3,), (1,)), "size or stride"),
        ((6, 0, (3, 1), (1,)), "size or stride"),
        ((6, 0, (1 << 40, 1 << 40), (0, 0)), "size or stride"),
        ((-1, 0, (1,), (1,)), "a storage is described as"),
    ],
)
def test_tensors_stay_inside_their_storage(tmp_path: Path, numbers: Any, named: str) -> None:
    path = archive(tmp_path / "file.pt", tensor_pickle(*numbers), {"0": bytes(24)})
    with pytest.raises(ConversionError, match=named):
        read_torch_file(path)


def test_the_helper_above_makes_good_tensors_too(tmp_path: Path) -> None:
    data = torch.arange(6.0)
    path = archive(tmp_path / "file.pt", tensor_pickle(6, 1, (2, 2), (3, 1)), {"0": data.numpy().tobytes()})
    assert torch.equal(read_torch_file(path), data.as_strided((2, 2), (3, 1), 1))


def test_a_storage_cannot_be_elsewhere(tmp_path: Path) -> None:
    path = archive(tmp_path / "file.pt", tensor_pickle(1, 0, (1,), (1,), key="../../secret"), {"0": bytes(4)})
    with pytest.raises(ConversionError, match=r"no entry 'data/../../secret'"):
        read_torch_file(path)


def test_files_that_are_no_whole_torch_files(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save({"a": torch.ones(1000)}, good)
    cases = {
        "compressed": archive(tmp_path / "zipped.pt", pickle.dumps({}, 2), compression=zipfile.ZIP_DEFLATED),
        "no whole file": tmp_path / "cut.pt",
        "is empty": tmp_path / "empty.pt",
        "from before 1.6": tmp_path / "legacy.pt",
        "not one of torch.save": tmp_path / "other.zip",
        "big-endian": tmp_path / "big.pt",
        "is missing": tmp_path / "absent.pt",
    }
    cases["no whole file"].write_bytes(good.read_bytes()[:3000])
    cases["is empty"].write_bytes(b"")
    torch.save({"a": 1}, cases["from before 1.6"], _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(cases["not one of torch.save"], "w") as file:
        file.writestr("readme", "hello")
    with zipfile.ZipFile(cases["big-endian"], "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({}, 2))
        file.writestr("archive/byteorder", "big")
    for named, path in cases.items():
        with pytest.raises(ConversionError, match=named) as refusal:
            read_torch_file(path)
        assert path.name in str(refusal.value)


def test_torch_opens_what_is_written(tmp_path: Path) -> None:
    """With weights_only, with its mapping, and with tensors that came in pieces."""
    pieces = torch.randn(3, 2).bfloat16()
    made: dict[str, Any] = {
        "values": [1, 2.5, "é\n", None, True, False, 2**40, -1, -(2**33), 2**100],
        "nested": [(1, 2), (), {}, {"a": {3: torch.float16}}],
        "transposed": torch.randn(5, 7).t(),
        "pieces": pieces,
        "empty": torch.empty(0),
        "scalar": torch.tensor(2),
        "last": torch.arange(12.0).view(3, 4),
        "size": torch.Size([2, 3]),
    }
    fed = ("pieces", "empty", "last")
    hollow = made | {key: TensorPlaceholder(tuple(made[key].shape), made[key].dtype) for key in fed}
    path = tmp_path / "file.pt"
    with TorchFileWriter(path, hollow) as writer:
        for piece in (pieces[:1], pieces[1:], made["last"][:2], made["last"][2:]):
            writer.feed(piece)
    for mmap in (False, True):
        same(torch.load(path, weights_only=True, mmap=mmap), made)
    same(read_torch_file(path), made)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        for info in file.infolist():
            with path.open("rb") as raw:
                raw.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", raw.read(4))
            assert (info.header_offset + 30 + name_length + extra_length) % 64 == 0


def test_a_file_that_is_not_full_is_an_error(tmp_path: Path) -> None:
    place = TensorPlaceholder((2, 3), torch.float32)
    for count, words in ((2, "4 elements of a tensor are missing"), (7, "7 elements where 6 are missing")):
        with pytest.raises(AssertionError, match=words), TorchFileWriter(tmp_path / "a", place) as writer:
            writer.feed(torch.ones(count))


def test_objects_of_classes_that_are_not_installed(tmp_path: Path) -> None:
    """Written by their name alone; read back as records."""
    fragment = record_type("nowhere.tensor_fragment.fragment_address")()
    fragment.fill({"numel": 3, "start": 1})
    stage = record_type("nowhere.config.Stage")(2)
    write_torch_file(tmp_path / "file.pt", {"map": {"weight": fragment}, "stage": stage})
    found = read_torch_file(tmp_path / "file.pt", ["nowhere.*"])
    weight = found["map"]["weight"]
    assert (weight.name, weight.state) == ("nowhere.tensor_fragment.fragment_address", {"numel": 3, "start": 1})
    assert found["stage"].args == (2,)
    with pytest.raises(ConversionError, match=r"nowhere\.tensor_fragment\.fragment_address"):
        read_torch_file(tmp_path / "file.pt")
