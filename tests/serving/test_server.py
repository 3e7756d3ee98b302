"""A real server: slow and rude clients, a model that stops or dies, and an end that loses nothing."""

import asyncio
import errno
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchloom.serving import server as server_module
from patchloom.serving.asgi import served_name
from patchloom.serving.hosts import is_local
from patchloom.serving.limits import CONNECTIONS, RESERVED_FILES, UNREAD_SECONDS, UPLOADS, Limits
from patchloom.serving.messages import HEARTBEAT_SECONDS
from patchloom.serving.server import listening
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import command
from tests.serving.conftest import GOLDEN, IMAGE_FILES

pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
PATIENCE_S = 90.0  # until something that must happen has happened, on a busy machine too
SCRIPT = """
import json, sys
from patchloom.serving.admission import Admission
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.server import serve
limits = Limits(queue=16, batch=4, header_seconds=1, upload_seconds=1, body_bytes=100_000)
processes = ModelProcesses(sys.argv[1], Admission(limits), device="cpu", say=lambda text: print(text, file=sys.stderr))
began = lambda url, app: print(json.dumps({"url": url, "pids": app.processes.pids}), flush=True)
serve(processes, "golden", port=0, began=began)
"""


def serve_command(served: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "patchloom.cli", "serve", str(served), "--port", "0", "--json", "-q", *more]


