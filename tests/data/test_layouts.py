"""Public datasets as they are downloaded: how each is read, or the question that is asked."""

import contextlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from patchloom.data.annotations import evidence
from patchloom.data.annotations.evidence import Evidence
from patchloom.data.annotations.mask_classes import has_masks, ignored_number, of_masks
from patchloom.data.checking.check import check
from patchloom.data.datasets import Source
from patchloom.data.labels.unlabeled import missing_labels, task_of_data
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data, split_source
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from tests.data.facts import any_has, facts, has_facts
from tests.data.layouts import LAYOUTS, Layout, masks, photos, write, yolo_files

READ = [layout for layout in LAYOUTS if layout.error is None]
ASKED = [layout for layout in LAYOUTS if layout.error is not None]


def by_name(layout: Layout) -> str:
    return layout.name


@pytest.mark.parametrize("layout", READ, ids=by_name)
def test_a_public_dataset_is_read_as_a_person_expects(layout: Layout, tmp_path) -> None:
    source = find_source(layout.build(tmp_path))
    task, _ = task_of_data(source)
    assert layout.reading in source.name.rpartition(" (")[2], source
    assert task == layout.task, source
    images = source.train.images
    names = images.object_names or source.train.names
    if task == "segment":
        names = of_masks(source).train.names
    assert (names if isinstance(layout.classes, tuple) else len(names)) == layout.classes
    assert {split: len(listing) for split, listing in source.listings.items()} == layout.splits
    assert (images.mask_ignore if task == "segment" and has_masks(images) else None) == layout.ignore
    for fact in layout.note:
        assert any_has(source.notes, fact), source.notes
    assert not source.faults


@pytest.mark.parametrize("layout", ASKED, ids=by_name)
def test_what_may_be_read_in_several_ways_is_a_question_with_commands(layout: Layout, tmp_path) -> None:
    given = layout.build(tmp_path)
    assert layout.error is not None
    with pytest.raises(layout.error) as raised:
        open_data(given)
    for part in layout.says:
        assert part in str(raised.value)


# What is given goes before what is found ------------------------------------------------------------------------------


def built(name: str, root: Path) -> Path:
    return next(layout for layout in LAYOUTS if layout.name == name).build(root)


@pytest.mark.parametrize(
    ("name", "options", "reading", "splits"),
    [
        ("oxford_pets", {"masks": "annotations/trimaps"}, "masks", {"train": 6}),
        ("oxford_pets", {"boxes": "annotations/xmls"}, "VOC boxes", {"train": 4}),
        ("oxford_pets", {"label_pattern": "{label}_*", "images": "images"}, "file names", {"train": 6}),
        ("pascal_voc", {"boxes": "VOC2012/Annotations"}, "VOC boxes", {"train": 2, "val": 2}),
        ("pascal_voc", {"masks": "VOC2012/SegmentationClass"}, "masks", {"train": 2, "val": 1}),
        ("busi", {"masks": "."}, "masks", {"train": 4}),
        ("coco128_with_two_label_sets", {"boxes": "labels_coco91"}, "YOLO boxes", {"train": 2, "val": 2}),
        ("coco128_with_two_folders", {"boxes": "object_detection/labels"}, "YOLO boxes", {"train": 2, "val": 2}),
        ("camvid_segnet", {"masks": "{split}annot", "images": "{split}"}, "masks", None),
        ("camvid_segnet", {"masks": "{split}annot"}, "masks", None),
        ("camvid_segnet", {"masks": "trainannot"}, "masks", {"train": 2}),
        ("camvid_segnet", {"images": "train", "masks": "trainannot"}, "masks", {"train": 2}),
        ("coco", {"boxes": "annotations/instances_{split}2017.json"}, "COCO boxes", {"train": 2, "val": 1}),
        ("coco", {"boxes": "annotations/instances_val2017.json"}, "COCO boxes", {"train": 1}),
        ("penn_fudan", {"images": "PNGImages", "masks": "PedMasks"}, "masks", {"train": 3}),
        ("cub200", {"images": "images"}, "class folders", {"train": 6}),
    ],
)
def test_options_name_the_folders_of_any_layout(name, options, reading, splits, tmp_path) -> None:
    source = find_source(built(name, tmp_path), reading=Reading(**options))
    assert reading in source.name.rpartition(" (")[2]
    expected = splits or {"train": 2, "val": 1, "test": 1}
    assert {split: len(listing) for split, listing in source.listings.items()} == expected


