"""The page of `patchloom app` and what it asks: nothing from elsewhere, no path of a client's, one line for a fault."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException

from patchloom.inference.index_build import index
from patchloom.report.page import LIST_POLICY
from patchloom.report.pictures.explanations import class_map, strengths
from patchloom.report.pictures.look import network_inputs
from patchloom.serving import server
from patchloom.serving.page import PageApp, report_of
from patchloom.serving.served_model import load_served
from patchloom.serving.server import free_port
from patchloom.serving.verbs import _open as open_page
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import command
from tests.serving.clients import LOOP, Reply, post, send_all
from tests.serving.conftest import GOLDEN, IMAGE_FILES
from tests.serving.pages import COLORS, MODELS, page_of

HERE = {"host": "127.0.0.1:8000"}


def ask(app: PageApp, method: str, path: str, body: bytes = b"", query: str = "") -> Reply:
    return send_all(app, (method, path, body, HERE, query))[0]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[PageApp, Path]:
    folder = tmp_path_factory.mktemp("index")
    return page_of(MODELS["index"](folder), images=folder / "files"), folder


@pytest.mark.parametrize("kind", [name for name in MODELS if name != "index"])
def test_the_page_runs_its_own_scripts_alone(kind: str, tmp_path: Path) -> None:
    if kind == "translator":
        pytest.importorskip("sentencepiece")
    app = page_of(MODELS[kind](tmp_path))
    reply = ask(app, "GET", "/")
    html, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert (len(scripts), len(styles)) == (1, 1)
    for directive, text in (("script-src", scripts[0]), ("style-src", styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert policy.removesuffix("; frame-ancestors 'none'") in html
    assert not re.search(
        r"""https?://|//\w|\sstyle=|\son\w+=|src="[^"]""", re.sub(r"<script.*?</script>", "", html, flags=re.S)
    )
    schema = ask(app, "GET", "/openapi.json").json
    assert set(schema["paths"]) == set(app.paths)
    assert "text/html" in schema["paths"]["/"]["get"]["responses"]["200"]["content"]


def test_what_the_page_says_where_there_is_no_map(tmp_path: Path) -> None:
    html = ask(page_of(MODELS["artifact"](tmp_path)), "GET", "/").body.decode()
    assert "patchloom app RUN" in html
    assert 'id="map"' not in html
    html = ask(page_of(MODELS["without classes"](tmp_path)), "GET", "/").body.decode()
    assert "patchloom index RUN" in html
    assert 'id="map"' in html


def test_what_speaks_for_a_class(tmp_path: Path) -> None:
    served = MODELS["classifier"](tmp_path)
    model, app = served.model, page_of(served)
    likeliest, other = (name for name, _ in model.predict(IMAGE_FILES[0], top=2))
    maps_by_label = {}
    for label in (None, other):
        reply = post(app, "/explain", IMAGE_FILES[0], query=f"label={label}" if label else "", **HERE).json["results"][
            0
        ]
        assert reply["label"] == (label or likeliest)
        assert [one["label"] for one in reply["answers"]] == [name for name, _ in model.predict(IMAGE_FILES[0], top=3)]
        maps_by_label[reply["label"]] = np.array(reply["map"])
    shown = network_inputs(model.model, model.preprocessing, IMAGE_FILES[:1])
    both = [class_map(shown.network, shown.images, torch.tensor([model.labels.index(name)])) for name in maps_by_label]
    for values, maps in zip(maps_by_label.values(), both, strict=True):
        np.testing.assert_allclose(values, strengths(maps, "evidence", both[0])[0].numpy(), atol=6e-4)
    assert np.abs(maps_by_label[likeliest]).max() == 1
    input_image = Image.open(io.BytesIO(base64.b64decode(reply["seen"])))
    assert np.array_equal(np.asarray(input_image), np.asarray(shown.input_images[0]))
    for query, fact in (("label=squirrel", "'squirrel'"), ("label=" + "x" * 1001, "1000"), ("path=a", "'path'")):
        reply = post(app, "/explain", IMAGE_FILES[0], query=query, **HERE)
        assert (reply.status, fact in reply.error, "\n" in reply.error) == (422, True, False), reply.error
    served = MODELS["without classes"](tmp_path)
    reply = post(page_of(served), "/explain", IMAGE_FILES[0], **HERE).json["results"][0]
    assert (reply["answers"], reply["label"], reply["kind"]) == ([], "", "share")
    assert post(page_of(served), "/explain", IMAGE_FILES[0], query="label=a", **HERE).status == 422


