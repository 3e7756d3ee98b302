"""An audit lists planted errors, names copies, and reads the corrections that its page saves."""

import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.data.reading_options import Reading
from patchloom.data.sources.corrections import Correction, read_corrections, write_corrections
from patchloom.training.auditing.audit import _outlying
from patchloom.training.auditing.audit_report import AuditReport
from patchloom.training.auditing.page import gain_commands, write_audit_page
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import missing, refused
from tests.reliability.commands import OPTIONS, ROOT, command
from tests.training.auditing.tinted import GIVEN, tinted, tinted_folders

CLASSES = ("green", "red", "violet")


def run(place: Path, **options: Any) -> AuditReport:
    return patchloom.audit(str(place / "data"), **{"say": str, **options})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes with two wrong labels in train; a copy between train and test, and a copy with another label."""
    root = tmp_path_factory.mktemp("audit")
    truth = tinted_folders(root / "data" / "train", CLASSES, 18, wrong=2)
    tinted_folders(root / "data" / "test", CLASSES, 2, first=50)
    pixels = np.linspace(0, 255, 16)[None, :, None] * np.ones((16, 1, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(root / "data" / "train" / "red" / "x.png")
    shutil.copy(root / "data" / "train" / "red" / "x.png", root / "data" / "train" / "green" / "x-again.png")
    shutil.copy(root / "data" / "train" / "red" / "red-3.png", root / "data" / "test" / "red" / "red-3-again.png")
    for tint in range(3):
        tinted(root / "new" / f"{tint}.png", tint, 3, 99)
    Image.fromarray(pixels.astype(np.uint8)[::-1, ::-1]).save(root / "new" / "odd.png")
    write_corrections(root / "truth.csv", [Correction(f"train/{key}", "relabel", of) for key, of in truth.items()])
    run(root, folds=3, out=str(root / "folds"), workers=0, **GIVEN)
    return root


def test_planted_errors_are_listed_first_with_their_true_class(place: Path) -> None:
    report = run(place, folds_run=str(place / "folds"))
    truth = {path: one.label for path, one in read_corrections(place / "truth.csv").items()}
    assert {one.image.key: one.suggestion for one in report.wrong_labels[:2]} == truth
    assert len(report.wrong_labels) <= 4
    assert report.predicted_top1 == pytest.approx(
        report.top1 + 100 * len(report.wrong_labels) / len(report.predictions), abs=100 / len(report.predictions)
    )
    assert 1 <= report.estimated_wrong <= 6


def test_copies_are_named_with_their_labels_and_splits(place: Path) -> None:
    report = run(place, folds_run=str(place / "folds"))
    assert [{one.key for one in group} for group in report.conflicts] == [
        {"train/red/x.png", "train/green/x-again.png"}
    ]
    assert [{one.key for one in group} for group in report.leaks] == [
        {"train/red/red-3.png", "test/red/red-3-again.png"}
    ]
    assert json.loads(json.dumps(report.to_dict()))["leaks"][0][1]["split"] == "test"


def test_what_was_reviewed_is_not_listed_again(place: Path, tmp_path: Path) -> None:
    first = run(place, folds_run=str(place / "folds"))
    kept = [Correction(one.image.key, "keep") for one in first.wrong_labels]
    both = [Correction(str(place / "data" / one.key), "keep") for one in first.conflicts[0]]
    write_corrections(tmp_path / "c.csv", [*kept, *both])
    again = run(place, folds_run=str(place / "folds"), reading=Reading(corrections=str(tmp_path / "c.csv")))
    assert again.wrong_labels == ()
    assert again.conflicts == ()
    assert again.reviewed == len(kept) + 2
    write_corrections(tmp_path / "c.csv", first.corrections())
    with refused(UsageError, first.wrong_labels[0].image.key, "folds"):  # the runs learned the labels before
        run(place, folds_run=str(place / "folds"), reading=Reading(corrections=str(tmp_path / "c.csv")))


def test_suggestions_become_a_file_that_training_reads(place: Path, tmp_path: Path) -> None:
    report = run(place, folds_run=str(place / "folds"))
    report.save_corrections(tmp_path / "c.csv")
    splits = patchloom.open_data(place / "data", reading=Reading(corrections=tmp_path / "c.csv"))
    labels = {
        images.key(i): splits.classes.names[images.labels[i]]
        for images in (splits.train, splits.val)
        for i in range(len(images))
    }
    assert all(labels[one.image.key] == one.suggestion for one in report.wrong_labels)
    assert missing("\n".join(gain_commands(report)), "--corrections corrections.csv", "compare", "--split test") == []


def test_unlabeled_images_are_chosen_by_doubt(place: Path) -> None:
    report = run(place, folds_run=str(place / "folds"), unlabeled=str(place / "new"), most=2)
    assert len(report.unlabeled) == 2
    assert Path(report.unlabeled[0].path).name == "odd.png"
    assert report.unlabeled[0].uncertainty >= report.unlabeled[1].uncertainty


def test_outliers_are_far_beyond_the_usual() -> None:
    distances = np.exp(np.random.default_rng(0).normal(0, 0.2, 500)).astype(np.float32)
    distances[[3, 70]] = 8, 20
    assert _outlying(distances)[:2] == [70, 3]
    assert len(_outlying(distances)) <= 4
    assert _outlying(np.ones(10, np.float32)) == []


def test_the_command_prints_the_list_and_writes_the_page(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("audit", place / "data", "--folds-run", place / "folds")
    done = command(arguments, monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert missing(done.output, "train/red/green-0.png", "Next:", str(place / "folds" / "audit.html")) == []
    page = (place / "folds" / "audit.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    printed = command((*arguments, "--json", "--page", place / "a.html"), monkeypatch, capsys).output
    assert json.loads(printed)["page"] == str(place / "a.html")


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"folds_run": "gone"}, UsageError, "gone"),
        ({"folds_run": "x", "epochs": 3}, UsageError, "--epochs"),
        ({"folds_run": "x", "set": {"seed": 1}}, UsageError, "--set"),
        ({"folds_run": "x", "folds": 3}, UsageError, "--folds"),
        ({"folds": 1}, UsageError, "--folds"),
        ({"most": 0}, UsageError, "--most"),
        ({"unlabeled": "gone-too"}, UsageError, "gone-too"),
        ({"reading": Reading(val="test")}, UsageError, "--val"),
    ],
)
def test_wrong_options_are_refused_before_work(
    options: dict[str, Any], error: type[Exception], fact: str, place: Path, tmp_path: Path
) -> None:
    given = {"out": str(tmp_path / "folds")} if "folds_run" not in options else {}
    with refused(error, fact):
        run(place, **given, **options)
    assert not (tmp_path / "folds").exists()


def test_runs_on_other_data_and_data_without_classes_are_refused(place: Path, tmp_path: Path) -> None:
    tinted_folders(tmp_path / "data", CLASSES, 3)
    with refused(UsageError, str(place / "folds")):
        run(tmp_path, folds_run=str(place / "folds"))
    with pytest.raises(DataError):
        patchloom.audit(str(place / "new"), folds_run=str(place / "folds"), say=str)


@pytest.fixture
def beside(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that the page of the documentation names."""
    for name, source in (("photos", "data"), ("new", "new"), ("runs/photos-folds-5", "folds")):
        shutil.copytree(place / source, tmp_path / name)
    shutil.copy(place / "truth.csv", tmp_path / "corrections.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "audit.md").read_text("utf-8"), re.DOTALL)


def test_the_commands_of_the_page_run(
    beside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [shlex.split(line, comments=True)[1:] for block in blocks("bash") for line in block.splitlines()]
    trained = [line for line in lines if line[0] == "train"]
    others = [line for line in lines if line[0] == "compare" or "--folds-run" in line]
    assert (len(trained), len(others)) == (3, 3)
    for line in [*(line + list(OPTIONS) for line in trained), *others]:
        done = command(tuple(line), monkeypatch, capsys)
        assert done.code == 0, (line, done.errors)
    assert (beside / "runs" / "photos-folds-5" / "audit.html").is_file()


def test_the_python_of_the_page_runs(beside: Path) -> None:
    small = {name: value for name, value in GIVEN.items() if name != "epochs"} | {"epochs": 1, "workers": 0}

    def audit(data: str, folds: int) -> AuditReport:
        assert folds == 5
        return patchloom.audit(data, folds=2, **small)

    names = {"patchloom": SimpleNamespace(audit=audit, train=partial(patchloom.train, **small))}
    (block,) = blocks("python")
    exec(compile(block, "docs/audit.md", "exec"), names)
    assert (beside / "suggested.csv").is_file()


def test_earlier_corrections_stay_in_the_file_of_the_page(place: Path, tmp_path: Path) -> None:
    report = run(place, folds_run=str(place / "folds"))
    write_audit_page(tmp_path / "audit.html", report, earlier=[Correction("</script>.png", "drop")])
    text = (tmp_path / "audit.html").read_text()
    described = json.loads(text.partition('id="described">')[2].partition("</script>")[0])
    assert described["earlier"] == [["</script>.png", "drop", ""]]