def test_folders_elsewhere_are_given_by_their_path(tmp_path) -> None:
    photos(tmp_path / "a", "one.jpg", "two.jpg")
    masks(tmp_path / "b", "one.png", "two.png")
    source = find_source(tmp_path / "a", reading=Reading(images=tmp_path / "a", masks=tmp_path / "b"))
    assert len(source.train) == 2
    assert source.train.images.mask(0) is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"masks": "nowhere"}, facts("--masks", "nowhere")),
        ({"images": "nowhere"}, facts("--images", "nowhere")),
        ({"masks": "annotations/trimaps", "boxes": "annotations/xmls"}, facts("--masks", "--boxes")),
        ({"boxes": "annotations/trimaps", "images": "images"}, facts("--boxes", "annotations/trimaps")),
        ({"masks": "annotations/list.txt"}, "list.txt"),
        ({"boxes": "annotations/xmls", "ignore": 3}, "--ignore"),
        ({"masks": "annotations/trimaps", "names": "nowhere.txt"}, facts("--names", "nowhere.txt")),
        ({"images": "images", "ignore": 3}, "--ignore"),
    ],
)
def test_options_that_name_nothing_are_refused(options, says, tmp_path) -> None:
    with pytest.raises(UsageError, match=says):
        find_source(built("oxford_pets", tmp_path), reading=Reading(**options))


@pytest.mark.parametrize("ignore", [-1, 256, "11"])
def test_an_ignored_value_is_one_of_a_mask(ignore) -> None:
    with pytest.raises(UsageError, match="ignore"):
        Reading(ignore=ignore)


# Masks ----------------------------------------------------------------------------------------------------------------


def segmented(root: Path, values: Sequence[int], classes: str = "", **options: object) -> Source:
    for split in ("train", "val", "test"):
        photos(root, f"images/{split}/a.jpg")
        masks(root, f"masks/{split}/a.png", values=values)
    if classes:
        write(root, "classes.txt", classes)
    return of_masks(find_source(root, reading=Reading(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "names", "options", "classes", "numbers"),
    [
        ((0, 1, 2), "road\ncar\nVoid\n", {}, ("road", "car"), [0, 1, 2]),
        ((0, 1, 2), "Unlabeled\nroad\ncar\n", {}, ("road", "car"), [0, 1, 255]),
        ((0, 1, 2, 255), "road\nignore\ncar\n", {}, ("road", "car"), [0, 1, 255]),
        ((0, 1, 2), "road\ncar\nsky\n", {"ignore": 1}, ("road", "sky"), [0, 1, 255]),
        ((0, 1, 2), "road\ncar\n", {"ignore": 0}, ("road", "car"), [0, 1, 255]),
        ((0, 1, 11), "", {"ignore": 11}, ("0", "1"), [0, 1, 11]),
        ((0, 1, 2), "", {"ignore": 0}, ("1", "2"), [0, 1, 255]),
        ((0, 255), "", {}, ("background", "foreground"), [0, 1]),
        ((0, 255), "ground\nroad\n", {}, ("ground", "road"), [0, 1]),
        ((0, 1, 255), "", {}, ("0", "1"), [0, 1, 255]),
    ],
)
def test_any_value_may_be_ignored(values, names, options, classes, numbers, tmp_path) -> None:
    source = segmented(tmp_path, values, names, **options)
    mask = source.train.images.mask(0)
    assert mask is not None
    assert (source.train.names, np.unique(mask.classes).tolist()) == (classes, numbers)
    ignored = ignored_number(source.train.images)
    assert {number for number in numbers if number != ignored} == set(range(len(classes)))


def test_masks_of_test_need_no_names(tmp_path) -> None:
    splits = split_source(segmented(tmp_path, (0, 1, 2)), labeled=False)
    assert splits.test is not None
    assert not any_has(splits.notes, "test")


def test_names_of_masks_are_given_in_a_file(tmp_path) -> None:
    write(tmp_path, "my names.txt", "road\ncar\nsky\n")
    source = segmented(tmp_path / "data", (0, 1, 2), "a\nb\nc\n", names=tmp_path / "my names.txt")
    assert source.train.names == ("road", "car", "sky")


def test_masks_that_are_named_so_and_fit_nothing_are_not_classes(tmp_path) -> None:
    photos(tmp_path, "train/a.png", "train/b.png", "trainannot/c.png", "trainannot/d.png")
    with pytest.raises(DataError, match=facts("trainannot", "--images", "--masks")):
        find_source(tmp_path)
    masks(tmp_path / "other", "masks/a.png", "masks/b.png")
    with pytest.raises(UsageError, match="--images"):
        find_source(tmp_path / "other")


def test_masks_saved_as_jpeg_are_said(tmp_path) -> None:
    """As Kvasir-SEG has them."""
    photos(tmp_path, "images/a.jpg", "images/b.jpg", "masks/a.jpg", "masks/b.jpg")
    with pytest.raises(DataError, match=facts("images", "masks", "JPEG", "PNG")):
        find_source(tmp_path)


def test_classes_called_mask_stay_classes(tmp_path) -> None:
    """As face-mask datasets have them, with images of the same names."""
    photos(tmp_path, *(f"{name}/{i}.png" for name in ("with_mask", "without_mask") for i in range(3)))
    assert find_source(tmp_path).train.names == ("with_mask", "without_mask")


def test_drawings_of_few_values_stay_classes(tmp_path) -> None:
    for name in ("circle", "square"):
        masks(tmp_path, *(f"{name}/{i}.png" for i in range(3)))
    assert find_source(tmp_path).train.names == ("circle", "square")


@pytest.mark.parametrize("name", ["camvid_segnet", "roboflow_voc", "yolo_v5", "coco"])
def test_an_archive_of_masks_or_boxes_is_not_read_as_classes(name, tmp_path) -> None:
    root = built(name, tmp_path / "data")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, file.relative_to(root))
    with pytest.raises(UsageError, match=facts("data.zip")):
        find_source(tmp_path / "data.zip")


