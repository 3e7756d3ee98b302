"""Several files and folders as one data set, and what is said of pictures without labels."""

import zipfile

import pytest
from PIL import Image

from patchloom.data.checking.survey import survey
from patchloom.data.labels.unlabeled import missing_labels
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data
from patchloom.data.sources.specs import join_specs, split_specs
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts, has_facts


def draw(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (sum(path.encode()) % 256, len(path), 3)).save(root / path)
    return root


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def labels_of(listing):
    return {
        listing.images.key(int(row)): listing.names[label]
        for row, label in zip(listing.rows, listing.labels, strict=True)
    }


def test_one_string_or_a_list(tmp_path):
    draw(tmp_path, "cats/0.png", "my dogs/0.png")
    given = join_specs(["cats", "my dogs"])
    assert given == "cats 'my dogs'"
    assert split_specs(given) == split_specs(["cats", "my dogs"]) == ["cats", "my dogs"]
    assert split_specs("my dogs") == ["my dogs"]
    assert split_specs("cats none") == ["cats none"]
    assert join_specs(["my dogs"]) == "my dogs"
    with pytest.raises(UsageError):
        split_specs([])


def test_folders_of_images_are_classes(tmp_path):
    draw(tmp_path, "cats/0.png", "cats/1.png", "dogs/0.png", "dogs/1.png")
    source = find_source("cats dogs")
    assert source.name.startswith("cats, dogs (")
    assert labels_of(source.train) == {
        "cats/0.png": "cats", "cats/1.png": "cats", "dogs/0.png": "dogs", "dogs/1.png": "dogs",
    }  # fmt: skip
    (note,) = source.notes
    assert has_facts(note, 2)
    assert source.train.images.where(2) == "dogs/0.png"
    assert survey(source).decoded == 4
    assert survey(source).decoded == 0


def test_folders_called_like_splits_are_splits(tmp_path):
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        draw(tmp_path / "a", *(f"{split}/{name}/{i}.png" for name in ("cat", "dog") for i in range(count)))
    data = open_data(["a/train", "a/val"])
    assert data.name.startswith("train, val (")
    assert (len(data.train), len(data.val), data.test) == (6, 4, None)
    data = open_data(["a/test", "a/val", "a/train"])
    assert (len(data.train), len(data.val), len(data.test)) == (6, 4, 2)


def test_data_sets_are_merged_by_class_name(tmp_path):
    draw(tmp_path / "2023", "cat/0.png", "cat/1.png", "dog/0.png")
    draw(tmp_path / "b", "dog/0.png", "owl/0.png")
    with zipfile.ZipFile("2024.zip", "w") as archive:
        for name in ("dog/0.png", "owl/0.png"):
            archive.write(f"b/{name}", name)
    source = find_source(["2023", "2024.zip"])
    assert labels_of(source.train) == {
        "2023/cat/0.png": "cat", "2023/cat/1.png": "cat", "2023/dog/0.png": "dog",
        "2024/dog/0.png": "dog", "2024/owl/0.png": "owl",
    }  # fmt: skip
    (note,) = source.notes
    assert has_facts(note, 2)
    assert [source.train.images.read(i).size for i in range(5)] == [(8, 8)] * 5


def test_mixtures_are_refused(tmp_path):
    draw(tmp_path, "a/cat/0.png", "a/dog/0.png", "b/0.png", "c/train/cat/0.png", "c/train/dog/0.png", "c/val/cat/1.png")
    with pytest.raises(UsageError, match=r"\bb\b"):
        find_source(["a", "b"])
    with pytest.raises(DataError, match=r"\bc\b.*\bval\b"):
        find_source(["a", "c"])
    with pytest.raises(UsageError, match=facts("--labels", 2)):
        find_source(["a", "b"], reading=Reading(labels="l.csv"))
    with pytest.raises(UsageError, match="none"):
        find_source(["a", "none"])


def test_several_parquet_files_are_one_set(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw(tmp_path, "0.png", "1.png")
    for name in ("train", "test"):
        images = [(tmp_path / f"{i}.png").read_bytes() for i in range(2)]
        pq.write_table(pa.table({"image": images, "label": ["a", "b"]}), f"x-{name}.parquet")
    source = find_source(["x-train.parquet", "x-test.parquet"])
    assert source.name == "x-train.parquet, x-test.parquet (parquet)"
    assert (len(source.train), len(source.test)) == (2, 2)


# Pictures without labels ----------------------------------------------------------------------------------------------


def test_a_flat_folder_is_told_the_ways_on(tmp_path):
    draw(tmp_path / "photos", "cat_1.png", "cat_2.png", "dog_1.png", "dog_2.png")
    with pytest.raises(DataError) as error:
        open_data("photos")
    options = ("--labels", "--label-pattern '{label}_*'", "--recipe dino")
    assert has_facts(error.value, "photos", 4, *options, 2, "'cat'", "'dog'")
    draw(tmp_path / "plain", "IMG_1.png", "IMG_2.png")
    with pytest.raises(DataError, match=facts("--label-pattern '{label}_*'")):
        open_data("plain")


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading(labels="l.csv", label_pattern="{label}_*"), facts("--labels", "--label-pattern")),
        (Reading(label_column="x"), facts("--label-column", "--labels")),
        (Reading(label_pattern="{label}_*"), "--label-pattern"),
    ],
)
def test_options_that_nobody_would_read(tmp_path, reading, said):
    draw(tmp_path, "a/cat/0.png")
    with pytest.raises(UsageError, match=said):
        find_source("a" if reading.label_pattern is None else "digits", reading=reading)


def test_a_folder_with_masks_says_what_it_is_for(tmp_path):
    draw(tmp_path / "seg", "images/0.png", "images/1.png")
    for i in range(2):
        (tmp_path / "seg" / "masks").mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "seg" / "masks" / f"{i}.png")
    assert has_facts(missing_labels(find_source("seg").train), "--task segment")


def test_classes_in_file_names_are_counted_in_all_of_them(tmp_path, monkeypatch):
    """Names are sorted: the first of them are of the first classes alone."""
    monkeypatch.setattr("patchloom.data.labels.unlabeled._SAMPLED_NAMES", 24)
    draw(tmp_path / "photos", *(f"{breed}_{number}.png" for breed in "abcdefghijkl" for number in range(8)))
    with pytest.raises(DataError, match=facts(12)):
        open_data(str(tmp_path / "photos"))
