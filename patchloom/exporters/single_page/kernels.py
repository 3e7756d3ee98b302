"""The expensive kernels of a network for WebAssembly, with vectors of four floats: products and unpacking of weights.

    unpack8, unpack16   (from, to, count, scale): int8 or fp16 → float32, eight at a time
    pack                (from, step, across, to, k, n): a block of a matrix with any strides → (k, n), contiguous
    panel8, 4, 1        (a, row of a, panel, c, row of c, m, k): c (m, n) += a (m, k) · panel (k, n), n = 8, 4 or 1

`interpreter.js` has the same functions in plain JavaScript, for browsers without WebAssembly vectors.
"""

from patchloom.exporters.single_page.wasm import (
    ADD,
    F32,
    F32_ADD,
    F32_MUL,
    I32,
    V128,
    Function,
    const,
    load_f32,
    module,
    simd,
    simd_memory,
    store_f32,
)

_ROWS = 4  # of c at once: with panels of 8 that is 8 sums, which fit into the 16 registers
_LOAD, _STORE, _LOAD_SPLAT = 0x00, 0x0B, 0x09
_LOAD_8X8_S, _LOAD_16X4_U = 0x01, 0x04
_EXTEND_LOW_S, _EXTEND_HIGH_S = 0xA7, 0xA8  # i16x8 → i32x4
_TO_FLOAT, _SPLAT_I32, _SPLAT_F32 = 0xFA, 0x11, 0x13
_SHIFT_LEFT, _AND, _OR = 0xAB, 0x4E, 0x50
_ADD, _MUL, _MULTIPLY_ADD = 0xE4, 0xE6, 0x105
_POINTER, _COUNT = I32, I32


def kernels(*, fused: bool) -> bytes:
    """Return the module. `fused` uses one instruction to multiply and add (relaxed SIMD); not every browser has it."""
    panels = [_panel(width, fused=fused) for width in (8, 4, 1)]
    return module([_unpack8(), _unpack16(), _pack(), *panels])


def _unpack8() -> Function:
    f = Function("unpack8", {"from": _POINTER, "to": _POINTER, "count": _COUNT, "scale": F32}, {"eight": V128})
    halves = [
        f.get("to")
        + (f.get("eight") + simd(extend) + simd(_TO_FLOAT) + f.get("scale") + simd(_SPLAT_F32) + simd(_MUL))
        + simd_memory(_STORE, 4, 16 * half)
        for half, extend in enumerate((_EXTEND_LOW_S, _EXTEND_HIGH_S))
    ]
    read = f.set("eight", f.get("from") + simd_memory(_LOAD_8X8_S, 3))
    steps = f.step("from", const(8)) + f.step("to", const(32))
    f.body = f.while_at_least("count", 8, read + b"".join(halves) + steps)
    return f


def _unpack16() -> Function:
    """Unpack fp16. Moving exponent and fraction to the bits of a float gives a value 2¹¹² times too small."""
    f = Function("unpack16", {"from": _POINTER, "to": _POINTER, "count": _COUNT, "scale": F32}, {"four": V128})
    half = b""
    for number in range(2):
        size = f.get("four") + const(0x7FFF) + simd(_SPLAT_I32) + simd(_AND) + const(13) + simd(_SHIFT_LEFT)
        sign = f.get("four") + const(0x8000) + simd(_SPLAT_I32) + simd(_AND) + const(16) + simd(_SHIFT_LEFT)
        enlarge = const((127 + 112) << 23) + simd(_SPLAT_I32) + simd(_MUL)
        scaled = size + sign + simd(_OR) + enlarge + f.get("scale") + simd(_SPLAT_F32) + simd(_MUL)
        half += f.set("four", f.get("from") + simd_memory(_LOAD_16X4_U, 3, 8 * number))
        half += f.get("to") + scaled + simd_memory(_STORE, 4, 16 * number)
    steps = f.step("from", const(16)) + f.step("to", const(32))
    f.body = f.while_at_least("count", 8, half + steps)
    return f


def _pack() -> Function:
    parameters = {"from": _POINTER, "step": I32, "across": I32, "to": _POINTER, "k": _COUNT, "n": _COUNT}
    f = Function("pack", parameters, {"at": _POINTER, "left": _COUNT})
    copy = f.get("to") + f.get("at") + load_f32() + store_f32()
    one = copy + f.step("at", f.get("across")) + f.step("to", const(4))
    row = f.set("at", f.get("from")) + f.set("left", f.get("n")) + f.while_at_least("left", 1, one)
    f.body = f.while_at_least("k", 1, row + f.step("from", f.get("step")))
    return f


def _panel(width: int, *, fused: bool) -> Function:
    parameters = {"a": _POINTER, "a_row": I32, "panel": _POINTER, "c": _POINTER, "c_row": I32, "m": _COUNT, "k": _COUNT}
    vectors = max(1, width // 4)
    kind = V128 if width > 1 else F32
    pointers = [f"{name}{row}" for name in ("a", "c") for row in range(_ROWS)] + ["p"]
    sums = [f"sum{row}_{vector}" for row in range(_ROWS) for vector in range(vectors)]
    columns = [f"column{vector}" for vector in range(vectors)]
    f = Function(f"panel{width}", parameters)
    f.locals = dict.fromkeys([*pointers, "left"], I32) | dict.fromkeys([*sums, *columns, "one"], kind)
    f.body = b"".join(
        f.while_at_least("m", rows, _rows(f, rows, width, vectors, fused=fused and width > 1)) for rows in (_ROWS, 1)
    )
    return f


def _rows(f: Function, rows: int, width: int, vectors: int, *, fused: bool) -> bytes:
    """Return code that adds to `rows` rows of c."""
    wide = width > 1
    read = (lambda offset: simd_memory(_LOAD, 2, offset)) if wide else load_f32
    write = (lambda offset: simd_memory(_STORE, 2, offset)) if wide else store_f32
    add, multiply = (simd(_ADD), simd(_MUL)) if wide else (F32_ADD, F32_MUL)
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]

    start, inner = f.set("p", f.get("panel")), b""
    for row in range(rows):
        for name in ("a", "c"):
            above = f.get(name) if row == 0 else f.get(f"{name}{row - 1}") + f.get(f"{name}_row") + ADD
            start += f.set(f"{name}{row}", above)
    for row, vector in places:
        start += f.set(f"sum{row}_{vector}", f.get(f"c{row}") + read(16 * vector))
    for vector in range(vectors):
        inner += f.set(f"column{vector}", f.get("p") + read(16 * vector))
    for row in range(rows):
        inner += f.set("one", f.get(f"a{row}") + (simd_memory(_LOAD_SPLAT, 2) if wide else load_f32()))
        for vector in range(vectors):
            total, factors = f.get(f"sum{row}_{vector}"), f.get("one") + f.get(f"column{vector}")
            grown = factors + total + simd(_MULTIPLY_ADD) if fused else total + factors + multiply + add
            inner += f.set(f"sum{row}_{vector}", grown)
        inner += f.step(f"a{row}", const(4))
    inner += f.step("p", const(4 * width))

    finish = b"".join(f.get(f"c{row}") + f.get(f"sum{row}_{vector}") + write(16 * vector) for row, vector in places)
    for name in ("a", "c"):
        for _ in range(rows):
            finish += f.step(name, f.get(f"{name}_row"))
    return start + f.set("left", f.get("k")) + f.while_at_least("left", 1, inner) + finish
