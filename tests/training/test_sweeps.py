"""A grid of settings over data sets: each point an ordinary run, done once, chosen without test images."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import patchloom
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data
from patchloom.data.splits import make_splits, share_of_train
from patchloom.engine.signals import Stopped
from patchloom.runs.config import read_recipe
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import make_plan
from patchloom.training.sweeps import sweep as module
from patchloom.training.sweeps.grid import read_grid, run_folder, settings_of
from patchloom.training.sweeps.page import curves
from patchloom.training.sweeps.record import RunResult
from patchloom.training.sweeps.table import Sweep, rows_of
from patchloom_runtime.errors import DataError, NumericalError, UsageError
from tests.reliability.commands import class_folders, command

CHANGES = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
GIVEN: dict[str, Any] = {"recipe": "small_images", "epochs": 1, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}
GRID = {"optim.lr": ["1e-3", "1e9"], "seed": [0, 1]}


def swept(data: Any, out: Path, grid: Any = None, **given: Any) -> tuple[Sweep, list[str]]:
    said: list[str] = []
    options = {**GIVEN, "set": CHANGES, **given}
    return patchloom.sweep(data, grid or GRID, out=str(out), say=said.append, **options), said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets: one with a test folder beside train, one of class folders alone; and a sweep over the first."""
    root = tmp_path_factory.mktemp("sweeps")
    class_folders(root / "a" / "train", pictures=12)
    class_folders(root / "a" / "test", pictures=3)
    class_folders(root / "b", pictures=10)
    found, _ = swept(str(root / "a"), root / "swept", {"optim.lr": [1e-3, 1e-4], "seed": [0, 1]}, test=True)
    assert found.best is not None
    return root


def results(place: Path) -> dict[str, Any]:
    return json.loads((place / "swept" / "sweep.json").read_text())["runs"]


def test_each_run_is_an_ordinary_run(place: Path) -> None:
    runs = results(place)
    assert len(runs) == 4
    for name, run in runs.items():
        recipe = read_recipe(place / "swept" / name)
        assert (recipe.optim.lr, recipe.seed) == (run["setting"]["optim.lr"], run["setting"]["seed"])
        assert (place / "swept" / name / "report.html").is_file()
        assert run["metrics"]["top1"] >= 0


def test_val_is_held_out_of_train_and_only_the_best_is_tested_once(place: Path) -> None:
    runs = results(place)
    # 24 training pictures, a fifth of each class held out; test is not what was chosen by
    assert {run["metrics"]["images"] for run in runs.values()} == {4.0}
    tested = [run for run in runs.values() if run["test"]]
    assert len(tested) == 2
    assert len({run["setting"]["optim.lr"] for run in tested}) == 1
    assert {run["test"]["images"] for run in tested} == {6.0}


def test_the_same_call_repeats_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("a finished run was done, or tested, again")

    monkeypatch.setattr(module, "run_training", refuse)
    monkeypatch.setattr(module, "evaluate", refuse)
    found, said = swept(str(place / "a"), place / "swept", {"optim.lr": [1e-3, 1e-4], "seed": [0, 1]}, test=True)
    assert any(re.search(r"\b4\b.*\b4\b", line.replace(str(place / "swept"), "")) for line in said)
    assert found.best.is_best
    assert found.best.test_mean is not None
    assert found.best.spread.runs == 2
    columns, rows = found.table()
    assert columns == ["#lr", "#top1", "#std", "#test top1", ""]
    assert [row[0] for row in rows] == ["0.001", "0.0001"]


def test_a_wider_grid_goes_on_from_what_is_there_and_a_failed_run_does_not_stop_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[TrainingSettings] = []

    def fail(settings: TrainingSettings, **options: Any) -> None:
        done.append(settings)
        raise NumericalError("the reason")

    monkeypatch.setattr(module, "run_training", fail)
    out = place / "wider"
    shutil.copytree(place / "swept", out)
    # Folders are named by what is asked, so the copy is known by its names.
    found, said = swept(str(place / "a"), out, {"optim.lr": [1e-3, 1e9], "seed": [0, 1]})
    assert [settings.changes["optim.lr"] for settings in done] == [1e9, 1e9]
    assert sum("the reason" in line for line in said) == 2
    good, bad = found.rows
    assert good.is_best
    assert (bad.mean, bad.is_best, len(bad.failed)) == (None, False, 2)
    assert "2" in found.table()[1][1][-1]
    assert "the reason" in found.page.read_text()
    assert set(json.loads((out / "sweep.json").read_text())["runs"]) > set(found.runs)  # what another grid made stays


