"""What is written and shown while training."""

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchloom.engine.display import Bar, Lines, Status, duration, make_display
from patchloom.engine.trackers import TRACKERS
from patchloom.runs.metrics import MetricsFile, open_records
from patchloom_runtime.errors import UsageError
from tests.messages import missing
from tests.reliability.commands import command


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
        open_records(tmp_path, trackers=["wandbb"])
    for fact in ("'wandbb'", *TRACKERS):
        assert fact in str(error.value)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_missing_tracker_names_its_extra(tmp_path: Path, tracker: str, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.engine.trackers.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"pip install 'patchloom\[{TRACKERS[tracker].extra}\]'"):
        open_records(tmp_path, trackers=[tracker])


EVALUATION = {"step": 2, "epoch": 1, "kind": "evaluation", "weights": "ema", "values": {"top1": 71.0}, "time": {}}
VALUES = [({"train/loss": 0.5}, 1), ({"evaluation/ema/top1": 71.0}, 2)]


class StandIns:
    """Modules with the functions of the trackers that patchloom calls; they keep what they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[dict[str, Any]] = []
        scalars = SimpleNamespace(SummaryWriter=self.summary_writer)
        modules = {
            "torch.utils.tensorboard": scalars,
            "wandb": SimpleNamespace(init=self.start),
            "trackio": SimpleNamespace(init=self.start),
            "mlflow": SimpleNamespace(MlflowClient=lambda: self),
            "mlflow.entities": SimpleNamespace(Metric=lambda name, value, _, step: (name, value, step)),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("patchloom.engine.trackers.find_spec", lambda name: name)
        monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)

    def start(self, **options: Any) -> Any:
        self.runs.append({"options": options, "values": [], "ended": False})
        run = self.runs[-1]

        def log(values: dict[str, float], step: int) -> None:
            run["values"].append((values, step))

        return SimpleNamespace(log=log, finish=lambda: run.update(ended=True))

    def summary_writer(self, folder: str) -> Any:
        run = self.start(folder=folder)
        return SimpleNamespace(
            add_scalar=lambda name, value, step: run.log({name: value}, step), flush=str, close=run.finish
        )

    # mlflow.MlflowClient

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        self.start(experiment=experiment, tags=tags, name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=len(self.runs) - 1))

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        name, _, value = query.partition(" = ")
        tag = name.removeprefix("tags.").strip("`")
        numbers = [n for n, run in enumerate(self.runs) if run["options"]["tags"][tag] == value.strip("'")]
        return [SimpleNamespace(info=SimpleNamespace(run_id=number)) for number in numbers[-max_results:]]

    def update_run(self, run_id: int, status: str) -> None:
        self.runs[run_id]["ended"] = status != "RUNNING"

    def log_batch(self, run_id: int, metrics: list[tuple[str, float, int]]) -> None:
        self.runs[run_id]["values"] += [({name: value}, step) for name, value, step in metrics]

    def set_terminated(self, run_id: int) -> None:
        self.runs[run_id]["ended"] = True


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_the_values_of_every_record(tracker: str, tmp_path: Path, monkeypatch) -> None:
    stand_ins = StandIns(monkeypatch)
    for count in (0, 2):  # a run and its continuation
        records = open_records(tmp_path / "photos", trackers=[tracker])
        records.begin(count)
        records.write(record(1, 0.5))
        records.write(EVALUATION)
        records.close()
    assert all(run["ended"] for run in stand_ins.runs)
    assert [pair for run in stand_ins.runs for pair in run["values"]] == VALUES * 2
    options = [run["options"] for run in stand_ins.runs]
    if tracker == "mlflow":
        assert [each["name"] for each in options] == ["photos"]  # one run, continued
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    elif tracker == "trackio":
        assert options[0]["name"] == options[1]["name"]
        assert [each["resume"] for each in options] == ["never", "allow"]
    elif tracker == "wandb":
        assert [(each["name"], each["resume"]) for each in options] == [("photos", "allow")] * 2
        other = open_records(tmp_path / "other" / "photos", trackers=[tracker])
        other.begin(0)
        other.close()
        first, second, third = (run["options"]["id"] for run in stand_ins.runs)
        assert first == second != third  # a folder of the same name is another run


@pytest.mark.parametrize("moment", ["begin", "write", "close"])
def test_a_tracker_that_fails_is_one_warning(moment: str, tmp_path: Path, monkeypatch, capsys) -> None:
    class Failing(TRACKERS["wandb"]):
        def begin(self, *, resumed: bool) -> None:
            self.fail("begin")

        def write(self, record: dict) -> None:
            self.fail("write")

        def close(self) -> None:
            self.fail("close")

        def fail(self, where: str) -> None:
            if where == moment:
                raise ConnectionError("no\nway")

    StandIns(monkeypatch)
    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    records = open_records(tmp_path, trackers=["wandb"])
    records.begin(0)
    for step in (1, 2, 3):
        records.write(record(step))
    records.close()
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert missing(warning, "wandb", "no") == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_an_unknown_tracker_is_refused_before_the_data_are_read(monkeypatch, capsys) -> None:
    done = command(("train", "nowhere", "--log", "tensorbord"), monkeypatch, capsys)
    assert done.code == 2
    assert missing(done.errors, "tensorbord", "tensorboard") == []
