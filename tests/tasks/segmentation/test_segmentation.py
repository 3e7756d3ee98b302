"""`patchloom train` on pictures with masks: it learns, resumes exactly, starts from other runs, answers and reports."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.inference.classifier import load as load_classifier
from patchloom.models.cost import cost
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_recipe
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.segmentation.model import load_segmenter
from patchloom.tasks.segmentation.run_files import read_segmented
from patchloom.tasks.table import task_of_run
from patchloom.training.run import run_training
from patchloom_runtime.errors import UsageError
from tests.forked import rank_places
from tests.golden import make
from tests.messages import missing, refused
from tests.reliability.commands import class_folders, command, forked

COLORS = np.array([(120, 120, 120), (210, 60, 50), (60, 80, 220)], np.int16)
TINY = (
    *("--model", "resmlp_s12", "--size", "32", "--batch", "4", "--device", "cpu"),
    *(part for value in ("patch_size=4", "depth=1", "dim=16") for part in ("--set", f"model.options.{value}")),
    *("--set", "segment.channels=8", "--set", "segment.auxiliary_channels=8", "--set", "schedule.warmup_steps=2"),
)

LEARNING = {"optim.lr": 0.02, "segment.channels": 16, "segment.dropout": 0, "augment.policy": "none",
            "augment.scale_min": 0.9, "augment.scale_max": 1.2}  # fmt: skip


def draw(rng: np.random.Generator, height: int, width: int) -> tuple[Image.Image, Image.Image]:
    """Rectangles of two classes on a ground, with a corner that is not labelled; the picture in their colours."""
    mask = np.zeros((height, width), np.uint8)
    for number in (1, 2):
        top, left = int(rng.integers(0, height - 16)), int(rng.integers(0, width - 16))
        mask[top : top + 14, left : left + 14] = number
    picture = (COLORS[mask] + rng.integers(-20, 20, (height, width, 3))).clip(0, 255).astype(np.uint8)
    mask[:4, :4] = 255
    return Image.fromarray(picture), Image.fromarray(mask)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masks")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for i in range(count):
            picture, mask = draw(rng, 36 + 4 * (i % 2), 44)
            for folder, image, ending in (("images", picture, "jpg"), ("masks", mask, "png")):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
                image.save(root / folder / split / f"{i}.{ending}", quality=95)
    (root / "classes.txt").write_text("ground\nred\nblue\n")
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained once for the tests that only read it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    changes = dict(part.split("=") for part in TINY if "=" in part)
    settings = TrainingSettings(
        data=str(data), model="resmlp_s12", size=32, batch=4, device="cpu", workers=0, epochs=20, out=str(folder),
        changes=changes | LEARNING,
    )  # fmt: skip
    said: list[str] = []
    run_training(settings, say=said.append)
    (folder / "said.txt").write_text("\n".join(said))
    return folder


def test_masks_are_learned_and_the_plan_says_why(run: Path) -> None:
    said = (run / "said.txt").read_text()
    lines = said.splitlines()
    assert any("segment" in line.split(":")[0].split() for line in lines)  # the task
    assert any(missing(line, 12, 5, 3) == [] for line in lines)  # images to train on and to validate, classes
    assert "augment.crop=scaled" in said
    report = read_segmented(run).report
    assert report.classes == ("ground", "red", "blue")
    assert report.counts[:, :, 0].sum() < 5 * 40 * 44 - 5 * 15  # the corners do not count
    assert report.miou > 45  # who always says ground has 27
    assert any(missing(line, "mIoU", f"{report.miou:.2f}") == [] for line in lines)
    assert json.loads((run / "config.json").read_text())["task"] == "segmentation"


def test_the_page_shows_classes_and_images_beside_the_truth(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert missing(page, "mIoU", '<section id="worst">', '<section id="best">') == []
    assert all(f"<td>{name}</td>" in page for name in ("ground", "red", "blue"))
    assert page.count("data:image") >= 8


def test_probabilities_of_pixels_are_calibrated_and_masks_stay(run: Path, data: Path) -> None:
    calibration, segmenter = read_calibration(run), load_segmenter(run, device="cpu")
    assert calibration.before is not None
    assert calibration.after is not None
    assert calibration.after.loss <= calibration.before.loss
    assert segmenter.maps.temperature == calibration.rules.temperature != 1
    image = torch.from_numpy(np.array(Image.open(next((data / "images").rglob("*.jpg"))).convert("RGB"))).permute(
        2, 0, 1
    )
    calibrated, places = segmenter.maps.probabilities(image), torch.arange(0, image[0].numel(), 7)
    logits = segmenter.maps.logits_at(image, places) / calibration.rules.temperature
    torch.testing.assert_close(calibrated.flatten(1)[:, places].T, logits.softmax(dim=1))
    segmenter.maps.temperature = 1.0
    torch.testing.assert_close(segmenter.maps.probabilities(image).argmax(dim=0), calibrated.argmax(dim=0))


def test_a_run_is_evaluated_with_and_without_its_data(run: Path, data: Path, monkeypatch, capsys) -> None:
    kept = json.loads(command(("evaluate", run, "--json"), monkeypatch, capsys).output)[run.name]
    now = json.loads(command(("evaluate", run, data, "--json", "--device", "cpu"), monkeypatch, capsys).output)[
        run.name
    ]
    assert now == kept
    assert set(kept["classes"]) == {"ground", "red", "blue"}
    several = command(("evaluate", run, data, "--multi-scale", "--device", "cpu"), monkeypatch, capsys)
    assert several.code == 0, several.errors
    train = command(("evaluate", run, data, "--split", "train", "--json", "--device", "cpu"), monkeypatch, capsys)
    assert json.loads(train.output)[run.name]["images"] == 12
    costed = json.loads(command(("evaluate", run, "--cost", "--json"), monkeypatch, capsys).output)[run.name]
    network = load_segmenter(run).model
    assert costed["multiply_adds"] == cost(network, network.image_size).multiply_adds > 0
    assert costed["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    rejected = command(("probe", run, data, "--knn", "5"), monkeypatch, capsys)
    assert (rejected.code, "--knn" in rejected.errors) == (2, True)
    unknown = command(("evaluate", run, "--mode", "half"), monkeypatch, capsys)
    assert (unknown.code, unknown.errors.count("\n")) == (2, 1)
    assert missing(unknown.errors, "--mode", "half", "whole", "slide") == []


def test_data_laid_out_otherwise_are_named_by_options_and_remembered(
    run: Path, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Two sets of masks: which of them is meant is asked, said once and known from then on."""
    other = tmp_path / "street"
    shutil.copytree(data / "images", other / "photos")
    shutil.copytree(data / "masks", other / "first")
    shutil.copytree(data / "masks", other / "second")
    mapping = ("--masks", "first", "--ignore", "255", "--names", data / "classes.txt")
    asked = command(("evaluate", run, other, "--device", "cpu"), monkeypatch, capsys)
    assert asked.code == 2
    assert all(part in asked.errors for part in ("--masks first", "--masks second"))
    kept = json.loads(command(("evaluate", run, "--json"), monkeypatch, capsys).output)[run.name]
    told = command(("evaluate", run, other, "--json", "--device", "cpu", *mapping), monkeypatch, capsys)
    assert json.loads(told.output)[run.name] == kept
    folder = tmp_path / "run"
    trained = command(("train", other, *TINY, "--epochs", "1", "--out", folder, *mapping), monkeypatch, capsys)
    assert trained.code == 0, trained.errors
    record = read_run_metadata(folder)
    assert record is not None
    assert (record.masks, record.ignore, record.names) == ("first", 255, str(data / "classes.txt"))
    again = command(("evaluate", folder, other, "--json", "--device", "cpu"), monkeypatch, capsys)
    assert set(json.loads(again.output)[folder.name]["classes"]) == {"ground", "red", "blue"}


