"""The model processes: started, supplied with batches, restarted when one ends.

Each has at most two batches, the running one and the next, so that it never waits for the front process. A request
whose process ended is tried once more in a batch of its own; if that ends a process too, the request is at fault. A
process whose heartbeats stop gets no further batch until they return.
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

from starlette.exceptions import HTTPException

from patchloom.machine import cores
from patchloom.plugins import plugin_files
from patchloom.serving.admission import Admission, ModelRequest
from patchloom.serving.messages import HEARTBEAT_SECONDS, pack, read_message
from patchloom_runtime import errors

BATCHES = 2  # per process at the same time
TRIES = 2  # per request
STOP_SECONDS = 5  # for an idle process to end
LONGEST_PAUSE = 30  # seconds before a process that keeps ending is restarted
MISSED_BEATS = 5  # in a row, after which a process counts as silent
STUCK = 4  # deadlines after which a process that returns no results is killed

Say = Callable[[str], None]


class ModelProcess:
    """One process and its batches."""

    def __init__(self, settings: dict[str, Any], admission: Admission) -> None:
        self._admission = admission
        self.batches: deque[tuple[list[ModelRequest], float]] = deque()
        self.missed_beats = 0  # since its last message, as `ModelProcesses` counts them
        own, other = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
        self._process = _start(other, settings, environment)
        other.close()
        self._socket = own
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded and return its description; raise the error of loading."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            about, _ = await read_message(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._ended()
            raise errors.ResourceError(f"the model process ended with code {code} while loading the model") from None
        if "error" in about:
            raise getattr(errors, about["kind"], errors.PatchloomError)(about["error"])
        return about

    def send(self, batch: list[ModelRequest]) -> None:
        """Send a batch; `receive` delivers its results."""
        requests = [{"verb": one.verb, "options": one.options, "inputs": len(one.inputs)} for one in batch]
        self.batches.append((batch, _now()))
        self._admission.in_process += _inputs(batch)
        if len(self.batches) == 1:
            self._admission.begin_batch(self, _inputs(batch))
        self._writer.writelines(pack({"requests": requests}, [part for one in batch for part in one.inputs]))

    async def receive(self, done: Callable[[int, float], None]) -> None:
        """Deliver results until the process ends; call `done` with the inputs and seconds of each batch."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header, bodies = await read_message(self._reader)
                self.missed_beats = 0
                if "statuses" not in header:  # a heartbeat
                    continue
                batch, _ = self.batches.popleft()
                inputs = _inputs(batch)
                self._admission.in_process -= inputs
                self._admission.record_batch(inputs, header["seconds"])
                self._admission.begin_batch(self, _inputs(self.batches[0][0]) if self.batches else 0)
                for request, status, body in zip(batch, header["statuses"], bodies, strict=True):
                    _deliver(request, status, body, header["seconds"])
                done(inputs, header["seconds"])

    def take_unfinished(self) -> list[ModelRequest]:
        """Remove the requests of an ended process and return those to try again; the others get an error."""
        again = []
        for batch, _ in self.batches:
            self._admission.in_process -= _inputs(batch)
            for request in batch:
                # Only the running batch can have ended the process; the next one was not looked at.
                request.tries += batch is self.batches[0][0]
                if request.results.done():
                    continue
                if request.tries < TRIES:
                    again.append(request)
                else:
                    reason = "the request ended the model process twice and is not retried"
                    request.results.set_exception(HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, reason))
        self.batches.clear()
        self._admission.begin_batch(self, 0)
        return again

    @property
    def is_silent(self) -> bool:
        """Whether its heartbeats have stopped."""
        return self.missed_beats >= MISSED_BEATS

    def is_stuck(self, seconds: float) -> bool:
        """Return whether it has returned no results, or was silent, for longer than `seconds`."""
        age = _now() - self.batches[0][1] if self.batches else 0.0
        return max(age, self.missed_beats * HEARTBEAT_SECONDS) > seconds

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        """Close the connection, which ends the process; kill it after STOP_SECONDS."""
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


