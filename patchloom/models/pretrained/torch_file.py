"""Read files of `torch.save` from strangers: an interpreter of the few pickle opcodes that weights need.

`pickletools` splits a pickle into opcodes without executing any. `_Machine` knows about forty of them and builds
plain values, tensors, and those few objects that training scripts save with their weights (`_BUILDERS`). Nothing is
imported or called by a name from the file. A tensor lies inside its storage, and a storage inside the file.

Both formats are read: a zip archive with a pickle and one member per storage, and, as before torch 1.6, a sequence of
pickles followed by the storages.
"""

import argparse
import io
import math
import pickletools
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom_runtime.untrusted import open_plain

MOST_OPCODES = 1 << 22  # per pickle; a tensor takes about forty
MOST_PICKLE_BYTES = 1 << 26
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the format before torch 1.6
_DIMENSIONS, _INTEGER = 32, 1 << 56
_LONGEST_NAME = 100
_DTYPES = {
    f"torch.{name}": value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not name.startswith("q")
}
_STORAGES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
    for module in ("torch", "torch.cuda")
} | {"torch.storage.UntypedStorage": torch.uint8}  # fmt: skip
_NUMBER = re.compile("[biufc][0-9]{1,2}")  # numpy's names of dtypes


class ForeignObjectError(ValueError):
    """Raised for a file that contains more than weights: loading it would call `name`."""

    def __init__(self, name: str) -> None:
        self.name = name if name.isprintable() else ascii(name)
        super().__init__(f"loading it would call {self.name}")


class _PickledName(NamedTuple):
    """The name of a class or function in a pickle, which is never imported."""

    text: str


class _Storage(NamedTuple):
    data: torch.UntypedStorage
    dtype: torch.dtype


_MARK = object()  # the start of a group of values on the stack
Allocate = Callable[[str, int, int], torch.UntypedStorage]  # by key, number of elements and bytes per element


def read_torch_file(path: Path) -> Any:
    """Return the object in a file of `torch.save`. Raises ForeignObjectError or, for damaged files, any error."""
    with open_plain(path) as raw, io.BufferedReader(raw) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return _read_archive(archive)
        file.seek(0)
        return _read_sequence(file.read())


# The formats ----------------------------------------------------------------------------------------------------------


def _read_archive(archive: zipfile.ZipFile) -> Any:
    members = {member.filename: member for member in archive.infolist()}
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    _expect(len(pickles) == 1, "it has no data.pkl of torch.save")
    folder = pickles[0].removesuffix("data.pkl")
    _expect(f"{folder}constants.pkl" not in members, "it is a TorchScript program, not weights")
    if order := members.get(f"{folder}byteorder"):
        _expect(order.file_size <= 8 and archive.read(order) == b"little", "its numbers are not little-endian")
    _expect(members[pickles[0]].file_size <= MOST_PICKLE_BYTES, "its data.pkl is too long")

    def load(key: str, count: int, itemsize: int) -> torch.UntypedStorage:
        size = count * itemsize
        member = members.get(f"{folder}data/{key}")
        if member is None or member.file_size != size:
            raise ValueError(f"storage {key[:20]!r} has another size, or is absent")
        values = torch.empty(size, dtype=torch.uint8)
        with archive.open(member) as source:
            _fill(values, source)
            source.read(1)  # compares the checksum
        return values.untyped_storage()

    return _Machine(load).run(io.BytesIO(archive.read(pickles[0])))


def _read_sequence(content: bytes) -> Any:
    file = io.BytesIO(content)
    waiting: dict[str, tuple[int, Tensor]] = {}  # number of elements and bytes, by key

    def reserve(key: str, count: int, itemsize: int) -> torch.UntypedStorage:
        reserved = sum(values.nbytes for _, values in waiting.values())
        _expect(reserved + count * itemsize <= len(content), "its storages are longer than the file")
        waiting[key] = count, torch.empty(count * itemsize, dtype=torch.uint8)
        return waiting[key][1].untyped_storage()

    def plain() -> Any:
        return _Machine(None).run(file)

    for number in (_MAGIC, _PROTOCOL):
        value = plain()
        _expect(type(value) is int and value == number, "it was not written by torch.save")
    machine = plain()
    _expect(isinstance(machine, dict) and machine.get("little_endian") is True, "its numbers are not little-endian")
    value = _Machine(reserve).run(file)
    keys = plain()
    _expect(isinstance(keys, list) and all(isinstance(key, str) for key in keys), "its storages have no names")
    _expect(sorted(keys) == sorted(waiting), "its storages are not those it names")
    for key in keys:
        count, values = waiting[key]
        _expect(file.read(8) == struct.pack("<q", count), f"storage {key[:20]!r} has another size")
        _fill(values, file)
    return value


