"""An assembler for WebAssembly: the part of the binary format that `kernels.py` needs.

Names follow the specification (webassembly.github.io/spec/core/binary): a module consists of sections, a function of
locals and a body in which operands precede the operation. Addresses and counts are i32, in bytes or items.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

I32, F32, V128 = 0x7F, 0x7D, 0x7B  # types of values
ADD, SUB, LESS_S, IS_ZERO = b"\x6a", b"\x6b", b"\x48", b"\x45"  # of i32
F32_ADD, F32_MUL = b"\x92", b"\x94"
_EMPTY, _END = b"\x40", b"\x0b"


def unsigned(value: int) -> bytes:
    """Encode an integer as unsigned LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def signed(value: int) -> bytes:
    """Encode an integer as signed LEB128."""
    out = bytearray()
    while not -0x40 <= value < 0x40:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value & 0x7F])


def const(value: int) -> bytes:
    """Push an i32 constant."""
    return b"\x41" + signed(value)


def memory(code: int, align: int, offset: int = 0) -> bytes:
    """Load or store one number. `align` is the base-2 logarithm of its bytes."""
    return bytes([code]) + unsigned(align) + unsigned(offset)


def load_f32(offset: int = 0) -> bytes:
    """Replace an address by the f32 stored there."""
    return memory(0x2A, 2, offset)


def store_f32(offset: int = 0) -> bytes:
    """Store an f32 at an address."""
    return memory(0x38, 2, offset)


def simd(code: int) -> bytes:
    """Apply an operation on 128-bit vectors, without immediates."""
    return b"\xfd" + unsigned(code)


def simd_memory(code: int, align: int, offset: int = 0) -> bytes:
    """Load or store a vector."""
    return simd(code) + unsigned(align) + unsigned(offset)


@dataclass
class Function:
    """A function under construction, with parameters and locals by name."""

    name: str
    parameters: dict[str, int]
    locals: dict[str, int] = field(default_factory=dict)
    body: bytes = b""

    def get(self, name: str) -> bytes:
        """Push a parameter or local."""
        return b"\x20" + unsigned(self._number(name))

    def set(self, name: str, value: bytes) -> bytes:
        """Set a parameter or local to the result of `value`."""
        return value + b"\x21" + unsigned(self._number(name))

    def step(self, name: str, by: bytes) -> bytes:
        """Add `by` to a parameter or local."""
        return self.set(name, self.get(name) + by + ADD)

    def while_at_least(self, counter: str, least: int, body: bytes) -> bytes:
        """Repeat `body` while the counter is at least `least`, and subtract `least` each time."""
        leave = self.get(counter) + const(least) + LESS_S + b"\x0d\x01"
        count = self.set(counter, self.get(counter) + const(least) + SUB)
        return b"\x02" + _EMPTY + b"\x03" + _EMPTY + leave + body + count + b"\x0c\x00" + _END + _END

    def _number(self, name: str) -> int:
        return [*self.parameters, *self.locals].index(name)

    def type(self) -> bytes:
        """Return the type: parameters and no result."""
        return b"\x60" + _vector([bytes([kind]) for kind in self.parameters.values()]) + b"\x00"

    def code(self) -> bytes:
        """Return the code: locals, one group each, and the body."""
        groups = _vector([b"\x01" + bytes([kind]) for kind in self.locals.values()])
        whole = groups + self.body + _END
        return unsigned(len(whole)) + whole


def module(functions: Sequence[Function]) -> bytes:
    """Return a module that exports the functions and imports their memory, `env.memory`."""
    count = len(functions)
    names = [
        _text(one.name) + b"\x00" + unsigned(number)  # 0: a function
        for number, one in enumerate(functions)
    ]
    sections = {
        1: _vector([one.type() for one in functions]),
        2: _vector([_text("env") + _text("memory") + b"\x02\x00" + unsigned(1)]),  # 2: a memory; at least one page
        3: _vector([unsigned(number) for number in range(count)]),
        7: _vector(names),
        10: _vector([one.code() for one in functions]),
    }
    whole = b"".join(bytes([number]) + unsigned(len(body)) + body for number, body in sections.items())
    return b"\x00asm\x01\x00\x00\x00" + whole


def _vector(items: Sequence[bytes]) -> bytes:
    return unsigned(len(items)) + b"".join(items)


def _text(text: str) -> bytes:
    return unsigned(len(text)) + text.encode()
