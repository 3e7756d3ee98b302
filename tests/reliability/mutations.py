"""Files as a stranger might hand them over: mutations that know the structure of each format.

A mutation is drawn from a random generator, so a case is known by its number. It says in a few words what it did, and
whether the format itself would show the damage: then a changed answer is never right.
"""

import copy
import csv
import io
import json
import os
import pickletools
import random
import sqlite3
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SECRET, FARTHER = "../outside/secret.png", "../../outside/secret.json"  # beside the folder that is read
LONG = 100_000
DEEP = 3_000


class Mutation(NamedTuple):
    """New bytes of a file."""

    data: bytes
    said: str  # what was done
    shows: bool = False  # the format has a checksum or an end that the change breaks
    means: bool = False  # what it says is another thing said well, which nobody can tell from the truth


class Raw(str):
    """Text that stands in JSON as it is."""


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**12, 10**30, 0.5, -1e308, "", "x", "x" * LONG, "a\0b", "a\nb\x1b[31m", [], {}, [[]],
    {"x": None}, SECRET, FARTHER, "/etc/hostname", "..", Raw("1e400"), Raw("NaN"), Raw("-Infinity"), Raw("9" * 5000),
    Raw('"\\ud800"'), Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP),
)  # fmt: skip


# Any bytes ----------------------------------------------------------------------------------------------------------


def damage(data: bytes, rng: random.Random) -> Mutation:
    """Damage that knows nothing of the format."""
    changed = bytearray(data)
    place = rng.randrange(len(changed)) if changed else 0
    kind = rng.choice(("bit", "bit", "byte", "cut", "insert", "drop", "empty", "more", "zeros", "utf-16"))
    if kind in ("bit", "byte") and changed:
        changed[place] = changed[place] ^ (1 << rng.randrange(8)) if kind == "bit" else rng.randrange(256)
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed[place:place] = rng.randbytes(rng.randrange(1, 64))
    elif kind == "drop":
        del changed[place : place + rng.randrange(1, 64)]
    elif kind == "empty":
        changed.clear()
    elif kind == "more":
        changed += rng.randbytes(rng.randrange(1, 600))
    elif kind == "zeros":
        changed[place : place + 64] = bytes(min(64, len(changed) - place))
    else:
        changed = bytearray(b"\xff\xfe" + bytes(data.decode("latin-1"), "utf-16-le"))
    return Mutation(bytes(changed), f"{kind} at byte {place}")


# Trees of JSON and YAML ---------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a tree, its root's too; of long lists the first and the last."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)) if len(value) < 9 else (0, 1, len(value) // 2, len(value) - 1):
            found += _places(value[i], (*path, i))
    return found


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _another(value: Any, rng: random.Random) -> Any:
    """A value that is near, or of another kind."""
    near: list[Any] = []
    if isinstance(value, bool) or value is None:
        near = [not value, int(bool(value)), "true"]
    elif isinstance(value, int | float):
        near = [value + 1, value - 1, -value, value * 1000, value / 3, str(value), [value]]
    elif isinstance(value, str):
        near = [value[:-1], value + "x", value.upper(), [value], value.encode().hex(), {value: value}]
    elif isinstance(value, list):
        near = [value[:-1], value + value[-1:], value[::-1], value * 300, [value], value[1:], [*value, None]]
    elif isinstance(value, dict):
        near = [list(value), list(value.items()), {"": value}, dict(reversed(value.items())), [value]]
    return copy.deepcopy(rng.choice(near if near and rng.random() < 0.4 else VALUES))