def _fill(values: Tensor, source: Any) -> None:
    """Read all bytes of a tensor."""
    rest = memoryview(values.numpy())  # type: ignore[arg-type]
    while rest:
        count = source.readinto(rest)
        _expect(bool(count), "it ends inside its storages")
        rest = rest[count:]


# The interpreter ------------------------------------------------------------------------------------------------------


class _Machine:
    """A stack machine for one pickle. Without `allocate` the pickle has no tensors."""

    def __init__(self, allocate: Allocate | None) -> None:
        self._allocate = allocate
        self._storages: dict[str, tuple[torch.UntypedStorage, int]] = {}
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, file: BinaryIO) -> Any:
        """Execute the next pickle of a file and return its value."""
        start = file.tell()
        for count, (opcode, value, _) in enumerate(pickletools.genops(file)):
            _expect(count < MOST_OPCODES, f"its pickle has more than {MOST_OPCODES:,} opcodes")
            _expect(file.tell() - start <= MOST_PICKLE_BYTES, "its pickle is too long")
            if opcode.name != "STOP":  # the last one
                self._step(opcode.name, value)
        result = self._pop()
        _expect(not self._stack, "its pickle leaves more than one value")
        return result

    def _step(self, name: str, value: Any) -> None:
        if name in _VALUES:
            make = _VALUES[name]
            self._stack.append(value if make is None else make())
        elif name in _TUPLES:
            self._stack.append(tuple(self._pop() for _ in range(_TUPLES[name]))[::-1])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else value] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            _expect(value in self._memo, "its pickle reads a value that it did not store")
            self._stack.append(self._memo[value])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._stack.append(self._name(value))
        elif name == "BINPERSID":
            self._stack.append(self._storage(self._pop()))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, named = self._pop(), self._pop()
            self._stack.append(_build(named, arguments))
        elif name == "BUILD":
            state = self._pop()
            _set_state(self._top(), state)
        elif name in _GROUPS:
            _GROUPS[name](self)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"its pickle uses the opcode {name}, which weights do not need")

    def _pop(self) -> Any:
        value = self._top()
        del self._stack[-1]
        return value

    def _top(self) -> Any:
        _expect(bool(self._stack) and self._stack[-1] is not _MARK, "its pickle takes a value that is not there")
        return self._stack[-1]

    def _group(self) -> list[Any]:
        """Remove and return the values after the last mark."""
        values: list[Any] = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)
        raise ValueError("its pickle ends a group that it did not begin")

    def _add_tuple(self) -> None:
        self._stack.append(tuple(self._group()))

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        _expect(type(target) is list, "its pickle appends to what is not a list")
        target += values

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        is_dict = type(target) in (dict, OrderedDict)
        _expect(is_dict and len(values) % 2 == 0, "its pickle sets items of what is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value

    def _name(self, value: Any) -> Any:
        if value is None:  # STACK_GLOBAL
            name, module = self._pop(), self._pop()
            _expect(isinstance(name, str) and isinstance(module, str), "a name is not text")
            value = f"{module} {name}"
        name = value.replace("__builtin__ ", "builtins ").replace(" ", ".", 1)  # as Python 2 calls it
        if name in _DTYPES:
            return _DTYPES[name]
        if name not in _BUILDERS and name not in _STORAGES:
            raise ForeignObjectError(name[:_LONGEST_NAME])
        return _PickledName(name)

    def _storage(self, values: Any) -> _Storage:
        _expect(isinstance(values, tuple) and len(values) in (5, 6), "a storage has no name")
        _, kind, key, _, count, *view = values
        _expect(isinstance(kind, _PickledName) and kind.text in _STORAGES, "a storage is of an unknown type")
        _expect(type(key) is str and type(count) is int and 0 <= count < _INTEGER, "a storage has no size")
        _expect(view in ([], [None]), "a storage is a view of another one: save the file again with a newer torch")
        dtype = _STORAGES[kind.text]
        size = count * dtype.itemsize
        if key not in self._storages:
            if self._allocate is None:
                raise ValueError("it names a storage outside the weights")
            self._storages[key] = self._allocate(key, count, dtype.itemsize), size
        data, known = self._storages[key]
        _expect(known == size, f"storage {key[:20]!r} has two sizes")
        return _Storage(data, dtype)


# What a pickle may build ----------------------------------------------------------------------------------------------


def _build(named: Any, arguments: Any) -> Any:
    _expect(isinstance(named, _PickledName) and named.text in _BUILDERS, "its pickle calls what is not a function")
    _expect(type(arguments) is tuple, "its pickle calls a function without arguments")
    return _BUILDERS[named.text](*arguments)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, *rest: Any) -> Tensor:
    """Return a view of a storage, as `_rebuild_tensor`, `_rebuild_tensor_v2` or, with a dtype, `_rebuild_tensor_v3`."""
    _expect(isinstance(storage, _Storage), "a tensor has no storage")
    _expect(isinstance(size, tuple) and isinstance(stride, tuple), "a tensor has no valid shape")
    whole = all(type(number) is int and 0 <= number < _INTEGER for number in (offset, *size, *stride))
    _expect(whole and len(size) == len(stride) <= _DIMENSIONS, "a tensor has no valid shape")
    _expect(math.prod(max(1, length) for length in size) < _INTEGER, "a tensor has no valid shape")
    _, *more = rest or (None,)  # hooks
    dtype = more.pop(0) if more and isinstance(more[0], torch.dtype) else storage.dtype
    _expect(all(each is None or each == {} for each in more), "a tensor is conjugated or negated: save its values")
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    end = offset if 0 in size else offset + last + 1
    _expect(end * dtype.itemsize <= storage.data.nbytes(), "a tensor is larger than its storage")
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, size, stride).requires_grad_(requires_grad is True)