def _start(connection: socket.socket, settings: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a model process that holds this end of a connection."""
    command = [sys.executable, "-m", "patchloom.serving.model_process", json.dumps(settings)]
    if sys.platform != "win32":
        command.append(str(connection.fileno()))
        return subprocess.Popen(command, pass_fds=[connection.fileno()], env=environment, stdin=subprocess.DEVNULL)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin, suppress(OSError):  # its end is noticed by `ready`
        process.stdin.write(connection.share(process.pid))  # Windows, where sockets are not inherited
    return process


class ModelProcesses:
    """All model processes of a server, and the tasks that supply them with batches."""

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
        self._settings |= {"pixels": pixels, "plugins": plugin_files()}
        self._say = say
        self.about: dict[str, Any] = {}
        self.ready: list[ModelProcess] = []
        self.silent: list[ModelProcess] = []
        self.restarts = 0
        self.count_batch: Callable[[int, float], None] = lambda _inputs, _seconds: None  # set by the metrics
        self._starting: list[ModelProcess] = []
        self.tasks: list[asyncio.Task[None]] = []  # end only with an error
        self._freed = asyncio.Event()

    async def start(self) -> None:
        """Load the model in all processes; if one fails, stop all and raise its error."""
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
        """End all processes, dropping their batches."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        processes = [*self.ready, *self.silent, *self._starting]
        self.ready, self.silent, self._starting, self.tasks = [], [], [], []
        self.admission.processes = 0
        await asyncio.gather(*(process.stop() for process in processes))

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that have loaded the model."""
        return [process.pid for process in (*self.ready, *self.silent)]

    @property
    def why_not_ready(self) -> str:
        """Reason why no process is ready."""
        if self.silent:
            return f"model process {self.silent[0].pid} does not respond"
        return "the model is loading"

    def _new(self) -> ModelProcess:
        process = ModelProcess(self._settings, self.admission)
        self._starting.append(process)
        return process

    async def _keep(self, process: ModelProcess) -> None:
        """Receive the results of a process; when it ends, start another in its place."""
        while True:
            self._starting.remove(process)
            self.ready.append(process)
            self._count()
            began = _now()
            await process.receive(self._done)
            (self.silent if process in self.silent else self.ready).remove(process)
            self._count()
            self.admission.requeue(process.take_unfinished())
            await process.stop()
            process = await self._restart(process.pid, lived=_now() - began)

    async def _restart(self, pid: int, lived: float) -> ModelProcess:
        pause = 0.0 if lived > LONGEST_PAUSE else 0.1
        while True:
            self._say(f"model process {pid} ended; restarting it")
            self.restarts += 1
            await asyncio.sleep(pause)
            process = self._new()
            try:
                await process.ready()
                return process
            except errors.PatchloomError as error:
                self._say(f"cannot load the model again: {error}")
                self._starting.remove(process)
                await process.stop()
                pause, pid = min(LONGEST_PAUSE, max(1.0, 2 * pause)), process.pid

    async def _dispatch(self) -> None:
        """Send batches to the process with the fewest."""
        admission = self.admission
        while True:
            await admission.wait_for_request()
            process = await self._free()
            joined = _now()
            if not process.batches and admission.waiting < admission.limits.batch:
                await asyncio.sleep(admission.limits.wait_seconds)
                if process not in self.ready:
                    continue
            waited = _now() - joined
            if batch := admission.take():
                for request in batch:
                    request.wait_seconds["batch"] = min(waited, _now() - request.began)
                process.send(batch)

    async def _free(self) -> ModelProcess:
        while True:
            free = [process for process in self.ready if len(process.batches) < BATCHES]
            if free:
                return min(free, key=lambda process: len(process.batches))
            self._freed.clear()
            await self._freed.wait()

    async def _watch(self) -> None:
        """Count missed heartbeats, and kill a process that is stuck.

        They are counted and not timed, so that a pause of this process is not mistaken for one of a model process.
        """
        longest = max(60.0, STUCK * self.admission.limits.deadline_seconds)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for process in (*self.ready, *self.silent):
                process.missed_beats += 1
                if process.is_silent != (process in self.silent):
                    self._move(process)
                if process.is_stuck(longest):
                    self._say(
                        f"model process {process.pid} has returned no results for {math.floor(longest)} s; killing it"
                    )
                    process.kill()

    def _move(self, process: ModelProcess) -> None:
        """Move a process between `ready` and `silent`."""
        before, after = (self.ready, self.silent) if process.is_silent else (self.silent, self.ready)
        before.remove(process)
        after.append(process)
        if process.is_silent:
            self.admission.begin_batch(process, 0)  # its batch no longer tells how fast the others are
        self._count()
        change = "does not respond and gets no requests" if process.is_silent else "responds again"
        self._say(f"model process {process.pid} {change}")

    def _done(self, inputs: int, seconds: float) -> None:
        self._freed.set()
        self.count_batch(inputs, seconds)

    def _count(self) -> None:
        self.admission.processes = len(self.ready)
        self._freed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _deliver(request: ModelRequest, status: int, body: bytes, seconds: float) -> None:
    if request.results.done():  # its deadline has passed
        return
    wait = request.wait_seconds
    wait["model"] = seconds
    wait["queue"] = max(0.0, _now() - request.began - seconds - wait["batch"])
    if status == HTTPStatus.OK:
        request.results.set_result(body)
    else:
        request.results.set_exception(HTTPException(status, body.decode(errors="replace")))


def _inputs(batch: list[ModelRequest]) -> int:
    return sum(len(request.inputs) for request in batch)
