"""Who waits, who is refused and for how long, and who goes together."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from patchloom.serving import processes
from patchloom.serving.admission import Admission, ModelRequest
from patchloom.serving.limits import Limits
from patchloom.serving.messages import Connection, pack, read_message
from patchloom.serving.processes import ModelProcess


def admission(**limits) -> Admission:
    made = Admission(Limits(**limits))
    made.processes = 1
    return made


def request(inputs: int = 1) -> ModelRequest:
    return ModelRequest("predict", {"top": 1}, [b"x"] * inputs)


async def waiting(room: Admission, *inputs: int) -> tuple[list[ModelRequest], list[asyncio.Task]]:
    requests = [request(count) for count in inputs]
    tasks = [asyncio.create_task(room.run(one)) for one in requests]
    await asyncio.sleep(0)
    return requests, tasks


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    async def run() -> None:
        room = admission(queue=6)
        _, tasks = await waiting(room, 2, 4)
        with pytest.raises(HTTPException, match=r"\b6\b.*\b6\b.*\b1 s\b") as refused:
            room.check()
        assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "1"})
        room.record_batch(1, 0.75)
        with pytest.raises(HTTPException) as refused:
            await room.run(request())
        assert refused.value.headers == {"Retry-After": "5"}  # six of 0.75 s
        room.processes = 2
        with pytest.raises(HTTPException) as refused:
            room.check()
        assert refused.value.headers == {"Retry-After": "3"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.waiting == 0

    asyncio.run(run())


def test_what_could_not_be_answered_in_time_is_refused_before_it_waits() -> None:
    async def run() -> None:
        room = admission(deadline_seconds=6)  # of which a third is planned
        room.record_batch(1, 1.0)
        room.in_process = 3
        with pytest.raises(HTTPException, match=r"\b3 s\b") as refused:
            room.check()
        assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "3"})
        room.in_process = 2
        room.check()
        room.processes = 0
        with pytest.raises(HTTPException) as refused:
            room.check()
        assert refused.value.status_code == 503

    asyncio.run(run())


def test_a_request_without_an_answer_is_given_up_and_left_out() -> None:
    async def run() -> None:
        room = admission(deadline_seconds=0.01)
        with pytest.raises(HTTPException, match=r"\b0\.01 s\b") as refused:
            await room.run(request())
        assert refused.value.status_code == 504
        assert room.waiting == 0
        assert room.take() == []

    asyncio.run(run())


def test_one_that_was_given_up_takes_no_room_wherever_it_is_found() -> None:
    async def run() -> None:
        room = admission(batch=4)
        (gone, late, wanted), tasks = await waiting(room, 2, 3, 1)
        tasks[0].cancel()  # its client has gone
        await asyncio.sleep(0)
        assert (gone.results.cancelled(), room.waiting) == (True, 4)
        late.results.cancel()  # and nobody has told the queue yet
        assert room.take() == [wanted]
        assert room.waiting == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.waiting == 0

    asyncio.run(run())


def test_batches_are_full_and_in_order_and_one_that_ended_a_process_goes_alone() -> None:
    async def run() -> None:
        room = admission(batch=4)
        requests, tasks = await waiting(room, 1, 2, 3, 9, 1, 1)
        assert room.waiting == 17
        assert room.take() == requests[:2]
        assert room.waiting == 14
        assert room.take() == requests[2:3]
        assert room.take() == requests[3:4]  # larger than a batch: alone
        requests[4].tries = 1
        assert room.take() == requests[4:5]
        assert room.take() == requests[5:]
        room.requeue(requests[:2])
        assert room.waiting == 3
        assert room.take() == requests[:2]
        assert room.waiting == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_request_that_ends_two_processes_is_refused() -> None:
    async def run() -> None:
        room = admission()
        bad, behind, late = request(), request(), request()
        late.results.cancel()
        process = SimpleNamespace(_admission=room, batches=processes.deque([([bad, late], 0.0), ([behind], 0.0)]))
        room.in_process = 3
        assert ModelProcess.take_unfinished(process) == [bad, behind]
        assert (bad.tries, behind.tries, room.in_process) == (1, 0, 0)
        process.batches.append(([bad], 0.0))
        assert ModelProcess.take_unfinished(process) == []
        with pytest.raises(HTTPException) as refused:
            bad.results.result()
        assert refused.value.status_code == 422

    asyncio.run(run())


def test_messages_come_as_they_were_sent_and_an_end_is_noticed() -> None:
    async def run() -> None:
        import socket

        here, there = socket.socketpair()
        other = Connection(there)
        reader, writer = await asyncio.open_connection(sock=here)
        writer.writelines(pack({"a": "ö"}, [b"", b"xyz"]))
        assert other.read() == ({"a": "ö", "sizes": [0, 3]}, [b"", b"xyz"])
        other.write({"b": 1}, [b"q"])
        assert await read_message(reader) == ({"b": 1, "sizes": [1]}, [b"q"])
        writer.write(pack({}, [b"whole"])[0])
        writer.close()
        await writer.wait_closed()
        assert other.read() is None
        other.close()

    asyncio.run(run())
