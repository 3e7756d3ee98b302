"""Model processes in virtual time: open-loop load while their speed changes, and heartbeats that stop."""

import asyncio
import random
import re
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import pytest
from starlette.exceptions import HTTPException

from patchloom.serving.admission import Admission, ModelRequest
from patchloom.serving.limits import QUEUE_SECONDS, Limits
from patchloom.serving.messages import HEARTBEAT_SECONDS, pack
from patchloom.serving.processes import ModelProcess, ModelProcesses
from tests.serving import virtual_time

BATCH, FAST, SLOW = 8, 0.025, 0.075  # seconds per input
PHASE, SECONDS = 7.0, 140.0  # of one speed, and of the whole simulation


class SimulatedProcess(ModelProcess):
    """A model process whose answers take virtual time."""

    def __init__(self, admission: Admission, speeds: random.Random) -> None:
        self._admission, self._speeds = admission, speeds
        self.batches, self.missed_beats = deque(), 0
        self.is_stopped = self.is_killed = False
        self._reader, self._writer = asyncio.StreamReader(), self
        self._given: asyncio.Queue[int] = asyncio.Queue()

    @property
    def pid(self) -> int:
        return 1

    def kill(self) -> None:
        self.is_killed = True

    def writelines(self, _: list[bytes]) -> None:
        self._given.put_nowait(len(self.batches[-1][0]))

    async def work(self) -> None:
        while True:
            size = await self._given.get()
            seconds = 0.0
            for _ in range(size):  # the speed may change in the middle of a batch
                took = each_at(_now()) * self._speeds.uniform(0.7, 1.3)
                await asyncio.sleep(took)
                seconds += took
            header = {"statuses": [HTTPStatus.OK] * size, "seconds": seconds}
            self._reader.feed_data(b"".join(pack(header, [b"[]"] * size)))

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not self.is_stopped:
                self._reader.feed_data(b"".join(pack({})))


def _now() -> float:
    return asyncio.get_running_loop().time()


def each_at(seconds: float) -> float:
    return SLOW if int(seconds / PHASE) % 2 else FAST


@asynccontextmanager
async def working(limits: Limits, workers: int = 1) -> AsyncIterator[ModelProcesses]:
    """Simulated processes that are ready."""
    room = Admission(limits)
    processes = ModelProcesses("", room, count=workers, threads=1, say=str)
    processes.ready = [SimulatedProcess(room, random.Random(seed)) for seed in range(workers)]
    processes._count()
    jobs = [processes._dispatch(), processes._watch()]
    for process in processes.ready:
        jobs += [process.work(), process.beat(), process.receive(processes._done)]
    tasks = [asyncio.create_task(job) for job in jobs]
    yield processes
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Outcome(NamedTuple):
    statuses: Counter[int]
    attainable: float  # answers of a model that is never idle while requests come
    waits: list[float]  # of answered requests


def simulate(times: float, deadline: float, workers: int = 1) -> Outcome:
    """Offer so many times the mean capacity."""
    capacity = workers * (1 / FAST + 1 / SLOW) / 2
    rate = times * capacity
    rng = random.Random(7)
    statuses: Counter[int] = Counter()
    waits: list[float] = []

    async def ask(room: Admission) -> None:
        began = _now()
        try:
            await room.run(ModelRequest("predict", {}, [b"x"]))
            statuses[200] += 1
            waits.append(_now() - began)
        except HTTPException as refused:
            statuses[refused.status_code] += 1

    async def run() -> None:
        async with working(Limits(batch=BATCH, deadline_seconds=deadline), workers) as processes:
            requests = []
            while _now() < SECONDS:
                await asyncio.sleep(rng.expovariate(rate))
                requests.append(asyncio.create_task(ask(processes.admission)))
            await asyncio.gather(*requests)

    virtual_time.run(run())
    attainable = SECONDS / 2 * sum(min(rate, workers / each) for each in (FAST, SLOW))
    return Outcome(statuses, attainable, sorted(waits))


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize(("deadline", "workers"), [(30.0, 1), (2.0, 1), (2.0, 2)])
def test_accepted_requests_are_in_time_and_the_model_stays_busy(times: float, deadline: float, workers: int) -> None:
    statuses, attainable, waits = simulate(times, deadline, workers)
    assert set(statuses) <= {200, 503, 504}
    assert statuses[504] <= 0.01 * statuses[200]
    assert statuses[200] >= 0.85 * attainable
    assert waits[int(0.99 * len(waits))] <= min(deadline, 2 * QUEUE_SECONDS)


def test_a_process_without_heartbeats_is_not_ready_until_they_come_again() -> None:
    async def run() -> None:
        async with working(Limits(), workers=2) as processes:
            room, (first, second) = processes.admission, processes.ready
            await asyncio.sleep(60)
            assert (processes.ready, room.processes) == ([first, second], 2)
            first.is_stopped = second.is_stopped = True
            await asyncio.sleep(3)
            assert (processes.ready, room.processes, processes.pids) == ([], 0, [1, 1])
            assert re.search(r"\b1\b", processes.why_not_ready)
            with pytest.raises(HTTPException) as refused:
                await room.run(ModelRequest("predict", {}, [b"x"]))
            assert (refused.value.status_code, "Retry-After" in refused.value.headers) == (503, True)
            second.is_stopped = False
            await asyncio.sleep(1)
            assert (processes.ready, processes.silent, room.processes) == ([second], [first], 1)
            assert await room.run(ModelRequest("predict", {}, [b"x"])) == b"[]"
            await asyncio.sleep(100)
            assert not first.is_killed
            await asyncio.sleep(30)
            assert (first.is_killed, second.is_killed) == (True, False)

    virtual_time.run(run())


def test_a_long_batch_is_no_silence(monkeypatch) -> None:
    monkeypatch.setattr("tests.serving.test_shedding.SLOW", 20.0)
    monkeypatch.setattr("tests.serving.test_shedding.FAST", 20.0)

    async def run() -> None:
        async with working(Limits()) as processes:
            answer = asyncio.create_task(processes.admission.run(ModelRequest("predict", {}, [b"x"])))
            await asyncio.sleep(10)
            assert (len(processes.ready), answer.done()) == (1, False)
            assert await answer == b"[]"

    virtual_time.run(run())


def test_a_batch_that_is_late_shortens_the_queue_before_it_ends() -> None:
    async def run() -> None:
        room = Admission(Limits(batch=4, deadline_seconds=6))
        room.processes, room.in_process = 2, 8
        room.record_batch(8, 0.8)
        room.begin_batch("first", 4)
        room.begin_batch("second", 4)
        assert room.expected_seconds() == pytest.approx(0.4)
        await asyncio.sleep(4)
        assert room.expected_seconds() == pytest.approx(4)  # one second per input
        with pytest.raises(HTTPException):
            room.check()
        room.begin_batch("second", 0)
        assert room.expected_seconds() == pytest.approx(8 / (1 + 10))

    virtual_time.run(run())


def test_one_slow_batch_alone_does_not_empty_the_queue() -> None:
    async def run() -> None:
        room = Admission(Limits())
        room.processes, room.in_process = 1, 8
        room.record_batch(1, 0.1)
        room.record_batch(1, 60.0)  # the process was stopped
        assert room.expected_seconds() == pytest.approx(8 * 0.2)
        for _ in range(5):
            room.record_batch(1, 60.0)
        assert room.expected_seconds() > 8 * 3

    virtual_time.run(run())