def _parameter(data: Any, requires_grad: Any, *_: Any) -> Tensor:
    _expect(isinstance(data, Tensor), "a parameter has no tensor")
    return torch.nn.Parameter(data.detach(), requires_grad is True)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    _expect(all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs), "a dict has no keys and values")
    return OrderedDict((_key(key), value) for key, value in pairs)


def _counter(counts: Any) -> Counter[Any]:
    _expect(type(counts) is dict, "a counter has no counts")
    return Counter(counts)


def _number_type(name: Any, *_: Any) -> np.dtype[Any]:
    _expect(isinstance(name, str) and _NUMBER.fullmatch(name) is not None, "a number has an unknown type")
    return np.dtype(name)


def _number(dtype: Any, data: Any) -> Any:
    fits = isinstance(dtype, np.dtype) and isinstance(data, bytes) and len(data) == dtype.itemsize
    _expect(fits, "a number has another size")
    return np.frombuffer(data, dtype)[0]


def _encoded(text: Any, encoding: Any) -> bytes:
    _expect(isinstance(text, str) and encoding == "latin1", "bytes have an unknown encoding")
    return bytes(text.encode("latin1"))


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, np.dtype):
        _expect(isinstance(state, tuple) and state[1:2] in (("<",), ("|",)), "a number is not little-endian")
        return
    _expect(type(target) in (OrderedDict, argparse.Namespace), "its pickle sets the state of another object")
    _expect(type(state) is dict and all(isinstance(key, str) for key in state), "a state has no names")
    # Other attributes of an OrderedDict would hide its methods.
    names = {"_metadata"} if type(target) is OrderedDict else set(state)
    vars(target).update({name: value for name, value in state.items() if name in names})


def _key(key: Any) -> str | int:
    _expect(type(key) in (str, int), "a key is neither text nor a whole number")
    return key


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,  # milestones of a learning rate
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _number_type,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
    "_codecs.encode": _encoded,
}
_VALUES: dict[str, Callable[[], Any] | None] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES")),
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_GROUPS: dict[str, Callable[[_Machine], None]] = {
    "TUPLE": _Machine._add_tuple,
    "APPEND": lambda machine: machine._append([machine._pop()]),
    "APPENDS": lambda machine: machine._append(machine._group()),
    "SETITEM": lambda machine: machine._set_items([machine._pop(), machine._pop()][::-1]),
    "SETITEMS": lambda machine: machine._set_items(machine._group()),
}
