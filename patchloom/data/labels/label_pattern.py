"""The class as a part of a file's name: `--label-pattern '{label}_*.jpg'`.

    {label}      the class, as long as fits: american_bulldog of american_bulldog_12.jpg
    *  {}        anything, ? one letter; upper and lower case are alike
    (?P<label>…) a regular expression instead, looked for anywhere in the name

A pattern with a slash is held against the path below the folder, any other against the file's name alone.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patchloom_runtime.errors import UsageError

# What names of pictures often are; the first by which a folder falls into classes is suggested.
_USUAL = ("{label}_*", "{label}-*", "{label} *", "{label}.*.*", "*_{label}.*", "*-{label}.*", r"(?P<label>\D+)\d")


@dataclass(frozen=True)
class LabelPattern:
    """A pattern as the user gave it, and what it is as a regular expression."""

    given: str
    expression: re.Pattern[str]

    def label(self, path: str) -> str:
        """The class in a path; '' where it does not match."""
        text = path if "/" in self.given else posixpath.basename(path)
        found = self.expression.search(text)
        return (found["label"] or "").strip() if found else ""


def read_pattern(given: str) -> LabelPattern:
    """A UsageError where it names no label."""
    if "(?P<label>" in given:
        try:
            return LabelPattern(given, re.compile(given))
        except re.error as error:
            raise UsageError(f"--label-pattern {given!r} is no regular expression ({error})") from error
    if given.count("{label}") != 1:
        raise UsageError(
            f"--label-pattern is {given!r}, expected one {{label}} in it, such as '{{label}}_*.jpg', "
            "or a regular expression with (?P<label>…)"
        )
    parts = re.split(r"(\{label\}|\{\}|\*|\?)", given)
    meaning = {"{label}": "(?P<label>[^/]+)", "{}": "[^/]*?", "*": "[^/]*?", "?": "[^/]"}
    text = "".join(meaning.get(part, re.escape(part)) for part in parts)
    return LabelPattern(given, re.compile(rf"\A{text}\Z", re.IGNORECASE))


def suggest_pattern(names: Sequence[str]) -> tuple[str, list[str]] | None:
    """A pattern by which file names fall into classes of two pictures and more each, and those classes."""
    for given in _USUAL:
        pattern = read_pattern(given)
        found = [pattern.label(name) for name in names]
        classes = Counter(found)
        words = sum(any(letter.isalpha() for letter in name) for name in classes)
        if "" not in classes and 1 < len(classes) <= len(names) / 2 and 2 * words > len(classes):
            return given, sorted(classes)
    return None
