"""The queue of requests: bounded in length and time, decided in the front process whatever the model is doing.

A request is refused at once, with a Retry-After that follows from recent batches, if the queue is full or if the
request could not meet its deadline. The expected wait is rather overestimated: a batch that is slower than the ones
before counts at once, a running batch counts as soon as it is late, and the model may become SLOWDOWN times slower
afterwards. Beyond one batch per process a longer queue speeds up nobody, so the queue is also bounded in seconds.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from patchloom.serving.limits import QUEUE_SECONDS, SLOWDOWN, Limits, overloaded
from patchloom.serving.uploads import Uploads

_SLOWER, _FASTER = 0.5, 0.1  # weight of the newest batch in the seconds per input, if it is slower or faster


class ModelRequest:
    """One request to the model, with the time it waited by reason."""

    def __init__(self, verb: str, options: Mapping[str, Any], inputs: Sequence[bytes]) -> None:
        self.verb, self.options, self.inputs = verb, dict(options), list(inputs)
        self.results: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()  # JSON
        self.tries = 0  # that ended with the model's process
        self.wait_seconds = {"queue": 0.0, "batch": 0.0, "model": 0.0}  # by reason
        self.began = 0.0


class Admission:
    """The waiting requests, and the estimate of how long a new one would wait."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.processes = 0  # ready ones
        self.in_process = 0  # inputs in model processes
        self.uploads = Uploads()
        self.held_bytes = 0  # request bodies in memory, from their first byte to their response
        self.waiting = 0  # inputs in the queue; a running count, so that refusing a request is O(1)
        self._waiting: deque[ModelRequest] = deque()
        self._seconds_each = 0.0  # model time per input; 0 until measured
        self._running: dict[object, tuple[int, float]] = {}  # process → inputs and start time of its current batch
        self._arrived = asyncio.Event()

    def expected_seconds(self) -> float:
        """Estimate, rather too high, how long a new request would wait; 0 until a batch has been measured."""
        inputs = self.waiting + self.in_process
        if not inputs or not self._seconds_each:
            return 0.0
        now = asyncio.get_running_loop().time()
        # A batch that takes longer than a full one should tells how fast its process is now.
        full = self.limits.batch
        each = [max(self._seconds_each, (now - began) / max(full, size)) for size, began in self._running.values()]
        each += [self._seconds_each] * (max(1, self.processes) - len(each))
        return inputs / sum(1 / seconds for seconds in each)

    def begin_batch(self, process: object, inputs: int) -> None:
        """Record that a process starts a batch of so many inputs now, or with 0 that it has none."""
        self._running.pop(process, None)
        if inputs:
            self._running[process] = inputs, asyncio.get_running_loop().time()

    def record_batch(self, inputs: int, seconds: float) -> None:
        """Update the seconds per input from a finished batch.

        A slower batch counts more than a faster one, but a single batch at most doubles the estimate.
        """
        each = seconds / max(1, inputs)
        known = self._seconds_each or each
        each = min(each, SLOWDOWN * known)
        self._seconds_each = known + (_SLOWER if each > known else _FASTER) * (each - known)

    def check(self, inputs: int = 1) -> None:
        """Raise HTTPException if the queue has no room or not enough time for this many inputs."""
        expected = self.expected_seconds()
        retry = max(1, math.ceil(expected))
        if not self.processes:
            raise overloaded("the model is not ready", retry)
        if self.waiting + inputs > self.limits.queue:
            raise overloaded(f"the queue is full ({self.waiting} of at most {self.limits.queue} inputs)", retry)
        if expected > self.limits.deadline_seconds / SLOWDOWN:
            raise overloaded("the request could not meet its deadline", retry)
        if expected > QUEUE_SECONDS and self.waiting + inputs > self.limits.batch * self.processes:
            raise overloaded(f"the request would wait longer than {QUEUE_SECONDS:g} s", retry)

    async def run(self, request: ModelRequest) -> bytes:
        """Queue a request and return the model's results as JSON."""
        self.check(len(request.inputs))
        request.began = asyncio.get_running_loop().time()
        self._waiting.append(request)
        self.waiting += len(request.inputs)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.limits.deadline_seconds):
                return await request.results
        except TimeoutError:
            seconds = f"{self.limits.deadline_seconds:g} s"
            raise HTTPException(HTTPStatus.GATEWAY_TIMEOUT, f"the model did not respond within {seconds}") from None
        finally:
            # Cancelled: its deadline has passed, or its client has gone.
            if request.results.cancelled() and request in self._waiting:
                self._waiting.remove(request)
                self.waiting -= len(request.inputs)

    def requeue(self, requests: Sequence[ModelRequest]) -> None:
        """Put requests whose process ended back to the front of the queue."""
        self._waiting.extendleft(reversed(requests))
        self.waiting += sum(len(request.inputs) for request in requests)
        self._arrived.set()

    async def wait_for_request(self) -> None:
        """Wait until the queue has a request."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> list[ModelRequest]:
        """Remove and return the next batch; a request that ended a process makes a batch of its own."""
        batch: list[ModelRequest] = []
        inputs, now = 0, asyncio.get_running_loop().time()
        while self._waiting:
            first = self._waiting[0]
            is_wanted = not first.results.done() and now < first.began + self.limits.deadline_seconds
            full = inputs + len(first.inputs) > self.limits.batch or first.tries or (batch and batch[-1].tries)
            if is_wanted and batch and full:
                break
            self._waiting.popleft()
            self.waiting -= len(first.inputs)
            if is_wanted:
                batch.append(first)
                inputs += len(first.inputs)
        return batch