def edit(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """The tree with one change, and what it is."""
    tree = copy.deepcopy(tree)
    path = rng.choice(_places(tree))
    value = _at(tree, path)
    shown = ".".join(map(str, path)) or "all"
    kind = rng.choice(("value", "value", "value", "delete", "rename", "twice", "swap"))
    if kind == "swap" and isinstance(value, list) and len(value) > 1:
        one, other = rng.sample(range(len(value)), 2)
        value[one], value[other] = value[other], value[one]
        return tree, f"{shown}: {one} and {other} swapped"
    if kind == "twice" and isinstance(value, dict) and value:
        key = rng.choice(list(value))
        text = to_json(value)
        twice = Raw(f"{text[:-1]}, {json.dumps(str(key))}: {to_json(_another(value[key], rng))}}}")
        return _put(tree, path, twice), f"{shown}: {key} twice"
    if kind in ("delete", "rename") and path:
        parent = _at(tree, path[:-1])
        if isinstance(parent, dict) or kind == "delete":
            kept = parent.pop(path[-1])
            if kind == "rename":
                parent[rng.choice(("", "x", str(path[-1]).upper(), str(path[-1]) + " ", SECRET))] = kept
            return tree, f"{shown}: {kind}d"
    new = _another(value, rng)
    told = to_json(new)
    return _put(tree, path, new), f"{shown} = {told if len(told) < 60 else told[:50] + f'… ({len(told)} characters)'}"


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    _at(tree, path[:-1])[path[-1]] = value
    return tree


def to_json(tree: Any) -> str:
    """The text of a tree; `Raw` stands in it as it is."""
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(str(value))
            return f"\x01raw{len(raws) - 1}\x01"
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list | tuple) else value

    text = json.dumps(marked(tree))
    for number, raw in enumerate(raws):
        text = text.replace(f'"\\u0001raw{number}\\u0001"', raw)
    return text


def _edited(tree: Any, rng: random.Random) -> tuple[Any, str]:
    tree, said = edit(tree, rng)
    if rng.random() < 0.15 and isinstance(tree, dict | list):
        tree, more = edit(tree, rng)
        said += f"; {more}"
    return tree, said


def of_json(data: bytes, rng: random.Random) -> Mutation:
    """A tree with another value, key or length; or damaged text."""
    if rng.random() < 0.15:
        return damage(data, rng)
    tree, said = _edited(json.loads(data), rng)
    return Mutation(to_json(tree).encode(), said)


def of_json_lines(data: bytes, rng: random.Random) -> Mutation:
    """One line of many as another tree, or lines lost, repeated, in another order."""
    if rng.random() < 0.2:
        return damage(data, rng)
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    if rng.random() < 0.2:
        kind = rng.choice(("repeated", "lost", "moved"))
        line = lines.pop(at)
        lines[0:0] = {"repeated": [line, line], "lost": [], "moved": [line]}[kind]
        return Mutation(b"\n".join(lines) + b"\n", f"line {at + 1} {kind}")
    tree, said = _edited(json.loads(lines[at]), rng)
    lines[at] = to_json(tree).encode()
    return Mutation(b"\n".join(lines) + b"\n", f"line {at + 1}: {said}")


_YAML = (
    "&a [*a]", "*nothing", "!!python/object/apply:os.system [id]", "!!binary x", "!!float nan", ".inf", "2001-01-01",
    "2001-13-45", "0o777", "0x" + "f" * 400, "{a: &b [1, 1], c: [*b, *b]}", "<<: {a: 1}", "? [1, 2]\n: 3", "|\n  x",
    "!<tag:x> y", "'", "{", "- - - x", "\t x", "---\nx: 1", "1_000", "1:30:00", "yes", "~", "!!set {a, b}", "%TAG x",
    "!!timestamp 1", "!!int x", "!!omap [a: 1]", "!!pairs x", "[" * DEEP,
)  # fmt: skip


def of_yaml(data: bytes, rng: random.Random) -> Mutation:
    """As of JSON; and aliases, tags, other scalars."""
    kind = rng.random()
    if kind < 0.1:
        return damage(data, rng)
    text = data.decode()
    if kind < 0.4:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        key = lines[at].partition(":")[0]
        new = rng.choice(_YAML)
        lines[at] = f"{key}: {new}"
        return Mutation("\n".join(lines).encode(), f"line {at + 1}: {key}: {new[:50]}")
    tree, said = _edited(yaml.safe_load(text), rng)
    if kind < 0.7:
        return Mutation(to_json(tree).encode(), f"{said}, in braces")
    return Mutation(yaml.dump(tree, Dumper=_Dumper).encode("utf-8", "surrogatepass"), said)


class _Dumper(yaml.SafeDumper):
    """Dumps `Raw` as text."""


