"""An S3 server on this machine (MiniStack), and a proxy in front of it that fails as networks and servers do."""

import calendar
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_STARTS_IN_S = 60.0
_SKEW_S = 900  # that S3 allows
_PIECE = 4096
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>made up</Message></Error>'


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, folder: Path, **environment: str) -> Iterator[str]:
    """Run a server on a port of this machine, and yield its address."""
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        for _ in range(int(_STARTS_IN_S / 0.05)):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def ministack(folder: Path) -> Iterator[str]:
    port = free_port()
    settings = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "HOME": str(folder)}
    with serving([sys.executable, "-m", "ministack"], port, folder, **settings) as address:
        yield address


def request(address: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request as an S3 client would; MiniStack looks at no signature."""
    scope = "Credential=a/20261118/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)) as connection:
        connection.request(method, path, body, {"Authorization": f"AWS4-HMAC-SHA256 {scope}"})
        reply = connection.getresponse()
        return reply.status, reply.read()


class FaultProxy:
    """A proxy whose next replies to GET follow `faults`, one each, and then `always`.

    ""         passed on
    500, 503   the server fails
    cut        the connection ends in the middle of the body
    stall      the body stops in the middle and the connection stays open
    slow       the body comes in small pieces
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.faults: deque[str] = deque()
        self.always = ""
        self.clock_s = 0.0  # by how much the server's clock is ahead
        self.reads: list[str] = []  # paths of GET, in order
        self.released = threading.Event()  # ends all stalls

    def next_fault(self) -> str:
        try:
            return self.faults.popleft()
        except IndexError:
            return self.always


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if code := self.refused():
                self.answer(403 if code == "RequestTimeTooSkewed" else 400, {}, _ERROR.format(code=code).encode())
                return
            fault = ""
            if self.command == "GET":
                proxy.reads.append(self.path)
                fault = proxy.next_fault()
            if fault.isdecimal():
                self.answer(int(fault), {}, _ERROR.format(code="InternalError").encode())
                return
            with closing(http.client.HTTPConnection(proxy.upstream.removeprefix("http://"), timeout=30)) as connection:
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                data = reply.read()
            skipped = ("transfer-encoding", "connection", "content-length", "date", "server")
            headers = {name: value for name, value in reply.getheaders() if name.lower() not in skipped}
            size = reply.getheader("content-length") if self.command == "HEAD" else str(len(data))
            self.answer(reply.status, headers | {"Content-Length": size or "0"}, data, fault)

        def refused(self) -> str:
            """Return the error code for a request of another time, or with a token that has expired."""
            date = self.headers.get("x-amz-date")
            if date:
                sent = calendar.timegm(time.strptime(date, "%Y%m%dT%H%M%SZ"))
                if abs(sent - time.time() - proxy.clock_s) > _SKEW_S:
                    return "RequestTimeTooSkewed"
            return "ExpiredToken" if self.headers.get("x-amz-security-token") == "expired" else ""

        def answer(self, status: int, headers: dict[str, str], data: bytes, fault: str = "") -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if fault in ("cut", "stall"):
                self.wfile.write(data[: len(data) // 2])
                if fault == "stall":
                    proxy.released.wait()
                self.close_connection = True
                return
            step = len(data) if fault != "slow" else _PIECE
            for start in range(0, len(data), max(1, step)):
                self.wfile.write(data[start : start + step])
                self.wfile.flush()

        do_GET = do_PUT = do_HEAD = do_POST = handle_any  # noqa: N815

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # the client gave up
                self.close_connection = True

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002
            pass

    return Handler


@contextmanager
def faults_before(upstream: str) -> Iterator[tuple[str, FaultProxy]]:
    """Yield the address of a proxy, and the proxy."""
    proxy = FaultProxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", proxy
    finally:
        proxy.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
