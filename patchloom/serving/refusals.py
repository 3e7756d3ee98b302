"""A request that is not answered: the status, and why, in one line."""

from collections.abc import Mapping
from http import HTTPStatus

from patchloom_runtime.errors import shortened
from patchloom_runtime.printable import printable


class Refused(Exception):  # noqa: N818 - it is an answer
    """What a client is told instead of an answer."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = int(status), dict(headers or {})

    @property
    def reason(self) -> str:
        """One line that can be shown, whatever a client sent."""
        return shortened(printable(str(self)))


def overloaded(reason: str, retry_seconds: int) -> Refused:
    """Nothing is wrong with the request; it may come again."""
    return Refused(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}; try again in {retry_seconds} s", {"Retry-After": str(retry_seconds)}
    )