def test_the_nearest_are_shown_small_with_the_level_at_which_they_match(searched: tuple[PageApp, Path]) -> None:
    app, folder = searched
    image_file = (folder / "files" / "crimson" / "0.jpg").read_bytes()
    plain = post(app, "/search", image_file, query="top=3", **HERE).json["results"][0]
    assert [one["thumbnail"] for one in plain["hits"]] == [one["match"] for one in plain["hits"]] == [None] * 3
    assert plain["answers"] == []
    reply = post(app, "/search", image_file, query="top=12&neighbours=4&thumbnails=96", **HERE).json["results"][0]
    assert [one["path"] for one in reply["hits"]][:3] == [one["path"] for one in plain["hits"]]
    assert reply["answers"][0]["label"] == "crimson"
    assert sum(one["probability"] for one in reply["answers"]) == pytest.approx(1)
    expected = {"crimson": "fine", "tomato": "temperature", "navy": None}
    assert {one["label"]: one["match"] for one in reply["hits"]} == expected
    for one in reply["hits"]:
        small = Image.open(io.BytesIO(base64.b64decode(one["thumbnail"])))
        assert (small.format, small.size) == ("JPEG", (96, 64))
    coarse = post(app, "/search", image_file, query="top=12&neighbours=4&level=temperature", **HERE).json["results"][0]
    assert [one["label"] for one in coarse["hits"]] == [COLORS[one["label"]] for one in reply["hits"]]
    assert coarse["answers"][0]["label"] == "warm"
    (folder / "files" / "navy" / "0.jpg").write_bytes(b"no picture")
    reply = post(app, "/search", image_file, query="top=12&thumbnails=96", **HERE).json["results"][0]
    assert sum(one["thumbnail"] is None for one in reply["hits"]) == 1


def test_an_index_shows_images_of_the_named_folders_alone(tmp_path: Path) -> None:
    opened = MODELS["index"](tmp_path)
    image_file = (tmp_path / "files" / "navy" / "0.jpg").read_bytes()
    query = "top=12&thumbnails=96"

    def shown(app: PageApp) -> set[str]:
        (reply,) = post(app, "/search", image_file, query=query, **HERE).json["results"]
        assert len(reply["hits"]) == 12
        return {one["path"] for one in reply["hits"] if one["thumbnail"] is not None}

    assert shown(page_of(opened)) == set()
    assert "--images" in ask(page_of(opened), "GET", "/").body.decode()
    (tmp_path / "other").mkdir()
    assert shown(page_of(opened, images=tmp_path / "other")) == set()
    navy = tmp_path / "files" / "navy"
    assert shown(page_of(opened, images=navy)) == {str(file) for file in navy.iterdir()}
    (navy / "0.jpg").rename(tmp_path / "private.jpg")
    (navy / "0.jpg").symlink_to(tmp_path / "private.jpg")
    assert shown(page_of(opened, images=navy)) == {str(navy / f"{number}.jpg") for number in (1, 2, 3)}


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


@pytest.mark.parametrize("replace", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, Path.mkdir, large])
def test_the_report_is_a_plain_file_of_the_run(replace: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "classifier", run)
    (run / "report.html").write_text("<title>the report</title>")
    (tmp_path / "linked").symlink_to(run)  # the folder itself is the user's to name
    app = page_of(load_served(str(run), device="cpu"), str(tmp_path / "linked"))
    assert ask(app, "GET", "/report").status == 200
    (run / "report.html").unlink()
    replace(run / "report.html")
    with pytest.raises(HTTPException) as refused:
        LOOP.run_until_complete(app._show_report(None))  # type: ignore[arg-type]
    assert refused.value.status_code == 404
    assert ask(app, "GET", "/report").status == 404  # started again


def test_a_client_names_no_file(searched: tuple[PageApp, Path]) -> None:
    app, folder = searched
    inside = str(folder / "files" / "navy" / "1.jpg")
    for query in (
        f"path={inside}",
        "thumbnails=-1",
        "thumbnails=9999",
        f"thumbnails={inside}",
        "neighbours=1001",
        "level=../..",
    ):
        reply = post(app, "/search", IMAGE_FILES[0], query=query, **HERE)
        assert (reply.status, "\n" in reply.error, inside in reply.error and "path=" not in query) == (
            422,
            False,
            False,
        )
    for path in ("/thumbnail", f"/thumbnails{inside}", inside, "/report/../index.json", "/report.html", "/app.js"):
        assert ask(app, "GET", path).status == 404, path


def test_the_report_is_that_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "classifier", run)
    model = load_served(str(run), device="cpu")
    without = page_of(model, str(run))
    assert ask(without, "GET", "/report").status == 404
    assert "/report" not in ask(without, "GET", "/").body.decode()
    (run / "report.html").write_text("<!doctype html><title>the report</title>")
    app = page_of(model, str(run))
    assert 'href="/report"' in ask(app, "GET", "/").body.decode()
    reply = ask(app, "GET", "/report")
    assert (reply.status, b"the report" in reply.body, reply.headers["content-type"]) == (
        200,
        True,
        "text/html; charset=utf-8",
    )
    assert re.findall(r"script-src ([^;]*)", reply.headers["content-security-policy"]) == [LIST_POLICY]
    assert "/report" in ask(app, "GET", "/openapi.json").json["paths"]
    assert report_of(str(tmp_path), str(run)) == str(run / "report.html")
    assert report_of("resmlp_s12:in1k", None) is None
    (run / "report.html").unlink()
    with pytest.raises(HTTPException) as refused:
        LOOP.run_until_complete(app._show_report(None))  # type: ignore[arg-type]
    assert refused.value.status_code == 404


