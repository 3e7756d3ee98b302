"""An artefact behind a real server: no torch anywhere, two model processes, and an end that loses nothing of either."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.serving.artefacts import write_artefact
from tests.serving.test_server import Server, serve_command

pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
HEAVY = ("torch", "torchvision", "timm", "onnx", "pandas", "scipy")


def picture(colour: tuple[int, int, int] = (10, 200, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 36), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tmp_path_factory.mktemp("served") / "colours")


def test_no_process_imports_torch(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever process imports one of these is gone at once, and the server with it."""
    for name in HEAVY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"import os\nos.write(2, b'{name} is imported')\nos._exit(99)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    server = Server(serve_command(artefact))
    try:
        status, _, told = server.ask("POST", "/predict?top=1", picture())
        assert (status, json.loads(told)["results"][0]["answers"][0]["label"]) == (200, "green")
        assert len(json.loads(server.ask("POST", "/embed", picture())[2])["results"][0]["vector"]) == 3
    finally:
        assert server.end() == ("", "")