# Boxes ----------------------------------------------------------------------------------------------------------------


def test_boxes_of_resized_images_are_scaled_and_said(tmp_path) -> None:
    root = built("voc_boxes", tmp_path)
    photos(root, *(f"JPEGImages/{file.stem}.jpg" for file in (root / "Annotations").iterdir()), size=(64, 48))
    source = find_source(root)
    assert source.train.images.boxes(0).tolist() == [[2, 4, 24, 28, 1], [0, 0, 18, 18, 0]]
    assert any_has(source.notes, 4, 2)
    assert not check(root).faults


def test_boxes_of_images_of_another_shape_are_a_fault(tmp_path) -> None:
    root = built("voc_boxes", tmp_path)
    photos(root, "JPEGImages/2007_000032.jpg", size=(64, 24))
    (fault,) = check(root).faults
    assert fault.where.endswith("2007_000032.jpg")
    assert has_facts(fault.detail, "32×24", "64×24")


@pytest.mark.parametrize(
    ("content", "says"),
    [("names: [a]\n", "train"), ("train: nowhere\nnames: [a]\n", "nowhere"), ("train: [\n", "YAML")],
)
def test_a_yaml_that_names_no_images_is_an_error(content, says, tmp_path) -> None:
    write(tmp_path, "data.yaml", content)
    with pytest.raises(DataError, match=says):
        find_source(tmp_path / "data.yaml")


def test_a_yaml_may_name_lists_of_images(tmp_path) -> None:
    yolo_files(tmp_path)
    write(tmp_path, "train.txt", "./images/train2017/000000000000.jpg\n")
    write(tmp_path, "val.txt", "./images/val2017/000000000001.jpg\n./images/val2017/000000000011.jpg\n")
    write(tmp_path, "own.yaml", "train: train.txt\nval: val.txt\nnames: [cat, dog, cow]\n")
    source = find_source(tmp_path / "own.yaml")
    assert {split: len(listing) for split, listing in source.listings.items()} == {"train": 1, "val": 2}
    assert source.train.images.boxes(0).tolist() == [[12, 6, 20, 18, 1]]