_Dumper.add_representer(Raw, lambda dumper, value: dumper.represent_str(str(value)[:200]))


# Tables -------------------------------------------------------------------------------------------------------------

_CELLS = (
    "", " ", "x", "nan", "NA", "-1", "1e400", "1.0", "10000000000", "a\0b", "=cmd()", "x" * LONG, "x" * 200_000,
    '"', "'",
    "a,b", "a\nb", "\ufeff", "\x1b[31m", "é", "e\u0301", SECRET, "/etc/hostname", "/dev/zero", "..", ".", "a/" * 3000,
    "train", "val", "\u200b", "*.png", "[0-9].png", "{0..9}.png", "~", "hf:a/b",
)  # fmt: skip


def of_csv(data: bytes, rng: random.Random) -> Mutation:
    """Cells, columns, rows, quotes and delimiters."""
    if rng.random() < 0.15:
        return damage(data, rng)
    rows = list(csv.reader(data.decode().splitlines()))
    at = rng.randrange(len(rows))
    column = rng.randrange(len(rows[at]))
    kind = rng.choice(
        ("cell", "cell", "cell", "header", "less", "more", "lost", "twice", "column", "text", "delimiter")
    )
    said = f"{kind} in row {at}, column {column}"
    delimiter = ","
    if kind == "cell":
        rows[at][column] = rng.choice(_CELLS)
        said = f"row {at}, column {column} = {rows[at][column][:40]!r}"
    elif kind == "header":
        rows[0][min(column, len(rows[0]) - 1)] = rng.choice(
            ("", "label", "path", "split", "coarse_label", "x", "label_label")
        )
    elif kind == "less":
        rows[at].pop(column)
    elif kind == "more":
        rows[at] += ["x"] * rng.choice((1, 2, 5000))
    elif kind == "lost":
        rows.pop(at)
    elif kind == "twice":
        rows.insert(at, list(rows[rng.randrange(len(rows))]))
    elif kind == "column":
        for row in rows:
            row.insert(min(column, len(row)), rng.choice(("", "split", "family_label", "x")))
    elif kind == "delimiter":
        delimiter = rng.choice(";\t|: ")
        said = f"delimiter {delimiter!r}"
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))).writerows(rows)
    text = out.getvalue()
    if kind == "text":
        old, new = rng.choice((("\n", "\r"), (",", '"'), (",", ",,"), ("\r\n", ""), ("\n", "\n\n"), (".png", "")))
        text, said = text.replace(old, new), f"{old!r} as {new!r}"
    return Mutation(text.encode("utf-8", "surrogatepass"), said)


