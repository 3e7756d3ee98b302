"""The program that a page runs: a list of operations on values, and one blob of weights.

All sizes are fixed, since the program processes one image. A value is (rows, columns) of float32. Its memory address is
decided here, where the last read of every value is known. `interpreter.js` has one function per operation.
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
_AT_ONCE = 8  # weights that are unpacked in one step; rows are padded to a multiple


@dataclass(eq=False)
class Buffer:
    """Floats in memory, in use from the operation that writes them to the last one that reads them."""

    floats: int
    first: int
    last: int
    at: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """A view of a buffer as (rows, columns). Several views may share one buffer."""

    number: int
    rows: int
    columns: int
    buffer: Buffer


@dataclass
class PageProgram:
    """Operations in order, their values and tensors, and the bytes of the weights."""

    weights: Weights
    values: list[Value] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    blob: bytearray = field(default_factory=bytearray)
    _buffers: list[Buffer] = field(default_factory=list)
    _half_precision: bool = False

    def value(self, rows: int, columns: int) -> Value:
        """Allocate a value for the result of the next operation."""
        step = len(self.operations)
        buffer = Buffer(rows * columns, step, step)
        self._buffers.append(buffer)
        return self._new_view(buffer, rows, columns)

    def view(self, value: Value, rows: int, columns: int) -> Value:
        """Return the same floats in another shape."""
        assert rows * columns == value.rows * value.columns
        return self._new_view(value.buffer, rows, columns)

    def _new_view(self, buffer: Buffer, rows: int, columns: int) -> Value:
        self.values.append(Value(len(self.values), rows, columns, buffer))
        return self.values[-1]

    def run(self, operation: str, out: Value, *inputs: Value, **settings: Any) -> Value:
        """Append an operation and return `out`. `settings` are numbers, texts and tensor numbers."""
        for value in (out, *inputs):
            self.keep(value)
        read = [value.number for value in inputs]
        self.operations.append({"op": operation, "out": out.number, "in": read, **settings})
        return out

    def keep(self, value: Value) -> None:
        """Keep the buffer of a value until the next operation, or until the end if there is none."""
        value.buffer.last = max(value.buffer.last, len(self.operations))

    # Weights ----------------------------------------------------------------------------------------------------

    @contextmanager
    def half_precision(self) -> Iterator[None]:
        """Store the matrices written in this context as fp16, also if `weights` is int8."""
        self._half_precision = True
        yield
        self._half_precision = False

    def matrix(self, weight: Tensor) -> int:
        """Store a matrix (rows, columns) of a product, in the program's `weights` format, and return its number.

        Each row is divided by its largest entry.
        """
        return self._rows(weight, "fp16" if self._half_precision else self.weights)

    def table(self, weight: Tensor) -> int:
        """Store a matrix (rows, columns) that is added or multiplied entry by entry, as fp16."""
        return self._rows(weight, "fp16")

    def vector(self, weight: Tensor) -> int:
        """Store a vector as float32."""
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
        address = {"at": self._append(stored)} | ({"scales": self._append(scales)} if scales else {})
        self.tensors.append({"rows": shape[0], "columns": shape[1], "form": form, **address})
        return len(self.tensors) - 1

    def _append(self, data: bytes) -> int:
        self.blob += bytes(-len(self.blob) % _ALIGNED)
        at = len(self.blob)
        self.blob += data
        return at

    # Result --------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return operations, values and tensors as JSON values, without the blob."""
        floats = _placed(self._buffers)
        return {
            "operations": self.operations,
            "values": [[value.buffer.at, value.rows, value.columns] for value in self.values],
            "floats": floats,
            "tensors": self.tensors,
            "weights": self.weights,
        }

    def encoded(self) -> str:
        """Return the blob in base64."""
        return base64.b64encode(self.blob).decode()


def _placed(buffers: list[Buffer]) -> int:
    """Assign each buffer the lowest address that is free while it is in use. Returns the floats needed."""
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda one: -one.floats):
        others = sorted(
            (one for one in placed if one.first <= buffer.last and buffer.first <= one.last), key=lambda o: o.at
        )
        buffer.at = 0
        for other in others:
            if buffer.at + buffer.floats <= other.at:
                break
            buffer.at = max(buffer.at, other.at + _padded(other.floats))
        placed.append(buffer)
    return max((buffer.at + _padded(buffer.floats) for buffer in placed), default=0)


def _padded(floats: int) -> int:
    """Round up to whole vectors, and add one step of unpacking."""
    return -(-floats // _AT_ONCE) * _AT_ONCE + _AT_ONCE


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())
