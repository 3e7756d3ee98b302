"""DINO, Grafit and its baselines through `patchloom train`, and what can be done with the result."""

import html
import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.engine.signals import Stopped
from patchloom.objectives.dino import Dino
from patchloom.runs.config import read_run_files
from patchloom.runs.metrics import read_metrics
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.runs.weights import load_network
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.images.look_page import look_at
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import silent
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.messages import missing, refused
from tests.reliability.commands import command

DATA = "shapes:count=80,size=32"
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4}
SMALL_HEAD = {"dino.outputs": 24, "dino.hidden": 16, "dino.bottleneck": 8, "views.local": 1}


def train(out: Path, *, data: str = DATA, recipe: str = "dino_small_images", say=silent, **changes):
    fields = TINY | (SMALL_HEAD if recipe.startswith("dino") else {})
    given = {"epochs": 2, "batch": 16, "workers": 0, "device": "cpu", "model": "resmlp_s12", "size": 32}
    fields |= {key: value for key, value in changes.items() if "." in key}
    given |= {key: value for key, value in changes.items() if "." not in key}
    return run_training(TrainingSettings(data=data, recipe=recipe, out=str(out), changes=fields, **given), say=say)


@pytest.fixture(scope="module")
def dino_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("dino") / "run").folder


# DINO ---------------------------------------------------------------------------------------------------------------


def test_dino_leaves_a_backbone_without_labels(dino_run: Path) -> None:
    network, files = load_network(dino_run)
    assert (network.config.num_classes, files.labels) == (0, ())
    records = read_metrics(dino_run / "metrics.jsonl")
    trained = [record["values"] for record in records if record["kind"] == "train"]
    assert {"loss", "kl", "teacher_entropy", "teacher_spread", "centre_norm"} <= trained[-1].keys()
    judged = [(record["weights"], *record["values"]) for record in records if record["kind"] == "evaluation"]
    assert judged == [("model", "knn20_top1", "knn20_top5"), ("ema", "knn20_top1", "knn20_top5")] * 2
    page = (dino_run / "report.html").read_text("utf-8")
    curves = page.partition('<section id="curves">')[2].partition("</section>")[0]
    assert re.search(r"\b20\b", curves)  # neighbours
    assert curves.count("<svg") >= 3


def test_its_features_are_measured_and_fine_tuned(dino_run: Path, tmp_path: Path) -> None:
    measured = dict(patchloom.load(dino_run).probe(DATA, knn=[5], linear=True))
    assert {"knn5_top1", "linear_top1"} <= measured.keys()
    tuned = train(tmp_path / "tuned", recipe="small_images", init=str(dino_run), epochs=1, **{"optim.lr": 1e-9})
    before, after = (load_network(folder)[0].state_dict() for folder in (dino_run, tuned.folder))
    torch.testing.assert_close(after["stem.weight"], before["stem.weight"], rtol=0, atol=1e-5)
    assert "top1" in tuned.metrics


def test_it_cannot_name_classes(dino_run: Path) -> None:
    classifier = patchloom.load(dino_run)
    for asked in (lambda: classifier.evaluate(DATA), lambda: classifier.predict([Image.new("RGB", (32, 32))])):
        with refused(UsageError):
            asked()
    with refused(UsageError, "--knn", "--linear"):
        patchloom.evaluate([str(dino_run)], DATA)


def suggested(told: list[str]) -> list[list[str]]:
    """Arguments of the commands in the last line of a training."""
    return [shlex.split(line) for line in re.split(r"\s*\|?\s*patchloom ", told[-1])[1:]]


