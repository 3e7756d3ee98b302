"""Bodies that come slowly: how long each may take, and whose slot another gets."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.exceptions import HTTPException

from patchloom.serving.admission import Admission
from patchloom.serving.exchange import Exchange, error_response
from patchloom.serving.limits import BYTES_PER_SECOND, UNREAD_GRACE_SECONDS, Limits, overloaded
from patchloom.serving.uploads import Uploads
from tests.serving import virtual_time

SCOPE = {"type": "http", "method": "POST", "path": "/predict", "headers": []}


class Client:
    """Sends `part` bytes after each of some pauses, and then nothing."""

    def __init__(self, part: int, *pauses: float) -> None:
        self._part, self._pauses = part, list(pauses)
        self.statuses: list[int] = []

    async def receive(self) -> dict[str, object]:
        if not self._pauses:
            await asyncio.Event().wait()
        await asyncio.sleep(self._pauses.pop(0))
        return {"type": "http.request", "body": b"x" * self._part, "more_body": True}

    async def send(self, message: dict[str, object]) -> None:
        self.statuses += [message["status"]] if "status" in message else []

    def exchange(self) -> Exchange:
        return Exchange(SCOPE, self.receive, self.send)


def seconds_until_cut(*pauses: float, part: int) -> float:
    async def read() -> float:
        room = Admission(Limits(upload_seconds=10))
        with pytest.raises(HTTPException) as refused:
            await Client(part, *pauses).exchange().read_body(room)
        assert (refused.value.status_code, len(room.uploads), room.held_bytes) == (408, 0, 0)
        return asyncio.get_running_loop().time()

    return virtual_time.run(read())


def test_a_body_below_the_rate_is_cut_after_the_grace_period() -> None:
    assert seconds_until_cut(part=1) == pytest.approx(10)
    assert seconds_until_cut(*[1.0] * 60, part=1) == pytest.approx(10, abs=0.01)
    assert seconds_until_cut(*[1.0] * 60, part=BYTES_PER_SECOND // 2) == pytest.approx(20, abs=1)
    assert seconds_until_cut(*[1.0] * 60, part=BYTES_PER_SECOND) == pytest.approx(70)


def test_bytes_that_came_early_do_not_earn_a_longer_pause() -> None:
    assert seconds_until_cut(0.0, part=15_000_000) == pytest.approx(10)


def test_a_refused_body_that_comes_slowly_is_soon_given_up() -> None:
    async def refuse() -> float:
        client = Client(1, *[0.1] * 600)
        exchange = client.exchange()
        await error_response(overloaded("the queue is full", 2))(SCOPE, client.receive, exchange.send)
        await exchange.drain()
        assert client.statuses == [503]
        return asyncio.get_running_loop().time()

    assert virtual_time.run(refuse()) == pytest.approx(UNREAD_GRACE_SECONDS, abs=0.1)


def test_the_slowest_body_gives_its_slot_to_a_new_one() -> None:
    async def take_slots() -> None:
        uploads = Uploads()
        uploads.limit = 2
        ended: list[str] = []

        async def read(name: str, part: int) -> None:
            try:
                async with uploads.slot(10) as upload:
                    for _ in range(50):
                        await asyncio.sleep(0.1)
                        upload.received(part)
            except TimeoutError:
                name += " cut"
            ended.append(name)

        fast = asyncio.create_task(read("fast", BYTES_PER_SECOND))
        slow = asyncio.create_task(read("slow", 1))
        await asyncio.sleep(0.5)
        with pytest.raises(HTTPException) as refused:  # nobody is far enough behind
            await read("third", BYTES_PER_SECOND)
        assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "1"})
        await asyncio.sleep(1)
        async with uploads.slot(10):
            await asyncio.sleep(0.01)
            assert (len(uploads), slow.done(), ended) == (2, True, ["slow cut"])
        async with AsyncExitStack() as slots:  # those that keep the rate stay
            await slots.enter_async_context(uploads.slot(10))
            with pytest.raises(HTTPException):
                await slots.enter_async_context(uploads.slot(10))
        await fast
        assert (ended, len(uploads)) == (["slow cut", "fast"], 0)

    virtual_time.run(take_slots())
