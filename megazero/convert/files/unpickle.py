"""Reading a pickle as plain data, without running anything that a file names.

A pickle is a program: it names functions and has them called. Here a name is looked up in a table and nowhere else, and
nothing is imported. The table holds functions of ours that check their arguments, and inert records. A name outside the
table ends the reading before anything of it has run. Python's own unpickler that is written in Python
(`pickle._Unpickler`) executes the instructions of `_PYTHONS`, which make plain data; those of `_OURS`, which could call
something or change an object, are executed here; any other is refused.

docs/torch-files.md says why this is not `torch.load(weights_only=True)`, nor one of Python's public modules.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megazero.convert.source import ConversionError
from megazero.system.reading import BOUNDS

_ALWAYS = 1 << 20
"""The length of arguments that all calls of a pickle may be given together, before `BOUNDS.copies` times its own length
is added.
"""


class Record:
    """An object of a class that is not imported.

    name   "module.Class"
    args   what the class was called with
    state  its attributes, as entries of a dictionary: a file cannot give an attribute a meaning

    Two records are equal if they are the same object. The class itself stands for a global that a file mentions without
    calling it.
    """

    __slots__ = ("args", "state")
    name = ""

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: dict[str, Any] = {}

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self.state.get(key, otherwise)

    def fill(self, state: Any) -> None:
        """What pickle gives an object after making it: a dictionary, or that and the slots' dictionary; anything else
        becomes `state[""]`.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(isinstance(part, dict) or part is None for part in parts):
            parts = ({"": state},)
        for part in parts:
            self.state.update(part or {})

    def __repr__(self) -> str:
        shown = [
            *map(_shown, self.args[:8]),
            *(f"{key}={_shown(value)}" for key, value in list(self.state.items())[:8]),
        ]
        return f"{self.name}({', '.join(shown)})"


def _shown(value: Any) -> str:
    """A value in an error message. Of a container only the type: what it holds can be too long to write out."""
    return reprlib.repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def record_type(name: str) -> type[Record]:
    """The type of record for a class of this dotted name. Writers make records of it too."""
    return type(name.rpartition(".")[2], (Record,), {"__slots__": (), "name": name})


@dataclass(frozen=True)
class Allowed:
    """A function of this package that a file may call under a name of its own."""

    call: Callable[..., Any]


class Filled:
    """An object that an allowed function makes. Its state follows in the file and is given to `fill`."""

    __slots__ = ()

    def fill(self, state: Any) -> None:
        raise NotImplementedError


class StateDict(dict[Any, Any], Filled):
    """An OrderedDict or defaultdict. Attributes that a file sets on one (torch's `_metadata`) are dropped."""

    __slots__ = ()

    def fill(self, state: Any) -> None:
        pass


def unpickle(
    data: bytes,
    where: str,
    table: Mapping[str, Any],
    known: Iterable[str] = (),
    storage: Callable[[Any], Any] | None = None,
) -> Any:
    """The data of a pickle, of any protocol.

    where    the file's name, for errors
    table    dotted name -> Allowed, a type of record, or a plain value
    known    dotted names, as patterns ("megatron.*"), that become records
    storage  what makes a persistent id (torch's storages) into an object

    Raises ConversionError, which names the global that is neither in the table nor known, before anything of it is run.
    """
    machine = _Machine(io.BytesIO(data), where, table, tuple(known), storage)
    try:
        return machine.load()
    except ConversionError as error:
        raise error if where in str(error) else ConversionError(f"{where}: {error}") from error
    except (pickle.UnpicklingError, EOFError, struct.error, *_BROKEN) as error:
        raise ConversionError(f"{where}: the pickle inside is broken ({type(error).__name__}: {error})") from error


_BROKEN = (ValueError, TypeError, LookupError, AttributeError, OverflowError, AssertionError, RuntimeError, MemoryError)


class _Machine(pickle._Unpickler):
    """Python's machine with the instructions of `_PYTHONS` and `_OURS`."""

    def __init__(
        self, data: io.BytesIO, where: str, table: Mapping[str, Any], known: tuple[str, ...], storage: Any
    ) -> None:
        super().__init__(data)
        self.length = len(data.getvalue())
        self.allowance = _ALWAYS + BOUNDS.copies * self.length
        self.where, self.table, self.known, self.storage = where, table, known, storage
        self.records: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{_RENAMED.get(module, module)}.{name}"
        if dotted in self.table:
            return self.table[dotted]
        if not any(fnmatchcase(dotted, pattern) for pattern in self.known):
            raise ConversionError(
                f"{self.where} names {dotted!r}, which is not known to belong into a checkpoint: "
                "refused, and nothing of it was run. If you trust the file, open it with the "
                "program that wrote it and save it without this object"
            )
        if dotted not in self.records:
            self.records[dotted] = record_type(dotted)
        return self.records[dotted]

    def persistent_load(self, pid: Any) -> Any:
        if self.storage is None:
            raise ConversionError(f"{self.where} refers to a tensor's storage, which this kind of file does not have")
        return self.storage(pid)

    def refuse(self, what: str) -> None:
        raise ConversionError(f"{self.where}: the pickle inside {what}: refused")

    def spend(self, given: Any) -> None:
        """Count what a call may copy. A pickle can name the same megabyte again with two bytes."""
        for value in (given, *(given if isinstance(given, tuple) else ())):
            self.allowance -= len(value) if isinstance(value, _SIZED) else 1
        if self.allowance < 0:
            self.refuse("copies the same data again and again")

    def make(self, maker: Any, args: Any, named: Any = None) -> Any:
        if not isinstance(args, tuple):
            self.refuse("calls something without a list of arguments")
        self.spend(args)
        if isinstance(maker, Allowed):
            return maker.call(*args) if not named else self.refuse("names arguments where none are expected")
        if not (isinstance(maker, type) and issubclass(maker, Record)):
            self.refuse(f"calls what is not to be called ({type(maker).__name__})")
        made = maker(*args)
        made.state.update(named or {})
        return made