def test_a_sweep_that_is_told_to_stop_stops(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **options: Any) -> None:
        raise Stopped(15, 3, 10, saved=True)

    monkeypatch.setattr(module, "run_training", stop)
    with pytest.raises(Stopped):
        swept(str(place / "b"), tmp_path / "out", {"seed": [0, 1]})
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_a_dry_run_counts_runs_and_time_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    found, said = swept(
        [str(place / "a"), str(place / "b")], tmp_path / "out", {"optim.lr": [1e-3, 1e-4]}, dry_run=True
    )
    assert len(found.runs) == len(found.seconds) == 4
    assert found.seconds.keys() == found.runs.keys()
    assert sum(line.startswith("measuring") for line in said) == 2  # once for each data set: the rate costs nothing
    assert not (tmp_path / "out").exists()


def test_shares_of_the_training_set_have_equal_updates(place: Path, tmp_path: Path) -> None:
    asked = module.plan_runs(
        [TrainingSettings(data=str(place / "a"), changes=CHANGES, val="held-out", **{**GIVEN, "epochs": 6})],
        settings_of({"train_share": [0.2, 0.5, 1]}),
        tmp_path,
        "cpu",
        test=False,
    )
    assert [run.recipe.train_share for run in asked] == [0.2, 0.5, 1.0]
    assert [run.recipe.schedule.epochs for run in asked] == [30, 15, 6]
    assert {run.updates for run in asked} == {30}
    assert len({run.recipe.schedule.warmup_steps for run in asked}) == 1


def test_a_share_is_of_every_class_and_part_of_a_larger_one(place: Path) -> None:
    splits = make_splits(find_source(place / "b"))
    small, large = (share_of_train(splits, share).train for share in (0.3, 0.6))
    assert np.bincount(small.labels).tolist() == [2, 2]  # of 8
    assert {small.key(i) for i in range(len(small))} < {large.key(i) for i in range(len(large))}
    assert share_of_train(splits, 1.0) is splits
    plan = make_plan(TrainingSettings(data=str(place / "b"), changes={**CHANGES, "train_share": "0.5"}, **GIVEN), "cpu")
    assert (len(plan.splits.train), len(plan.splits.val), plan.record.train) == (8, 4, 16)
    (note,) = [note for note in plan.notes if "train_share" in note]
    assert {"8", "16"} <= set(re.findall(r"\b\d+\b", note))
    assert "0.5" in note


def test_val_held_out_keeps_what_the_data_have_for_a_test(place: Path, tmp_path: Path) -> None:
    for reading in (Reading(), Reading(val="held-out")):
        splits = open_data(place / "a", reading=reading)
        assert (len(splits.train), len(splits.val), len(splits.test)) == (20, 4, 6)
    tested = open_data(place / "a", reading=Reading(val="test"))
    assert (len(tested.train), len(tested.val), tested.test) == (24, 6, None)
    shutil.copytree(place / "a", tmp_path / "b")
    (tmp_path / "b" / "test").rename(tmp_path / "b" / "val")
    own = open_data(tmp_path / "b", reading=Reading(val="held-out"))
    assert (len(own.train), len(own.val), len(own.test)) == (20, 4, 6)
    with pytest.raises(UsageError, match=r"\btest\b"):
        open_data(tmp_path / "b", reading=Reading(val="test"))
    shutil.copytree(place / "a", tmp_path / "c")
    class_folders(tmp_path / "c" / "val", pictures=2)
    both = open_data(tmp_path / "c", reading=Reading(val="held-out"))
    assert (len(both.train), len(both.val), len(both.test)) == (24, 4, 6)