def test_a_folder_without_classes_is_enough(tmp_path: Path, monkeypatch, capsys) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(20):
        pixels = np.random.default_rng(number).integers(256, size=(40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
    told: list[str] = []
    run = train(tmp_path / "run", data=str(photos), batch=8, say=told.append)
    assert run.metrics == {}
    indexed = command(suggested(told)[0], monkeypatch, capsys)
    assert indexed.code == 0, indexed.errors
    assert missing(indexed.output, 20, 16) == []
    looks = look_at(str(run.folder), out=tmp_path / "look.html").looks
    assert [(Path(name).parent, one.truth) for name, _, one in looks] == [(photos, "")] * 4
    with refused(DataError, 20):
        train(tmp_path / "other", data=str(photos), recipe="grafit_small_images")


def test_a_stopped_dino_run_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole").folder
    after_update, done = Dino.after_update, []

    def stopping(self, model, step):
        after_update(self, model, step)
        done.append(step)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Dino, "after_update", stopping)
    with pytest.raises(Stopped):
        train(tmp_path / "broken")
    monkeypatch.undo()
    broken = train(tmp_path / "broken").folder
    for part in ("weights", "objective", "optimizer"):
        ours, theirs = (load_file(newest(folder) / f"{part}.safetensors") for folder in (whole, broken))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def test_it_is_looked_at_without_being_given_pictures(dino_run: Path, tmp_path: Path) -> None:
    page = look_at(str(dino_run), out=tmp_path / "look.html")
    val = patchloom.open_data(DATA).val
    assert page.looks[0][2].truth == val.classes.names[val.labels[0]]
    assert page.looks[-1][0] == val.where(len(val) - 1)
    assert len({name for name, _, _ in page.looks}) == len(page.looks) == min(24, len(val))
    assert all(len(one.maps) == 1 for _, _, one in page.looks)
    assert all(Path(name).name in page.path.read_text("utf-8") for name, _, _ in page.looks)


def test_a_collapse_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    # Nothing keeps the outputs apart: no centre, and a teacher too warm to choose.
    changes = {"dino.teacher_temperature": 50.0, "dino.warmup_teacher_temperature": 50.0, "dino.centre_momentum": 1.0}
    train(tmp_path / "run", epochs=1, say=told.append, **changes)
    assert [line for line in told if line.startswith("warning: ") and missing(line, 1, "DINO") == []]


@pytest.mark.parametrize(
    ("small_views", "shown_sides"), [("resample", (32, 32, 16)), ("resize", (32, 32, 32)), ("none", (32, 32))]
)
def test_small_views_are_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_views: str, shown_sides: tuple[int, ...]
) -> None:
    sides = set()
    inputs = Dino.inputs

    def remembered(self, batch):
        shown = inputs(self, batch)
        sides.update((view, *image.shape[2:]) for view, image in enumerate(shown))
        return shown

    monkeypatch.setattr(Dino, "inputs", remembered)
    run = train(tmp_path / "run", epochs=1, **{"dino.small_views": small_views})
    assert sides == {(view, side, side) for view, side in enumerate(shown_sides)}
    assert read_run_files(run.folder).recipe.dino.small_views == small_views


@pytest.mark.parametrize("model", ["deit_ti", "timm:test_resnet"])
def test_other_backbones(tmp_path: Path, model: str) -> None:
    options = {"depth": 1, "dim": 16, "heads": 2, "patch_size": 8} if model == "deit_ti" else {}
    settings = TrainingSettings(
        data=DATA, recipe="dino_small_images", out=str(tmp_path / "run"), model=model, epochs=1, batch=16, workers=0,
        device="cpu", changes=SMALL_HEAD | {f"model.options.{key}": value for key, value in options.items()},
    )  # fmt: skip
    assert "knn20_top1" in run_training(settings, say=silent).metrics


# Grafit ---------------------------------------------------------------------------------------------------------------


METHODS = ("grafit", "grafit_fc", "snca", "snca_plus", "instance", "triplet")


@pytest.mark.parametrize("method", [*METHODS, "cross_entropy_instance", "cross_entropy_triplet"])
def test_every_method_is_trained_at_a_level(tmp_path: Path, method: str) -> None:
    run = train(
        tmp_path / "run", recipe="grafit_small_images", level="coarse", epochs=1, **{"objective.method": method}
    )
    network, files = load_network(run.folder)
    learns_classes = method.startswith("cross_entropy")
    assert network.config.num_classes == (4 if learns_classes else 0)
    assert network.config.projector == {"grafit": "mlp", "snca_plus": "mlp", "grafit_fc": "fc", "snca": "fc"}.get(
        method, "none"
    )
    assert len(files.labels) == (0 if method in ("instance", "triplet") else 4)
    assert files.level == "coarse"
    assert ("top1" if learns_classes else "knn20_top1") in run.metrics


def test_what_is_suggested_at_the_end_works(tmp_path: Path, monkeypatch, capsys) -> None:
    for name, given, count in (("dino", {}, 1), ("grafit", {"recipe": "grafit_small_images", "level": "coarse"}, 2)):
        told: list[str] = []
        train(tmp_path / name, epochs=1, say=told.append, **given)
        for arguments in suggested(told)[:count]:
            assert command(arguments, monkeypatch, capsys).code == 0, arguments


