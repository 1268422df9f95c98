"""The names that torch.save writes, and what each stands for when a file is read: tensors, numpy arrays, containers.

No function of torch or numpy is called with arguments from a file: a crafted `numpy.dtype` takes bytes for pointers,
and `bytearray` allocates any number of bytes. The functions here check their arguments first.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.convert.files.unpickle import Allowed, Filled, Record, StateDict, record_type
from megazero.convert.source import ConversionError
from megazero.system.reading import BOUNDS

STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_NUMPY_CODE = re.compile(r"[<>=|]?(?:[?bBhHiIlLqQefd]|[biufSU][0-9]{1,6}|c8|c16)")


@dataclass(frozen=True)
class StorageKind:
    """A type of storage. dtype None: a storage of bytes, whose dtype the tensor names."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class Storage:
    """The memory of a storage as a flat tensor, of bytes where the kind has no dtype."""

    flat: Tensor
    kind: StorageKind


class NumpyType(Filled):
    """A numpy dtype. Objects and structures are refused."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMPY_CODE.fullmatch(code):
            raise ConversionError(f"a numpy array of type {reprlib.repr(code)} is not read: only numbers and text are")
        self.dtype = np.dtype(code)

    def fill(self, state: Any) -> None:
        _expect(isinstance(state, tuple) and len(state) >= 5, "a numpy dtype's state")
        _expect(state[1] in ("<", ">", "=", "|"), "a numpy dtype's byte order")
        _expect(all(part is None for part in state[2:5]), "a numpy dtype made of parts")
        if state[1] in "<>" and self.dtype.byteorder != "|":
            self.dtype = self.dtype.newbyteorder(state[1])


class NumpyArray(Filled):
    """A numpy array. It is empty until its state follows in the file."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = np.empty(0)

    def fill(self, state: Any) -> None:
        _expect(isinstance(state, tuple) and len(state) == 5, "a numpy array's state")
        _, shape, kind, fortran, data = state
        self.value = _array(data, kind, shape, "F" if fortran else "C")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ConversionError(f"{what} is not what numpy or torch writes")


def _array(data: Any, kind: Any, shape: Any, order: str) -> np.ndarray:
    _expect(isinstance(kind, NumpyType) and isinstance(data, bytes), "a numpy array's memory")
    _expect(_are_sizes(shape) and math.prod(shape) * kind.dtype.itemsize == len(data), "a numpy array's shape")
    return np.frombuffer(data, kind.dtype).reshape(shape, order="F" if order == "F" else "C").copy()


def _scalar(kind: Any, data: Any = b"") -> Any:
    return _array(data, kind, (), "C").item()


def _reconstruct(*_: Any) -> NumpyArray:
    return NumpyArray()


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any, *_: Any) -> NumpyArray:
    made = NumpyArray()
    made.value = _array(data, kind, shape, "F" if order == "F" else "C")
    return made


def _are_sizes(numbers: Any) -> bool:
    if not isinstance(numbers, tuple | list) or len(numbers) > BOUNDS.dimensions:
        return False
    return all(type(n) is int and 0 <= n < BOUNDS.elements for n in numbers) and math.prod(numbers) < BOUNDS.elements


def _size(numbers: Any = ()) -> torch.Size:
    _expect(_are_sizes(numbers), "a tensor's size")
    return torch.Size(numbers)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage. Raises ConversionError where it does not lie inside."""
    _expect(isinstance(storage, Storage) and storage.kind.dtype is not None, "a tensor's storage")
    return _view(storage.flat, offset, size, stride)


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, hooks: Any = None, flags: Any = None
) -> Tensor:
    _expect(not flags or not any(flags.values()), "a conjugate or negative tensor's flag")
    return _tensor(storage, offset, size, stride)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, flags: Any = None
) -> Tensor:
    _expect(isinstance(storage, Storage) and isinstance(dtype, torch.dtype), "a tensor's storage")
    _expect(not flags or not any(flags.values()), "a conjugate or negative tensor's flag")
    flat = storage.flat.view(torch.uint8)
    return _view(flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype), offset, size, stride)


def _view(flat: Tensor, offset: Any, size: Any, stride: Any) -> Tensor:
    steps = isinstance(stride, tuple) and all(type(n) is int and 0 <= n < BOUNDS.elements for n in stride)
    _expect(
        type(offset) is int and offset >= 0 and _are_sizes(size) and steps and len(size) == len(stride),
        "a tensor's size or stride",
    )
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) == 0:
        return flat.new_empty(size)
    if last >= flat.numel():
        raise ConversionError(
            f"a tensor of size {tuple(size)} at offset {offset} reaches beyond its storage of {flat.numel()} elements"
        )
    if math.prod(size) > flat.numel() + BOUNDS.repeated:
        raise ConversionError(
            f"a tensor of size {tuple(size)} repeats a storage of {flat.numel()} elements: it would be more than the "
            "file holds"
        )
    return flat.as_strided(size, stride, offset)


def _parameter(data: Any, *_: Any) -> Tensor:
    _expect(isinstance(data, Tensor), "a parameter")
    return data


def _from_type(maker: Any, kind: Any, args: Any, *_: Any) -> Tensor:
    """A tensor with attributes. The attributes are dropped."""
    _expect(
        isinstance(maker, Allowed) and maker.call in (_tensor_v2, _tensor_v3) and isinstance(args, tuple),
        "a tensor with attributes",
    )
    return maker.call(*args)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes, as protocol 2 writes them."""
    _expect(isinstance(text, str) and encoding in ("latin1", "latin-1"), "a string of bytes")
    return text.encode("latin1")