def test_windows_and_whole_pictures_agree_about_most_pixels(run: Path, data: Path) -> None:
    evaluate = task_of_run(run).report.evaluate
    whole, slid = (evaluate({"run": run}, str(data), split="val", device="cpu", mode=mode).values["run"]["miou"]
                   for mode in ("whole", "slide"))  # fmt: skip
    assert whole == pytest.approx(slid, abs=20)


def test_two_runs_are_compared_image_by_image(run: Path, data: Path, tmp_path: Path) -> None:
    import shutil

    other = shutil.copytree(run, tmp_path / "other")
    found = task_of_run(run).report.evaluate({"run": run, "other": other}, None, split=None, device="cpu")
    compared = found.values["comparisons"][0]
    assert (compared["difference"], compared["p"]) == (0, 1)
    assert missing(found.lines[-1], "run", "other", "+0.00", "mIoU") == []


def test_masks_are_written_beside_nothing_of_the_users(
    run: Path, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    pictures, before = data / "images" / "val", sorted(data.rglob("*"))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    done = command(
        ("predict", run, pictures, tmp_path / "bad.png", "--out", tmp_path / "out", "--json", "--device", "cpu"),
        monkeypatch,
        capsys,
    )
    assert done.code == 3
    answers = json.loads(done.output)
    assert len(answers) == 6
    assert answers[-1]["error"]
    first = answers[0]
    assert [Path(each).name for each in first["written"]] == ["0.png", "0.colour.png", "0.overlay.jpg"]
    assert sum(share for _, share in first["answers"]) == pytest.approx(1)
    with Image.open(tmp_path / "out" / "0.png") as index:
        assert index.mode == "P"
        numbers = np.asarray(index)
    assert numbers.shape == (36, 44)
    assert set(np.unique(numbers)) <= {0, 1, 2}
    with Image.open(data / "masks" / "val" / "0.png") as mask:
        truth = np.asarray(mask)
    assert (numbers == truth)[truth != 255].mean() > 0.7
    with Image.open(tmp_path / "out" / "0.overlay.jpg") as overlay:
        assert overlay.size == (44, 36)
    assert sorted(data.rglob("*")) == before


def test_shares_are_written_to_a_table_and_sorted_by(run: Path, data: Path, tmp_path: Path) -> None:
    picture = min((data / "images" / "val").iterdir())
    (expected,) = patchloom.predict(run, picture, device="cpu")
    patchloom.predict(run, picture, csv=tmp_path / "s.csv", sort_into=tmp_path / "sorted", device="cpu")
    (row,) = csv.DictReader((tmp_path / "s.csv").read_text().splitlines())
    assert [row["label"], row["label2"]] == [name for name, _ in expected.answers[:2]]
    assert float(row["score"]) == pytest.approx(expected.answers[0][1], rel=1e-6)
    assert (tmp_path / "sorted" / expected.answers[0][0] / picture.name).read_bytes() == picture.read_bytes()
    (dropped,) = patchloom.predict(run, picture, threshold=expected.answers[0][1], device="cpu")
    assert dropped.answers == expected.answers[:1]


def test_an_animation_has_masks_for_its_frames(run: Path, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 36), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=100)
    answers = list(
        task_of_run(run).model.predictor(run, device="cpu").predict_files([tmp_path / "clip.gif"], out=tmp_path / "o")
    )
    assert [Path(each.written[0]).name for each in answers] == ["clip-frame-0.png", "clip-frame-1.png"]