def test_the_process_that_shows_the_page_loads_no_torch() -> None:
    about: dict[str, Any] = {
        "labels": ["a"],
        "several": False,
        "levels": [],
        "level": "",
        "languages": [],
        "files": None,
        "network": "n",
    }
    code = f"""
import sys
from patchloom.serving.page import page_response
for verb in ("segment", "detect"):
    page_response("a", {about} | {{"verbs": [verb], "is_artifact": False}}, where="", has_report=False, limits={{}})
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    served: list[dict[str, Any]] = []
    opened: list[str] = []

    def serve(processes: Any, name: str, **options: Any) -> None:
        processes.about = {"verbs": ["predict"], "network": "resmlp_s12"}
        served.append(options | {"name": name})
        options["began"]("http://127.0.0.1:1", options["make"](processes, name))

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr("patchloom.serving.verbs._open", opened.append)
    run = str(GOLDEN / "classifier")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert free_port("127.0.0.1", taken.getsockname()[1]) == 0
    with pytest.raises(UsageError, match=r"no-such-host\.invalid.*\b8000\b"):
        free_port("no-such-host.invalid", 8000)
    monkeypatch.setattr(server, "free_port", lambda _host, _port: 0)
    reply = command(("app", run), monkeypatch, capsys)
    assert reply.code == 0
    assert "resmlp_s12" in reply.output
    assert reply.output.endswith("\nhttp://127.0.0.1:1\n")
    assert re.fullmatch(r"note: .*\b8000\b.*\n", reply.errors)
    assert (served[-1]["port"], served[-1]["name"], opened) == (0, "classifier", ["http://127.0.0.1:1"])
    reply = command(("app", run, "--no-browser", "--port", "7", "--host", "0.0.0.0", "--json"), monkeypatch, capsys)
    assert (reply.code, len(opened), served[-1]["port"]) == (0, 1, 7)
    assert re.fullmatch(r"note: .*0\.0\.0\.0.*\n", reply.errors)
    reply = command(("app", "no/run", "--port", "7"), monkeypatch, capsys)
    assert (reply.code, reply.errors.count("\n"), "no/run" in reply.errors) == (2, 1, True)


def test_a_real_one() -> None:
    pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
    from tests.serving.test_server import Server

    line = [sys.executable, "-m", "patchloom.cli", "app", str(GOLDEN / "classifier"), "--no-browser"]
    started = Server([*line, "--port", "0", "--json", "-q"])
    try:
        status, headers, body = started.ask("GET", "/")
        assert (status, b"<!doctype html>" in body) == (200, True)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert started.ask("POST", "/explain", IMAGE_FILES[0])[0] == 200
        assert started.ask("GET", "/", Host="evil.example")[0] == 421
    finally:
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(20) == 0
        assert started.process.communicate() == ("", "")


def test_a_real_one_of_an_index(tmp_path: Path) -> None:
    pytest.importorskip("granian", reason="pip install 'patchloom[serve]'")
    from tests.serving.test_server import Server, is_alive

    shutil.copytree(GOLDEN / "classifier", tmp_path / "run")
    os.mkfifo(tmp_path / "run" / "report.html")
    image_folder = tmp_path / "pictures"
    shutil.copytree(GOLDEN / "pictures", image_folder)
    index(str(tmp_path / "run"), [str(image_folder)], out=tmp_path / "index", device="cpu")
    line = [sys.executable, "-m", "patchloom.cli", "app", str(tmp_path / "index"), "--images", str(image_folder)]
    started = Server([*line, "--no-browser", "--port", "0", "--json", "-q"])
    children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
    try:
        assert started.ask("GET", "/report")[0] == 404
        status, _, body = started.ask("POST", "/search?thumbnails=64&top=3", IMAGE_FILES[0])
        assert status == 200
        assert all(hit["thumbnail"] for hit in json.loads(body)["results"][0]["hits"])
        assert len(children) == 2  # the model, and what makes thumbnails
    finally:
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(20) == 0
        started.process.communicate()
    assert not any(is_alive(int(pid)) for pid in children)


def test_no_browser_where_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    shown = threading.Event()
    monkeypatch.setattr(webbrowser, "open", lambda url: (opened.append(url), shown.set()))
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    open_page("http://127.0.0.1:1")
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    open_page("http://127.0.0.1:2")
    assert shown.wait(5)
    assert opened == ["http://127.0.0.1:2"]