@pytest.mark.parametrize(
    ("grid", "given", "facts"),
    [
        ({"optim.lrr": [1]}, {}, ["'optim.lrr'", "patchloom recipes"]),
        ({"optim.lr": [1e-3, 1e-3]}, {}, ["optim.lr", "0.001, 0.001"]),
        ({"epochs": [1, 2]}, {}, ["epochs"]),
        ({"optim.lr": ["fast"]}, {}, ["optim.lr", "'fast'"]),
        ({"train_share": [0.01, 1]}, {}, ["--batch 2", "4"]),
        ({"seed": [0]}, {"test": True}, ["/b", "--test"]),
    ],
)
def test_what_cannot_be_swept_is_said_before_work(place: Path, tmp_path: Path, grid, given, facts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        swept(str(place / "b"), tmp_path / "out", grid, **given)
    for fact in facts:
        assert fact in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_grid_is_read_from_text() -> None:
    assert read_grid(["optim.lr=1e-3, 3e-4", "model=a,b"]) == {"optim.lr": ["1e-3", "3e-4"], "model": ["a", "b"]}
    assert settings_of({"model": ["a"], "optim.lr": ["1e-3", "1"]})[1] == {"model": "a", "optim.lr": 1}
    for wrong in ("optim.lr", "optim.lr=", "optim.lr=1,,2", "=1"):
        with pytest.raises(UsageError, match="--grid"):
            read_grid([wrong])
    with pytest.raises(UsageError, match=r"\bseed\b"):
        read_grid(["seed=0", "seed=1"])


def test_a_folder_stands_for_all_that_was_asked() -> None:
    one = TrainingSettings(data="digits", epochs=1, device="cpu")
    other = TrainingSettings(data="digits", epochs=2, device="cpu")
    elsewhere = TrainingSettings(data="digits", epochs=1, device="cuda", workers=3)
    folders = [run_folder(Path("out"), settings, {"optim.lr": 0.1}) for settings in (one, other, elsewhere)]
    assert folders[0] == folders[2] != folders[1]
    assert folders[0].parent == Path("out/digits")
    assert folders[0].name.startswith("lr=0.1-")


def made(*scores: tuple[str, float, int, float | None]) -> Sweep:
    """(data, lr, seed, score or None where it failed) of each run."""
    runs = [
        RunResult(data=data, setting={"optim.lr": lr, "seed": seed}, metric="top1", metrics={"top1": score or 0.0},
                  failed="" if score is not None else "reason")
        for data, lr, seed, score in scores
    ]  # fmt: skip
    rows = rows_of([run.setting for run in runs], runs)
    return Sweep(Path("out"), rows, {str(number): run for number, run in enumerate(runs)}, "top1")


def test_a_setting_is_the_mean_over_sets_of_the_mean_over_seeds() -> None:
    found = made(
        *[("x", 0.1, seed, score) for seed, score in ((0, 50.0), (1, 60.0))],
        *[("y", 0.1, seed, score) for seed, score in ((0, 90.0), (1, 92.0))],
        *[("x", 0.01, seed, score) for seed, score in ((0, 99.0), (1, None))],
        *[("y", 0.01, seed, score) for seed, score in ((0, 99.0), (1, 99.0))],
    )
    columns, rows = found.table()
    assert columns == ["#lr", "#x", "#y", "#mean", "#std", ""]
    assert [row[:-1] for row in rows] == [["0.1", "55.00", "91.00", "73.00", "4.24"], ["0.01", "–", "99.00", "–", "–"]]
    assert "1" in rows[1][-1]
    told = found.to_dict()
    assert told["best"] == {"optim.lr": 0.1}
    assert told["best_of_sets"] == {"x": {"optim.lr": 0.1}, "y": {"optim.lr": 0.01}}
    assert told["rows"][1]["failed"] == [{"data": "x", "setting": {"optim.lr": 0.01, "seed": 1}, "why": "reason"}]


def test_a_curve_has_a_logarithmic_axis() -> None:
    found = made(("x", 0.001, 0, 50.0), ("x", 0.01, 0, 60.0), ("x", 0.1, 0, 55.0))
    [(title, chart, _)] = curves(found)
    for fact in ("top1", "optim.lr"):
        assert fact in title
    places = [float(part.partition('"')[0]) for part in str(chart).split('<circle cx="')[1:]]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])


