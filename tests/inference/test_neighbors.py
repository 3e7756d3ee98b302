"""Classes predicted by the files of an index (thesis, equation 2.6), and conditioned searches (equation 2.5)."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import patchloom
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom.runs.config import Preprocessing, write_run_files
from patchloom.runs.weights import save_weights
from patchloom_runtime.errors import CheckpointError, UsageError
from tests.networks import small
from tests.reliability.commands import command
from tests.tasks.classification.test_levels import COLORS, GROUPS, colors, draw

SIGMA, K = 0.05, 5


def without_classifier(folder: Path, labels: tuple[str, ...] = ("cold", "warm"), **options: object) -> Path:
    """Make a run like Grafit's at a coarse level: an untrained network without a classifier."""
    network = small("resmlp_s12", num_classes=0, image_size=16, **options)
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 1.0)
    write_run_files(folder, network, preprocessing, None, labels, "coarse", task="embedding")
    save_weights(folder, dict(network.state_dict()), {})
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return colors(tmp_path_factory.mktemp("photos"), train=6, val=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return without_classifier(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def collection(tmp_path_factory, run: Path, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("index") / "photos.index"
    index(str(run), [photos / "train"], out=folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> patchloom.inference.classifier.Classifier:
    return patchloom.load(run, device="cpu")


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one.double() @ other.double() / (one.double().norm() * other.double().norm()))


def posterior(model, query: Path, files: list[Path], label, k: int = K) -> dict[str, float]:
    """Slow reference of equation 2.6: compare with every file, and let the k nearest vote."""
    own = model.embed(query)
    near = sorted(((cosine(own, model.embed(file)), label(file)) for file in files if file != query), reverse=True)[:k]
    votes: dict[str, float] = {}
    for score, name in near:
        votes[name] = votes.get(name, 0.0) + math.exp(score / SIGMA)
    return {name: value / sum(votes.values()) for name, value in votes.items()}


def fine(file: Path) -> str:
    return file.parent.name


def coarse(file: Path) -> str:
    return GROUPS[fine(file)]


@pytest.mark.parametrize(("level", "label"), [(None, coarse), ("coarse", coarse), ("fine", fine)])
def test_classes_are_those_of_the_nearest_files_at_any_level(model, photos, collection, level, label) -> None:
    files, queries = sorted((photos / "train").rglob("*.png")), sorted((photos / "val").rglob("*.png"))[::3]
    result = model.predict(queries, top=4, index=collection, level=level, neighbors=K)
    for query, answers in zip(queries, result, strict=True):
        expected = posterior(model, query, files, label)
        assert [share for _, share in answers] == sorted((share for _, share in answers), reverse=True)
        assert dict(answers) == pytest.approx(expected, rel=1e-4)
    assert model.predict(queries[0], top=1, index=open_index(collection, device="cpu"), level=level) != []


def test_a_file_of_the_index_has_no_vote_on_itself(model, photos, collection) -> None:
    files = sorted((photos / "train").rglob("*.png"))
    (answer,) = model.predict_files([files[0]], top=4, index=collection, level="fine", neighbors=K)
    assert dict(answer.answers) == pytest.approx(posterior(model, files[0], files, fine), rel=1e-4)
    assert ".png" in answer.reason  # the nearest
    assert "1.0000" not in answer.reason


def test_classes_it_was_never_trained_on_and_files_without_a_label(run, model, photos, tmp_path) -> None:
    draw(tmp_path / "more" / "green", (10, 200, 30), 4, 70)
    draw(tmp_path / "more" / "olive", (90, 110, 20), 4, 71)
    draw(tmp_path / "loose", (10, 200, 30), 3, 72)
    index(str(run), [tmp_path / "more"], out=tmp_path / "index", device="cpu")  # which has no levels
    built = index(str(run), [photos / "train", tmp_path / "loose"], out=tmp_path / "index", device="cpu").index
    assert built.labels == {"cold": 12, "green": 4, "olive": 4, "warm": 12}
    query = tmp_path / "loose" / "1.png"
    labeled = [*sorted((photos / "train").rglob("*.png")), *sorted((tmp_path / "more").rglob("*.png"))]
    for level in ("fine", "coarse"):
        answers = model.predict(query, top=9, index=built, level=level, neighbors=K)
        names = GROUPS if level == "coarse" else {}
        expected = posterior(model, query, labeled, lambda file, names=names: names.get(fine(file), fine(file)))
        assert dict(answers) == pytest.approx(expected, rel=1e-4)


def test_the_old_spelling_of_the_keyword_works_with_a_warning(model, photos, collection) -> None:
    query = next((photos / "val").rglob("*.png"))
    with pytest.warns(DeprecationWarning, match="neighbours.*neighbors"):
        old = model.predict(query, index=collection, neighbours=K)
    assert old == model.predict(query, index=collection, neighbors=K)
    with pytest.warns(DeprecationWarning, match="neighbours.*neighbors"):
        (one,) = model.predict_files([query], index=collection, neighbours=K)
    assert one.answers == old
    opened = patchloom.open_index(collection)
    with pytest.warns(DeprecationWarning, match="neighbours.*neighbors"):
        conditioned = opened.search(query, condition="coarse", neighbours=K)
    assert conditioned.hits == opened.search(query, condition="coarse", neighbors=K).hits


def test_fewer_files_than_neighbors_all_vote(model, photos, collection) -> None:
    query = next((photos / "val").rglob("*.png"))
    (answer,) = model.predict_files([query], top=9, index=collection, neighbors=1000)
    assert (answer.level, {name for name, _ in answer.answers}) == ("coarse", {"cold", "warm"})
    assert re.search(r"\b12\b.*\b24\b.*\.png", answer.reason)


@pytest.mark.parametrize("class_name", ["", "warm"])
def test_a_conditioned_search_adds_the_log_odds_of_the_coarse_class(model, photos, collection, class_name) -> None:
    files, query = sorted((photos / "train").rglob("*.png")), sorted((photos / "val").rglob("*.png"))[3]
    line = f"coarse={class_name}" if class_name else "coarse"
    result = open_index(collection, device="cpu").search(
        query, top=24, condition=line, neighbors=None if class_name else K, level="fine"
    )
    shares = {class_name: 1.0} if class_name else posterior(model, query, files, coarse)
    own, expected = model.embed(query), {}
    for file in files:
        p = min(max(shares.get(coarse(file), 0.0), 1e-6), 1 - 1e-6)
        expected[str(file)] = cosine(own, model.embed(file)) + math.log(p / (1 - p))  # equation 2.5
    assert {hit.path: hit.conditioned for hit in result.hits} == pytest.approx(expected, abs=1e-3)
    ranked = [hit.conditioned for hit in result.hits]
    assert ranked == sorted(ranked, reverse=True)
    assert all(hit.label == fine(Path(hit.path)) for hit in result.hits)
    assert result.condition.level == "coarse"
    assert dict(result.condition.answers) == pytest.approx(shares, rel=1e-4)
    if class_name:
        assert [hit.label in ("red", "pink") for hit in result.hits] == [True] * 12 + [False] * 12


def test_of_a_file_without_a_label_nothing_is_known(run, photos, tmp_path) -> None:
    draw(tmp_path / "loose", (10, 200, 30), 2, 72)
    built = index(str(run), [photos / "train", tmp_path / "loose"], out=tmp_path / "index", device="cpu").index
    result = built.search(photos / "val" / "cold" / "sky" / "0.png", top=26, condition="coarse=cold", skip_self=True)
    assert [hit.label for hit in result.hits] == ["cold"] * 12 + [""] * 2 + ["warm"] * 12
    assert all(hit.conditioned == hit.score for hit in result.hits if not hit.label)


def test_an_index_keeps_all_levels_and_shows_that_of_the_run(run, photos, tmp_path) -> None:
    built = index(str(run), [photos / "train"], out=tmp_path / "index", device="cpu").index
    assert (built.about.level, built.labels) == ("coarse", {"cold": 12, "warm": 12})
    assert built.about.labels == dict.fromkeys(sorted(COLORS), 6)
    (result,) = built.search([photos / "val" / "warm" / "red" / "0.png"], top=1)
    assert (result.label, result.level) == ("warm", "coarse")
    again = index(str(run), [photos / "train"], out=tmp_path / "index", device="cpu", level="fine")
    assert (again.embedded, again.index.about.level) == (0, "")
    (result,) = open_index(tmp_path / "index", device="cpu").search([photos / "val" / "warm" / "red" / "0.png"], top=1)
    assert (result.label, result.level) == ("red", "fine")


def test_the_commands_say_level_score_and_reason(run, photos, collection, monkeypatch, capsys) -> None:
    query = photos / "val" / "cold" / "navy" / "0.png"
    line = ("predict", run, query, "--index", collection, "--level", "fine", "--neighbors", "3", "--device", "cpu")
    done = command(line, monkeypatch, capsys)
    assert done.code == 0
    assert re.search(r"\(fine: .*\b3\b.*\.png", done.output)
    (parsed,) = json.loads(command((*line, "--json"), monkeypatch, capsys).output)
    assert (parsed["level"], len(parsed["answers"][0])) == ("fine", 2)
    assert re.search(r"\b3\b.*\.png", parsed["reason"])

    line = ("search", collection, query, "--condition", "coarse=cold", "--top", "2", "--device", "cpu")
    done = command((*line, "--page", photos / "page.html"), monkeypatch, capsys)
    assert "coarse: cold 100.0%" in done.output
    assert "coarse: cold 100.0%" in (photos / "page.html").read_text()
    (parsed,) = json.loads(command((*line, "--json"), monkeypatch, capsys).output)
    assert parsed["condition"].keys() == {"level", "answers", "reason"}
    assert (parsed["condition"]["level"], parsed["condition"]["answers"]) == ("coarse", [["cold", 1.0]])
    assert parsed["hits"][0]["conditioned"] > 13


def test_invalid_options_are_refused_before_any_image_is_read(run, model, photos, collection, tmp_path) -> None:
    with pytest.raises(UsageError, match="--index"):
        model.predict("none.png")
    with pytest.raises(UsageError) as error:
        model.predict("none.png", level="fine")
    assert "level" in str(error.value)
    assert "--index" in str(error.value)
    with pytest.raises(UsageError) as error:
        model.predict("none.png", index=collection, level="corse")
    assert "corse" in str(error.value)
    assert "coarse" in str(error.value)
    assert "fine" in str(error.value)
    searched = open_index(collection, device="cpu")
    with pytest.raises(UsageError) as error:
        searched.search(photos / "val" / "cold" / "navy" / "0.png", condition="coarse=worm")
    assert "worm" in str(error.value)
    assert "warm" in str(error.value)
    assert "coarse" in str(error.value)
    with pytest.raises(UsageError) as error:
        searched.search("none.png", neighbors=3)
    assert "neighbors" in str(error.value)
    assert "condition" in str(error.value)
    draw(tmp_path / "loose", (10, 200, 30), 3, 72)
    index(str(run), [tmp_path / "loose"], out=tmp_path / "bare", device="cpu")
    with pytest.raises(UsageError) as error:
        model.predict("none.png", index=tmp_path / "bare")
    assert str(tmp_path / "bare") in str(error.value)
    assert "--labels" in str(error.value)
    other = patchloom.load(without_classifier(tmp_path / "other", seed=1), device="cpu")
    with pytest.raises(CheckpointError) as error:
        other.predict("none.png", index=collection)
    assert str(collection) in str(error.value)
    assert "other" in str(error.value)


def test_two_folders_that_disagree_on_a_class_are_refused(run, photos, tmp_path) -> None:
    draw(tmp_path / "more" / "pale" / "pink", (250, 150, 160), 2, 1)
    draw(tmp_path / "more" / "pale" / "grey", (150, 150, 160), 2, 1)
    with pytest.raises(patchloom.errors.DataError) as error:
        index(str(run), [photos / "train", tmp_path / "more"], out=tmp_path / "index", device="cpu")
    assert "pink" in str(error.value)
    assert "pale" in str(error.value)
    assert "coarse" in str(error.value)
    assert "warm" in str(error.value)


def test_an_index_of_the_trunk_is_searched_with_the_trunk(photos, tmp_path) -> None:
    run = without_classifier(tmp_path / "run", projector="fc")
    index(str(run), [photos / "train"], out=tmp_path / "trunk", device="cpu", trunk=True)
    query = photos / "val" / "cold" / "navy" / "0.png"
    whole, trunk = patchloom.load(run, device="cpu"), patchloom.load(run, device="cpu", trunk=True)
    assert whole.predict(query, index=tmp_path / "trunk") == trunk.predict(query, index=tmp_path / "trunk")
    index(str(run), [photos / "train"], out=tmp_path / "projected", device="cpu")
    with pytest.raises(CheckpointError) as error:
        trunk.predict(query, index=tmp_path / "projected")
    assert str(tmp_path / "projected") in str(error.value)
    assert "trunk" in str(error.value)
