"""Messages are checked by the facts they hold, so that their wording stays free."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def missing(text: str, *facts: object) -> list[object]:
    """Return the facts that a text lacks: strings anywhere in it, numbers as whole numbers (1024 is also 1,024)."""
    return [fact for fact in facts if not _holds(text, fact)]


@contextmanager
def refused(
    error: type[Exception] | tuple[type[Exception], ...], *facts: object
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this class whose message holds all these facts."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert missing(message, *facts) == [], message


def _holds(text: str, fact: object) -> bool:
    if isinstance(fact, int | float):
        return any(re.search(rf"(?<![\w.]){re.escape(form)}(?![\w]|\.\d)", text) for form in (f"{fact}", f"{fact:,}"))
    return str(fact) in text
