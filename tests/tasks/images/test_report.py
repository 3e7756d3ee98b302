"""Reports of one run, of several runs, and of incomplete run folders."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from patchloom.runs.checksums import write_checked
from patchloom.runs.predictions import Predictions, load_predictions, save_predictions
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.images.report import number_rows
from patchloom.tasks.report import report_run
from patchloom_runtime.errors import CheckpointError, UsageError
from tests.reliability.commands import command


def sections(page: Path) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page.read_text("utf-8"))


def notes(page: Path) -> str:
    text = page.read_text("utf-8")
    return text.partition('<section id="notes">')[2].partition("</section>")[0]


WHOLE = [
    "summary",
    "numbers",
    "curves",
    "confusion",
    "classes",
    "reliability",
    "mistakes",
    "pictures",
    "recipe",
    "cost",
]


def test_a_whole_run_has_every_section(run) -> None:
    folder = run("a")
    page = report_run(folder)
    assert page == folder / "report.html"
    result = sections(page)
    assert [name for name in result if name != "notes"] == [*WHOLE, "environment"]
    text = page.read_text("utf-8")
    record = read_run_metadata(folder)
    assert record is not None
    assert record.data_name in text
    assert record.machine in text
    for key in ("looks", "interactions", "Sparsity", "Filters", "Embeddings"):
        assert re.search(rf"<h3>[^<]*\b{key}\b[^<]*</h3>", text)


def test_training_leaves_the_same_report(run) -> None:
    folder = run("a")
    left = (folder / "report.html").read_text("utf-8")
    assert report_run(folder, out=folder / "again.html").read_text("utf-8").count("<section") == left.count("<section")


def test_numbers_have_their_interval(run) -> None:
    report = load_predictions(run("a")).report
    low, high = report.top_interval()
    name, value, detail = number_rows(report)[0]
    assert (name, value) == ("top-1", f"{report.top(1):.2f} %")
    assert detail.startswith(f"{low:.2f} … {high:.2f}")
    assert [row[0] for row in number_rows(report)][-1] == "images"


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ("predictions.safetensors", {"numbers", "confusion", "classes", "reliability", "mistakes"}),
        ("weights.safetensors", {"reliability", "pictures"}),  # a calibration belongs to its weights
        ("metrics.jsonl", {"curves"}),
        ("recipe.yaml", {"recipe"}),
    ],
)
def test_a_missing_file_is_a_note_and_the_rest_is_reported(run, lost: str, missing: set[str]) -> None:
    folder = run("a")
    (folder / lost).unlink()
    page = report_run(folder)
    assert [name for name in WHOLE if name not in sections(page)] == [name for name in WHOLE if name in missing]
    assert lost in notes(page)


@pytest.mark.parametrize("damaged", ["run.json", "predictions.safetensors", "weights.safetensors"])
def test_a_damaged_file_is_a_note_and_the_rest_is_reported(run, damaged: str) -> None:
    folder = run("a")
    (folder / damaged).write_bytes(b"{")
    page = report_run(folder)
    assert damaged in notes(page)
    assert {"summary", "curves", "recipe", "cost"} <= set(sections(page))


def test_moved_data_are_opened_by_the_option(run, trained: Path, tmp_path: Path) -> None:
    folder = run("a")
    record = json.loads((folder / "run.json").read_text("utf-8"))
    changed = json.dumps(record | {"data": str(tmp_path / "gone"), "newer": 1})
    write_checked(folder, {"run.json": changed.encode()})
    page = report_run(folder)
    assert str(tmp_path / "gone") in notes(page)
    assert "mistakes" not in sections(page)
    assert "pictures" in sections(page)  # only of the weights
    moved = Path(shutil.copytree(trained / "data", tmp_path / "moved"))
    assert "mistakes" in sections(report_run(folder, data=str(moved)))
    next(iter((moved / "red").iterdir())).rename(moved / "red" / "other.png")
    assert str(moved) in notes(report_run(folder, data=str(moved)))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        report_run(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "config.json" in str(error.value)


def test_a_run_of_a_newer_version_is_refused(run) -> None:
    folder = run("a")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write_checked(folder, {"config.json": json.dumps(config | {"format": 99}).encode()})
    with pytest.raises(CheckpointError) as error:
        report_run(folder)
    assert "config.json" in str(error.value)
    assert "99" in str(error.value)


# Several runs -------------------------------------------------------------------------------------------------------


def test_runs_side_by_side(trained: Path, tmp_path: Path) -> None:
    page = report_runs([str(trained / name) for name in ("a", "b", "vit")], out=tmp_path / "page.html")
    assert [name for name in sections(page) if name not in ("notes", "classes")] == [
        *("settings", "numbers", "pairs", "curves", "costs", "apart"),
    ]
    text = page.read_text("utf-8")
    settings = text.partition('id="settings"')[2].partition("</section>")[0]
    assert re.search(r"<td[^>]*>seed</td>\s*<td[^>]*>0</td>\s*<td[^>]*>1</td>\s*<td[^>]*>0</td>", settings)
    assert ">model.name</td>" in settings
    assert "schedule.epochs" not in settings
    assert len(re.findall(r"<tr><td>a</td><td[^>]*>b</td>", text)) == 1


def test_different_data_and_initial_weights_are_reported(run, tmp_path: Path) -> None:
    folders = [run("a"), run("b")]
    record = json.loads((folders[1] / "run.json").read_text("utf-8"))
    changed = json.dumps(record | {"init": "runs/dino", "level": "coarse"})
    write_checked(folders[1], {"run.json": changed.encode()})
    page = report_runs([str(folder) for folder in folders], out=tmp_path / "page.html")
    settings = page.read_text("utf-8").partition('id="settings"')[2].partition("</section>")[0]
    for name, value in (("init", "runs/dino"), ("level", "coarse")):
        assert re.search(rf"<td[^>]*>{name}</td>\s*<td[^>]*>–</td>\s*<td[^>]*>{value}</td>", settings)
    assert ">data</td>" not in settings


def test_runs_on_data_are_placed_by_both_sets(trained: Path, tmp_path: Path) -> None:
    names = ("a", "b", "vit")
    page = report_runs([str(trained / name) for name in names], data=str(trained / "data"), out=tmp_path / "page.html")
    cloud = page.read_text("utf-8").partition('id="cloud"')[2].partition("</section>")[0]
    for name in names:
        own = load_predictions(trained / name).report.top(1)
        assert re.search(rf"<title>{name} · \w+ \({own:.4g}, ", cloud)
    assert "cloud" not in sections(report_runs([str(trained / name) for name in names], out=tmp_path / "page.html"))


def test_a_difference_is_marked_only_where_it_is_significant(run, tmp_path: Path) -> None:
    a, b = run("a"), run("b")
    stored = load_predictions(a)
    count = 400
    labels = np.zeros(count, np.int64)

    def decided(wrong: int) -> Predictions:
        ranks = (np.arange(count) < wrong).astype(np.int64)
        columns = {"index": np.arange(count), "labels": labels, "predictions": ranks, "ranks": ranks}
        real = {"confidence": np.ones(count, np.float32), "losses": np.ones(count, np.float32)}
        report = type(stored.report)(stored.report.classes, **columns, **real)
        return Predictions(report, stored.fingerprint)

    for wrong, significant in ((45, 0), (80, 1)):
        save_predictions(a, decided(40))
        save_predictions(b, decided(wrong))
        text = report_runs([str(a), str(b)], out=tmp_path / "page.html").read_text("utf-8")
        pairs = text.partition('<section id="pairs">')[2].partition("</section>")[0]
        assert pairs.count('<b class="good">') == significant
        assert f"{100 * (wrong - 40) / count:+.2f}" in text


def test_runs_on_other_images_are_listed_but_not_compared(run, tmp_path: Path) -> None:
    a, b = run("a"), run("b")
    stored = load_predictions(b)
    save_predictions(b, Predictions(stored.report, "other"))
    page = report_runs([str(a), str(b)], out=tmp_path / "page.html")
    assert re.search(r"\bb\b", notes(page))
    assert "pairs" not in sections(page)
    assert f"{stored.report.top(1):.2f}" in page.read_text("utf-8")


def test_one_run_is_not_several(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        report_runs([str(trained / "a")], out=tmp_path / "page.html")


def test_the_commands(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    one = command(("report", trained / "a", "--page", "one.html"), monkeypatch, capsys)
    assert (one.code, one.output, one.errors) == (0, "one.html\n", "")
    both = command(("report", trained / "a", trained / "b"), monkeypatch, capsys)
    assert (both.code, both.output) == (0, "comparison.html\n")
    assert (tmp_path / "comparison.html").is_file()
    wrong = command(("report", tmp_path), monkeypatch, capsys)
    assert wrong.code == 2
    assert wrong.errors.count("\n") == 1
