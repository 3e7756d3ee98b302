"""Every kind of image input and every mode: predict, embed, look and search give exactly the results of the command."""

import inspect
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom
from patchloom.inference.classifier import Classifier
from patchloom.inference.index import Index
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom_runtime.errors import DataError, UsageError
from tests.data.all_modes import FILES, ways_of, write_files
from tests.data.bad_images import PICTURE, PIXELS
from tests.reliability.commands import command

LABELS = ("cat", "dog", "<b>cow</b>")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    torch.manual_seed(0)
    options = {"num_classes": 3, "image_size": 16, "depth": 1, "dim": 24, "patch_size": 4}
    model = patchloom.create_model("resmlp_s12", **options).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.3)  # as if trained, so that images get different predictions
    preprocessing = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.25), (16, 16), 0.9)
    return Classifier(model, RunFiles("resmlp_s12", {"num_classes": 3}, preprocessing, None, LABELS))


@pytest.fixture(scope="module")
def run(classifier: Classifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "cats"
    classifier.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def index(run: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Index:
    images = next(iter(files.values())).parent
    return patchloom.index(str(run), [images], out=tmp_path_factory.mktemp("index"), device="cpu").index


@pytest.mark.parametrize("mode", FILES)
def test_all_ways_answer_as_the_command_does(
    mode: str, files: dict[str, Path], run: Path, index: Index, monkeypatch, capsys
) -> None:
    path = files[mode]
    done = command(("predict", run, path, "--json", "--device", "cpu"), monkeypatch, capsys)
    first = json.loads(done.output)[0]  # of an animation, its first frame
    classifier = patchloom.load(run, device="cpu")
    expected = classifier.predict(path)
    # The command shows all frames of an animation at once, and some processors round products of other sizes otherwise.
    assert [name for name, _ in expected] == [name for name, _ in first["answers"]]
    assert [share for _, share in expected] == pytest.approx([share for _, share in first["answers"]], rel=1e-4)
    vector, result = classifier.embed(str(path)), index.search(path)
    for name, image in ways_of(mode, path):
        assert classifier.predict(image) == expected, name
        assert classifier.predict(iter([image])) == [expected], name
        assert classifier.look(image).answers == expected, name
        assert torch.equal(classifier.embed(image), vector), name
        assert torch.equal(classifier.embed([image])[0], vector), name
        hits = index.search(image).hits
        assert [hit[:3] for hit in hits] == [hit[:3] for hit in result.hits], name


def test_different_images_have_different_predictions(files: dict[str, Path], classifier: Classifier) -> None:
    scores = {mode: tuple(share for _, share in classifier.predict(path)) for mode, path in files.items()}
    turned = [scores[f"exif-jpeg-{turn}"] for turn in range(1, 9)]
    assert len(set(turned)) == 8
    assert scores["RGBA"] != scores["RGB"]


def test_one_and_many(files: dict[str, Path], classifier: Classifier) -> None:
    folder = files["RGB"].parent
    single = classifier.predict(files["RGB"])
    assert [name for name, _ in single] == sorted(LABELS, key=dict(single).__getitem__, reverse=True)
    assert classifier.predict([]) == []
    assert classifier.predict([files["RGB"]]) == [single]
    assert classifier.predict(PIXELS, top=1) == single[:1]
    all_of_folder = classifier.predict(folder)
    assert len(all_of_folder) == len(FILES) > 32  # in more than one batch
    assert all_of_folder == classifier.predict(path for path in sorted(files.values()))
    of_files = classifier.predict_files([folder], every=2)  # of two frames the first
    assert all_of_folder == [one.answers for one in of_files]
    batch = np.stack([PIXELS] * 3)
    assert len(classifier.predict(batch)) == len(classifier.look(torch.tensor(batch).permute(0, 3, 1, 2))) == 3
    assert classifier.embed(batch).shape == (3, 24)
    assert classifier.embed(PIXELS).shape == (24,)
    assert classifier.embed(PIXELS, size=32, crop_ratio=1).shape == (24,)


def test_vectors_are_those_of_the_image_set(files: dict[str, Path], classifier: Classifier) -> None:
    val = patchloom.open_data("shapes:count=40,size=16").val
    pictures = [val.read(i) for i in range(len(val))]
    assert torch.equal(classifier.embed(val).vectors, classifier.embed(pictures))
    assert torch.equal(classifier.embed(val, size=32).vectors, classifier.embed(pictures, size=32))
    assert classifier.predict(val) == classifier.predict(pictures)
    with pytest.raises(UsageError, match="workers"):
        classifier.embed(files["RGB"], workers=1)
    with pytest.raises(DataError):
        classifier.embed([])


def test_no_more_than_a_batch_is_read_ahead(classifier: Classifier) -> None:
    requested, most = 0, 0

    def stream():
        nonlocal requested, most
        for _ in range(70):
            requested += 1
            most = max(most, requested - answered)
            yield PICTURE

    answered = 0
    predict_batch = classifier._predict_batch

    def counting(batch, top, tta):
        nonlocal answered
        answered += len(batch)
        return predict_batch(batch, top, tta)

    classifier._predict_batch = counting
    try:
        assert len(classifier.predict(stream())) == 70
    finally:
        del classifier._predict_batch
    assert most == 32


def test_unreadable_files_are_named_and_the_command_continues(tmp_path: Path, classifier: Classifier) -> None:
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(b"")
    PICTURE.save(good)
    with pytest.raises(DataError, match=r"bad\.png"):
        classifier.predict([good, bad])
    first, second = classifier.predict_files([bad, good])
    assert first.error.startswith(f"{bad}: ")
    assert second.answers == classifier.predict(good)
    with pytest.raises(UsageError) as error:
        classifier.predict([good, 3])
    assert "1" in str(error.value)
    assert "int" in str(error.value)
    with pytest.raises(UsageError) as error:
        classifier.predict(good, tops=3)
    assert "tops" in str(error.value)
    assert re.search(r"\btop\b", str(error.value))


def test_search_takes_sets_batches_and_mixed_lists(index: Index, files: dict[str, Path]) -> None:
    batch, val = np.stack([PIXELS, PIXELS]), patchloom.open_data("shapes:count=20,size=16").val
    assert len(index.search(batch, top=2)) == 2
    assert len(index.search(val, top=1)) == len(val)
    assert index.search([]) == []
    mixed = index.search([files["L"], PIXELS, str(files["RGB"]), io.BytesIO(FILES["RGB"])], top=1)
    assert [one.query for one in mixed] == [str(files["L"]), "", str(files["RGB"]), ""]
    assert mixed[1].hits[0].score == mixed[3].hits[0].score
    assert index.search(np.array([str(files["L"])]), top=1)[0] == mixed[0]


def test_editors_see_the_signatures() -> None:
    for function in (Classifier.predict, Classifier.embed, Classifier.look, Index.search):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert function.__doc__
