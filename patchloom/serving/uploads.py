"""Request bodies being read: how many at the same time, and how fast each must arrive.

A client must send at least BYTES_PER_SECOND, with a grace period for its start and its pauses. If all slots are taken,
the body that is furthest behind that rate is cut off, so that slow clients do not keep others out.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from patchloom.serving.limits import BYTES_PER_SECOND, SECONDS_BEHIND, UPLOADS, overloaded


class Upload:
    """One body; `timer` ends it when its client falls behind by more than the grace period."""

    def __init__(self, timer: asyncio.Timeout, grace_seconds: float) -> None:
        self.timer, self._grace_seconds = timer, grace_seconds

    @property
    def ends(self) -> float:
        """The loop time at which the body is cut off unless more of it arrives."""
        when = self.timer.when()
        assert when is not None
        return when

    @property
    def seconds_behind(self) -> float:
        """How much of the grace period is used up."""
        return self._grace_seconds - (self.ends - asyncio.get_running_loop().time())

    def received(self, size: int) -> None:
        """Extend the timer by the time that `size` bytes may take; early bytes do not earn a longer pause."""
        latest = asyncio.get_running_loop().time() + self._grace_seconds
        self.timer.reschedule(min(self.ends + size / BYTES_PER_SECOND, latest))


@asynccontextmanager
async def paced(grace_seconds: float) -> AsyncIterator[Upload]:
    """Raise TimeoutError inside the block when a body arrives too slowly."""
    async with asyncio.timeout(grace_seconds) as timer:
        yield Upload(timer, grace_seconds)


class Uploads:
    """The slots of all bodies being read."""

    def __init__(self) -> None:
        self.limit = UPLOADS
        self._unfinished: set[Upload] = set()

    def __len__(self) -> int:
        return len(self._unfinished)

    @asynccontextmanager
    async def slot(self, grace_seconds: float) -> AsyncIterator[Upload]:
        """Take a slot; raise TimeoutError inside the block when the body is too slow or is cut off for another."""
        if len(self) >= self.limit:
            self._cut_slowest()
        async with paced(grace_seconds) as upload:
            self._unfinished.add(upload)
            try:
                yield upload
            finally:
                self._unfinished.discard(upload)

    def _cut_slowest(self) -> None:
        slowest = min(self._unfinished, key=lambda upload: upload.ends)
        if slowest.seconds_behind < SECONDS_BEHIND:
            raise overloaded(f"{len(self)} bodies are being read already", 1)
        self._unfinished.remove(slowest)
        if not slowest.timer.expired():
            slowest.timer.reschedule(asyncio.get_running_loop().time())