def test_equal_means_that_differ_by_rounding_are_drawn() -> None:
    found = made(("x", 0.1, 0, 10.41666666666667), ("x", 1.0, 0, 10.416666666666664))
    assert "<svg" in str(curves(found)[0][1])


def test_the_command_prints_one_table(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", place / "a", "--recipe", "small_images", "--epochs", 1, "--batch", 4, "--size", 16, "--workers", 0]
    line += ["--device", "cpu", *(f"--set={key}={value}" for key, value in CHANGES.items()), "--out", place / "swept"]
    line += ["--grid", "optim.lr=1e-3,1e-4", "--grid", "seed=0,1"]
    done = command(tuple(line), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert str(place / "swept" / "sweep.html") in done.output
    told = json.loads(command((*line, "--json"), monkeypatch, capsys).output)
    assert len(told["rows"]) == 2
    assert len(told["runs"]) == 4


def test_a_damaged_record_is_a_note(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "swept", tmp_path / "swept")
    (tmp_path / "swept" / "sweep.json").write_text('{"format": 1, "runs": {"a": 3}}')
    before = {path: path.read_bytes() for path in (tmp_path / "swept").rglob("metrics.jsonl")}
    assert len(before) == 4
    found, said = swept(str(place / "a"), tmp_path / "swept", {"optim.lr": [1e-3], "seed": [0]})
    assert any("sweep.json" in line for line in said)
    assert len(results(tmp_path)) == 1
    assert {path: path.read_bytes() for path in before} == before  # the run itself is kept
    assert found.best is not None


def test_pictures_of_a_list_are_left_out_of_train(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "list.tsv"
    file.write_text("file\treason\ntrain/red/0.png\tsame as x\n" + str(place / "a/train/blue/1.png") + "\n")
    source = find_source(place / "a", reading=Reading(exclude=file))
    assert len(source.train) == 22
    assert any(str(file) in note and "2" in note.replace(str(file), "") for note in source.notes)
    plan = make_plan(TrainingSettings(data=str(place / "a"), changes=CHANGES, exclude=str(file), **GIVEN), "cpu")
    assert len(plan.splits.train) + len(plan.splits.val) == 22
    part = find_source(place / "a" / "test", reading=Reading(exclude=file))
    assert len(part.train) == 6  # a list is of train
    file.write_text("train/red/99.png\n")
    with pytest.raises(DataError) as error:
        find_source(place / "a", reading=Reading(exclude=file))
    for fact in (str(file), "24", "'train/red/99.png'"):
        assert fact in str(error.value)
    with pytest.raises(UsageError, match=r"\bgone\b"):
        find_source(place / "a", reading=Reading(exclude=tmp_path / "gone"))


def test_val_is_held_out_or_as_the_data_have_it() -> None:
    with pytest.raises(UsageError, match=r"'fold'.*held-out.*test"):
        Reading(val="fold")  # type: ignore[arg-type]


def test_settings_that_tie_on_a_data_set_are_counted() -> None:
    found = made(("x", 0.1, 0, 50.0), ("y", 0.1, 0, 90.0), ("x", 0.01, 0, 50.0), ("y", 0.01, 0, 80.0))
    assert found.best_of_sets_in_words == [("x", "2 settings tie"), ("y", "lr=0.1")]


def test_settings_with_the_same_score_tie() -> None:
    runs = [
        RunResult(data="a", setting={"optim.lr": lr}, metric="top1", metrics={"top1": score})
        for lr, score in ((1.0, 50.0), (0.1, 75.0), (0.01, 75.0))
    ]
    rows = rows_of([run.setting for run in runs], runs)
    assert [row.is_best for row in rows] == [False, True, True]
    found = Sweep(Path("swept"), rows, {str(i): run for i, run in enumerate(runs)}, "top1")
    assert found.ties == 2
    first, second, third = (row[-1] for row in found.table()[1])
    assert not first
    assert second
    assert second == third
    assert [setting["optim.lr"] for setting in found.to_dict()["ties"]] == [0.1, 0.01]