def of_text(data: bytes, rng: random.Random) -> Mutation:
    """Lines changed, lost or repeated."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.choice(("damage", "line", "lost", "twice", "long", "bytes", "ends"))
    if kind == "damage":
        return damage(data, rng)
    if kind == "line":
        lines[at] = rng.choice(_CELLS).encode("utf-8", "surrogatepass")
    elif kind == "lost":
        lines.pop(at)
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "long":
        lines[at] = (lines[at] or b"x ") * 20_000
    elif kind == "bytes":
        lines[at] = rng.randbytes(30)
    return Mutation((b"\r" if kind == "ends" else b"\n").join(lines), f"{kind} in line {at + 1}")


# Arrays -------------------------------------------------------------------------------------------------------------


def of_safetensors(data: bytes, rng: random.Random) -> Mutation:
    """The header as another tree, kinds and shapes of tensors, numbers in them."""
    length = int.from_bytes(data[:8], "little")
    header, payload = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    kind = rng.choice(("damage", "tree", "tree", "tensor", "tensor", "length", "flip", "number", "about"))
    said = kind
    if kind == "damage":
        return damage(data, rng)
    if kind == "flip":
        at = rng.randrange(len(payload))
        payload[at] ^= 1 << rng.randrange(8)
        return Mutation(data[: 8 + length] + bytes(payload), f"bit at byte {at} of the numbers")
    if kind == "number":
        at = rng.randrange(len(payload) // 4) * 4
        number = rng.choice((float("nan"), float("inf"), -1.0, 1e38, 1e-40))
        payload[at : at + 4] = struct.pack("<f", number)
        return Mutation(data[: 8 + length] + bytes(payload), f"number {number} at byte {at}")
    if kind == "length":
        number = rng.choice((0, 1, length - 1, length + 1, 2**40, 2**63 - 1, 2**64 - 1, 100_000_001))
        return Mutation(number.to_bytes(8, "little") + data[8:], f"header of {number} bytes")
    if kind == "about" and "patchloom" in header.get("__metadata__", {}):
        name = "patchloom"
        inner, said = _edited(json.loads(header["__metadata__"][name]), rng)
        header["__metadata__"][name] = to_json(inner)
        said = f"__metadata__.{name}: {said}"
    elif kind == "tensor":
        name = rng.choice([key for key in header if key != "__metadata__"])
        tensor = header[name]
        field, value = rng.choice(
            [("dtype", one) for one in ("F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "x")]
            + [("shape", one) for one in ([], [0], [1, *tensor["shape"]], tensor["shape"][::-1], [2**40, 2**40])]
            + [("shape", [-1]), ("shape", [1] * 70), ("shape", [0, 2**62]), ("data_offsets", [0, 0])]
        )
        tensor[field] = value
        said = f"{name}.{field} = {value}"
    else:
        header, said = _edited(header, rng)
    packed = to_json(header).encode()
    return Mutation(len(packed).to_bytes(8, "little") + packed + bytes(payload), said)


def of_npy(data: bytes, rng: random.Random) -> Mutation:
    """The header's version, kind, order and shape; numbers."""
    end = 10 + int.from_bytes(data[8:10], "little")
    kind = rng.choice(("damage", "version", "header", "header", "header", "number"))
    if kind == "damage":
        return damage(data, rng)
    if kind == "version":
        return Mutation(data[:6] + bytes(rng.choice(((2, 0), (3, 0), (9, 9), (0, 0)))) + data[8:], "another version")
    if kind == "number":
        number = rng.choice((float("nan"), float("inf"), 2.0, -3e38))
        return Mutation(data[:end] + struct.pack("<f", number) + data[end + 4 :], f"first number {number}")
    header = data[10:end].decode()
    old, new = rng.choice(
        (("'<f4'", "'<f8'"), ("'<f4'", "'>f4'"), ("'<f4'", "'|O'"), ("'<f4'", "'<f2'"), ("'<f4'", "'|S4'"),
         ("'<f4'", "[('a', '<f4')]"), ("'<f4'", "'|V4'"), ("'<f4'", "5"), ("False", "True"), ("False", "None"),
         ("'shape': (", "'shape': (1, "), ("'shape': (", "'shape': (-"), ("'shape': (", "'shape': (9999999999, "),
         ("'shape': (", "'shape': (0, "), ("'shape': (", "'x': ("), ("}", "} + {}"), ("{", "(" * 200 + "{"),
         ("'descr'", "__import__('os').system('id')"))
    )  # fmt: skip
    packed = header.replace(old, new, 1).encode()
    return Mutation(data[:8] + len(packed).to_bytes(2, "little") + packed + data[end:], f"{old} as {new[:40]}")


# Archives -----------------------------------------------------------------------------------------------------------


def _tar_headers(data: bytes) -> list[int]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [member.offset for member in archive.getmembers()]


_TAR_FIELDS = {"name": (0, 100), "mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12),
               "chksum": (148, 8), "type": (156, 1), "link": (157, 100), "magic": (257, 8),
               "prefix": (345, 155)}  # fmt: skip
_TAR_VALUES = {
    "name": (b"", b"../outside/secret.png", b"/etc/hostname", b"x" * 100, b"\xff\xfe.png", b"a/../b.png", b"\0" * 100),
    "size": (b"0", b"77777777777", b"-1", b"x", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"00000000001"),
    "type": tuple(bytes([kind]) for kind in b"0123456789xgLKSDVMNA\0Z"),
    "link": (b"../outside/secret.png", b"/dev/zero"),
}


