"""What anybody may have written is read only where it is a plain file, of a bounded size and a known shape."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchloom_runtime.errors import CheckpointError, DataError
from patchloom_runtime.text import vocabulary
from patchloom_runtime.untrusted import check_shape, memory_bytes, parse_json, read_plain


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", most=3) == b"abc"


def test_pipes_devices_folders_and_large_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"abcd")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=re.escape(str(path))) as error:
            read_plain(path)
        assert error.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="large") as error:
        read_plain(tmp_path / "large", most=3)
    assert {"4", "3"} <= set(re.findall(r"\b\d+\b", str(error.value.strerror)))


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b"[" * 100_000, []),
        (b"[" * 65 + b"]" * 65, ["64"]),
        (b'{"a": \xff}', []),
        (b"1" * 5000, ["4300"]),  # Python's own limit
        (b"{", []),
        (b" " * 11, ["11", "10"]),
    ],
)
def test_json_that_cannot_be_used_is_one_line(data: bytes, facts: list[str]) -> None:
    most = 10 if data.isspace() else 1 << 20
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        parse_json(data, most)
    assert "\n" not in str(caught.value)
    for fact in facts:
        assert fact in str(caught.value)


def test_json_as_deep_as_allowed_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64) is not None
    assert parse_json('{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


SHAPE: dict[str, Any] = {"n": int, "x": float, "names": list[str], "of?": {"k": str | None}, "any": Any}
GOOD: dict[str, Any] = {"n": 1, "x": 2, "names": ["a"], "of": {"k": None}, "any": [1]}


def test_a_value_of_the_shape_passes() -> None:
    check_shape(GOOD, SHAPE)
    check_shape({name: value for name, value in GOOD.items() if name != "of"} | {"more": 1}, SHAPE)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"n": True}, "n", "true"),
        ({"n": 1.0}, "n", r"1\.0"),
        ({"x": "1"}, "x", '"1"'),
        ({"names": "a"}, "names", '"a"'),
        ({"names": [1]}, "names", r"\[1\]"),
        ({"of": 3}, "of", r"\b3\b"),
        ({"of": {}}, "of", r"\bk\b"),
        ({"of": {"k": 1}}, r"of\.k", r"\b1\b"),
    ],
)
def test_a_value_of_another_shape_is_named(change: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{field}\b") as caught:
        check_shape(GOOD | change, SHAPE)
    assert re.search(value, str(caught.value))
    with pytest.raises(ValueError, match=r"\b3\b"):
        check_shape(3, SHAPE)


def test_a_message_stays_one_line_whatever_is_named() -> None:
    assert str(DataError("'a\nb'")) == r"'a\nb'"


def test_a_vocabulary_of_half_characters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model_proto: bytes) -> None:
        raise UnicodeDecodeError("utf-8", model_proto, 0, 1, "invalid start byte")  # as sentencepiece does

    monkeypatch.setattr(vocabulary, "_sentencepiece", lambda: SimpleNamespace(SentencePieceProcessor=refuse))
    with pytest.raises(CheckpointError, match=r"vocabulary\.model"):
        vocabulary.Vocabulary.from_bytes(b"\x96")


def test_memory_is_what_the_control_group_allows(tmp_path: Path) -> None:
    machine = memory_bytes(str(tmp_path))
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("max", machine), (str(1 << 62), machine), ("1048576", 1 << 20)):
        (tmp_path / "memory.max").write_text(f"{text}\n")
        assert memory_bytes(str(tmp_path)) == expected