def test_it_is_judged_at_every_level_by_its_projection(tmp_path: Path) -> None:
    changes = {"objective.method": "grafit"}
    run = train(tmp_path / "run", recipe="grafit_small_images", level="coarse", epochs=1, **changes)
    found = patchloom.evaluate_levels([str(run.folder)], DATA)
    values = next(iter(found.runs.values())).values
    assert {"map", "map_conditioned", "map_oracle", "map_coarse"} <= values.keys()
    network, _ = load_network(run.folder)
    with torch.no_grad():
        network.projector[0].weight.zero_()
    weights = dict(network.state_dict())
    classifier = patchloom.load(run.folder)
    shown = classifier.embed(patchloom.open_data(DATA).val)
    assert shown.vectors.shape[1] == 256
    classifier.model.load_state_dict(weights)
    same = classifier.embed(patchloom.open_data(DATA).val).vectors
    assert torch.equal(same[0], same[-1])


@pytest.fixture(scope="module")
def grafit_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        tmp_path_factory.mktemp("grafit") / "run", recipe="grafit_small_images", level="coarse", epochs=1
    ).folder


def test_its_trunk_is_judged_and_searched_where_asked_for(grafit_run: Path, tmp_path: Path) -> None:
    val = patchloom.open_data(DATA).val
    projected, trunk = patchloom.load(grafit_run), patchloom.load(grafit_run, trunk=True)
    width = trunk.model.feature_dim
    assert (projected.embed(val).vectors.shape[1], trunk.embed(val).vectors.shape[1]) == (128, width)

    bare = tmp_path / "bare"  # the same trunk as a run of its own
    trunk.save_pretrained(bare)
    own, other = (
        next(iter(patchloom.evaluate_levels([str(run)], DATA, trunk=leave_out).runs.values())).values
        for run, leave_out in ((grafit_run, True), (bare, False))
    )
    assert own == other != next(iter(patchloom.evaluate_levels([str(grafit_run)], DATA).runs.values())).values

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in range(6):
        val.read(name).save(pictures / f"{name}.png")
    found = patchloom.index(str(grafit_run), [pictures], out=tmp_path / "index", trunk=True, device="cpu").index
    assert (found.about.trunk, found.about.dimension) == (True, width)
    query = pictures / "2.png"
    (answer,) = patchloom.open_index(tmp_path / "index", device="cpu").search([query], top=6)
    (expected,) = patchloom.index(str(bare), [pictures], out=tmp_path / "other", device="cpu").index.search(
        [query], top=6
    )
    assert answer.hits == expected.hits
    with refused(UsageError, "--trunk"):
        patchloom.index(str(grafit_run), [pictures], out=tmp_path / "index", device="cpu")
    with refused(UsageError, bare):
        patchloom.index(str(bare), [pictures], out=tmp_path / "third", trunk=True, device="cpu")
    assert not (tmp_path / "third").exists()