def test_two_lists_of_names_are_a_question(tmp_path) -> None:
    yolo_files(tmp_path)
    write(tmp_path, "a.yaml", "names: [cat, dog, cow]\n")
    write(tmp_path, "b.yaml", "names: [one, two, three]\n")
    with pytest.raises(UsageError, match=facts("a.yaml", "b.yaml", "--names")):
        find_source(tmp_path)
    named = find_source(tmp_path, reading=Reading(names="b.yaml"))
    assert named.train.images.object_names == ("one", "two", "three")


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("open_images", [8, 6, 16, 18]),
        ("roboflow_csv", [2, 3, 12, 14]),
        ("label_studio", [8, 12, 16, 18]),
        ("cvat", [2.5, 3, 12, 14]),
        ("labelme", [2, 3, 12, 14]),
    ],
)
def test_boxes_of_other_tools_are_in_pixels(name, box, tmp_path) -> None:
    images = find_source(built(name, tmp_path)).train.images
    assert images.boxes(0)[0, :4].tolist() == box
    assert images.objects(0).boxes[0, :4].tolist() == box
    assert not check(built(name, tmp_path / "again")).faults


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "says"),
    [
        ("label_studio", "project-1-at-2024-05-01-10-00-12345678.json", "rectanglelabels", "brushlabels", "COCO"),
        ("cvat", "annotations.xml", "<box", "<ellipse", "COCO 1.0"),
        ("labelme", "a.json", '"polygon"', '"circle"', "circle"),
        ("roboflow_csv", "train/_annotations.csv", "a.jpg,32,24,cat,2", "a.jpg,32,24,cat,x", "line 2"),
    ],
)
def test_what_other_tools_know_and_boxes_do_not_is_said(name, file, old, new, says, tmp_path) -> None:
    root = built(name, tmp_path)
    write(root, file, (root / file).read_text().replace(old, new).replace("</box>", "</ellipse>"))
    with pytest.raises(DataError, match=says):
        find_source(root)


HOSTILE = (
    "[1]",
    '[{"data": 3}]',
    '[{"data": {"image": "../x.jpg"}, "annotations": [{"result": [{"type": []}]}]}]',
    '{"shapes": 3}',
    '{"shapes": [[1]]}',
    '{"shapes": [{"label": 1, "points": [[1, 2, 3]]}]}',
    "{",
    "\x00",
)


