"""Which images and labels a run is evaluated on: held-out images, splits, other data."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import patchloom
from patchloom.cli import make_app
from patchloom.data.reading_options import Reading
from patchloom.inference import evaluations
from patchloom.inference.index_build import index
from patchloom.runs import checksums
from patchloom.runs import files as run_files
from patchloom.runs.predictions import load_predictions
from patchloom.runs.run_metadata import read_run_metadata, recorded_reading
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.report import report_run
from patchloom.training.run import make_plan, run_training
from tests.reliability.commands import class_folders, command
from tests.small_runs import CHANGES

TINY = {"model": "resmlp_s12", "size": 16, "epochs": 1, "batch": 8, "workers": 0, "device": "cpu", "changes": CHANGES}


def says_what_was_held_out(notes: Sequence[str]) -> bool:
    return any(re.search(r"\b12\b", note) and "--split all" in note for note in notes)


def test_the_data_of_the_run_are_evaluated_on_its_held_out_images(trained: Path) -> None:
    stored = load_predictions(trained / "a")
    (evaluated,) = evaluate([str(trained / "a")], str(trained / "data")).evaluations.values()
    assert evaluated.fingerprint == stored.fingerprint
    assert evaluated.report.predictions.tolist() == stored.report.predictions.tolist()
    assert says_what_was_held_out(evaluated.notes)
    python = patchloom.load(trained / "a", device="cpu").evaluate(str(trained / "data"))
    assert python.fingerprint == stored.fingerprint
    everything = patchloom.load(trained / "a", device="cpu").evaluate(str(trained / "data"), split="all")
    assert len(everything.report.index) == 60


def test_data_that_moved_are_still_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "data", tmp_path / "moved")
    evaluated = patchloom.load(trained / "a", device="cpu").evaluate(str(tmp_path / "moved"))
    assert (len(evaluated.report.index), says_what_was_held_out(evaluated.notes)) == (12, True)


def test_other_data_count_as_a_whole(trained: Path, tmp_path: Path) -> None:
    class_folders(tmp_path / "other", pictures=31)
    evaluated = patchloom.load(trained / "a", device="cpu").evaluate(str(tmp_path / "other"))
    assert len(evaluated.report.index) == 62
    assert any("--split val" in note for note in evaluated.notes)
    damaged = Path(shutil.copytree(trained / "a", tmp_path / "a"))
    (damaged / "data.json").write_text("{")
    assert len(patchloom.load(damaged, device="cpu").evaluate(str(trained / "data")).report.index) == 60


def test_runs_are_compared_on_the_same_images(trained: Path, tmp_path: Path) -> None:
    stranger = Path(shutil.copytree(trained / "b", tmp_path / "stranger"))
    (stranger / "data.json").unlink()
    for runs in (("a", stranger), (stranger, "a")):
        evaluated = evaluate([str(trained / run) for run in runs], str(trained / "data"))
        assert {len(each.report.index) for each in evaluated.evaluations.values()} == {12}


def test_evaluate_lists_its_data_once(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folders(tmp_path / "other" / "train", pictures=4)
    class_folders(tmp_path / "other" / "val", pictures=2)
    find_source, listed = evaluations.find_source, []

    def counting(data: str, **options):
        listed.append(data)
        return find_source(data, **options)

    monkeypatch.setattr(evaluations, "find_source", counting)
    for data in (trained / "data", tmp_path / "other"):
        evaluate([str(trained / "a"), str(trained / "b")], str(data), device="cpu")
        patchloom.load(trained / "a", device="cpu").evaluate(str(data))
        readings = {Reading().filled_from(recorded_reading(trained / run, str(data))) for run in ("a", "b")}
        assert listed == [str(data)] * (len(readings) + 1)
        listed.clear()


def test_a_prediction_reads_every_file_of_the_run_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    for module in (checksums, run_files):
        original = module.read_plain

        def counting(path: Path, *limits: int, original=original) -> bytes:
            reads[path.name] += 1
            return original(path, *limits)

        monkeypatch.setattr(module, "read_plain", counting)
    image = next((trained / "data").rglob("*.png"))
    result = CliRunner().invoke(make_app(), ["predict", str(trained / "a"), str(image), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert {"config.json", "labels.json", "recipe.yaml", "checksums.json", "weights.safetensors"} <= set(reads)
    assert set(reads.values()) == {1}, reads


def test_a_split_has_its_own_report(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "set"
    for split, count in (("train", 3), ("val", 2), ("test", 5)):
        class_folders(data / split, pictures=count)
    run = Path(shutil.copytree(trained / "a", tmp_path / "a"))
    page = report_run(run, data=str(data), split="test")
    assert page == run / "report-test.html"
    text = page.read_text("utf-8")
    assert re.search(rf"<title>[^<]*\btest\b[^<]*{data}", text)
    assert '<section id="mistakes">' in text  # with their images
    assert (run / "report.html").read_bytes() == (trained / "a" / "report.html").read_bytes()


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ with train, val and test of uneven depth and a run on its outermost folders."""
    root = tmp_path_factory.mktemp("nested")
    for split, count in (("train", 6), ("val", 2), ("test", 3)):
        class_folders(root / "data" / split / "warm", ("red", "blue"), pictures=count)
        class_folders(root / "data" / split, ("green", "grey"), pictures=count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        settings = TrainingSettings(data=str(root / "data"), out=str(root / "run"), classes="outermost", **TINY)
        run_training(settings, say=str)
    return root


def test_the_plan_counts_the_test_images(nested: Path, tmp_path: Path) -> None:
    plan = make_plan(TrainingSettings(data=str(nested / "data"), out=str(tmp_path / "new"), **TINY), "cpu")
    later = f"patchloom evaluate {tmp_path / 'new'} {nested / 'data'} --split test"
    (plan_line,) = (line for line in plan.lines() if line.endswith(later))
    assert re.search(r"\b12\b", plan_line.removesuffix(later))
    assert len(plan.splits.classes) == 4
    assert re.search(r"--classes outermost.*\b3\b", " ".join(plan.splits.notes))


def test_a_run_remembers_how_its_data_were_read(nested: Path, monkeypatch) -> None:
    record = read_run_metadata(nested / "run")
    assert record is not None
    assert record.reading == Reading(classes="outermost")
    assert " --classes outermost " in record.command(nested / "run")
    monkeypatch.chdir(nested)
    for place in (nested / "data", f"{nested / 'data'}{os.sep}", "data", nested / "data" / "test"):
        assert recorded_reading(nested / "run", str(place)) == record.reading
    assert recorded_reading(nested / "run", str(nested)) == Reading()


def test_a_test_split_and_a_test_folder_are_the_same(nested: Path) -> None:
    classifier = patchloom.load(nested / "run", device="cpu")
    assert classifier.labels == ("green", "grey", "warm")
    split = classifier.evaluate(str(nested / "data"), split="test")
    folder = classifier.evaluate(str(nested / "data" / "test"))
    assert split.fingerprint == folder.fingerprint
    assert len(split.report.index) == 12
    assert classifier.evaluate(str(nested / "data")).values()["images"] == 8


def test_an_index_is_labeled_as_the_run_reads(nested: Path, tmp_path: Path) -> None:
    run, data = str(nested / "run"), nested / "data"
    outermost = {"green": 11, "grey": 11, "warm": 22}
    assert index(run, [data], out=tmp_path / "one", device="cpu").index.about.labels == outermost
    moved = shutil.copytree(data, tmp_path / "moved")
    assert index(run, [moved], out=tmp_path / "two", device="cpu").index.labels == outermost
    fine = patchloom.Reading(classes="innermost")
    built = index(run, [data], out=tmp_path / "three", device="cpu", reading=fine, level="coarse")
    assert built.index.labels == outermost
    inside = index(run, [moved / "test" / "warm"], out=tmp_path / "four", device="cpu")
    assert inside.index.about.labels == {"blue": 3, "red": 3}


def test_the_commands_take_the_reading(nested: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(nested / "cache"))
    run, data = str(nested / "run"), str(nested / "data")
    command_line = ("evaluate", run, data, "--split", "test", "--classes", "innermost", "--level", "coarse")
    done = command((*command_line, "--device", "cpu", "--json"), monkeypatch, capsys)
    assert json.loads(done.output)["images"] == 12
    refused = command(("evaluate", run, "--classes", "innermost"), monkeypatch, capsys)
    assert (refused.code, "--classes" in refused.errors) == (2, True)
    done = command(
        ("report", run, "--data", data, "--split", "test", "--page", tmp_path / "t.html"), monkeypatch, capsys
    )
    assert (done.code, (tmp_path / "t.html").is_file()) == (0, True)
    refused = command(("report", run, run, "--split", "test"), monkeypatch, capsys)
    assert (refused.code, "--data" in refused.errors) == (2, True)
    done = command(
        ("index", run, data, "--out", tmp_path / "i", "--level", "none", "--device", "cpu"), monkeypatch, capsys
    )
    assert (done.code, "none" in done.errors) == (2, True)


def test_check_suggests_the_command_with_its_options(nested: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(nested / "cache"))
    data, file = nested / "data", nested / "my taxonomy.csv"
    file.write_text("class,kind\ngreen,cold\ngrey,cold\nwarm,warm\n")
    reading_options = ("--taxonomy", file, "--classes", "outermost")
    done = command(("check", data, "--no-cache", *reading_options), monkeypatch, capsys)
    last = f"patchloom train {data} --taxonomy '{file}' --classes outermost"
    assert done.output.splitlines()[-1].endswith(last)
    assert re.search(r"\b3\b.*\b24 train\b.*\b8 val\b.*\b12 test\b", done.output)


def test_an_old_record_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"data": "d", "data_name": "d", "labels": "l.csv"}))
    assert recorded_reading(tmp_path, "d") == Reading(labels="l.csv")