def test_the_commands_compare_by_the_trunk(grafit_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def values(*options: str) -> dict[str, float]:
        done = command(["probe", grafit_run, DATA, *options, "--json"], monkeypatch, capsys)
        return json.loads(done.output)["run"]

    for options, trunk in (((), False), (("--trunk",), True)):
        probed = patchloom.load(grafit_run, trunk=trunk).probe(DATA, knn=[1, 5])
        assert values("--knn", "1,5", *options).items() >= dict(probed).items()
    for arguments in (["probe", grafit_run, DATA, "--linear", "--trunk"], ["look", grafit_run, "--trunk"]):
        done = command(arguments, monkeypatch, capsys)
        assert (done.code, "--trunk" in done.errors) == (2, True)
    page = tmp_path / "ranked.html"
    assert command(["look", grafit_run, "--ranked", "--trunk", "--page", page], monkeypatch, capsys).code == 0
    assert page.exists()


def test_runs_that_name_no_classes_are_compared_by_neighbours(dino_run: Path, grafit_run: Path, tmp_path: Path) -> None:
    copies = [str(shutil.copytree(run, tmp_path / name)) for run, name in ((dino_run, "dino"), (grafit_run, "grafit"))]
    page = report_runs(copies, out=tmp_path / "page.html").read_text("utf-8")
    numbers = page.partition('id="numbers"')[2].partition("</section>")[0]
    assert re.search(r'<th[^>]* class="number"[^>]*>[^<]*\b20\b', numbers)  # neighbours
    for run in (dino_run, grafit_run):
        judged = [r["values"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "evaluation"]
        assert f"{max(values['knn20_top1'] for values in judged):.2f}" in numbers
    assert re.search(r"\b20\b", page.partition('id="curves"')[2].partition("</section>")[0])
    assert "patchloom probe" in page


def test_without_instances_grafit_is_snca(tmp_path: Path) -> None:
    runs = [
        train(tmp_path / name, recipe="grafit_small_images", level="coarse", epochs=1, **changes).folder
        for name, changes in (
            ("grafit", {"objective.method": "grafit", "grafit.instance_weight": 0.0}),
            ("snca", {"objective.method": "snca_plus"}),
        )
    ]
    ours, theirs = (load_file(run / "weights.safetensors") for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_clusterfit_learns_clusters_of_another_run(tmp_path: Path, dino_run: Path) -> None:
    changes = {"grafit.clusters": 6, "grafit.clusters_of": str(dino_run)}
    run = train(tmp_path / "run", recipe="clusterfit", epochs=1, **changes)
    labels = json.loads((run.folder / "clusters.json").read_text())
    assert set(labels) == set(range(6))
    assert load_network(run.folder)[0].config.num_classes == 6
    # What it goes on with is what it began with.
    (run.folder / "clusters.json").write_text(json.dumps(labels[:-1]))
    with refused(CheckpointError, "clusters.json", 79, 80):
        train(tmp_path / "run", recipe="clusterfit", **changes)
    with refused(UsageError, "--set grafit.clusters_of=RUN"):
        train(tmp_path / "other", recipe="clusterfit")
    with refused(UsageError, "grafit.clusters", 1500, 80):
        train(tmp_path / "other", recipe="clusterfit", **{"grafit.clusters_of": str(dino_run)})


def test_cross_entropy_has_the_same_frame(tmp_path: Path) -> None:
    plain = {"objective.method": "classification"}
    run = train(tmp_path / "run", recipe="grafit_small_images", level="coarse", epochs=1, **plain)
    assert "top1" in run.metrics
    with refused(UsageError, "views.number", 2, "classification"):
        train(tmp_path / "other", recipe="grafit_small_images", **plain, **{"views.number": 2})


def test_small_views_need_a_network_of_any_size_but_in_dino(tmp_path: Path) -> None:
    with refused(UsageError, "resmlp_s12", "views.local"):
        train(tmp_path / "run", recipe="grafit_small_images", **{"views.local": 2, "views.local_size": 16})


def test_a_projector_is_left_behind_by_fine_tuning(tmp_path: Path) -> None:
    grafit = train(tmp_path / "grafit", recipe="grafit_small_images", level="coarse", epochs=1).folder
    tuned = train(
        tmp_path / "tuned", recipe="small_images", init=str(grafit), epochs=1, **{"model.options.head": "mlp"}
    ).folder
    names = load_file(tuned / "weights.safetensors").keys()
    assert not any(name.startswith("projector") for name in names)
    assert {"classifier.0.weight", "classifier.3.bias"} <= names


def test_fields_of_other_methods_are_refused(tmp_path: Path) -> None:
    with refused(UsageError, "dino.outputs", 24, "classification"):
        train(tmp_path / "run", recipe="small_images", **{"dino.outputs": 24})
    with refused(UsageError, "augment.mixup"):
        train(tmp_path / "run", **{"augment.mixup": 0.8})
    with refused(UsageError, "dino", "teacher"):
        train(tmp_path / "run", teacher="runs/none")
    assert not (tmp_path / "run").exists()


def test_the_command_in_the_report_repeats_a_run(grafit_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    start = train(tmp_path / "start", recipe="instances", epochs=1).folder
    first = train(tmp_path / "first", epochs=1, recipe="grafit_small_images", level="coarse", init=str(start)).folder
    recipe, record = read_run_files(first).recipe, read_run_metadata(first)
    assert recipe is not None
    assert record is not None
    assert "dino" not in recipe.to_dict()
    told = record.command(first)
    assert html.escape(told) in (first / "report.html").read_text("utf-8")
    again = tmp_path / "again"
    arguments = shlex.split(told.replace("NEW-FOLDER", str(again)))[1:]
    assert command([*arguments, "--workers", "0", "--device", "cpu"], monkeypatch, capsys).code == 0
    ours, theirs, without = (load_file(run / "weights.safetensors") for run in (first, again, grafit_run))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["stem.weight"], without["stem.weight"])
