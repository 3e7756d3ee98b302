"""What anybody may have written is read only where it is a plain file, of a bounded size and a known shape."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchloom.data.text import vocabulary
from patchloom.errors import CheckpointError, DataError
from patchloom.foreign import check_shape, memory_bytes, parse_json, read_plain


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", most=3) == b"abc"


def test_pipes_devices_folders_and_large_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"abcd")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="it is not a file"):
            read_plain(path)
    with pytest.raises(OSError, match="it has 4 bytes, expected at most 3"):
        read_plain(tmp_path / "large", most=3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * 100_000, "nested too deeply|Expecting value"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a": \xff}', "it is not text"),
        (b"1" * 5000, "Exceeds the limit"),
        (b"{", "Expecting property name"),
        (b" " * 11, "it has 11 characters, expected at most 10"),
    ],
)
def test_json_that_cannot_be_used_is_one_line(data: bytes, said: str) -> None:
    most = 10 if data.isspace() else 1 << 20
    with pytest.raises(ValueError, match=said) as caught:
        parse_json(data, most)
    assert "\n" not in str(caught.value)


def test_json_as_deep_as_allowed_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64) is not None
    assert parse_json('{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


SHAPE: dict[str, Any] = {"n": int, "x": float, "names": list[str], "of?": {"k": str | None}, "any": Any}
GOOD: dict[str, Any] = {"n": 1, "x": 2, "names": ["a"], "of": {"k": None}, "any": [1]}


def test_a_value_of_the_shape_passes() -> None:
    check_shape(GOOD, SHAPE)
    check_shape({name: value for name, value in GOOD.items() if name != "of"} | {"more": 1}, SHAPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": True}, "n is true, expected a whole number"),
        ({"n": 1.0}, "n is 1.0, expected a whole number"),
        ({"x": "1"}, 'x is "1", expected a number'),
        ({"names": "a"}, 'names is "a", expected a list, each text'),
        ({"names": [1]}, r"names is \[1\], expected a list, each text"),
        ({"of": 3}, "of is 3, expected an object with fields"),
        ({"of": {}}, "of has no field 'k'"),
        ({"of": {"k": 1}}, "of.k is 1, expected text or null"),
    ],
)
def test_a_value_of_another_shape_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_shape(GOOD | change, SHAPE)
    with pytest.raises(ValueError, match="it is 3, expected an object"):
        check_shape(3, SHAPE)


def test_a_message_stays_one_line_whatever_is_named() -> None:
    assert str(DataError("no pictures of 'a\nb'")) == r"no pictures of 'a\nb'"


def test_a_vocabulary_of_half_characters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model_proto: bytes) -> None:
        raise UnicodeDecodeError("utf-8", model_proto, 0, 1, "invalid start byte")  # as sentencepiece does

    monkeypatch.setattr(vocabulary, "_sentencepiece", lambda: SimpleNamespace(SentencePieceProcessor=refuse))
    with pytest.raises(CheckpointError, match=r"vocabulary\.model is no vocabulary"):
        vocabulary.Vocabulary.from_bytes(b"\x96")


def test_memory_is_what_the_control_group_allows(tmp_path: Path) -> None:
    machine = memory_bytes(str(tmp_path))
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("max", machine), (str(1 << 62), machine), ("1048576", 1 << 20)):
        (tmp_path / "memory.max").write_text(f"{text}\n")
        assert memory_bytes(str(tmp_path)) == expected
