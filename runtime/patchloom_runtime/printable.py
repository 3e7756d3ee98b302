"""Text from outside — names of files and classes, words of a stranger's folder — as it may be shown."""

import os
import re
from typing import TextIO

# Control characters, marks that turn the direction of what follows, line separators, and halves of characters: what a
# terminal would act upon, and what cannot be encoded.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_FORMULA = ("=", "+", "-", "@")


def printable(text: str | os.PathLike[str]) -> str:
    """The text in one line that does nothing but show it: what no screen should act upon is escaped, as \\x1b."""
    return _UNPRINTABLE.sub(_escaped, os.fspath(text))


def table_cell(text: str | os.PathLike[str]) -> str:
    """The text as a cell of a table: printable, and by an apostrophe no formula to a spreadsheet."""
    shown = printable(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def plural(count: int, noun: str) -> str:
    """The count with its noun: "1 epoch", "1,200 images", "3 classes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x")) else "s"
    return f"{count:,} {noun}{ending}"


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def for_rich(stream: TextIO) -> TextIO:
    """Where rich may write on a standard stream: past what escapes control characters in the words of others.

    rich looks for `rich_proxied_file` too, but once a bar is drawn it stands before the stream itself.
    """
    return getattr(stream, "rich_proxied_file", stream)
