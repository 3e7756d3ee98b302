"""Who may ask through a browser: the Host that a request names, and the page that it comes from."""

from collections.abc import Iterator
from typing import Any

import pytest

from patchloom.serving.app import App
from patchloom.serving.hosts import Hosts
from patchloom_runtime.errors import UsageError
from tests.serving.clients import get, send_all
from tests.serving.conftest import GOLDEN, IMAGE_FILES

LOCAL = Hosts("127.0.0.1", "127.0.0.1", 8000)
EVERYWHERE = Hosts("0.0.0.0", "0.0.0.0", 8000)
NAMED = Hosts("0.0.0.0", "0.0.0.0", 8000, ["Photos.example", "localhost:9000"])


def status(app: App, hosts: Hosts, *headers: tuple[str, str], method: str = "GET") -> int:
    app.hosts = hosts
    path, body = ("/", b"") if method == "GET" else ("/predict", IMAGE_FILES[0])
    reply = send_all(app, (method, path, body, headers))[0]
    assert "access-control-allow-origin" not in reply.headers
    return reply.status


@pytest.mark.parametrize(
    ("host", "local", "named"),
    [
        ("127.0.0.1:8000", 200, 200),
        ("127.0.0.1", 200, 200),
        ("LocalHost:8000", 200, 200),
        ("[::1]:8000", 200, 200),
        ("localhost:9000", 421, 200),
        ("photos.example", 421, 200),
        ("photos.example:8000", 421, 200),
        ("photos.example:9000", 421, 421),
        ("10.1.2.3:8000", 421, 200),
        ("[fd00::1]:8000", 421, 200),
        ("10.1.2.3:evil.example", 421, 421),
        ("localhost:80", 421, 421),
        ("localhost:08000", 421, 421),
        ("localhost:", 421, 421),
        ("localhost:evil.example", 421, 421),
        ("localhost.:8000", 421, 421),
        ("127.0.0.1.evil.example", 421, 421),
        ("127.1:8000", 421, 421),
        ("localhost:8000@evil.example", 421, 421),
        ("localhost, evil.example", 421, 421),
        ("evil.example:8000", 421, 421),
        ("", 400, 400),
    ],
)
def test_a_request_names_a_host_of_the_server(host: str, local: int, named: int, app: App) -> None:
    assert status(app, LOCAL, ("host", host)) == local
    assert status(app, NAMED, ("host", host)) == named
    assert status(app, EVERYWHERE, ("host", host)) == 200


def test_a_request_has_one_host(app: App) -> None:
    for hosts in (LOCAL, NAMED, EVERYWHERE):
        assert status(app, hosts, ("host", "localhost:8000"), ("host", "localhost:8000")) == 400
    assert status(app, LOCAL) == 400
    assert status(app, EVERYWHERE) == 200  # as old probes ask
    app.hosts = LOCAL
    assert get(app, "/ready", host="evil.example").status == 421


def test_the_address_listened_on_counts_not_its_name(app: App) -> None:
    hosts = Hosts("machine", "127.0.1.1", 8000)
    assert hosts.is_local
    for host, expected in (("machine:8000", 200), ("127.0.1.1:8000", 200), ("evil.example:8000", 421)):
        assert status(app, hosts, ("host", host)) == expected
    assert status(app, Hosts("::1", "::1", 8000), ("host", "[::1]:8000")) == 200


@pytest.mark.parametrize("name", ["", "http://photos.example", "a/b", "*", "a b", "photos.example:x"])
def test_a_host_to_allow_is_a_host(name: str) -> None:
    with pytest.raises(UsageError) as error:
        Hosts("127.0.0.1", "127.0.0.1", 8000, [name])
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("headers", "local", "named"),
    [
        ({}, 200, 200),
        ({"origin": "http://localhost:8000"}, 200, 200),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, 200, 200),
        ({"sec-fetch-site": "none"}, 200, 200),
        ({"origin": "https://photos.example"}, 403, 200),  # a proxy sends its own Host
        ({"origin": "http://localhost"}, 403, 403),  # another server of this machine
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403, 403),
        ({"origin": "http://10.1.2.3:8000"}, 403, 403),
        ({"origin": "https://evil.example"}, 403, 403),
        ({"origin": "null"}, 403, 403),
        ({"sec-fetch-site": "cross-site"}, 403, 403),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"}, 403, 403),
    ],
)
def test_another_page_posts_nothing(headers: dict[str, str], local: int, named: int, app: App) -> None:
    sent = [("host", "localhost:8000"), ("content-type", "image/png"), *headers.items()]
    assert status(app, LOCAL, *sent, method="POST") == local
    assert status(app, NAMED, *sent, method="POST") == named
    expected = 200 if local == 200 else 403
    assert status(app, EVERYWHERE, *sent, method="POST") == expected
    assert status(app, LOCAL, *sent) == 200  # a link may lead here


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
    from tests.serving.test_server import Server, serve_command

    started = Server(serve_command(GOLDEN / "classifier", "--device", "cpu"))
    yield started
    started.end()


def first_line(server: Any, text: str) -> bytes:
    with server.raw(text.replace("PORT", str(server.port)).replace("\n", "\r\n").encode()) as connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        ("GET /health HTTP/1.1\nHost: localhost:PORT\nConnection: close\n\n", b"200"),
        ("GET /health HTTP/1.1\nHOST: LOCALHOST:PORT\nConnection: close\n\n", b"200"),
        ("GET /health HTTP/1.1\nHost: [::1]:PORT\nConnection: close\n\n", b"200"),
        ("GET /health HTTP/1.1\nHost: localhost:PORT\nHost: evil.example\nConnection: close\n\n", b"400"),
        ("GET /health HTTP/1.1\nHost: localhost:evil.example\nConnection: close\n\n", b"421"),
        ("GET /health HTTP/1.1\nHost: 127.0.0.1.evil.example\nConnection: close\n\n", b"421"),
        ("GET /health HTTP/1.1\nHost: localhost.:PORT\nConnection: close\n\n", b"421"),
        ("GET http://localhost:PORT/health HTTP/1.1\nHost: evil.example\nConnection: close\n\n", b"421"),
        ("GET /health HTTP/1.0\n\n", b"400"),
        ("GET /health HTTP/1.0\nHost: localhost:PORT\n\n", b"200"),
        ("POST /predict HTTP/1.1\nHost: localhost:PORT\nOrigin: http://a.example\nContent-Length: 0\n\n", b"403"),
    ],
)
def test_a_real_server_checks_it(request_text: str, expected: bytes, server: Any) -> None:
    assert first_line(server, request_text).split()[1] == expected


def test_a_real_server_speaks_no_http_2(server: Any) -> None:
    """Where `:authority` would stand for Host."""
    settings = "\0\0\0\4\0\0\0\0\0"
    assert not first_line(server, f"PRI * HTTP/2.0\n\nSM\n\n{settings}").startswith(b"\0")
