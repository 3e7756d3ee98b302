"""Class folders in folders of coarser classes, of uneven depth too; and folders that are days or sessions instead."""

from pathlib import Path

import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.labels.nested_folders import find_nesting
from patchloom.data.reading_options import Reading
from patchloom.data.sources.labeled_files import list_labeled
from patchloom.data.sources.source import find_source, open_data
from tests.data.facts import any_has, has_facts

GROCERIES = (
    "Fruit/Apple/Golden-Delicious", "Fruit/Apple/Granny-Smith", "Fruit/Banana", "Fruit/Orange",
    "Packages/Juice/Orange", "Packages/Juice/Bravo", "Packages/Milk/Arla-Milk", "Vegetables/Leek",
)  # fmt: skip
CLASSES = ("Arla-Milk", "Banana", "Bravo", "Fruit/Orange", "Golden-Delicious", "Granny-Smith", "Juice/Orange", "Leek")


def draw(folder: Path, count: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        shade = sum(str(folder).encode()) % 256
        Image.new("RGB", (8, 8), (shade, i * 40, len(folder.name) * 9)).save(folder / f"{i}.png")


def chains(*paths: str) -> list[tuple[str, ...]]:
    return [tuple(path.split("/")) for path in paths]


@pytest.fixture
def groceries(tmp_path):
    for split in ("train", "val"):
        for folder in GROCERIES:
            draw(tmp_path / split / folder, 3 if split == "train" else 1)
    return tmp_path


def test_folders_of_uneven_depth_are_classes_below_levels(groceries):
    data = open_data(groceries)
    assert data.classes.names == CLASSES
    assert list(data.classes.levels) == ["coarse1", "coarse2"]
    middle, numbers = data.classes.levels["coarse1"]
    of = {name: middle[number] for name, number in zip(data.classes.names, numbers, strict=True)}
    assert of["Golden-Delicious"] == "Apple"
    assert of["Banana"] == "Banana"  # the path is shorter: the class itself
    assert of["Juice/Orange"] == "Juice"
    outer, numbers = data.classes.levels["coarse2"]
    assert outer == ("Fruit", "Packages", "Vegetables")
    assert [outer[number] for number in numbers][:2] == ["Packages", "Fruit"]
    (note,) = data.notes
    assert has_facts(note, 8, "coarse1 (6)", "coarse2 (3)", "--classes outermost", 3)


def test_an_inner_name_of_two_parents_is_two_classes(groceries):
    data = open_data(groceries)
    counts = dict.fromkeys(data.classes.names, 0)
    for label in data.train.labels:
        counts[data.classes.names[label]] += 1
    assert counts["Fruit/Orange"] == counts["Juice/Orange"] == 3


def test_either_reading_can_be_asked_for(groceries):
    outermost = open_data(groceries, reading=Reading(classes="outermost"))
    assert outermost.classes.names == ("Fruit", "Packages", "Vegetables")
    assert outermost.classes.levels == {}
    (note,) = outermost.notes
    assert has_facts(note, 3, "--classes innermost", 8)
    for folder in ("a/2023", "a/2024", "b/2023", "b/2024"):
        draw(groceries / "days" / folder)
    assert open_data(groceries / "days").classes.names == ("a", "b")
    innermost = open_data(groceries / "days", reading=Reading(classes="innermost"))
    assert innermost.classes.names == ("a/2023", "a/2024", "b/2023", "b/2024")
    assert innermost.classes.levels == {"coarse": (("a", "b"), (0, 0, 1, 1))}


def test_check_says_what_train_will_say(groceries):
    report = check(groceries)
    assert tuple(report.classes) == CLASSES
    assert report.notes == open_data(groceries).notes
    assert len(check(groceries, reading=Reading(classes="outermost")).classes) == 3


def test_a_folder_with_images_is_a_class_and_what_lies_in_it_belongs_to_it(tmp_path):
    for folder in ("Fruit/Apple", "Fruit/Apple/shop", "Fruit/Apple/home", "Fruit/Pear", "Milk"):
        draw(tmp_path / folder)
    listing = find_source(tmp_path).train
    assert listing.names == ("Apple", "Milk", "Pear")
    assert sorted(listing.labels.tolist()).count(0) == 9


def test_a_class_without_images_is_noticed_where_depths_differ(groceries):
    (groceries / "train" / "Fruit" / "Kiwi").mkdir()
    (groceries / "train" / "Packages" / "Milk" / "Oatly").mkdir()
    (groceries / "train" / "Vegetables" / "Leek" / "none").mkdir()  # in a class
    notes = open_data(groceries).notes
    assert any_has(notes, "train", "'Kiwi', 'Oatly'")


def test_a_folder_of_two_levels_by_one_name_is_told_apart():
    nesting, _ = find_nesting(chains("Fruit/Red/a", "Fruit/Red/b", "Greens/Red/c", "Greens/d"))
    assert nesting is not None
    assert nesting.levels()["coarse1"] == {"a": "Fruit/Red", "b": "Fruit/Red", "c": "Greens/Red", "d": "d"}
    assert nesting.levels()["coarse2"] == {"a": "Fruit", "b": "Fruit", "c": "Greens", "d": "Greens"}


@pytest.mark.parametrize(
    ("train", "val", "why"),
    [
        (["a/2023", "a/2024", "b/2023", "b/2024"], [], (2,)),
        (["a/s1", "a/s2", "b/s3"], ["a/s4", "b/s5"], ("val", "train")),
        (["a/s1", "a/s2", "b/s3", "c"], ["a", "b", "c"], ("val", "train")),
    ],
)
def test_days_cameras_and_sessions_are_no_classes(train, val, why):
    nesting, text = find_nesting(chains(*train), chains(*val))
    assert nesting is None
    inner, outer = len(train), len({path[0] for path in train})
    assert has_facts(text, outer, *why, "--classes innermost", inner)


@pytest.mark.parametrize("train", [["a/x", "b/y"], ["a/img", "b/img"], ["a", "b"]])
def test_nothing_is_said_where_both_readings_are_the_same(train):
    assert find_nesting(chains(*train), chains(*train)) == (None, "")


def test_files_are_listed_with_the_class_that_training_reads(groceries):
    draw(groceries / "train" / "Fruit" / "Banana" / "ripe", 1)
    Image.new("RGB", (8, 8)).save(groceries / "train" / "loose.png")
    innermost = dict(list_labeled(groceries, CLASSES).files)
    assert innermost[str(groceries / "val" / "Packages" / "Juice" / "Orange" / "0.png")] == "Juice/Orange"
    assert innermost[str(groceries / "train" / "Fruit" / "Banana" / "ripe" / "0.png")] == "Banana"
    assert innermost[str(groceries / "train" / "loose.png")] == ""
    result = list_labeled(groceries, ("Fruit", "Packages", "Vegetables"))  # a run trained at coarse2
    outermost = dict(result.at(result.level))
    assert outermost[str(groceries / "val" / "Packages" / "Juice" / "Orange" / "0.png")] == "Packages"
    middle = dict(list_labeled(groceries, CLASSES, level="coarse1").at("coarse1"))
    assert middle[str(groceries / "val" / "Packages" / "Juice" / "Orange" / "0.png")] == "Juice"