def test_python_gives_class_numbers(run: Path, data: Path) -> None:
    segmenter = task_of_run(run).model.load(run, device="cpu")
    one = segmenter.predict(data / "images" / "val" / "0.jpg")
    assert one.shape == (36, 44)
    assert [each.shape for each in segmenter.predict([np.zeros((20, 30, 3), np.uint8)] * 2)] == [(20, 30)] * 2
    assert missing(repr(segmenter), "Segmenter", "resmlp_s12", 3, "cpu") == []


def pictures_per_section(page: str) -> list[int]:
    return [part.count("<img") for part in page.split('<section id="picture-')[1:]]


def test_look_draws_the_worst_of_val_and_given_pictures(
    run: Path, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    worst = command(("look", run, "--page", tmp_path / "worst.html", "--json"), monkeypatch, capsys)
    assert worst.code == 0, worst.errors
    assert len(json.loads(worst.output)["pictures"]) == 5
    page = (tmp_path / "worst.html").read_text()
    assert page.count('<section id="picture-') == 5
    scores = [float(number) for number in re.findall(r'<p class="muted">[^<]*?([\d.]+) %', page)]
    assert len(scores) == 5
    assert scores == sorted(scores)  # the worst first
    with_truth = pictures_per_section(page)
    given = command(
        ("look", run, data / "images" / "val" / "1.jpg", "--page", tmp_path / "one.html"), monkeypatch, capsys
    )
    assert given.code == 0, given.errors
    assert re.search(r"1\.jpg\s+ground", given.output)
    assert pictures_per_section((tmp_path / "one.html").read_text())[0] >= min(with_truth)  # its true mask too
    whole = command(("look", run, data, "--count", 2, "--page", tmp_path / "two.html"), monkeypatch, capsys)
    assert whole.code == 0, whole.errors
    two = pictures_per_section((tmp_path / "two.html").read_text())
    assert len(two) == 2
    assert min(two) >= min(with_truth)
    shutil.copy(data / "images" / "val" / "1.jpg", tmp_path / "stranger.jpg")
    command(("look", run, tmp_path / "stranger.jpg", "--page", tmp_path / "without.html"), monkeypatch, capsys)
    assert pictures_per_section((tmp_path / "without.html").read_text())[0] < min(with_truth)  # it has no true mask


def test_a_segmenter_is_no_classifier(run: Path, monkeypatch, capsys) -> None:
    with refused(UsageError, run):
        load_classifier(run)
    assert patchloom.load(run, device="cpu").labels == ("ground", "red", "blue")


def test_verify_reads_its_answers(run: Path, monkeypatch, capsys) -> None:
    assert command(("verify", run), monkeypatch, capsys).code == 0


def test_a_run_is_planned_into_a_time(data: Path, tmp_path: Path) -> None:
    changes = dict(part.split("=") for part in TINY if "=" in part)
    settings = TrainingSettings(
        data=str(data), model="resmlp_s12", size=32, batch=4, device="cpu", workers=0, time="20s",
        out=str(tmp_path / "x"), changes=changes,
    )  # fmt: skip
    said: list[str] = []
    run_training(settings, dry_run=True, say=said.append)
    epochs = next(line for line in said if "schedule.epochs = " in line)
    assert "20s" in epochs or "time" in epochs
    assert int(re.search(r"schedule.epochs = (\d+)", epochs)[1]) >= 1


def newest(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").iterdir()) / "weights.safetensors")


def test_a_run_resumes_bit_for_bit_in_mid_epoch_with_any_workers(data: Path, tmp_path: Path, monkeypatch) -> None:
    from patchloom.engine import loop
    from patchloom.engine.signals import Stopped

    def train(out: str, workers: int) -> None:
        changes = dict(part.split("=") for part in TINY if "=" in part)
        settings = TrainingSettings(
            data=str(data), model="resmlp_s12", size=32, batch=4, device="cpu", workers=workers, epochs=2,
            out=str(tmp_path / out), changes=changes,
        )  # fmt: skip
        run_training(settings, say=lambda _: None)

    train("whole", 0)
    update = loop._Loop.update

    def stops(self, batch, wishes):
        done = update(self, batch, wishes)
        return replace(done, interrupt=True) if self.progress.step == 3 else done

    monkeypatch.setattr(loop._Loop, "update", stops)
    with pytest.raises(Stopped):
        train("cut", 2)
    monkeypatch.undo()
    train("cut", 1)
    whole, cut = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_two_processes_are_as_one(data: Path, tmp_path: Path) -> None:
    line = ("train", data, *TINY, "--epochs", "1", "--workers", "0", "--set", "segment.norm=group")
    line = (*line, "--set", "segment.dropout=0")
    running = [forked(*line, "--out", tmp_path / "two", env=place) for place in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, output + errors
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert all(torch.allclose(tensor, two[name], rtol=1e-3, atol=2e-4) for name, tensor in one.items())
    (*_, first), (*_, second) = make.evaluations(tmp_path / "one")[-1], make.evaluations(tmp_path / "two")[-1]
    assert first == pytest.approx(second, rel=0.05)


def test_a_backbone_comes_from_a_classifier_and_its_size_is_resampled(data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"model.options.patch_size": 4, "model.options.depth": 1, "model.options.dim": 16}
    patchloom.train(
        class_folders(tmp_path / "data"), model="resmlp_s12", size=16, epochs=1, batch=4, device="cpu",
        out="classifier", set=changes,
    )  # fmt: skip
    said: list[str] = []
    heads = {"segment.channels": 8, "segment.auxiliary_channels": 8, "model.freeze": "backbone"}
    settings = TrainingSettings(
        data=str(data), init="classifier", size=32, epochs=1, batch=4, device="cpu", workers=0, out="run", changes=heads
    )
    run_training(settings, say=said.append)
    assert any(missing(line, "classifier", "resmlp_s12", 1, 16, 32, 3) == [] for line in said)
    assert read_recipe(Path("run")).model.options["dim"] == 16
    given, kept = load_file("classifier/weights.safetensors"), load_file("run/weights.safetensors")
    same = [name for name in given if name.startswith("blocks.0.channels")]
    assert same
    assert all(torch.equal(given[name], kept[f"backbone.{name}"]) for name in same)  # frozen, so as it came


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"data": "classes"}, ("images/", "masks/")),
        ({"teacher": "x"}, ("--teacher",)),
        ({"recipe": "upernet_160k", "fit": True}, ("--fit", "upernet_160k")),
        ({"changes": {"augment.mixup": 1}}, ("augment.mixup", "segmentation")),
        ({"batch": 1}, ("optim.batch_size", 1, "segment.norm=group")),
        ({"changes": {"augment.policy": "randaugment"}}, ("augment.policy", "randaugment")),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(given: dict, facts: tuple, data: Path, tmp_path: Path) -> None:
    if given.get("data"):
        given = {"data": str(class_folders(tmp_path / "classes"))}
    settings = TrainingSettings(**{"data": str(data), "task": "segment", "device": "cpu", "out": str(tmp_path / "x"),
                                   "workers": 0, "epochs": 1} | given)  # fmt: skip
    with refused(UsageError, *facts):
        run_training(settings, say=lambda _: None)


def test_an_artifact_answers_as_the_run_does(run: Path, data: Path, tmp_path: Path) -> None:
    done = patchloom.export(str(run), str(tmp_path / "x"), to="torch")
    of_run, of_file = done.rows
    assert (done.measure, done.images, of_file.agreement) == ("mIoU", 5, 100.0)
    assert of_file.accuracy == of_run.accuracy
    assert of_run.accuracy > 50
    model, segmenter = patchloom.load(tmp_path / "x"), patchloom.load(run, device="cpu")
    assert model.labels == ("ground", "red", "blue")
    pictures = sorted((data / "images" / "val").iterdir())
    for found, wanted in zip(model.predict(pictures), segmenter.predict(pictures), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert (found == wanted).mean() > 0.999
    small = np.asarray(Image.open(pictures[0]).crop((0, 0, 20, 12)))  # enlarged to a window, by torch and by Pillow
    assert (model.predict(small) == segmenter.predict(small)).mean() > 0.97
