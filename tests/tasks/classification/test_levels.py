"""Runs trained at levels of a taxonomy, evaluated at all levels; and their ranked lists."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.retrieval import at_level, choose_neighbors, retrieval
from patchloom.evaluation.separability import separability
from patchloom.inference.classifier import Classifier, load
from patchloom.recipes import get_recipe, override
from patchloom.runs.config import Preprocessing, read_run_files, write_run_files
from patchloom.runs.run_metadata import RunMetadata, read_run_metadata, write_run_metadata
from patchloom.runs.weights import save_weights
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.classification.levels import FINEST, MEASURES, evaluate_levels, open_leveled, trained_level
from patchloom.tasks.classification.ranked_page import (
    WRONG,
    Ranked,
    RankedHit,
    RankedList,
    frame_colors,
    framed,
    rank,
    ranked_sheet,
    spread_queries,
    write_ranked,
)
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.networks import small
from tests.reliability.commands import OPTIONS, command

COLORS = {"red": (220, 20, 20), "pink": (250, 150, 160), "navy": (10, 10, 120), "sky": (120, 180, 250)}
GROUPS = {"red": "warm", "pink": "warm", "navy": "cold", "sky": "cold"}


def draw(folder: Path, color: tuple[int, int, int], count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        noise = np.random.default_rng((seed, i)).normal(0, 12, (16, 16, 3))
        Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)).save(folder / f"{i}.png")


def colors(root: Path, train: int = 8, val: int = 3) -> Path:
    for split, count in (("train", train), ("val", val)):
        for seed, (name, color) in enumerate(COLORS.items()):
            draw(root / split / GROUPS[name] / name, color, count, seed + 10 * (split == "val"))
    return root


def make_run(folder: Path, data: Path, level: str | None, *, seed: int = 0, taxonomy: str | None = None) -> str:
    """Make a run at a level with an untrained network."""
    names = open_data(data, level=level, reading=Reading(taxonomy=taxonomy)).classes.names
    network = small("resmlp_s12", seed=seed, num_classes=len(names), image_size=16)
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 1.0)
    write_run_files(folder, network, preprocessing, None, names, level, task="classification")
    save_weights(folder, dict(network.state_dict()), {})
    write_run_metadata(folder, RunMetadata(data=str(data), data_name="colors", level=level, taxonomy=taxonomy))
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return colors(tmp_path_factory.mktemp("colors"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: make_run(folder / name, data, level) for name, level in (("fine", None), ("coarse", "coarse"))}


# Numbers --------------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_embeddings(runs, data, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.tasks.classification.levels.separability", partial(separability, splits=1))
    result = evaluate_levels([runs["coarse"]], str(data), device="cpu", halves=True)
    (run,) = result.runs.values()
    classifier, splits = load(runs["coarse"], device="cpu"), open_data(data)
    train, val = classifier.embed(splits.train), classifier.embed(splits.val)
    own = at_level(train, splits.classes, "coarse")
    k = choose_neighbors(own, classes=2)
    softmax = torch.tensor([[share for _, share in sorted(row)] for row in classifier.predict(
        [splits.val.read(i) for i in range(len(splits.val))], top=2
    )])  # fmt: skip
    expected = dict(
        retrieval(train, val, classes=splits.classes, trained_level="coarse", k=(k,), softmax=softmax.double())
    )
    assert (run.trained_level, run.neighbours) == ("coarse", k)
    for name, value in expected.items():
        assert run.values[name] == pytest.approx(value, abs=1e-3), name
    assert {"map", "map_conditioned", "map_conditioned_all", "map_conditioned_softmax", "map_oracle"} <= set(run.values)
    assert run.values["separability_top1"] == dict(separability(own, classes=2, splits=1))["separability_top1"]
    assert "separability_conditioned_top1" in run.values
    assert result.levels == {"coarse": 2, FINEST: 4}


def test_a_network_without_classes_is_halved_at_a_named_level(data, tmp_path, monkeypatch) -> None:
    """Thesis table 2.1: triplets and untrained networks are measured on the same task as cross-entropy."""
    network = small("resmlp_s12", num_classes=0, image_size=16)
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 1.0)
    write_run_files(tmp_path / "bare", network, preprocessing, None, (), None, task="embedding")
    save_weights(tmp_path / "bare", dict(network.state_dict()), {})
    halved = []

    def counted(images, *, classes, **options):
        halved.append((classes, int(images.labels.max()) + 1))
        return separability(images, classes=classes, **options)

    monkeypatch.setattr("patchloom.tasks.classification.levels.separability", counted)
    options = {"device": "cpu", "halves": True}
    for level in (None, "fine", "coarse"):
        result = evaluate_levels([str(tmp_path / "bare")], str(data), halves_level=level, **options)
        assert "separability_conditioned_top1" not in result.runs["bare"].values
    levels = result.levels
    assert halved == [(levels[name], levels[name]) for name in (FINEST, FINEST, "coarse")]
    with pytest.raises(UsageError, match="cours"):
        evaluate_levels([str(tmp_path / "bare")], str(data), halves_level="cours", **options)


def test_clusters_have_the_level_that_their_training_named(data, tmp_path) -> None:
    recipe = override(get_recipe("clusterfit"), {"model.name": "resmlp_s12", "grafit.clusters": 3})
    network = small("resmlp_s12", num_classes=3, image_size=16)
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 1.0)
    levels = {}
    for name, chosen in (("clusters", recipe), ("dino", override(recipe, {"objective.method": "instance"}))):
        write_run_files(tmp_path / name, network, preprocessing, chosen, (), "coarse", task="embedding")
        save_weights(tmp_path / name, dict(network.state_dict()), {})
        result = evaluate_levels([str(tmp_path / name)], str(data), device="cpu").runs[name]
        levels[name] = result.trained_level
        assert any("conditioned" in value for value in result.values) == (name == "clusters")
    assert levels == {"clusters": "coarse", "dino": None}


def test_a_table_of_train_level_by_test_level(runs, data) -> None:
    result = evaluate_levels([runs["fine"], runs["coarse"]], str(data), device="cpu")
    assert [(name, run.trained_level) for name, run in result.runs.items()] == [("coarse", "coarse"), ("fine", FINEST)]
    for measure, name in (("knn_top1", "knn{}_top1"), ("map", "map")):
        table = result.table(measure)
        assert list(table) == ["coarse", FINEST]
        for run, judged in result.runs.items():
            own = name.format(judged.neighbours)
            assert table[FINEST][run] == judged.values[own]
            assert table["coarse"][run] == judged.values[f"{own}_coarse"]
    alone = evaluate_levels([runs["fine"]], str(data), device="cpu")
    assert alone.runs["fine"] == result.runs["fine"]
    assert not [name for name in alone.runs["fine"].values if "conditioned" in name]


def test_the_trained_level_is_recognized_by_its_classes(runs, data) -> None:
    classes = open_data(data).classes
    fine, coarse = (load(runs[name], device="cpu") for name in ("fine", "coarse"))
    assert (trained_level(fine, classes), trained_level(coarse, classes)) == ("", "coarse")
    renamed = patchloom.data.datasets.ClassTable(classes.names, {"warmth": classes.levels["coarse"]})
    assert trained_level(coarse, renamed) == "warmth"
    assert trained_level(coarse, patchloom.data.datasets.ClassTable(("a", "b"))) is None


def test_a_run_on_other_classes_is_judged_too(runs, data, tmp_path) -> None:
    stranger = make_run(tmp_path / "stranger", Path("digits"), None)
    result = evaluate_levels([stranger, runs["coarse"]], str(data), device="cpu")
    assert result.runs["stranger"].trained_level is None
    assert set(result.table("map")["coarse"]) == {"stranger", "coarse"}


def test_what_cannot_be_evaluated_is_named(runs, tmp_path) -> None:
    root = colors(tmp_path / "data")
    draw(root / "train" / "warm" / "rose", (255, 90, 110), 2, 50)
    draw(root / "val" / "cold" / "teal", (0, 120, 120), 1, 51)
    (root / "val" / "cold" / "sky" / "0.png").write_bytes(b"")
    lines = ["class,coarse,every", *(f"{name},{group},color" for name, group in (GROUPS | {"rose": "warm"}).items())]
    (tmp_path / "data" / "taxonomy.csv").write_text("\n".join([*lines, "teal,cold,color"]))
    result = evaluate_levels([runs["coarse"]], str(root), device="cpu")
    (level,) = (note for note in result.notes if "color" in note)
    (unasked,) = (note for note in result.notes if "rose" in note)
    (unknown,) = (note for note in result.notes if "teal" in note)
    (unreadable,) = (note for note in result.notes if note not in (level, unasked, unknown))
    assert "every" in level
    assert "2" in unasked
    assert "1" in unknown
    assert "1" in unreadable
    assert result.levels == {"coarse": 2, FINEST: 5}
    assert result.runs["coarse"].values["map_queries"] == 11


def test_a_level_that_numbers_are_called_after_is_refused(runs, tmp_path) -> None:
    root = colors(tmp_path / "data")
    (root / "taxonomy.csv").write_text("\n".join(["class,all", *(f"{name},{of}" for name, of in GROUPS.items())]))
    with pytest.raises(UsageError, match=r"\ball\b"):
        evaluate_levels([runs["coarse"]], str(root), device="cpu")


def test_data_without_levels_take_the_taxonomy_of_the_run(tmp_path) -> None:
    flat = tmp_path / "flat"
    for seed, (name, color) in enumerate(COLORS.items()):
        draw(flat / name, color, 6, seed)
    run = make_run(tmp_path / "bare", flat, None)
    with pytest.raises(UsageError) as error:
        evaluate_levels([run], str(flat), device="cpu")
    assert str(flat) in str(error.value)
    assert "4" in str(error.value)
    assert "taxonomy.csv" in str(error.value)
    (tmp_path / "t.json").write_text(json.dumps(GROUPS))
    with_file = make_run(tmp_path / "with", flat, "coarse", taxonomy=str(tmp_path / "t.json"))
    assert open_leveled(str(flat), [run, with_file]).classes.levels["coarse"][0] == ("cold", "warm")
    assert evaluate([with_file], str(flat), device="cpu").values()["with"]["images"] == 24
    (tmp_path / "with" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        evaluate([with_file], str(flat), device="cpu")


def test_training_at_a_level_is_remembered(tmp_path) -> None:
    flat = tmp_path / "flat"
    for seed, (name, color) in enumerate(COLORS.items()):
        draw(flat / name, color, 5, seed)
    (tmp_path / "t.csv").write_text("\n".join(["class,warmth", *(f"{name},{group}" for name, group in GROUPS.items())]))
    settings = TrainingSettings(
        data=str(flat), out=str(tmp_path / "run"), recipe="small_images", level="warmth", size=16, epochs=1, batch=8,
        taxonomy=str(tmp_path / "t.csv"), device="cpu", workers=0,
        changes={"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8},
    )  # fmt: skip
    trained = run_training(settings, say=str)
    assert read_run_files(trained.folder).level == "warmth"
    assert read_run_metadata(trained.folder).taxonomy == str(tmp_path / "t.csv")
    assert '<section id="mistakes">' in (trained.folder / "report.html").read_text("utf-8")  # with their images
    Classifier.from_pretrained(trained.folder, device="cpu").save_pretrained(tmp_path / "copy")
    assert load(tmp_path / "copy", device="cpu").level == "warmth"
    result = evaluate_levels([str(trained.folder)], str(flat), device="cpu")
    assert result.runs["run"].trained_level == "warmth"


# The commands ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_levels_and_tables(runs, data, monkeypatch, capsys) -> None:
    line = ("probe", runs["fine"], runs["coarse"], data, "--levels", "--device", "cpu")
    done = command(line, monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert "map_conditioned_softmax" in done.output
    assert done.output.count("coarse (coarse)") == len(MEASURES)
    assert done.output.count("*") == 5
    answer = json.loads(command((*line, "--json"), monkeypatch, capsys).output)
    expected = evaluate_levels([runs["fine"], runs["coarse"]], str(data), device="cpu")
    assert re.search(rf"\bcoarse\b.*\bk = {expected.runs['coarse'].neighbours}\b", done.output)
    assert answer["tables"]["map"] == expected.table("map")
    assert answer["runs"]["coarse"]["trained_level"] == "coarse"
    assert answer["levels"] == {"coarse": 2, "fine": 4}


def test_a_run_at_a_coarse_level_is_evaluated_on_its_own_level(runs, data, monkeypatch, capsys) -> None:
    done = command(("evaluate", runs["coarse"], data, "--device", "cpu", "--json"), monkeypatch, capsys)
    assert json.loads(done.output)["images"] == 12


@pytest.mark.parametrize("options", [("--knn", "5"), ("--sweep", "crop"), ("--cost",), ("--split", "val")])
def test_options_that_do_not_go_with_levels(runs, data, monkeypatch, capsys, options) -> None:
    done = command(("probe", runs["fine"], data, "--levels", *options), monkeypatch, capsys)
    assert done.code == 2
    assert options[0] in done.errors
    done = command(("probe", runs["fine"], "--levels"), monkeypatch, capsys)
    assert (done.code, "--levels" in done.errors) == (2, True)


def test_train_takes_a_taxonomy(tmp_path, monkeypatch, capsys) -> None:
    root = colors(tmp_path / "data", train=4, val=2)
    (tmp_path / "bad.csv").write_text("class,family,order\nred,a,x\npink,a,y\nnavy,b,x\nsky,c,x\n")
    line = ("train", root, "--taxonomy", tmp_path / "bad.csv", "--out", tmp_path / "run", *OPTIONS, "--dry-run")
    done = command(line, monkeypatch, capsys)
    assert done.code == 3
    facts = ("bad.csv", "family", "red", "pink", "order")
    assert [fact for fact in facts if fact not in done.errors] == []
    done = command(("train", root, "--level", "corse", *OPTIONS, "--dry-run"), monkeypatch, capsys)
    assert "coarse" in done.errors


def test_the_comparison_of_runs_at_two_levels(runs, data, tmp_path) -> None:
    page = report_runs([runs["fine"], runs["coarse"]], data=str(data), out=tmp_path / "page.html").read_text("utf-8")
    result = evaluate_levels([runs["fine"], runs["coarse"]], str(data), device="cpu")
    section = page[page.index('<section id="levels">') : page.index('<section id="energy">')]
    assert re.search(rf'<td class="number best"[^>]*>{result.table("map")["coarse"]["coarse"]:.2f}</td>', section)
    assert section.count('class="number best"') == 4
    assert re.search(r'<th[^>]* class="number"[^>]*>fine \(fine\)</th>', section)
    assert page[page.index('<section id="energy">') :].count("<path") >= 2


# Ranked lists ---------------------------------------------------------------------------------------------------------


def test_hits_are_framed_by_the_finest_level_that_is_right() -> None:
    classes = patchloom.data.datasets.ClassTable(
        ("a", "b", "c", "d"), {"mid": (("ab", "c", "d"), (0, 0, 1, 2)), "top": (("abc", "d"), (0, 0, 0, 1))}
    )
    angles = torch.tensor([0.1, 0.2, 0.3, 0.4, 1.0])
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    train = Embeddings(vectors, torch.tensor([1, 0, 3, 2, 0]), torch.tensor([0, 2, 4, 6, 8]))
    val = Embeddings(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([3, 0]), torch.tensor([3, 5]))
    result = rank(train, val, [5, 9], classes, top=4)
    assert list(result) == [5]
    assert [(hit.place, hit.level) for hit in result[5]] == [(0, 1), (2, 0), (4, None), (6, 2)]
    assert [hit.score for hit in result[5]] == pytest.approx(angles[:4].cos().tolist())


def test_queries_come_from_all_classes() -> None:
    labels = np.repeat(np.arange(10), 3)
    assert labels[spread_queries(labels, 4)].tolist() == [0, 3, 6, 9]
    assert labels[spread_queries(labels, 12)].tolist() == [0, 0, 1, 1, *range(2, 10)]
    assert spread_queries(np.array([-1, 2, -1, 2]), 5) == [1, 3]


def test_the_sheet_shows_frames_and_a_legend() -> None:
    gray = Image.new("RGB", (20, 20), (128, 128, 128))
    colors_of = frame_colors(3)
    assert len({*colors_of, WRONG}) == 4
    row = [Ranked(gray, "x", 0), Ranked(gray, "x", 1), Ranked(gray, "x", 2), Ranked(gray, "a long caption", None)]
    lists = [RankedList(gray, "query", [("one", row), ("two", row[::-1])])]
    pixels = np.asarray(ranked_sheet(lists, ["fine", "coarse", "coarser"])).reshape(-1, 3)
    counts = {color: int((pixels == color).all(axis=1).sum()) for color in (*colors_of, WRONG)}
    frame = (np.asarray(framed(gray, WRONG)).reshape(-1, 3) == WRONG).all(axis=1).sum()
    assert all(2 * frame < count < 2 * frame + 400 for count in counts.values()), counts
    assert frame_colors(1) == [colors_of[0]]


def test_the_page_and_the_png_of_ranked_lists(runs, data, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "ranked.html"
    result = write_ranked([runs["fine"], runs["coarse"]], str(data), out=out, top=5, queries=3, device="cpu")
    assert len(result.queries) == 3
    text = out.read_text("utf-8")
    assert text.count("<section>") == 3
    assert text.count('title="') == 3 * 2 * 5
    with Image.open(result.png) as image:
        assert image.format == "PNG"
    hits = [hit for by_run in result.queries.values() for of_run in by_run.values() for hit in of_run]
    assert all(isinstance(hit, RankedHit) for hit in hits)
    assert text.count('class="frame0" title') == sum(hit.level == 0 for hit in hits)
    done = command(("look", runs["fine"], "--ranked", "--top", "2", "--page", tmp_path / "b.html"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert done.output.splitlines()[-2:] == [str(tmp_path / "b.html"), str(tmp_path / "b.png")]
    ranked = command(("look", runs["fine"], "--ranked", "--json", "--data", data), monkeypatch, capsys)
    assert len(json.loads(ranked.output)["queries"]) == 8
    assert (Path(runs["fine"]) / "ranked.html").is_file()


def test_ranked_lists_that_are_refused(runs, data, tmp_path, monkeypatch, capsys) -> None:
    done = command(("look", runs["fine"], data, "--ranked"), monkeypatch, capsys)
    assert (done.code, "--data" in done.errors) == (2, True)
    with pytest.raises(UsageError, match=r"\.html"):
        write_ranked([runs["fine"]], str(data), out=tmp_path / "a.png")
    root = colors(tmp_path / "data", train=2, val=1)
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"\.png"):
        write_ranked([runs["fine"]], str(root), out=tmp_path / "a.html", device="cpu")


def test_data_without_levels_are_right_or_wrong(runs, tmp_path) -> None:
    for seed, (name, color) in enumerate(COLORS.items()):
        draw(tmp_path / "flat" / name, color, 5, seed)
    result = write_ranked([runs["fine"]], str(tmp_path / "flat"), out=tmp_path / "a.html", top=3, device="cpu")
    levels = {hit.level for by_run in result.queries.values() for hits in by_run.values() for hit in hits}
    assert 0 in levels
    assert levels <= {0, None}
