"""The same application behind Ray Serve, on a cluster of this machine; docs/serving.md has these lines."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.serving.artifacts import write_artifact
from tests.serving.test_artifact_server import GREEN
from tests.serving.test_server import is_alive, until

DOCS = Path(__file__).parent.parent.parent / "docs" / "serving.md"


def ask(path: str, body: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:8000{path}", body, timeout=30) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def model_pids() -> list[int]:
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if b"patchloom.serving.model_process" in line and b"colours" in line and is_alive(int(name)):
            pids.append(int(name))
    return pids


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_serve_answers_as_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    pytest.importorskip("ray.serve", reason="pip install 'ray[serve]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # nothing is written at home
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    artifact = write_artifact(tmp_path / "colours")
    (code,) = re.findall(r"```python\n(from ray import serve\n.*?)```", DOCS.read_text(), re.DOTALL)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(code.replace("/models/photos-onnx", str(artifact)), {})
        assert ask("/ready")[0] == 200
        status, reply = ask("/predict?top=1", GREEN)
        assert (status, json.loads(reply)["results"][0]["answers"][0]["label"]) == (200, "green")
        assert ask("/predict", b"junk")[0] == 422
        assert ask("/nothing")[0] == 404
        assert ask("/v2/models/colours/ready")[0] == 200
        first, second = model_pids()  # one per replica
        os.kill(first, signal.SIGKILL)
        # Its replica says when to come again, until it has started another; the other one answers.
        assert {ask("/predict", GREEN)[0] for _ in range(20)} in ({200}, {200, 503})
        until(lambda: {ask("/predict", GREEN)[0] for _ in range(10)} == {200})
        from ray import serve

        serve.shutdown()
        until(lambda: not model_pids(), 30)
        assert not is_alive(second)
    finally:
        ray.shutdown()
