"""The processes that hold the model: started, given batches, started again where one ends.

Each has at most two batches, the one it answers and the next, so that it never waits for this process. A request whose
process ended is tried once more, alone; where that ends a process too, it is the request's fault. A process whose
heartbeats stop gets no further batch until they come again.
"""

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from patchloom.machine import cores
from patchloom.serving.admission import Admission, Request
from patchloom.serving.messages import HEARTBEAT_SECONDS, packed, read_message
from patchloom.serving.refusals import Refused
from patchloom_runtime import errors

BATCHES = 2  # of one process at once
TRIES = 2  # of one request
STOP_SECONDS = 5  # that an idle process may take to end
LONGEST_PAUSE = 30  # seconds before one that keeps ending is started again
MISSED_BEATS = 5  # in a row, after which a process is silent
STUCK = 4  # deadlines after which a process that does not answer is ended

Say = Callable[[str], None]


class ModelProcess:
    """One process and the batches it has."""

    def __init__(self, settings: dict[str, Any], admission: Admission) -> None:
        self._admission = admission
        self.batches: deque[tuple[list[Request], float]] = deque()
        self.missed_beats = 0  # since its last message, as `ModelProcesses` counts them
        own, other = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
        command = [sys.executable, "-m", "patchloom.serving.model_process", str(other.fileno()), json.dumps(settings)]
        self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL)
        other.close()
        self._socket = own
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def ready(self) -> dict[str, Any]:
        """Wait until it has loaded the model; what it says of it, or the error that it met."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            about, _ = await read_message(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._ended()
            raise errors.ResourceError(f"the model's process ended with {code} while it loaded the model") from None
        if "error" in about:
            raise getattr(errors, about["kind"], errors.PatchloomError)(about["error"])
        return about

    def give(self, batch: list[Request]) -> None:
        """Send it a batch; `answer` will have the answers."""
        requests = [{"verb": one.verb, "options": one.options, "inputs": len(one.inputs)} for one in batch]
        self.batches.append((batch, _now()))
        self._admission.in_process += _inputs(batch)
        if len(self.batches) == 1:
            self._admission.begin_batch(self, _inputs(batch))
        self._writer.writelines(packed({"requests": requests}, [part for one in batch for part in one.inputs]))

    async def answer(self, done: Callable[[int, float], None]) -> None:
        """Hand out answers until the process ends; `done` is told the inputs and seconds of each batch."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header, bodies = await read_message(self._reader)
                self.missed_beats = 0
                if "statuses" not in header:  # a heartbeat
                    continue
                batch, _ = self.batches.popleft()
                inputs = _inputs(batch)
                self._admission.in_process -= inputs
                self._admission.measured(inputs, header["seconds"])
                self._admission.begin_batch(self, _inputs(self.batches[0][0]) if self.batches else 0)
                for request, status, body in zip(batch, header["statuses"], bodies, strict=True):
                    _hand_over(request, status, body, header["seconds"])
                done(inputs, header["seconds"])

    def given_back(self) -> list[Request]:
        """The requests of an ended process that are to be tried again; the others are answered."""
        again = []
        for batch, _ in self.batches:
            self._admission.in_process -= _inputs(batch)
            for request in batch:
                # Of the batch behind the one it ended with, nothing was looked at.
                request.tries += batch is self.batches[0][0]
                if request.answer.done():
                    continue
                if request.tries < TRIES:
                    again.append(request)
                else:
                    told = "it ended the model's process twice and is not tried again"
                    request.answer.set_exception(Refused(HTTPStatus.UNPROCESSABLE_ENTITY, told))
        self.batches.clear()
        self._admission.begin_batch(self, 0)
        return again

    @property
    def is_silent(self) -> bool:
        """Whether it is stopped, as far as its heartbeats tell."""
        return self.missed_beats >= MISSED_BEATS

    def is_stuck(self, seconds: float) -> bool:
        """Whether it has not answered its first batch, or was silent, for so long."""
        age = _now() - self.batches[0][1] if self.batches else 0.0
        return max(age, self.missed_beats * HEARTBEAT_SECONDS) > seconds

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    async def stop(self) -> None:
        """Close what it reads from, so that it ends; or end it."""
        if hasattr(self, "_writer"):
            self._writer.close()
        else:
            self._socket.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended()
        except TimeoutError:
            self.kill()
            await self._ended()

    async def _ended(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.01)
        return code


