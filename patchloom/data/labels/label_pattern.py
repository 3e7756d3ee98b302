"""Patterns that extract the class from a file name: `--label-pattern '{label}_*.jpg'`.

    {label}      the class, as long as possible: american_bulldog in american_bulldog_12.jpg
    *  {}  ?     any text, any text, one letter; case is ignored
    (?P<label>…) a regular expression instead, searched anywhere in the name

A pattern with a slash is matched against the path below the folder, any other against the file name alone.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patchloom_runtime.errors import UsageError

# Common forms of file names. The first one that divides the images of a folder into classes is suggested.
_USUAL = ("{label}_*", "{label}-*", "{label} *", "{label}.*.*", "*_{label}.*", "*-{label}.*", r"(?P<label>\D+)\d")


@dataclass(frozen=True)
class LabelPattern:
    """A pattern as the user wrote it, and its regular expression."""

    text: str
    expression: re.Pattern[str]

    def label(self, path: str) -> str:
        """Return the class in a path, or '' if it does not match."""
        match = self.expression.search(path if "/" in self.text else posixpath.basename(path))
        return (match["label"] or "").strip() if match else ""


def read_pattern(text: str) -> LabelPattern:
    """Parse a pattern. Raise UsageError if it does not contain the label exactly once."""
    if "(?P<label>" in text:
        try:
            return LabelPattern(text, re.compile(text))
        except re.error as error:
            raise UsageError(f"--label-pattern {text!r} is not a regular expression ({error})") from error
    if text.count("{label}") != 1:
        raise UsageError(
            f"--label-pattern is {text!r}, expected one {{label}} in it, such as '{{label}}_*.jpg', "
            "or a regular expression with (?P<label>…)"
        )
    parts = re.split(r"(\{label\}|\{\}|\*|\?)", text)
    meaning = {"{label}": "(?P<label>[^/]+)", "{}": "[^/]*?", "*": "[^/]*?", "?": "[^/]"}
    expression = "".join(meaning.get(part, re.escape(part)) for part in parts)
    return LabelPattern(text, re.compile(rf"\A{expression}\Z", re.IGNORECASE))


def suggest_pattern(names: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return a pattern that divides file names into classes of about two or more images each, and those classes."""
    for text in _USUAL:
        pattern = read_pattern(text)
        classes = Counter(pattern.label(name) for name in names)
        words = sum(any(letter.isalpha() for letter in name) for name in classes)
        if "" not in classes and 1 < len(classes) <= len(names) / 2 and 2 * words > len(classes):
            return text, sorted(classes)
    return None