_SIZED = (tuple, list, dict, set, frozenset, str, bytes)
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as protocol 2 and older spell them


def _check_key(machine: _Machine, key: Any) -> None:
    """Refuse a key that cannot be hashed safely. Hashing a tuple hashes all that is inside: deep ones overflow the
    stack, and ones that share their parts take forever.
    """
    waiting, parts = [key], 0
    while waiting:
        part = waiting.pop()
        parts += len(part) if isinstance(part, tuple) else 0
        if parts > BOUNDS.key_parts:
            machine.refuse(f"has a key of more than {BOUNDS.key_parts} parts, tuples inside tuples")
        if isinstance(part, tuple):
            waiting += part
        elif isinstance(part, list | dict | set):
            machine.refuse(f"has a {type(part).__name__} as a key")


def _reduce(machine: Any) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.make(machine.stack[-1], args)


def _newobj_ex(machine: Any) -> None:
    named, args = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = machine.make(machine.stack[-1], args, named)


def _build(machine: Any) -> None:
    state = machine.stack.pop()
    made = machine.stack[-1]
    if not isinstance(made, Record | Filled):
        machine.refuse(f"sets attributes of a {type(made).__name__}")
    machine.spend(state)
    made.fill(state)


def _put_items(machine: Any, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) not in (dict, StateDict):
        machine.refuse(f"sets items of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _check_key(machine, key)
        target[key] = value


def _setitem(machine: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _put_items(machine, [key, value])


def _setitems(machine: Any) -> None:
    _put_items(machine, machine.pop_mark())


def _dict(machine: Any) -> None:
    items = machine.pop_mark()
    machine.append({})
    _put_items(machine, items)


def _extend(machine: Any, items: list[Any]) -> None:
    if type(machine.stack[-1]) is not list:
        machine.refuse(f"appends to a {type(machine.stack[-1]).__name__}")
    machine.stack[-1].extend(items)


def _append(machine: Any) -> None:
    _extend(machine, [machine.stack.pop()])


def _appends(machine: Any) -> None:
    _extend(machine, machine.pop_mark())


def _additems(machine: Any) -> None:
    items = machine.pop_mark()
    if type(machine.stack[-1]) is not set:
        machine.refuse(f"adds to a {type(machine.stack[-1]).__name__}")
    for item in items:
        _check_key(machine, item)
    machine.stack[-1].update(items)


def _frozenset(machine: Any) -> None:
    items = machine.pop_mark()
    for item in items:
        _check_key(machine, item)
    machine.append(frozenset(items))


def _bytes(machine: Any) -> None:
    """Python's own instruction takes as much memory as the file claims."""
    length = int.from_bytes(machine.read(8), "little")
    data = machine.read(min(length, machine.length))
    if len(data) != length:
        machine.refuse(f"announces {length} bytes, which it does not have")
    machine.append(data)


def _unknown(machine: Any) -> None:
    machine.refuse("uses an instruction that no torch.save writes")


_PYTHONS = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES "
    "SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT EMPTY_SET GLOBAL "
    "STACK_GLOBAL BINPERSID GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE"
)
_OURS: dict[bytes, Callable[[Any], None]] = {
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _reduce,
    pickle.NEWOBJ_EX: _newobj_ex,
    pickle.BUILD: _build,
    pickle.SETITEM: _setitem,
    pickle.SETITEMS: _setitems,
    pickle.DICT: _dict,
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.ADDITEMS: _additems,
    pickle.FROZENSET: _frozenset,
    pickle.BYTEARRAY8: _bytes,
}
# Refused are INST and OBJ of Python 2's classes, EXT*, which call through a registry of the process, buffers from
# outside, and whatever a later Python adds.
_Machine.dispatch = {
    **dict.fromkeys(range(256), _unknown),
    **{ord(op): pickle._Unpickler.dispatch[ord(op)] for op in (getattr(pickle, name) for name in _PYTHONS.split())},
    **{ord(op): how for op, how in _OURS.items()},
}
