"""What is written and shown while training."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest

from patchloom.engine.display import Bar, Lines, Status, duration, make_display
from patchloom.runs.metrics import MetricsFile, open_records
from patchloom_runtime.errors import UsageError


def record(step: int, value: float = 1.0) -> dict:
    return {"step": step, "epoch": 0, "kind": "train", "weights": "model", "values": {"loss": value}, "time": {}}


def status(step: int) -> Status:
    return Status(step, 100, 1, 2, 1e-3, 12345.6, 0.05, 61.0, 512.0, {"loss": 0.4123}, "best top1 71.2")


def test_metrics_file_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    for remaining, steps in ((0, [1, 2, 3]), (2, [4])):
        file = MetricsFile(path)
        file.begin(remaining)
        for step in steps:
            file.write(record(step))
        file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 4]
    file = MetricsFile(path)
    file.begin(0)
    file.close()
    assert path.read_text() == ""


def test_metrics_file_is_json_whatever_the_values(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.begin(0)
    file.write(record(1, math.nan))
    line = (tmp_path / "metrics.jsonl").read_text()
    file.close()
    assert json.loads(line)["values"] == {"loss": None}


def test_lines_appear_every_ten_seconds_and_at_the_end() -> None:
    now, lines = [0.0], []
    display = Lines(lines.append, lambda: now[0])
    for step, at in ((1, 0.0), (2, 3.0), (3, 10.0), (4, 12.0), (100, 13.0)):
        now[0] = at
        display.tick(status(step))
    assert [re.findall(r"\b\d+/100\b", line) for line in lines] == [["1/100"], ["3/100"], ["100/100"]]
    for fact in ("1/2", "1/100", "loss 0.4123", "lr 1.00e-03", "12,346", "5%", "512 MiB", "top1 71.2", "1:01"):
        assert fact in lines[0]
    display.show_values({"epoch": 3, "weights": "ema", "values": {"top1": 71.23}})
    for fact in ("3", "EMA", "top1 71.23"):
        assert fact in lines[-1]


def test_a_bar_shows_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    bar.begin()
    bar.tick(status(50))
    bar.note("going on [from] step 3")
    bar.close()
    displayed = capsys.readouterr().out
    assert "going on [from] step 3" in displayed
    assert "loss 0.4123" in displayed


def test_no_bar_where_nobody_watches() -> None:
    assert isinstance(make_display(), Lines) or sys.stdout.isatty()


def test_durations() -> None:
    assert [duration(s) for s in (None, 5, 61.4, 3600, 86399)] == ["?", "0:05", "1:01", "1:00:00", "23:59:59"]


def test_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    records = open_records(tmp_path, is_main=False)
    records.begin(0)
    records.write(record(1))
    records.close()
    assert list(tmp_path.iterdir()) == []


def test_trackers_are_known_or_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        open_records(tmp_path, trackers=["mlflow"])
    for fact in ("'mlflow'", "tensorboard", "wandb"):
        assert fact in str(error.value)


@pytest.mark.parametrize(("tracker", "extra"), [("tensorboard", "log"), ("wandb", "wandb")])
def test_a_missing_tracker_names_its_extra(tmp_path: Path, tracker: str, extra: str) -> None:
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(UsageError, match=rf"pip install 'patchloom\[{extra}\]'"):
        open_records(tmp_path, trackers=[tracker])
