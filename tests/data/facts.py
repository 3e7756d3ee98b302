"""The facts in a message, such as a path, an option or a number; its wording is free to change."""

import re
from collections.abc import Iterable


def facts(*parts: object) -> str:
    """Return a pattern that matches text with all the parts, in any order; an int counts as a whole number only."""
    return "(?s)" + "".join(f"(?=.*{_pattern(part)})" for part in parts)


def _pattern(part: object) -> str:
    return rf"(?<![\w.,-]){part}(?![\w])" if isinstance(part, int) else re.escape(str(part))


def has_facts(text: object, *parts: object) -> bool:
    """Return whether the text holds all the parts."""
    return re.search(facts(*parts), str(text)) is not None


def any_has(lines: Iterable[object], *parts: object) -> bool:
    """Return whether one of the lines holds all the parts."""
    return any(has_facts(line, *parts) for line in lines)
