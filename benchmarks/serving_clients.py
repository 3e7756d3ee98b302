"""Clients of benchmarks/serving.py: open-loop load, one client after another, slow headers, a signal under load."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

TIMEOUT = 10.0  # seconds until a client gives up: what is answered later is lost
SLOW_SOCKETS, SLOW_SECONDS = 50, 12.0


@dataclass(frozen=True)
class Target:
    """Port of a server, and the request to send."""

    port: int
    body: bytes
    kind: str

    @property
    def message(self) -> bytes:
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {self.kind}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


@dataclass(frozen=True)
class Answer:
    status: str  # "timeout" or "reset" if there was none
    began: float
    seconds: float


async def ask(target: Target) -> Answer:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(target.message)
            status = (await reader.read(65536))[9:12].decode() or "reset"
            writer.close()
    except TimeoutError:
        status = "timeout"
    except OSError:
        status = "reset"
    return Answer(status, began, time.perf_counter() - began)


def percentile(seconds: list[float], share: float) -> float:
    """Return a percentile in milliseconds; 0 for an empty list."""
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class Load:
    """The responses to requests sent for some seconds."""

    answers: list[Answer]
    began: float
    seconds: float

    def per_second(self, within: float = TIMEOUT) -> float:
        """Return the rate of good responses, a 200 `within` seconds, that arrived while requests were sent."""
        ends = self.began + self.seconds
        good = (one for one in self.answers if one.status == "200" and one.seconds <= within)
        return sum(one.began + one.seconds <= ends for one in good) / self.seconds

    @property
    def offered(self) -> float:
        return len(self.answers) / self.seconds

    def of(self, *statuses: str) -> list[float]:
        return [one.seconds for one in self.answers if one.status in statuses]

    @property
    def refused(self) -> list[float]:
        return self.of("503", "429")

    def summary(self) -> str:
        return " ".join(
            f"{count} × {status}" for status, count in Counter(a.status for a in self.answers).most_common()
        )


def closed_loop(target: Target, clients: int, seconds: float) -> Load:
    """Run clients that each send a request after the response to the one before."""
    answers: list[Answer] = []

    async def one(ends: float) -> None:
        while time.perf_counter() < ends:
            answers.append(await ask(target))

    async def run() -> Load:
        began = time.perf_counter()
        await asyncio.gather(*(one(began + seconds) for _ in range(clients)))
        return Load(answers, began, seconds)

    return asyncio.run(run())


def open_loop(target: Target, rate: float, seconds: float) -> Load:
    """Send requests at a fixed rate, whatever the responses are."""

    async def run() -> Load:
        tasks, began = [], time.perf_counter()
        for number in range(max(1, int(rate * seconds))):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(target)))
        sent = max(seconds, time.perf_counter() - began)
        return Load(list(await asyncio.gather(*tasks)), began, sent)

    return asyncio.run(run())


def slow_headers(target: Target) -> list[float]:
    """Send headers byte by byte on 50 sockets; return after how many seconds each was closed."""

    async def one() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        began = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        with suppress(OSError, TimeoutError):
            while time.perf_counter() - began < SLOW_SECONDS:
                writer.write(b"x")
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.25):
                        if not await reader.read(100):
                            break
        writer.close()
        return time.perf_counter() - began

    async def run() -> list[float]:
        return list(await asyncio.gather(*(one() for _ in range(SLOW_SOCKETS))))

    return asyncio.run(run())


@dataclass(frozen=True)
class Ended:
    """What SIGTERM under load left of a server."""

    lost: int  # requests sent before the signal without a response
    seconds: float  # until its process was gone
    left: int  # processes that were still running then
    port_open: bool


def end_under_load(target: Target, pid: int, rate: float) -> Ended:
    """Send SIGTERM after one of one and a half seconds of requests."""
    signaled: list[float] = []

    def tell() -> None:
        signaled.append(time.perf_counter())
        os.kill(pid, signal.SIGTERM)

    async def run() -> list[Answer]:
        asyncio.get_running_loop().call_later(1.0, tell)
        tasks, began = [], time.perf_counter()
        for number in range(max(1, int(1.5 * rate))):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(target)))
        return list(await asyncio.gather(*tasks))

    answers = asyncio.run(run())
    while _lives(pid) and time.perf_counter() - signaled[0] < 40:
        time.sleep(0.01)
    seconds = time.perf_counter() - signaled[0]
    lost = sum(one.began < signaled[0] - 0.02 and one.status in ("timeout", "reset") for one in answers)
    return Ended(lost, seconds, len(list(members(pid))), _is_open(target.port))


def members(session: int) -> Iterator[int]:
    """Yield the process ids of a session that are running."""
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat") as file:
                state, _, _, own = file.read().rsplit(")", 1)[1].split()[:4]
            if int(own) == session and state != "Z":
                yield int(name)


def _lives(pid: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False


def _is_open(port: int) -> bool:
    import socket

    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
