"""An artifact behind a real server: no torch anywhere, two model processes, and an end that loses nothing of either."""

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.serving.messages import HEARTBEAT_SECONDS
from tests.serving.artifacts import write_artifact
from tests.serving.test_server import Server, is_alive, post, read_all, refuses, serve_command, until

pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
HEAVY = ("torch", "torchvision", "timm", "onnx", "pandas", "scipy")


def png(color: tuple[int, int, int] = (10, 200, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 36), color).save(buffer, "PNG")
    return buffer.getvalue()


GREEN = png()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("served") / "colours")


@pytest.fixture(scope="module")
def two(artifact: Path) -> Iterator[Server]:
    """Two model processes."""
    started = Server(serve_command(artifact, "--processes", "2"))
    yield started
    started.end()


def test_no_process_imports_torch(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever process imports one of these is gone at once, and the server with it."""
    for name in HEAVY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"import os\nos.write(2, b'{name} is imported')\nos._exit(99)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    server = Server(serve_command(artifact))
    try:
        status, _, reply = server.ask("POST", "/predict?top=1", GREEN)
        assert (status, json.loads(reply)["results"][0]["answers"][0]["label"]) == (200, "green")
        assert len(json.loads(server.ask("POST", "/embed", GREEN)[2])["results"][0]["vector"]) == 3
    finally:
        assert server.end() == ("", "")


def test_tritons_client_is_answered(two: Server) -> None:
    tritonclient = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
    client = tritonclient.InferenceServerClient(f"127.0.0.1:{two.port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("colours")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        assert client.get_model_metadata("colours")["inputs"][0]["datatype"] == "BYTES"
        files = tritonclient.InferInput("image", [2], "BYTES")
        files.set_data_from_numpy(np.array([png((200, 0, 0)), GREEN], dtype=object))
        inference = client.infer("colours", [files], parameters={"top": 1})
        assert inference.as_numpy("label").tolist() == [[b"red"], [b"green"]]
        assert inference.as_numpy("probability").shape == (2, 1)
        pixels = tritonclient.InferInput("image", [1, 16, 16, 3], "UINT8")
        for binary in (True, False):
            pixels.set_data_from_numpy(np.full((1, 16, 16, 3), (0, 0, 200), np.uint8), binary_data=binary)
            label = tritonclient.InferRequestedOutput("label", binary_data=binary)
            (row,) = client.infer("colours", [pixels], outputs=[label]).as_numpy("label").tolist()
            assert row[0] in (b"blue", "blue")
        assert client.infer("colours-embed", [pixels]).as_numpy("vector").tolist() == [[0, 0, 200]]
        with pytest.raises(Exception, match=r"\[404\].*/v2/models/other"):
            client.get_model_metadata("other")
    finally:
        client.close()


def test_one_of_two_model_processes_may_die(two: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(two.ask, "POST", "/predict", GREEN) for _ in range(60)]
        until(lambda: sum(one.done() for one in futures) >= 5)
        os.kill(two.pids[0], signal.SIGKILL)
        futures += [pool.submit(two.ask, "POST", "/predict", GREEN) for _ in range(60)]
        assert {one.result()[0] for one in futures} == {200}
    until(lambda: two.number("model_processes") == 2)
    assert two.number("model_restarts_total") == 1
    assert not is_alive(two.pids[0])


def test_two_model_processes_answer_what_was_taken_and_end(artifact: Path) -> None:
    server = Server(serve_command(artifact, "--processes", "2"))
    for pid in server.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(40) as pool:
            futures = [pool.submit(server.ask, "POST", "/predict", GREEN) for _ in range(40)]
            slow = server.raw(post(len(GREEN), GREEN[:50]))
            until(lambda: server.number("queue_inputs") + server.number("in_process_inputs") == 40)
            until(lambda: server.number("held_bytes") == 40 * len(GREEN) + 50)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: refuses(server.port))
            for pid in server.pids:
                os.kill(pid, signal.SIGCONT)
            assert [one.result()[0] for one in futures] == [200] * 40
        time.sleep(2 * HEARTBEAT_SECONDS)  # until the model is ready again, whatever the stop took
        slow.sendall(GREEN[50:])
        assert read_all(slow).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(20) == 0
        assert not any(map(is_alive, server.pids))
    finally:
        for pid in filter(is_alive, server.pids):
            os.kill(pid, signal.SIGKILL)
        server.end()


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(two: Server) -> None:
    """Good ones, bad ones and those that are given up; of all processes together."""
    bodies = [GREEN, GREEN[:60], b"junk", bytes(300_000), png((1, 2, 3))]

    def ask(number: int) -> int:
        path = ("/predict", "/embed", f"/nothing/{number}", "/predict?top=0", "/v2/models/colours/infer")[number % 5]
        if number % 50 == 0:
            with two.raw(post(len(GREEN), GREEN[:30])):
                return 0
        return two.ask("POST", path, bodies[number % 4])[0]

    def resident() -> float:
        text = two.ask("GET", "/metrics")[2].decode()
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("patchloom_memory_bytes{"))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(2000))) < 500
        before = resident()
        assert max(pool.map(ask, range(6000))) < 500
    assert resident() - before < 8 << 20
