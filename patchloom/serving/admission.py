"""Who is let in: a queue of bounded length, decided where clients are talked to, whatever the model is doing.

A request is refused at once, with a time to come again that follows from recent batches, where as many wait as may, or
where it could not be answered before its deadline. The time that it would wait is rather overestimated: a batch that is
slower than those before it counts at once, one that is still running counts as soon as it is late, and the model may
become SLOWDOWN times slower afterwards. Beyond one batch per process a longer queue makes nobody faster, so it is also
bounded in seconds.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from patchloom.serving.limits import QUEUE_SECONDS, SLOWDOWN, Limits
from patchloom.serving.refusals import Refused, overloaded
from patchloom.serving.uploads import Uploads

_SLOWER, _FASTER = 0.5, 0.1  # share of the newest batch in the seconds per input, where it is slower or faster


class Request:
    """What is asked of the model, on its way; its times say why it waited."""

    def __init__(self, verb: str, options: Mapping[str, Any], inputs: Sequence[bytes]) -> None:
        self.verb, self.options, self.inputs = verb, dict(options), list(inputs)
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.tries = 0  # that ended with the model's process
        self.seconds = {"queue": 0.0, "batch": 0.0, "model": 0.0}  # of waiting, by reason
        self.began = 0.0


class Admission:
    """The requests that wait."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.processes = 0  # ready ones
        self.in_process = 0  # inputs that the model's processes have
        self.uploads = Uploads()
        self.held_bytes = 0  # of bodies, from their first byte to their answer
        self.waiting = 0  # inputs in the queue, counted as they come and go, so that refusing looks at none of them
        self._waiting: deque[Request] = deque()
        self._seconds_each = 0.0  # of the model, per input; 0 while nothing was measured
        self._running: dict[object, tuple[int, float]] = {}  # per process, inputs of its present batch, and its begin
        self._arrived = asyncio.Event()

    def expected_seconds(self) -> float:
        """Estimate until when one that comes now would be begun, rather too long; 0 while nothing was measured."""
        inputs = self.waiting + self.in_process
        if not inputs or not self._seconds_each:
            return 0.0
        now = asyncio.get_running_loop().time()
        # A batch that takes longer than a full one should says how fast its process is now.
        full = self.limits.batch
        each = [max(self._seconds_each, (now - began) / max(full, size)) for size, began in self._running.values()]
        each += [self._seconds_each] * (max(1, self.processes) - len(each))
        return inputs / sum(1 / seconds for seconds in each)

    def begin_batch(self, process: object, inputs: int) -> None:
        """Note that a process begins a batch of so many inputs now; 0 where it has none."""
        self._running.pop(process, None)
        if inputs:
            self._running[process] = inputs, asyncio.get_running_loop().time()

    def measured(self, inputs: int, seconds: float) -> None:
        """Note how long a batch took the model.

        A slower one counts more than a faster one, but a single one at most doubles the estimate.
        """
        each = seconds / max(1, inputs)
        known = self._seconds_each or each
        each = min(each, SLOWDOWN * known)
        self._seconds_each = known + (_SLOWER if each > known else _FASTER) * (each - known)

    def check(self, inputs: int = 1) -> None:
        """Refuse what there is no room or no time for."""
        expected = self.expected_seconds()
        retry = max(1, math.ceil(expected))
        if not self.processes:
            raise overloaded("the model is not ready", retry)
        if self.waiting + inputs > self.limits.queue:
            raise overloaded(f"{self.waiting} of at most {self.limits.queue} inputs are waiting already", retry)
        if expected > self.limits.deadline_seconds / SLOWDOWN:
            raise overloaded("it could not be answered before its deadline", retry)
        if expected > QUEUE_SECONDS and self.waiting + inputs > self.limits.batch * self.processes:
            raise overloaded(f"it would wait longer than {QUEUE_SECONDS:g} s", retry)

    async def answered(self, request: Request) -> bytes:
        """Wait for the model's answer: its JSON."""
        self.check(len(request.inputs))
        request.began = asyncio.get_running_loop().time()
        self._waiting.append(request)
        self.waiting += len(request.inputs)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.limits.deadline_seconds):
                return await request.answer
        except TimeoutError:
            seconds = f"{self.limits.deadline_seconds:g} s"
            raise Refused(HTTPStatus.GATEWAY_TIMEOUT, f"there was no answer within {seconds}") from None
        finally:
            given_up = request.answer.cancelled()  # its deadline has passed, or its client has gone
            if given_up and request in self._waiting:
                self._waiting.remove(request)
                self.waiting -= len(request.inputs)

    def again(self, requests: Sequence[Request]) -> None:
        """Put back those whose process ended, before all others."""
        self._waiting.extendleft(reversed(requests))
        self.waiting += sum(len(request.inputs) for request in requests)
        self._arrived.set()

    async def arrived(self) -> None:
        """Wait until somebody waits."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> list[Request]:
        """The next batch, of those that still want an answer; one that ended a process goes alone."""
        taken: list[Request] = []
        inputs, now = 0, asyncio.get_running_loop().time()
        while self._waiting:
            first = self._waiting[0]
            is_wanted = not first.answer.done() and now < first.began + self.limits.deadline_seconds
            full = inputs + len(first.inputs) > self.limits.batch or first.tries or (taken and taken[-1].tries)
            if is_wanted and taken and full:
                break
            self._waiting.popleft()
            self.waiting -= len(first.inputs)
            if is_wanted:
                taken.append(first)
                inputs += len(first.inputs)
        return taken