class ModelProcesses:
    """All processes of a server, and what gives them work."""

    def __init__(
        self,
        source: str,
        admission: Admission,
        *,
        count: int = 1,
        threads: int | None = None,
        device: str = "auto",
        model: str | None = None,
        say: Say = print,
    ) -> None:
        threads = threads or max(1, cores() // count)
        self.source, self.admission, self.count, self.threads = source, admission, count, threads
        pixels = admission.limits.pixels
        self._settings: dict[str, Any] = {"source": source, "device": device, "model": model, "threads": threads}
        self._settings["pixels"] = pixels
        self._say = say
        self.about: dict[str, Any] = {}
        self.ready: list[ModelProcess] = []
        self.silent: list[ModelProcess] = []
        self.restarts = 0
        self.batch_inputs: Callable[[int, float], None] = lambda _inputs, _seconds: None  # who counts batches
        self._starting: list[ModelProcess] = []
        self.tasks: list[asyncio.Task[None]] = []  # which end with an error alone
        self._freed = asyncio.Event()

    async def start(self) -> None:
        """Load the model in all of them; where one cannot, its error, and none is left."""
        if self.tasks:
            return
        try:
            starting = [self._new() for _ in range(self.count)]
            abouts = await asyncio.gather(*(process.ready() for process in starting))
        except BaseException:
            await self.stop()
            raise
        self.about = abouts[0]
        self.tasks = [asyncio.create_task(self._keep(process)) for process in starting]
        self.tasks += [asyncio.create_task(self._dispatch()), asyncio.create_task(self._watch())]
        while len(self.ready) < self.count:
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End all processes; what they still had is not answered."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        processes = [*self.ready, *self.silent, *self._starting]
        self.ready, self.silent, self._starting, self.tasks = [], [], [], []
        self.admission.processes = 0
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """Of the processes that have loaded the model."""
        return [process.pid for process in (*self.ready, *self.silent)]

    @property
    def why_not_ready(self) -> str:
        """The reason why no process is ready."""
        if self.silent:
            return f"the model's process {self.silent[0].pid} does not respond"
        return "the model is being loaded"

    def _new(self) -> ModelProcess:
        process = ModelProcess(self._settings, self.admission)
        self._starting.append(process)
        return process

    async def _keep(self, process: ModelProcess) -> None:
        """Let a process answer; where it ends, start another in its place."""
        while True:
            self._starting.remove(process)
            self.ready.append(process)
            self._count()
            began = _now()
            await process.answer(self._done)
            (self.silent if process in self.silent else self.ready).remove(process)
            self._count()
            self.admission.again(process.given_back())
            await process.stop()
            process = await self._started_again(process.pid, lived=_now() - began)

    async def _started_again(self, pid: int, lived: float) -> ModelProcess:
        pause = 0.0 if lived > LONGEST_PAUSE else 0.1
        while True:
            self._say(f"the model's process {pid} ended; it is started again")
            self.restarts += 1
            await asyncio.sleep(pause)
            process = self._new()
            try:
                await process.ready()
                return process
            except errors.PatchloomError as error:
                self._say(f"the model cannot be loaded again: {error}")
                self._starting.remove(process)
                await process.stop()
                pause, pid = min(LONGEST_PAUSE, max(1.0, 2 * pause)), process.pid

    async def _dispatch(self) -> None:
        """Give batches to whoever has the fewest."""
        admission = self.admission
        while True:
            await admission.arrived()
            process = await self._free()
            joined = _now()
            if not process.batches and admission.waiting < admission.limits.batch:
                await asyncio.sleep(admission.limits.wait_seconds)
                if process not in self.ready:
                    continue
            waited = _now() - joined
            if batch := admission.take():
                for request in batch:
                    request.seconds["batch"] = min(waited, _now() - request.began)
                process.give(batch)

    async def _free(self) -> ModelProcess:
        while True:
            free = [process for process in self.ready if len(process.batches) < BATCHES]
            if free:
                return min(free, key=lambda process: len(process.batches))
            self._freed.clear()
            await self._freed.wait()

    async def _watch(self) -> None:
        """Count heartbeats that do not come, and end a process that does not answer any more.

        They are counted and not timed, so that a pause of this process is not taken for one of the model's.
        """
        longest = max(60.0, STUCK * self.admission.limits.deadline_seconds)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for process in (*self.ready, *self.silent):
                process.missed_beats += 1
                if process.is_silent != (process in self.silent):
                    self._change(process)
                if process.is_stuck(longest):
                    self._say(f"the model's process {process.pid} has not answered for {math.floor(longest)} s")
                    process.kill()

    def _change(self, process: ModelProcess) -> None:
        """Move a process between those that are ready and those that are silent."""
        before, after = (self.ready, self.silent) if process.is_silent else (self.silent, self.ready)
        before.remove(process)
        after.append(process)
        if process.is_silent:
            self.admission.begin_batch(process, 0)  # which does not say how fast the others are
        self._count()
        change = "does not respond: it gets no requests" if process.is_silent else "responds again"
        self._say(f"the model's process {process.pid} {change}")

    def _done(self, inputs: int, seconds: float) -> None:
        self._freed.set()
        self.batch_inputs(inputs, seconds)

    def _count(self) -> None:
        self.admission.processes = len(self.ready)
        self._freed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _hand_over(request: Request, status: int, body: bytes, seconds: float) -> None:
    if request.answer.done():  # its deadline has passed
        return
    request.seconds["model"] = seconds
    request.seconds["queue"] = max(0.0, _now() - request.began - seconds - request.seconds["batch"])
    if status == HTTPStatus.OK:
        request.answer.set_result(body)
    else:
        request.answer.set_exception(Refused(status, body.decode(errors="replace")))


def _inputs(batch: list[Request]) -> int:
    return sum(len(request.inputs) for request in batch)
