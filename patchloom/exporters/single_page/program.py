"""What the page computes: a list of operations on values, and one blob of weights.

Everything has a fixed size, that of one picture: a value is (rows, columns) of float32 at a place in memory that is
decided here, where it is known when it was last read. `interpreter.js` has a function for each operation.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

Weights = Literal["int8", "fp16"]
_ALIGNED = 16  # bytes: a vector
_AT_ONCE = 8  # weights that are unpacked in one step, so rows are filled up to a multiple


@dataclass(eq=False)
class Room:
    """Floats in memory, from the operation that writes them to the last that reads them."""

    floats: int
    first: int
    last: int
    at: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """(rows, columns) of a room; several may look at one room in several shapes."""

    number: int
    rows: int
    columns: int
    room: Room


@dataclass
class PageProgram:
    """Operations in order, what they work on, and the bytes of the weights."""

    weights: Weights
    values: list[Value] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    blob: bytearray = field(default_factory=bytearray)
    _rooms: list[Room] = field(default_factory=list)
    _exactly: bool = False

    def value(self, rows: int, columns: int) -> Value:
        """Room for what the next operation gives."""
        step = len(self.operations)
        room = Room(rows * columns, step, step)
        self._rooms.append(room)
        return self._shown(room, rows, columns)

    def view(self, value: Value, rows: int, columns: int) -> Value:
        """The same floats in another shape."""
        assert rows * columns == value.rows * value.columns
        return self._shown(value.room, rows, columns)

    def _shown(self, room: Room, rows: int, columns: int) -> Value:
        self.values.append(Value(len(self.values), rows, columns, room))
        return self.values[-1]

    def run(self, operation: str, out: Value, *inputs: Value, **settings: Any) -> Value:
        """Note an operation; `settings` are numbers, texts and numbers of tensors. Returns `out`."""
        for value in (out, *inputs):
            self.keep(value)
        read = [value.number for value in inputs]
        self.operations.append({"op": operation, "out": out.number, "in": read, **settings})
        return out

    def keep(self, value: Value) -> None:
        """Do not reuse its room before the next operation, or before the end where there is none."""
        value.room.last = max(value.room.last, len(self.operations))

    # Weights ----------------------------------------------------------------------------------------------------

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Matrices that are written meanwhile are fp16, whatever was asked for."""
        self._exactly = True
        yield
        self._exactly = False

    def matrix(self, weight: Tensor) -> int:
        """(rows, columns) of a product, in the form asked for: each row divided by its largest entry."""
        return self._rows(weight, "fp16" if self._exactly else self.weights)

    def table(self, weight: Tensor) -> int:
        """(rows, columns) of what is added or multiplied entry by entry: never below fp16."""
        return self._rows(weight, "fp16")

    def vector(self, weight: Tensor) -> int:
        """As it is, in float32."""
        flat = _numpy(weight).reshape(1, -1)
        return self._tensor(flat.shape, "float", flat.tobytes(), b"")

    def _rows(self, weight: Tensor, form: Weights) -> int:
        rows = _numpy(weight)
        assert rows.ndim == 2
        largest = np.abs(rows).max(axis=1, keepdims=True)
        steps = 127 if form == "int8" else 1
        scales = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(steps)
        filled = np.pad(rows / scales, ((0, 0), (0, -rows.shape[1] % _AT_ONCE)))
        stored = np.rint(filled).astype(np.int8) if form == "int8" else filled.astype(np.float16)
        return self._tensor(rows.shape, form, stored.tobytes(), scales.tobytes())

    def _tensor(self, shape: tuple[int, ...], form: str, stored: bytes, scales: bytes) -> int:
        place = {"at": self._stored(stored)} | ({"scales": self._stored(scales)} if scales else {})
        self.tensors.append({"rows": shape[0], "columns": shape[1], "form": form, **place})
        return len(self.tensors) - 1

    def _stored(self, data: bytes) -> int:
        self.blob += bytes(-len(self.blob) % _ALIGNED)
        at = len(self.blob)
        self.blob += data
        return at

    # The whole --------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Operations, values and tensors as JSON; the blob goes beside it."""
        floats = _placed(self._rooms)
        return {
            "operations": self.operations,
            "values": [[value.room.at, value.rows, value.columns] for value in self.values],
            "floats": floats,
            "tensors": self.tensors,
            "weights": self.weights,
        }

    def encoded(self) -> str:
        """The blob in base64."""
        return base64.b64encode(self.blob).decode()


def _placed(rooms: list[Room]) -> int:
    """Give each room the lowest place that is free as long as it lives; returns the floats needed."""
    placed: list[Room] = []
    for room in sorted(rooms, key=lambda one: -one.floats):
        others = sorted(
            (one for one in placed if one.first <= room.last and room.first <= one.last), key=lambda o: o.at
        )
        room.at = 0
        for other in others:
            if room.at + room.floats <= other.at:
                break
            room.at = max(room.at, other.at + _padded(other.floats))
        placed.append(room)
    return max((room.at + _padded(room.floats) for room in placed), default=0)


def _padded(floats: int) -> int:
    """Up to whole vectors, with one step of unpacking to spare."""
    return -(-floats // _AT_ONCE) * _AT_ONCE + _AT_ONCE


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())