@pytest.mark.parametrize(
    "name",
    ["label_studio", "labelme", "cvat", "roboflow_csv", "open_images", "inaturalist2018", "inaturalist2018_taxonomy"],
)
def test_files_of_any_content_are_one_line(name, tmp_path) -> None:
    root = built(name, tmp_path)
    files = [file for file in sorted(root.rglob("*")) if file.suffix in (".json", ".xml", ".csv")]
    for file in files:
        whole = file.read_text()
        for content in (*HOSTILE, whole[: len(whole) // 2], whole.replace("1", "x"), whole.replace('"', "'")):
            file.write_text(content)
            with contextlib.suppress(PatchloomError):  # one line
                check(root)
        file.write_text(whole)


def test_categories_of_inaturalist_have_six_levels_above_the_species(tmp_path) -> None:
    splits = open_data(built("inaturalist2018_taxonomy", tmp_path))
    levels = {level: names for level, (names, _) in splits.classes.levels.items()}
    assert set(levels) == {"kingdom", "phylum", "class", "order", "family", "genus"}
    assert levels["family"] == ("Lamiaceae", "Prunellidae")
    genera = splits.classes.levels["genus"]
    assert len(genera[0]) == 3  # Prunella of birds is not Prunella of plants
    assert genera[0][genera[1][2]] == "Salvia"
    assert splits.classes.names[splits.val.labels[0]] == "Prunella modularis"
    by_order = open_data(built("inaturalist2018_taxonomy", tmp_path / "again"), level="order")
    assert by_order.classes.names == ("Lamiales", "Passeriformes")


def test_a_list_names_no_image_outside_of_its_folder(tmp_path) -> None:
    root = built("inaturalist2018", tmp_path / "data")
    photos(tmp_path, "secret.jpg")
    content = json.loads((root / "train2018.json").read_text())
    for name in ("../secret.jpg", str(tmp_path / "secret.jpg")):
        content["images"][0]["file_name"] = name
        write(root, "train2018.json", content)
        with pytest.raises(DataError, match=r"secret\.jpg"):
            find_source(root)


# Classes --------------------------------------------------------------------------------------------------------------


def test_splits_that_differ_by_a_folder_have_one_class_list(tmp_path) -> None:
    report = check(built("grocery_store", tmp_path))
    assert len(report.classes) == 3
    assert not report.stray_classes
    assert any("3 classes" in note and "Mushroom/Brown-Cap-Mushroom" in note for note in report.notes)


@pytest.mark.parametrize(
    ("column", "cells", "task"),
    [
        ("score", [f"{i / 7:.3f}" for i in range(30)], "regress"),
        ("label", ["0.5", "1.5"] * 15, "regress"),
        ("age", [str(20 + i % 25) for i in range(90)], "regress"),
        ("label", [str(i) for i in range(30)], "regress"),
        ("tags", ["cat|dog", "cat", "dog|cow"] * 10, "multilabel"),
    ],
)
def test_labels_of_another_task_suggest_it(column, cells, task, tmp_path) -> None:
    photos(tmp_path, *(f"{i}.jpg" for i in range(len(cells))))
    write(tmp_path, "labels.csv", "\n".join([f"path,{column}", *(f"{i}.jpg,{cell}" for i, cell in enumerate(cells))]))
    source = find_source(tmp_path)
    assert task_of_data(source)[0] == task
    assert not source.train.is_classified
    assert any(repr(column) in note for note in source.notes)
    assert f"--task {task} " in missing_labels(source.train)


@pytest.mark.parametrize(
    ("column", "options"), [("label", {}), ("class_id", {}), ("age", {"label_column": "age"}), ("breed", {})]
)
def test_many_numbers_may_be_classes(column, options, tmp_path) -> None:
    photos(tmp_path, *(f"{i}.jpg" for i in range(75)))
    write(tmp_path, "labels.csv", "\n".join([f"path,{column}", *(f"{i}.jpg,{i % 25}" for i in range(75))]))
    source = find_source(tmp_path, reading=Reading(labels=tmp_path / "labels.csv", **options))
    assert len(source.train.names) == 25


def test_numbers_of_a_list_are_named_by_a_file(tmp_path) -> None:
    photos(tmp_path, *(f"{i}.jpg" for i in range(4)))
    write(tmp_path, "labels.csv", "path,label\n0.jpg,0\n1.jpg,1\n2.jpg,0\n3.jpg,1\n")
    write(tmp_path, "mine.txt", "cat\ndog\n")
    source = find_source(tmp_path / "labels.csv", reading=Reading(names=tmp_path / "mine.txt"))
    assert source.train.names == ("cat", "dog")


@pytest.mark.parametrize("option", [{"names": "a.txt"}, {"ignore": 3}])
def test_options_that_nobody_reads_are_refused(option, tmp_path) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=f"--{name}"):
        find_source(built("cifar10", tmp_path), reading=Reading(**option))
    with pytest.raises(UsageError, match=f"--{name}"):
        find_source("digits", reading=Reading(**option))


def test_a_file_that_is_no_list_leaves_images_without_labels(tmp_path) -> None:
    photos(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    write(tmp_path, "notes.txt", "taken in spring, with a new lens\n")
    source = find_source(tmp_path)  # as DINO learns from it
    assert (len(source.train), source.train.names) == (3, ())
    assert any("notes.txt" in note for note in source.notes)


def test_a_large_dataset_is_not_looked_through_for_evidence(tmp_path, monkeypatch) -> None:
    """The look at a folder ends at a number of names, whatever it holds."""
    monkeypatch.setattr(evidence, "MOST_ENTRIES", 5)
    monkeypatch.setattr(evidence, "MOST_CHILDREN", 3)
    for name in "abcdef":
        write(tmp_path, f"{name}/x.txt", "")
        for i in range(20):
            write(tmp_path, f"{name}/{i}.jpg", "")
    folders = Evidence.search(tmp_path).folders
    assert len(folders) <= 4
    assert all(len(folder.images) + len(folder.files) <= 5 for folder in folders.values())
