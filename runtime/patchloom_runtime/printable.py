"""Safe display of text from files: escape control characters, and format counts."""

import os
import re
from typing import TextIO

# Control characters, text direction marks, line separators and surrogates: characters that a terminal would act on or
# that cannot be encoded.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_FORMULA = ("=", "+", "-", "@")


def printable(text: str | os.PathLike[str]) -> str:
    """Return the text in one line, with control characters escaped as \\x1b."""
    return _UNPRINTABLE.sub(_escaped, os.fspath(text))


def table_cell(text: str | os.PathLike[str]) -> str:
    """Return printable text for a table. A leading apostrophe keeps spreadsheets from reading it as a formula."""
    cell = printable(text)
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 epoch", "1,200 images", "3 classes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x")) else "s"
    return f"{count:,} {noun}{ending}"


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python represents a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def for_rich(stream: TextIO) -> TextIO:
    """Return the stream that rich should write to, without the wrapper that escapes control characters.

    rich looks for `rich_proxied_file` as well, but once a progress bar is drawn it wraps the stream itself.
    """
    return getattr(stream, "rich_proxied_file", stream)
