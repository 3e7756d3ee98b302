"""Classes from file names."""

import pytest
from PIL import Image

from patchloom.data.labels.label_pattern import read_pattern, suggest_pattern
from patchloom.data.sources.labeled_folder import open_by_pattern
from patchloom.data.trees.tree import FolderTree
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts, has_facts


def draw(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / path)
    return FolderTree(root)


@pytest.mark.parametrize(
    ("pattern", "path", "label"),
    [
        ("{label}_*.jpg", "american_bulldog_12.JPG", "american_bulldog"),
        ("{label}_*.jpg", "cat_1.png", ""),
        ("{label}-{}.png", "cat-1-2.png", "cat-1"),
        ("img_*_{label}.*", "img_001_great_dane.jpeg", "great_dane"),
        ("{label}*.png", ".png", ""),
        ("?_{label}.*", "12_cat.png", ""),
        ("{label}_*", "deep/er/cat_1.png", "cat"),
        ("*/{label}/*", "a/cat/1.png", "cat"),
        (r"^(?P<label>[^_]+)_", "x/cat_1_2.png", "cat"),
        (r"(?P<label>\D+)\d", "cat12.png", "cat"),
    ],
)
def test_patterns(pattern, path, label):
    assert read_pattern(pattern).label(path) == label


@pytest.mark.parametrize("pattern", ["cat_*", "{label}_{label}", "(?P<label>[a-z)"])
def test_patterns_that_are_none(pattern):
    with pytest.raises(UsageError, match="--label-pattern"):
        read_pattern(pattern)


def test_flat_and_nested(tmp_path):
    tree = draw(tmp_path / "photos", "cat_1.png", "cat_2.png", "day2/dog_1.png", "dog_2.png", "README.png")
    source = open_by_pattern(tree, "{label}_*.png")
    assert source.name.startswith("photos (")
    assert (source.train.names, source.train.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    first, second = source.notes
    assert has_facts(first, "'{label}_*.png'", 2)
    assert has_facts(second, 5, "'{label}_*.png'", "README.png")
    with pytest.raises(DataError, match=facts(5, "'{label}_*.png'", "README.png")):
        open_by_pattern(tree, "{label}_*.png", strict=True)
    with pytest.raises(DataError, match=facts("--label-pattern", "'{label}=*'", "README.png")):
        open_by_pattern(tree, "{label}=*")
    with pytest.raises(DataError, match=facts("'README.png'")):
        open_by_pattern(tree, "{label}")


def test_folders_called_train_and_val_are_splits(tmp_path):
    tree = draw(tmp_path, "train/cat_1.png", "train/cat_2.png", "train/dog_1.png", "val/dog_1.png")
    source = open_by_pattern(tree, "{label}_*")
    assert (len(source.train), len(source.val)) == (3, 1)


def test_suggestions():
    assert suggest_pattern(["cat_1.png", "cat_2.png", "dog_1.png", "dog_2.png"]) == ("{label}_*", ["cat", "dog"])
    assert suggest_pattern(["1-cat.png", "2-cat.png", "3-dog.png", "4-dog.png"]) == ("*-{label}.*", ["cat", "dog"])
    assert suggest_pattern(["cat.1.jpg", "cat.2.jpg", "dog.1.jpg", "dog.2.jpg"]) == ("{label}.*.*", ["cat", "dog"])
    assert suggest_pattern(["cat1.png", "cat2.png", "dog1.png", "dog2.png"]) == (r"(?P<label>\D+)\d", ["cat", "dog"])
    assert suggest_pattern([f"IMG_{i}.jpg" for i in range(9)]) is None
    assert suggest_pattern(["a.png", "b.png"]) is None
