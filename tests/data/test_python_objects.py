"""Data that Python code passes: a Dataset, arrays, lists, tables and dicts of splits are read like files."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.data.sources.python_objects import PythonData
from patchloom.data.sources.source import find_source, open_data
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import refused

COUNT = 24
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 20, 3), dtype=np.uint8)
LABELS = np.arange(COUNT) % 3
NAMES = ("cat", "dog", "eel")
SMALL: dict[str, Any] = {
    "model": "resmlp_s12", "size": 16, "epochs": 1, "batch": 4, "device": "cpu", "workers": 0,
    "set": {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4},
}  # fmt: skip


class Numbered(torch.utils.data.Dataset):
    """Images with class numbers; counts how often an image is read."""

    def __init__(self, **attributes: Any) -> None:
        self.reads = 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return torch.from_numpy(PIXELS[index]).permute(2, 0, 1), int(LABELS[index])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / "images" / f"{i % 2}" / f"{i}.png") for i in range(COUNT)]
    for i, path in enumerate(paths):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[i]).save(path)
    return paths


def names_of(labels: np.ndarray) -> list[str]:
    return [NAMES[label] for label in labels]


def forms(files: list[str]) -> dict[str, Any]:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    table = {"file_path": files, "species": names_of(LABELS), "weight": np.linspace(0, 1, COUNT)}
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    return {
        "arrays": (PIXELS, np.array(NAMES)[LABELS]),
        "tensors": (torch.from_numpy(PIXELS).permute(0, 3, 1, 2), names_of(LABELS)),
        "floats": (PIXELS / 255.0, names_of(LABELS)),
        "lists": (images, names_of(LABELS)),
        "pairs": list(zip(images, names_of(LABELS), strict=True)),
        "paths": list(zip(files, names_of(LABELS), strict=True)),
        "bytes": [(Path(file).read_bytes(), NAMES[label]) for file, label in zip(files, LABELS, strict=True)],
        "dataset": Numbered(classes=list(NAMES)),
        "pandas": pandas.DataFrame(table),
        "pyarrow": pyarrow.table(table),
        "images in a table": pandas.DataFrame({"image": images, "label": names_of(LABELS)}),
    }


def test_every_form_gives_the_same_images_and_classes(files: list[str]) -> None:
    for form, data in forms(files).items():
        source = find_source(data)
        train = source.train
        assert train.names == NAMES, form
        assert train.labels.tolist() == LABELS.tolist(), form
        for row in (0, COUNT - 1):
            assert np.array_equal(np.asarray(train.images.read(row)), PIXELS[row]), form


def test_numbers_are_classes_in_their_order() -> None:
    source = find_source((PIXELS, LABELS * 5 - 5))
    assert source.train.names == ("-5", "0", "5")
    assert source.train.labels.tolist() == LABELS.tolist()


def test_images_without_targets() -> None:
    assert (find_source(PIXELS).train.labels < 0).all()
    some = find_source([(image, None if i else "cat") for i, image in enumerate(PIXELS)])
    assert (some.train.labels < 0).sum() == COUNT - 1


@pytest.mark.parametrize("form", ["names", "vectors", "tensors"])
def test_several_labels_per_image(form: str) -> None:
    hot = np.stack([LABELS > 0, LABELS == 1], axis=1).astype(int)
    targets: dict[str, Any] = {
        "names": [[name for name, applies in zip("01", row, strict=True) if applies] for row in hot],
        "vectors": hot,
        "tensors": [torch.from_numpy(row) for row in hot],
    }
    train = find_source((PIXELS, targets[form])).train
    assert train.targets.kind == "labels"
    assert train.names == ("0", "1")
    assert np.array_equal(train.targets.values, hot)


def test_numbers() -> None:
    weights = np.linspace(0, 3, COUNT)
    train = find_source((PIXELS, weights)).train
    assert (train.targets.kind, train.targets.values.shape) == ("numbers", (COUNT, 1))
    assert np.allclose(train.targets.values[:, 0], weights)
    pairs = find_source([(image, [0.5, 2.0]) for image in PIXELS]).train.targets
    assert (pairs.kind, pairs.values.shape) == ("numbers", (COUNT, 2))


def test_a_dict_has_splits_of_any_form(files: list[str], tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.fromarray(PIXELS[0]).save(tmp_path / "val" / name / "a.png")
    data = {"train": (PIXELS, names_of(LABELS)), "valid": str(tmp_path / "val"), "test": [(files[0], "cat")]}
    splits = open_data(data)
    assert [len(split) for split in (splits.train, splits.val, splits.test)] == [COUNT, 3, 1]
    assert splits.test.classes.names == NAMES


def test_a_table_has_splits_and_a_chosen_column(files: list[str]) -> None:
    pandas = pytest.importorskip("pandas")
    split = ["train"] * 16 + ["val"] * 4 + ["test"] * 4
    table = pandas.DataFrame({"path": files, "shade": names_of(LABELS[::-1]), "kind": names_of(LABELS), "split": split})
    with refused(UsageError, "shade", "kind", "label_column"):
        find_source(table)
    source = find_source(table, reading=patchloom.Reading(label_column="kind"))
    assert [len(listing) for listing in source.listings.values()] == [16, 4, 4]
    with refused(UsageError, "kinds", "kind"):
        find_source(table, reading=patchloom.Reading(label_column="kinds"))


@pytest.mark.parametrize(
    ("first", "second", "kind", "values"),
    [
        ([1, 0, None], [True, False, True], "labels", [[1, 1], [0, 0], [np.nan, 1]]),
        ([1.5, 2, None], [3, 4, 5], "numbers", [[1.5, 3], [2, 4], [np.nan, 5]]),
        (["cat", "dog", None], ["wet", None, "wet"], "labels", [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
        ([1, 2, 3], ["a", "b", "c"], None, None),
    ],
)
def test_several_columns_of_a_table(first: Any, second: Any, kind: Any, values: Any, files: list[str]) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"path": files[:3], "first": first, "second": second, "third": [1, 2, 3]})
    reading = patchloom.Reading(label_column="first, second")
    if kind is None:
        with refused(UsageError, "first", "second"):
            find_source(table, reading=reading)
        return
    train = find_source(table, reading=reading).train
    assert (train.targets.kind, len(train.names)) == (kind, len(values[0]))
    assert np.array_equal(train.targets.values, np.array(values, np.float32), equal_nan=True)
    with refused(UsageError, "fourth"):
        find_source(table, reading=patchloom.Reading(label_column="first,fourth"))


def test_the_targets_that_a_dataset_lists_are_used_if_its_items_confirm_them() -> None:
    listed, wrong = Numbered(targets=LABELS.tolist()), Numbered(targets=(LABELS + 1).tolist())
    assert find_source(listed).train.labels.tolist() == find_source(wrong).train.labels.tolist() == LABELS.tolist()
    assert listed.reads < wrong.reads


def test_equal_data_have_equal_names() -> None:
    name = PythonData((PIXELS, LABELS))
    assert name == PythonData((PIXELS.copy(), LABELS.tolist())) == pickle.loads(pickle.dumps(name))
    changed = PIXELS.copy()
    changed[7, 3, 3, 0] ^= 1
    twice = {"train": (PIXELS, LABELS), "val": (PIXELS, LABELS)}
    others = [(changed, LABELS), (PIXELS, LABELS[::-1]), (PIXELS[:-1], LABELS[:-1]), twice]
    assert len({name, *map(PythonData, others)}) == 5


def test_a_random_dataset_is_noted_and_keeps_its_name() -> None:
    class Random(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(3, 20, 20), int(LABELS[index])

    assert PythonData(Random()) == PythonData(Random())
    assert any("transform=" in note for note in find_source(Random()).notes)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ((PIXELS, LABELS[:-1]), (COUNT, COUNT - 1)),
        ([], ("no data",)),
        ((PIXELS,), ("tuple", "(images, targets)")),
        ([("a.jpg", 1), "b.jpg"], ("(image, target)",)),
        ({"train": (PIXELS, LABELS), "dev": (PIXELS, LABELS)}, ("dev", "val")),
        ({"val": (PIXELS, LABELS)}, ("train",)),
        (torch.utils.data.DataLoader(Numbered()), ("DataLoader", "dataset")),
        (3, ("int", "Dataset")),
        ((PIXELS, [*"ab"] * 11 + [1, 2]), ("names", "numbers")),
        ((PIXELS, [{}] * COUNT), ("image 0", "dict")),
    ],
)
def test_other_objects_are_refused(data: Any, facts: tuple[Any, ...]) -> None:
    with refused(UsageError, *facts):
        find_source(data)


def test_options_about_files_are_refused() -> None:
    with refused(UsageError, "label_pattern"):
        find_source((PIXELS, LABELS), reading=patchloom.Reading(label_pattern="{label}_*"))
    with refused(UsageError, "label_column"):
        find_source((PIXELS, LABELS), reading=patchloom.Reading(label_column="a"))


def test_an_item_that_fails_is_named() -> None:
    class Failing(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 5:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    images = find_source(Failing(targets=LABELS)).train.images
    with refused(DataError, "Failing", 5, "the disk is gone"):
        images.read(5)
    normalized = find_source((PIXELS / 127.5 - 1, LABELS)).train.images
    with refused(DataError, "image 3", "0…1"):
        normalized.read(3)


def test_a_run_on_objects_is_trained_resumed_evaluated_and_reported(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"train": (PIXELS, LABELS), "val": Numbered(), "test": (PIXELS[:6], LABELS[:6])}
    run = patchloom.train(data, out="run", **SMALL | {"workers": 2})
    assert "patchloom.evaluate('run', data, split='test')" in capsys.readouterr().out
    assert run.metrics["images"] == COUNT
    assert patchloom.evaluate("run", data).values()["run"]["top1"] == run.metrics["top1"]
    assert patchloom.evaluate("run", data, split="test").values()["run"]["images"] == 6
    assert patchloom.load("run").evaluate((PIXELS, LABELS)).values()["top1"] == run.metrics["top1"]
    assert patchloom.check(data).splits == {"train": COUNT, "val": COUNT, "test": 6}
    assert set(dict(patchloom.probe("run", data, knn=(3,))["run"])) >= {"knn3_top1"}
    again = patchloom.train(data, out="run", **SMALL | {"epochs": 2})  # more epochs
    assert again.outcome.progress.epoch == 2
    other = data | {"train": (PIXELS[::-1], LABELS)}
    with refused(DataError, "run", str(PythonData(other))):
        patchloom.train(other, out="run", **SMALL)
    with refused(UsageError, "python:", "patchloom.evaluate"):  # the command line cannot name objects
        open_data(str(PythonData(data)))


def test_the_images_that_a_run_held_out_are_those_evaluated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flat = np.repeat(np.arange(COUNT, dtype=np.uint8), 20 * 20 * 3).reshape(PIXELS.shape)  # all nearly equal
    run = patchloom.train((flat, LABELS), **SMALL)
    assert run.folder.parent == Path("runs")
    held_out = patchloom.evaluate(run.folder, (flat, LABELS)).evaluations[run.folder.name]
    assert len(held_out.report.index) == run.metrics["images"] < COUNT


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the arrays, by their names."""
    folder = tmp_path_factory.mktemp("classified") / "run"
    patchloom.train((PIXELS, np.array(NAMES)[LABELS]), out=str(folder), **SMALL)
    return folder


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
@pytest.mark.parametrize("form", ["arrays", "dataset", "files"])
def test_training_and_evaluation_hold_out_the_same_images(
    task: str, form: str, files: list[str], tmp_path: Path
) -> None:
    pixels = PIXELS.copy()
    pixels[COUNT // 2 :] = pixels[: COUNT // 2]  # copies, which stay on one side of the split of scanned files
    targets: Any = {
        "classify": LABELS.tolist(),
        "multilabel": np.stack([LABELS > 0, LABELS == 1], axis=1).astype(int).tolist(),
        "regress": np.linspace(0.1, 3, COUNT).tolist(),
    }[task]
    for path, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(path)
    images = {"arrays": pixels, "dataset": list(pixels), "files": files}[form]
    data: Any = list(zip(images, targets, strict=True))
    if form == "arrays":
        data = (images, targets)
    elif form == "dataset":
        data = Pairs(data)
    run = patchloom.train(data, out=str(tmp_path / "run"), task=task, **SMALL)
    metric = {"classify": "top1", "multilabel": "map", "regress": "scaled_mae"}[task]
    values = patchloom.evaluate(run.folder, data).values()["run"]
    stored = patchloom.evaluate(run.folder).values()["run"]
    assert values["images"] == stored["images"] == run.metrics["images"] < COUNT
    assert values[metric] == pytest.approx(stored[metric], rel=1e-4)
    assert {metric, "images"} <= values.keys() & stored.keys() & run.metrics.keys()
    if task != "classify":
        with refused(UsageError, "tta"):
            patchloom.evaluate(run.folder, data, tta=True)
        both = patchloom.compare([run.folder, shutil.copytree(run.folder, tmp_path / "copy")])
        assert both.values()["copy"][metric] == stored[metric]
        assert both.scores.lines


class Pairs(torch.utils.data.Dataset):
    """A Dataset of the items of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_objects_are_indexed_with_their_classes(classified: Path, files: list[str], tmp_path: Path) -> None:
    counts = {name: int((number == LABELS).sum()) for number, name in enumerate(NAMES)}
    vectors = patchloom.load(classified, device="cpu").embed(PIXELS)
    vectors = torch.nn.functional.normalize(vectors)
    for form, data in forms(files).items():
        out = tmp_path / form.replace(" ", "_")
        built = patchloom.index(str(classified), data, out=out, device="cpu", reading=column_of(form))
        assert (built.embedded, built.index.labels) == (COUNT, counts), form
        first = built.index.search(PIXELS[5], top=1).hits[0]
        assert first.score == pytest.approx(1, abs=1e-4), form
        assert first.label == NAMES[LABELS[5]], form
        if form in ("paths", "pandas", "pyarrow"):
            assert first.path == files[5], form
        else:
            assert first.path.startswith("python:"), form
            assert first.path.endswith("/5"), form
        again = patchloom.index(str(classified), data, out=out, device="cpu", reading=column_of(form))
        assert (again.embedded, again.unchanged) == (0, COUNT), form
    assert torch.allclose(vectors[5] @ vectors[5], torch.tensor(1.0))


def column_of(form: str) -> patchloom.Reading:
    return patchloom.Reading(label_column="species") if form in ("pandas", "pyarrow") else patchloom.Reading()


def test_a_path_alone_is_indexed_and_what_cannot_be_is_refused(classified: Path, files: list[str], tmp_path) -> None:
    folder = str(Path(files[0]).parent)
    assert patchloom.index(str(classified), folder, out=tmp_path / "one", device="cpu").embedded == COUNT // 2
    with refused(UsageError, "gone.png"):
        patchloom.index(str(classified), ["gone.png"], out=tmp_path / "two", device="cpu")
    with refused(UsageError, "int"):
        patchloom.index(str(classified), 3, out=tmp_path / "two", device="cpu")
    with refused(UsageError, 24, 23):
        patchloom.index(str(classified), (PIXELS, LABELS[1:]), out=tmp_path / "two", device="cpu")


def test_look_takes_data_with_targets(classified: Path, files: list[str]) -> None:
    model = patchloom.load(classified, device="cpu")
    expected = [one.answers for one in model.look(list(PIXELS))]
    truths = names_of(LABELS)
    for form, data in forms(files).items():
        if form in ("pandas", "pyarrow"):  # two columns besides the paths
            data = data[["file_path", "species"]] if form == "pandas" else data.select(["file_path", "species"])
        looks = model.look(data)
        assert [one.truth for one in looks] == truths, form
        assert [one.answers for one in looks] == expected, form
        own = patchloom.look(model.model, model.preprocessing, data, model.labels, calibration=model.calibration)
        assert [one.right for one in own] == [one.right for one in looks], form
    assert [one.truth for one in model.look(list(PIXELS))] == [""] * COUNT
    with refused(UsageError, "patchloom.load", str(classified)):
        patchloom.look(str(classified), None, PIXELS)
    with refused(UsageError, "dict"):
        model.look({"train": (PIXELS, LABELS)})