def of_tar(data: bytes, rng: random.Random) -> Mutation:
    """Fields of headers with their checksum or without, members of other kinds, an early end."""
    kind = rng.choice(("header", "header", "header", "flip", "cut", "end", "member", "payload", "order"))
    headers = _tar_headers(data)
    changed = bytearray(data)
    at = rng.choice(headers)
    if kind == "flip":
        place = at + rng.randrange(500)
        changed[place] ^= 1 << rng.randrange(8)
        # The checksum counts bytes without their order and is read as a number: spaces about it mean nothing.
        return Mutation(bytes(changed), f"bit at byte {place - at} of the header at {at}", not 148 <= place - at < 156)
    if kind == "payload":
        place = min(at + 512 + rng.randrange(512), len(changed) - 1)
        changed[place] ^= 1 << rng.randrange(8)
        return Mutation(bytes(changed), f"bit at byte {place}")
    if kind == "cut":
        place = rng.randrange(headers[-1] + 512)
        return Mutation(data[:place], f"cut at byte {place}", True)
    if kind == "end":
        end = len(data.rstrip(b"\0"))
        more = rng.choice((b"", b"\0" * 512, b"\0" * 1024 + data[: headers[1]], rng.randbytes(1024)))
        return Mutation(data[: -(-end // 512) * 512] + more, f"{len(more)} bytes in place of the end", len(more) < 1024)
    if kind == "order":
        one, other = sorted(rng.sample(range(len(headers)), 2))
        parts = [data[a:b] for a, b in zip(headers, [*headers[1:], len(data)], strict=True)]
        tail = parts[-1][-1024:]
        return Mutation(b"".join([*parts[:one], parts[other], *parts[one:]])[:-1024] + tail, f"member {other} twice")
    if kind == "member":
        return _with_member(data, rng)
    field = rng.choice(list(_TAR_FIELDS))
    start, size = _TAR_FIELDS[field]
    value = rng.choice(_TAR_VALUES.get(field, (b"", b"\xff" * size, b"-1", b"0000001", rng.randbytes(size))))[:size]
    changed[at + start : at + start + size] = value.ljust(size, b"\0")
    summed = field != "chksum" and rng.random() < 0.7
    if summed:
        changed[at + 148 : at + 156] = b" " * 8
        changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    same = bytes(changed) == data
    return Mutation(
        bytes(changed), f"{field} = {value[:30]!r} in the header at {at}{', summed' * summed}", not summed and not same
    )


def _with_member(data: bytes, rng: random.Random) -> Mutation:
    """A member of another kind before all others."""
    name = rng.choice(
        (SECRET, "/etc/hostname", "x/../../outside/secret.png", "red/new.png", "x" * 300 + ".png", "0009.png")
    )
    kind = rng.choice(
        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.REGTYPE)
    )
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.devmajor, info.devminor = (
        kind,
        rng.choice((SECRET, "/dev/zero", "0000.png", name)),
        1,
        5,
    )
    if rng.random() < 0.3:
        info.pax_headers = rng.choice(
            ({"path": SECRET}, {"size": "99999999999999"}, {"size": "x"}, {"GNU.sparse.realsize": "999999999999"},
             {"mtime": "x"},
             {"GNU.sparse.map": "0,1,9,x"}, {"comment": "x" * 70_000})
        )  # fmt: skip
    block = info.tobuf(rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)), errors="surrogateescape")
    return Mutation(
        block + data, f"a member {name[:40]} of type {kind.decode()} {info.pax_headers or info.linkname}"[:120]
    )


def of_zip(data: bytes, rng: random.Random) -> Mutation:
    """Names, sizes, methods and flags in headers and the central directory; members that should not be."""
    kind = rng.choice(("damage", "directory", "directory", "local", "member", "cut", "end"))
    if kind == "damage":
        return damage(data, rng)
    if kind == "member":
        out = io.BytesIO(data)
        name = rng.choice(
            (SECRET, "/etc/hostname", "red/../../x.png", "red\\x.png", "red/new.png", "C:/x.png", "red/0.png")
        )
        with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive, warnings_off():
            info = zipfile.ZipInfo(name)
            info.external_attr = rng.choice((0o100644, 0o120777, 0o020666, 0o040755)) << 16
            archive.writestr(info, rng.choice((b"", b"/etc/hostname", bytes(50_000_000))))
        return Mutation(out.getvalue(), f"a member {name} of mode {info.external_attr >> 16:o}")
    if kind == "cut":
        place = rng.randrange(len(data))
        return Mutation(data[:place], f"cut at byte {place}", True)
    signature = {"directory": b"PK\x01\x02", "local": b"PK\x03\x04", "end": b"PK\x05\x06"}[kind]
    places = [i for i in range(len(data)) if data.startswith(signature, i)]
    at = rng.choice(places) + rng.randrange(4, {"directory": 46, "local": 30, "end": 22}[kind])
    changed = bytearray(data)
    value = rng.choice((0, 1, 255, 8, 99, changed[at] ^ 1))
    changed[at] = value
    return Mutation(bytes(changed), f"byte {at} of a {kind} header = {value}")