def _bytes(data: Any = b"", *_: Any) -> bytes:
    _expect(isinstance(data, bytes | list) and all(type(n) is int for n in data), "a string of bytes")
    return bytes(data)


def _set(items: Any = ()) -> set[Any]:
    _expect(isinstance(items, list | tuple), "a set")
    _expect(
        all(isinstance(item, str | bytes | int | float | None | Record | torch.dtype) for item in items),
        "a set's element",
    )
    return set(items)


def _list(items: Any = ()) -> list[Any]:
    _expect(isinstance(items, list | tuple | set), "a list")
    return list(items)


def _mapping(*args: Any) -> StateDict:
    """OrderedDict(), also OrderedDict([(key, value), ...]), and defaultdict(factory)."""
    made = StateDict()
    for pair in args[0] if args and isinstance(args[0], list) else ():
        _expect(
            isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | int), "a dictionary's pair"
        )
        made[pair[0]] = pair[1]
    return made


def _device(kind: Any, *_: Any) -> str:
    _expect(isinstance(kind, str), "a device")
    return kind


def _first(value: Any, *_: Any) -> Any:
    return value


def _remade(kind: Any, base: Any, state: Any = None) -> Record:
    """An object of a plain class, as protocols 0 and 1 write it."""
    _expect(
        isinstance(kind, type) and issubclass(kind, Record) and state is None,
        "an object of a class that is not a plain one",
    )
    return kind()


def _member(kind: Any, name: Any) -> Record:
    """A member of an enumeration by its name, as Python 3.11.0 to 3.11.3 write it. All others write `kind(value)`."""
    if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(name, str) and name.isidentifier()):
        raise ConversionError(
            "'builtins.getattr' of something other than an enumeration: refused, and nothing of it was run"
        )
    return kind(name)


def torch_table() -> Mapping[str, Any]:
    """Dotted name -> what it stands for in a file of torch.save. Plain objects that mean nothing for tensors become
    records.
    """
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    storages = {
        f"torch{where}.{name}": StorageKind(dtype) for name, dtype in STORAGES.items() for where in ("", ".cuda")
    }
    untyped = {f"torch{where}.UntypedStorage": StorageKind(None) for where in ("", ".storage", ".cuda")}
    functions: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": _first,
        "collections.OrderedDict": _mapping,
        "collections.defaultdict": _mapping,
        "builtins.set": _set,
        "builtins.list": _list,
        "builtins.dict": _mapping,
        "builtins.bytes": _bytes,
        "builtins.getattr": _member,
        "_codecs.encode": _encode,
        "copyreg._reconstructor": _remade,
        "numpy.dtype": NumpyType,
        **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
        **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
        **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    }
    records = (
        "argparse.Namespace",
        "types.SimpleNamespace",
        "numpy.ndarray",
        "builtins.object",
        "builtins.int",
        "builtins.float",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "datetime.timedelta",
        "datetime.datetime",
        *(f"pathlib{where}.{kind}Path" for where in ("", "._local") for kind in ("", "Posix", "PurePosix")),
    )
    plain = {name: record_type(name) for name in records}
    return {**dtypes, **storages, **untyped, **plain, **{name: Allowed(call) for name, call in functions.items()}}
