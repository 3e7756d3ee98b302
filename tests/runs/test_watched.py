"""The state of runs that are training, and `patchloom watch`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import patchloom
from patchloom import disk
from patchloom.cli import watch as watch_module
from patchloom.cli.watch import text_chart
from patchloom.engine.display import Status
from patchloom.engine.records import ENDED
from patchloom.runs.metrics import METRICS, MetricsFile, MetricsTail
from patchloom.runs.status import FILE, StatusFile, read_status
from patchloom.runs.watched import WatchedRun
from tests.messages import missing
from tests.reliability.commands import command

STATUS = Status(30, 100, 2, 5, 1e-3, 812.0, 0.03, 61.0, 512.0, {"loss": 0.25, "odd": float("nan")}, "best top1 71.2")


def record(step: int, kind: str = "train", **values: float) -> dict:
    time_values = {"elapsed_s": 1.0, "images_per_s": 800.0}
    named = values or {"loss": 1.0 / step}
    return {"step": step, "epoch": 1, "kind": kind, "weights": "model", "values": named, "time": time_values}


def write_records(folder: Path, *records: dict, kept: int = 0) -> None:
    file = MetricsFile(folder / METRICS)
    file.begin(kept)
    for each in records:
        file.write(each)
    file.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "run", record(10), record(20), record(20, "evaluation", top1=71.2, loss=0.4), record(30))
    return tmp_path / "run"


def test_new_lines_are_read_and_half_a_line_waits(folder: Path) -> None:
    path, tail = folder / METRICS, MetricsTail(folder / METRICS)
    whole = path.read_bytes()
    for length in (len(whole) // 3, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:length])
        tail.update()
        assert len(tail.records) == whole[:length].count(b"\n")
    assert [each["step"] for each in tail.records] == [10, 20, 20, 30]
    tail.update()
    assert len(tail.records) == 4


def test_a_resumed_run_is_read_from_its_beginning(folder: Path) -> None:
    tail = MetricsTail(folder / METRICS)
    tail.update()
    write_records(folder, record(21), record(22), record(23), record(24), record(25), kept=2)
    tail.update()
    assert [each["step"] for each in tail.records] == [10, 20, 21, 22, 23, 24, 25]
    (folder / METRICS).unlink()
    tail.update()
    assert tail.records == []


def test_damaged_lines_are_skipped(folder: Path) -> None:
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{]\n" + lines[2])
    tail = MetricsTail(path)
    tail.update()
    assert [each["step"] for each in tail.records] == [10, 20]


def test_a_running_run(folder: Path) -> None:
    StatusFile(folder).write("training", STATUS)
    state = WatchedRun(folder).update()
    assert (state.state, state.activity, state.step, state.left_s) == ("running", "training", 30, 61.0)
    assert state.values == {"loss": 0.25, "odd": None}
    assert state.evaluation is not None
    assert state.evaluation["values"]["top1"] == 71.2
    assert missing(state.headline() + state.numbers(), "training", "2/5", "30/100", "1:01", "812", "top1 71.2") == []
    StatusFile(folder).write(ENDED)  # a notebook's process goes on
    assert WatchedRun(folder).update().state == "stopped"


def test_the_activity_keeps_the_numbers(folder: Path) -> None:
    status = StatusFile(folder)
    status.write("training", STATUS)
    status.write("evaluating")
    state = WatchedRun(folder).update()
    assert (state.activity, state.total_steps) == ("evaluating", 100)
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []


def ended_process() -> str:
    """The id of a process of this system that has ended."""
    number = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1, check=True).stdout)
    return f"{disk._system()}-{number}-1"


@pytest.mark.parametrize(
    ("activity", "process", "age_s", "state"),
    [
        ("training", "ended", 5, "killed"),
        (ENDED, "ended", 5, "stopped"),
        ("training", "0badf00d-1-1", 5, "running"),  # of another machine
        ("training", "0badf00d-1-1", 500, "killed"),
        ("training", "no process", 5, "killed"),
    ],
)
def test_a_process_that_is_gone(folder: Path, activity: str, process: str, age_s: float, state: str) -> None:
    named = ended_process() if process == "ended" else process
    content = {"process": named, "at": time.time() - age_s, "activity": activity, "step": 30, "total_steps": 100}
    (folder / FILE).write_text(json.dumps(content))
    if "-" in named:
        (folder / ".lock").write_text(f" {named.split('-')[1]}")
    assert WatchedRun(folder).update().state == state


def test_a_run_that_has_not_begun_or_is_starting(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path / "later")
    assert run.update().state == "not begun"
    (tmp_path / "later").mkdir()
    assert run.update().state == "not begun"
    (tmp_path / "later" / ".lock").write_text(f" {os.getpid()}")
    assert run.update().state == "starting"
    os.utime(tmp_path / "later" / ".lock", (0, 0))
    assert run.update().state == "not begun"
    shutil.rmtree(tmp_path / "later")
    assert run.update().state == "not begun"


def test_a_status_that_is_damaged_is_none(folder: Path) -> None:
    for text in ("", "{", "[]", '{"process": 1}', '{"process": "a", "at": 1, "activity": "x", "step": "y"}'):
        (folder / FILE).write_text(text)
        assert read_status(folder) == {}
        assert WatchedRun(folder).update().state == "stopped"


def test_training_leaves_its_last_status(trained: Path) -> None:
    state = WatchedRun(trained / "a").update()
    assert state.state == "finished"
    status = read_status(trained / "a")
    assert (status["activity"], status["step"]) == (ENDED, status["total_steps"])


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "a", tmp_path / "a"))


def test_watch_ends_with_the_runs(finished: Path, trained: Path, monkeypatch, capsys) -> None:
    done = command(("watch", finished), monkeypatch, capsys)
    assert done.code == 0
    (line,) = done.output.splitlines()
    assert missing(line, finished, "finished") == []


def test_python_returns_the_states(finished: Path, folder: Path) -> None:
    assert [state.state for state in patchloom.watch([finished, folder, "nowhere"])] == [
        "finished", "stopped", "not begun",
    ]  # fmt: skip
    assert patchloom.watch(str(finished))[0].is_over


def test_watch_follows_a_run(finished: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """A folder that appears, trains, is killed, is resumed, and finishes."""
    folder, own = tmp_path / "new", disk.this_process()

    def status(activity: str, process: str) -> None:
        content = {"process": process, "at": time.time(), "activity": activity, "step": 5, "total_steps": 100}
        (folder / FILE).write_text(json.dumps(content))

    moments = [
        folder.mkdir,
        lambda: status("training", own),
        lambda: write_records(folder, record(10), record(20, "evaluation", top1=50.0)),
        lambda: status("saving", own),
        lambda: status("saving", ended_process()),
        lambda: status("training", own),
        lambda: (shutil.rmtree(folder), shutil.copytree(finished, folder)),
    ]
    monkeypatch.setattr(watch_module.time, "sleep", lambda _: moments.pop(0)())
    done = command(("watch", folder, "--page", tmp_path / "page.html"), monkeypatch, capsys)
    assert (done.code, moments) == (0, [])
    states = ("not begun", "training", "training", "saving", "killed", "training", "finished")
    assert [state for state, line in zip(states, done.output.splitlines(), strict=True) if state not in line] == []
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert 'http-equiv="refresh"' not in page  # nothing more to come


def test_once_as_json_and_as_a_page(folder: Path, finished: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    StatusFile(folder).write("training", STATUS)
    (folder / "pictures").mkdir()
    Image.new("RGB", (40, 40), "red").save(folder / "pictures" / "epoch_0010.png")
    (folder / "pictures" / "epoch_0002.png").write_bytes(b"older")
    line = ("watch", folder, finished, "--once", "--json", "--page", tmp_path / "page.html")
    done = command(line, monkeypatch, capsys)
    first, second = json.loads(done.output)
    assert (first["state"], second["state"]) == ("running", "finished")
    assert first["picture"].endswith("epoch_0010.png")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<section>") == 2
    assert len(re.findall(r'<img src="data:image/jpeg', page)) == 1
    assert 'http-equiv="refresh"' in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)


@pytest.mark.parametrize("name", ["nowhere", "a file"])
def test_what_is_no_run_is_one_line(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "a file").write_text("")
    done = command(("watch", tmp_path / name, "--once"), monkeypatch, capsys)
    assert (done.code, done.output) == (2, "")
    assert missing(done.errors, tmp_path / name) == []


def test_names_do_not_steer_the_page_or_the_terminal(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = tmp_path / "<script>\x1b[2J"
    write_records(folder, record(1), record(2), record(3, "evaluation", **{"<b>": 1.0}))
    done = command(("watch", folder, "--once", "--page", tmp_path / "page.html"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert "\x1b" not in done.output
    page = (tmp_path / "page.html").read_text()
    assert "\x1b" not in page
    assert page.count("<script>") == 1  # the page's own
    assert "<b>" not in page.replace("<p><b>", "")


def test_a_curve_in_text() -> None:
    title, *rows = text_chart("loss", [(0, 4.0), (1, float("nan")), (10, 0.0)])
    assert missing(title, "loss", "0", "4") == []
    assert len({len(row) for row in (title, *rows)}) == 1
    assert (rows[0][0] != "⠀", rows[-1][-1] != "⠀") == (True, True)  # from the top left to the bottom right
    assert (rows[0][-1], rows[-1][0]) == ("⠀", "⠀")
    assert "finite" in text_chart("loss", [(0, float("nan"))])[0]
    assert len(text_chart("flat", [(0, 1.0), (5, 1.0)])) == len(rows) + 1


def test_the_commands_of_the_page_run(finished: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("patchloom watch ")]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    for name in ("flowers", "other"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    for line in lines:
        done = command(tuple(shlex.split(line, comments=True)[1:]), monkeypatch, capsys)
        assert (done.code, done.errors) == (0, ""), line
        assert "finished" in done.output
    assert Path("watch.html").is_file()