class Server:
    """A started one."""

    def __init__(self, line: list[str]) -> None:
        # One thread, as tests have: two servers side by side would fight for the cores.
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            more = self.process.stdout.readline()
            assert more, self.process.stderr.read()  # type: ignore[union-attr]
            text += more
        reply = json.loads(text)
        self.pids: list[int] = reply["pids"]
        self.pid = self.pids[0]
        self.port = int(reply["url"].rsplit(":", 1)[1])

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, data

    def number(self, name: str) -> float:
        """A metric."""
        text = self.ask("GET", "/metrics")[2].decode()
        return float(re.search(rf"^patchloom_{name} (\S+)$", text, re.MULTILINE)[1])

    def raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(data)
        return connection

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, the model does nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> tuple[str, str]:
        """What it still said."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server([sys.executable, "-c", SCRIPT, str(GOLDEN / "classifier")])
    yield started
    started.end()


@pytest.fixture
def many() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def post(length: object, rest: bytes = b"", more: bytes = b"") -> bytes:
    return (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n%s\r\n" % (str(length).encode(), more)
        + rest
    )


def test_slow_clients_are_cut(server: Server) -> None:
    idle = server.raw(b"")
    half = server.raw(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
    idle_after = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    slow = server.raw(post(1000, b"abc"))
    assert read_all(idle) == read_all(half) == b""
    assert read_all(idle_after).endswith(b'{"live": true}')
    reply = read_all(slow)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert re.search(rb"\b3 bytes\b.*\b1\.\d* s\b", reply)


def test_headers_that_come_byte_by_byte_are_cut(server: Server) -> None:
    """50 of them, while others are answered; this server allows a second, every other one five."""
    assert Limits().header_seconds <= 10
    slow = {server.raw(b"GET /health HTTP/1.1\r\nX: ") for _ in range(50)}
    ends = time.monotonic() + 10
    while slow and time.monotonic() < ends:
        assert server.ask("GET", "/health")[0] == 200
        for each in select.select(list(slow), [], [], 0.2)[0]:
            slow.discard(each)
            _closed(each)
        for each in slow:
            try:
                each.send(b"x")
            except OSError:  # closed since; seen as readable next time
                continue
    assert not slow


def _closed(connection: socket.socket) -> None:
    """What can be read now is its end."""
    with connection:
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            return


def test_rude_clients_get_a_reason(server: Server) -> None:
    assert read_all(server.raw(b"\0\1\2\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    big = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000
    with server.raw(big + b"\r\n\r\n") as connection:
        assert connection.recv(20).startswith(b"HTTP/1.1 431 ")
    chunked = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = read_all(server.raw(chunked + b"ZZ\r\nabc"))
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b'{"error": ' in reply
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(IMAGE_FILES[0]), IMAGE_FILES[0])
    assert read_all(server.raw(chunked + whole)).startswith(b"HTTP/1.1 200 ")
    with server.raw(post(1000, b"abc")):
        pass  # gone in the middle of its body
    for path in ("/predict", "/v2/models/golden/infer"):
        status, headers, data = server.ask("POST", path, bytes(30_000_000))
        assert (status, headers["connection"], "30000000 bytes" in json.loads(data)["error"]) == (413, "close", True)
    assert server.ask("GET", "/../../etc/passwd")[0] == 404
    assert server.ask("POST", "/predict", IMAGE_FILES[0])[0] == 200


def test_a_full_queue_refuses_at_once_and_answers_the_others(server: Server, many: ThreadPoolExecutor) -> None:
    def ask(_: object) -> tuple[int, float, dict[str, str]]:
        began = time.monotonic()
        status, headers, _ = server.ask("POST", "/predict", IMAGE_FILES[0])
        return status, time.monotonic() - began, headers

    with server.stopped():
        futures = [many.submit(ask, None) for _ in range(40)]
        until(
            lambda: (
                sum(one.done() for one in futures) + server.number("queue_inputs") + server.number("in_process_inputs")
                == 40
            )
        )
        refused = [one.result() for one in futures if one.done()]
        assert 0 < server.number("queue_inputs") <= 16  # who says so never waits for the model
    assert all(status == 503 and int(headers["retry-after"]) >= 1 for status, _, headers in refused)
    assert sum(one.result()[0] == 200 for one in futures) == 40 - len(refused) > 0


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_requests_are_taken_without_ending_the_models_turn(server: Server) -> None:
    assert server.ask("POST", "/predict", IMAGE_FILES[0])[0] == 200
    threads = [int(name) for name in os.listdir(f"/proc/{server.process.pid}/task")]
    assert len(threads) > 1  # Granian's too
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(server.pid) == os.SCHED_OTHER


def test_a_model_that_dies_is_started_again_and_what_it_had_is_answered(
    server: Server, many: ThreadPoolExecutor
) -> None:
    with server.stopped():
        futures = [many.submit(server.ask, "POST", "/predict", IMAGE_FILES[0]) for _ in range(12)]
        until(lambda: server.number("in_process_inputs"))
        os.kill(server.pid, signal.SIGKILL)
        assert [one.result()[0] for one in futures] == [200] * 12
        dead, server.pid = server.pid, json.loads(server.ask("GET", "/ready")[2]) and _child(server.process.pid)
        assert dead != server.pid
    assert server.number("model_restarts_total") == 1


def test_a_stopped_model_is_not_ready_until_it_goes_on(server: Server) -> None:
    with server.stopped():
        until(lambda: server.ask("GET", "/ready")[0] == 503)
        assert str(server.pid) in json.loads(server.ask("GET", "/ready")[2])["reason"]
        status, headers, _ = server.ask("POST", "/predict", IMAGE_FILES[0])
        assert (status, headers["retry-after"]) == (503, "1")
    until(lambda: server.ask("GET", "/ready")[0] == 200)
    assert server.ask("POST", "/predict", IMAGE_FILES[0])[0] == 200


def _child(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return int(file.read().split()[0])


@contextmanager
def default_server() -> Iterator[Server]:
    """One with the limits that `patchloom serve` has."""
    started = Server(serve_command(GOLDEN / "classifier"))
    try:
        yield started
    finally:
        started.end()


def test_1500_clients_that_send_slowly_keep_nobody_out() -> None:
    """More than have room: those that fall behind are cut for others."""

    async def slow(port: int, until: asyncio.Event) -> None:
        while not until.is_set():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(post(100_000, b"x"))
                reading = asyncio.create_task(reader.read())
                await asyncio.wait([reading, asyncio.create_task(until.wait())], return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                writer.close()

    async def good(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(len(IMAGE_FILES[0]), IMAGE_FILES[0], b"Connection: close\r\n"))
        answer = await reader.read()
        writer.close()
        return answer[9:12]

    async def attack(server: Server) -> list[bytes]:
        over = asyncio.Event()
        clients = [asyncio.create_task(slow(server.port, over)) for _ in range(1500)]
        while await asyncio.to_thread(server.number, "uploads") < UPLOADS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)  # until they are behind
        async with asyncio.timeout(5):
            answers = [await good(server.port) for _ in range(20)]
        over.set()
        await asyncio.gather(*clients)
        return answers

    _allow_open_files(2000)
    with default_server() as server:
        assert asyncio.run(attack(server)) == [b"200"] * 20


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def test_connections_are_bounded_by_open_files(monkeypatch) -> None:
    """Beyond them accepting would fail over and over, at the cost of a core."""
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    lines: list[str] = []
    assert server_module._connections(lines.append) == 256 - RESERVED_FILES
    assert len(lines) == 1
    assert re.search(r"\b256\b", lines[0])
    limits[:] = [(1024, 1_000_000)]
    assert server_module._connections(lines.append) == CONNECTIONS
    assert limits[-1] == (CONNECTIONS + RESERVED_FILES, 1_000_000)
    limits[:] = [(64, 64)]
    assert server_module._connections(lines.append) == 16


def test_told_to_stop_it_answers_what_it_took_and_leaves_nothing(many: ThreadPoolExecutor) -> None:
    server = Server(serve_command(GOLDEN / "classifier"))
    with server.stopped():
        futures = [many.submit(server.ask, "POST", "/predict", IMAGE_FILES[0]) for _ in range(30)]
        slow = server.raw(post(len(IMAGE_FILES[0]), IMAGE_FILES[0][:100]))
        until(lambda: server.number("queue_inputs") + server.number("in_process_inputs") == 30)
        until(lambda: server.number("held_bytes") == 30 * len(IMAGE_FILES[0]) + 100)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server.port))
        assert server.process.poll() is None
    assert [one.result()[0] for one in futures] == [200] * 30
    time.sleep(2 * HEARTBEAT_SECONDS)  # until the model is ready again, whatever the stop took
    slow.sendall(IMAGE_FILES[0][100:])  # it was taken: its answer comes
    assert read_all(slow).startswith(b"HTTP/1.1 200 ")
    assert server.process.wait(20) == 0
    assert not is_alive(server.pid)
    assert server.process.communicate() == ("", "")


def test_a_signal_is_not_lost_when_many_clients_come_and_go() -> None:
    """Granian's threads wake the loop by a pipe that holds some hundred bytes; so do the loop's own signals."""

    async def run() -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        with server_module._on_signals(stopping, SimpleNamespace(pids=[])):
            for _ in range(10_000):
                loop.call_soon_threadsafe(int)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(20):
                await stopping.wait()

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) == before


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_model_ends_with_a_server_that_is_killed(server: Server) -> None:
    """The last of this file: the server is gone."""
    server.process.kill()
    until(lambda: not is_alive(server.pid))


def test_what_is_wrong_is_said_before_the_model_is_loaded(monkeypatch, capsys, tmp_path) -> None:
    with listening("127.0.0.1", 0) as bound:
        bound.listen()
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNREAD_SECONDS
        port = bound.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1.*\b{port}\b.*{os.strerror(errno.EADDRINUSE)}"):
            listening("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"no-such-host\.invalid.*\b1\b"):
        listening("no-such-host.invalid", 1)
    for source in (str(tmp_path), "no/run"):
        reply = command(("serve", source), monkeypatch, capsys)
        assert (reply.code, source in reply.errors, reply.errors.count("\n")) == (2, True, 1)
    reply = command(("serve", str(GOLDEN / "classifier"), "--api-key", " "), monkeypatch, capsys)
    assert (reply.code, "--api-key" in reply.errors) == (2, True)
    assert (is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0")) == (True,) * 3 + (
        False,
    )
    assert (served_name("a b/ü:in1k"), served_name(str(tmp_path))) == ("a-b---in1k", tmp_path.name)