def warnings_off() -> Any:
    """zipfile warns of a name that is there twice."""
    import warnings

    return warnings.catch_warnings(action="ignore")


# Pictures -----------------------------------------------------------------------------------------------------------


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", zlib.crc32(kind + content))


def of_png(data: bytes, rng: random.Random) -> Mutation:
    """Chunks with their checksums made right: other sizes and kinds, chunks lost, twice, foreign."""
    if rng.random() < 0.3:
        return damage(data, rng)
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">L", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    kind = rng.choice(("size", "header", "lost", "twice", "foreign", "flip", "large"))
    number = rng.randrange(len(chunks))
    if kind == "size":
        side = rng.choice((0, 1, 15, 17, 65_535, 2**31 - 1, 2**32 - 1))
        chunks[0] = (b"IHDR", struct.pack(">L", side) + chunks[0][1][4:])
        kind = f"width {side}"
    elif kind == "header":
        content = bytearray(chunks[0][1])
        content[rng.randrange(8, 13)] = rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 16, 255))
        chunks[0] = (b"IHDR", bytes(content))
        kind = f"header {content[8:].hex()}"
    elif kind == "lost":
        chunks.pop(number)
    elif kind == "twice":
        chunks.insert(number, chunks[number])
    elif kind == "foreign":
        name = rng.choice(
            (b"iCCP", b"zTXt", b"iTXt", b"tRNS", b"PLTE", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"gAMA", b"XXXX")
        )
        content = rng.choice(
            (b"", b"x\0\0" + zlib.compress(bytes(20_000_000)), rng.randbytes(40), b"\0" * 4, b"II*\0\x08\0\0\0\xff\xff")
        )
        chunks.insert(rng.randrange(1, len(chunks)), (name, content))
        kind = f"{name.decode()} of {len(content)} bytes"
    elif kind == "flip":
        name, content = chunks[number]
        if content:
            place = rng.randrange(len(content))
            chunks[number] = (name, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        kind = f"bit in {name.decode()}"
    else:
        side = rng.choice((9_000, 13_000, 30_000))
        chunks = [(b"IHDR", struct.pack(">LLBBBBB", side, side, 8, 0, 0, 0, 0)),
                  (b"IDAT", zlib.compress(bytes(10_000_000), 9)), (b"IEND", b"")]  # fmt: skip
        kind = f"{side} pixels a side in a few bytes"
    return Mutation(data[:8] + b"".join(_chunk(*one) for one in chunks), kind)


def of_jpeg(data: bytes, rng: random.Random) -> Mutation:
    """Segments: sizes, EXIF, comments; bits of the scan."""
    kind = rng.choice(("damage", "damage", "size", "exif", "comment", "app", "cut"))
    if kind == "damage":
        return damage(data, rng)
    if kind == "size":
        at = data.find(b"\xff\xc0") + 5
        side = rng.choice((0, 1, 65_535, 30_000))
        return Mutation(data[:at] + struct.pack(">H", side) + data[at + 2 :], f"height {side}")
    if kind == "cut":
        place = rng.randrange(2, len(data))
        return Mutation(data[:place], f"cut at byte {place}")
    entry = struct.pack(
        "<HHLL", 0x0112, rng.choice((3, 4, 1, 13, 255)), rng.choice((1, 2**31)), rng.choice((1, 6, 9, 2**31))
    )
    exif = b"Exif\0\0II*\0" + struct.pack("<L", rng.choice((8, 0, 2**31))) + struct.pack("<H", 1) + entry + b"\0" * 4
    marker, content = {"exif": (b"\xff\xe1", exif), "comment": (b"\xff\xfe", b"x" * 60_000)}.get(
        kind,
        (
            bytes([0xFF, 0xE0 + rng.randrange(16)]),
            rng.choice((b"ICC_PROFILE\0\1\1", b"Adobe\0\0\0\0\0\0\0", b"MPF\0" + b"x" * 30)),
        ),
    )
    repeated = (marker + struct.pack(">H", len(content) + 2) + content) * rng.choice((1, 1, 40))
    return Mutation(data[:2] + repeated + data[2:], f"{kind} {content[:40]!r}")


# Tables of a data base ----------------------------------------------------------------------------------------------

_ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"


def of_sqlite(data: bytes, rng: random.Random) -> Mutation:
    """Rows with values of other types, other columns and tables, damaged pages."""
    if rng.random() < 0.4:
        return damage(data, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache")
        path.write_bytes(data)
        database = sqlite3.connect(path)
        try:
            columns = [row[1] for row in database.execute("PRAGMA table_info(sights)")]
            column = rng.choice(columns)
            kept = {type(row[0]) for row in database.execute(f"SELECT {column} FROM sights")}
            value = rng.choice((None, "x", b"\xff", 2**40, -1, 1.5, "9" * 30, b"", "", "x" * LONG, b"\0" * LONG))
            statement = rng.choice(
                [(f"UPDATE sights SET {column} = ?", (value,))] * 6
                + [(f"UPDATE sights SET {column} = ? WHERE rowid = 1", (value,))] * 4
                + [(text, ()) for text in (
                    f"ALTER TABLE sights DROP COLUMN {columns[-1]}", "ALTER TABLE sights ADD COLUMN x",
                    "DROP TABLE sights",
                    "ALTER TABLE sights RENAME TO other", "DELETE FROM sights", "PRAGMA user_version = 99",
                    "PRAGMA journal_mode = WAL", "PRAGMA auto_vacuum = 2", "PRAGMA application_id = 5",
                )]
                + [("VIEW", ())] * 2
            )  # fmt: skip
            try:
                if statement[0] == "VIEW":
                    database.execute("DROP TABLE sights")
                    empty = ", ".join(["x", *["''"] * (len(columns) - 1)])
                    statement = (f"CREATE VIEW sights AS {_ENDLESS} {empty} FROM c", ())
                database.execute(*statement)
                database.commit()
            except sqlite3.Error as error:
                return Mutation(b"", f"{statement[0]}: {error}; emptied")
        finally:
            database.close()
        said = f"{statement[0][:60]} {str(statement[1])[:40]}"
        return Mutation(path.read_bytes(), said, means=statement[1] != () and type(value) in kept)


# Pickles ------------------------------------------------------------------------------------------------------------


def of_pickle(data: bytes, rng: random.Random) -> Mutation:
    """Opcodes lost, repeated, moved, nested or with other arguments; damaged bytes."""
    if rng.random() < 0.2:
        return damage(data, rng)
    places = [place or 0 for _, _, place in pickletools.genops(data)]
    parts = [data[start:end] for start, end in zip(places, [*places[1:], len(data)], strict=True)]
    at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    kind = rng.choice(("lost", "repeated", "moved", "argument", "nested", "group", "stored"))
    if kind == "lost":
        del parts[at]
    elif kind == "repeated":
        parts[at] *= rng.choice((2, 100, 5_000))
    elif kind == "moved":
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == "argument":
        parts[at] = rng.choice(
            (b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"N", b"]", b"}", b")", b"X\1\0\0\0x")
        )
    elif kind == "nested":
        parts.insert(at, rng.choice((b"\x85", b"(", b"]", b"](")) * rng.choice((1, 10_000)))
    elif kind == "group":
        parts.insert(at, b"".join(parts[min(at, other) : max(at, other)]))
    else:
        parts.insert(at, b"h" + bytes([rng.randrange(256)]))
    return Mutation(b"".join(parts), f"{kind} opcode {at}")


# Parquet ------------------------------------------------------------------------------------------------------------


def of_parquet(data: bytes, rng: random.Random) -> Mutation:
    """Columns of other kinds, names and lengths, other metadata; damaged bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.35:
        return damage(data, rng)
    table = pq.read_table(io.BytesIO(data))
    kind = rng.choice(
        ("column", "column", "column", "names", "lost", "rows", "metadata", "metadata", "same name", "nulls")
    )
    column = rng.choice(table.column_names)
    at, count = table.column_names.index(column), table.num_rows
    said = f"{kind} {column}"
    if kind == "column":
        values: Callable[[], Any] = rng.choice(
            (lambda: pa.array([None] * count), lambda: pa.array([-1] * count), lambda: pa.array([2**40] * count),
             lambda: pa.array([10**9] * count, pa.int32()), lambda: pa.array([0.5] * count),
             lambda: pa.array(["x"] * count), lambda: pa.array([b"\xff"] * count),
             lambda: pa.array([[1, 2]] * count), lambda: pa.array([{"bytes": b"x"}] * count),
             lambda: pa.array([{"bytes": None, "path": SECRET}] * count), lambda: pa.array([{"path": "x"}] * count),
             lambda: pa.array([True] * count), lambda: pa.array([float("nan")] * count), lambda: pa.array([""] * count),
             lambda: pa.array([bytes(30_000_000)] * count), lambda: pa.array(["a\0\x1b[31m\n"] * count),
             lambda: pa.array([0] * count, pa.timestamp("s")), lambda: pa.array(["x"] * count).dictionary_encode(),
             lambda: pa.array([[[0, 0, 1]]] * count), lambda: pa.array([[]] * count, pa.list_(pa.int64())))
        )  # fmt: skip
        made = values()
        table, said = table.set_column(at, column, made), f"{column} of {made.type}: {str(made[0].as_py())[:40]}"
    elif kind == "names":
        new = rng.choice(("", "x", "label", "image", "split", "coarse_label", "mask", "boxes", "labels", "translation"))
        table, said = (
            table.rename_columns([new if name == column else name for name in table.column_names]),
            f"{column} called {new!r}",
        )
    elif kind == "lost":
        table = table.drop_columns([column])
    elif kind == "rows":
        table = table.slice(0, rng.choice((0, 1)))
    elif kind == "same name":
        table = table.append_column(column, table.column(column))
    elif kind == "nulls":
        table = table.set_column(
            at, column, pa.array([None, *table.column(column).to_pylist()[1:]], table.column(column).type)
        )
    else:
        kept = dict(table.schema.metadata or {})
        name = rng.choice(list(kept) or [b"dataset_info"])
        if name == b"ARROW:schema":
            kept[name] = b"x"
        else:
            tree, said = _edited(json.loads(kept.get(name, b"{}")), rng)
            kept[name] = to_json(tree).encode()
            said = f"metadata {name.decode()}: {said}"
        table = table.replace_schema_metadata(kept)
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=rng.choice((None, 1, 5)))
    return Mutation(out.getvalue(), said)


# In the file system -------------------------------------------------------------------------------------------------


def obstruct(path: Path, outside: Path, rng: random.Random) -> str:
    """Something else in place of a file; what it is."""
    kind = rng.choice(
        ("pipe", "device", "folder", "loop", "outside", "dangling", "gone", "empty", "socket", "full", "huge")
    )
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/tty", "/dev/random", "/proc/self/mem")))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "outside":
        path.symlink_to(rng.choice(sorted(outside.iterdir())))
    elif kind == "dangling":
        path.symlink_to("not-there")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "socket":
        os.mknod(path, 0o140644)
    elif kind == "full":
        path.write_bytes(bytes(1 << 20))
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    return f"{kind} in its place"


KINDS: dict[str, Callable[[bytes, random.Random], Mutation]] = {
    "json": of_json, "jsonl": of_json_lines, "yaml": of_yaml, "csv": of_csv, "text": of_text,
    "safetensors": of_safetensors, "npy": of_npy, "tar": of_tar, "zip": of_zip, "png": of_png, "jpg": of_jpeg,
    "sqlite": of_sqlite, "parquet": of_parquet, "pickle": of_pickle, "bytes": damage,
}  # fmt: skip
