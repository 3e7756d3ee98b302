"""Folders of pictures with objects: COCO's masks, VOC's XML, YOLO's text, masks of numbers; and their faults."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.sources.source import find_source, open_data
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.object_masks import ObjectMask
from tests.data.dirty import jpeg, make_image
from tests.data.facts import any_has, facts, has_facts
from tests.data.test_annotated import assert_faults, faults_of, make_coco

SQUARE = [[4, 6, 20, 6, 20, 18, 4, 18]]


def image_files(root: Path, folder: str, names, size=(48, 40)) -> None:
    for i, name in enumerate(names):
        path = root / folder / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(make_image(i).resize(size)))


# COCO


def annotation(identity, outline, image=1, category=18, **more):
    return {
        "id": identity, "image_id": image, "category_id": category, "bbox": [4, 6, 16, 12], "segmentation": outline,
    } | more  # fmt: skip


def outlined(root, *more):
    make_coco(root)
    file = root / "annotations" / "instances_train2017.json"
    entries = json.loads(file.read_text())
    entries["annotations"] = [annotation(1, SQUARE), annotation(2, SQUARE, image=2), *more]
    file.write_text(json.dumps(entries))
    return root


def test_masks_of_coco(tmp_path):
    small = np.zeros((48, 48), bool)
    small[8:12, 6:10] = True
    rows = [
        annotation(3, ObjectMask.of(small).to_coco((48, 48)), category=44, bbox=[6, 8, 4, 4], area=16.5),
        annotation(4, {"size": [48, 48], "counts": [48 * 47, 48]}, bbox=[47, 0, 1, 48], iscrowd=1, area=48),
    ]
    source = find_source(outlined(tmp_path / "data", *rows))
    assert has_facts(source.name, "data", "COCO")
    images = source.train.images
    assert images.mask_names == ("background", "dog", "bottle")
    objects = images.objects(0)
    assert (objects.crowd.tolist(), objects.areas.tolist()) == ([False, False, True], [192, 16.5, 48])
    assert [mask.area for mask in objects.masks] == [16 * 12, 16, 48]  # they overlap
    mask = images.mask(0)
    assert mask.instances[10, 8] == 2
    assert mask.classes[10, 8] == 2
    assert mask.instances[7, 5] == 1
    assert (mask.instances[:, 47] == 0).all()
    assert (mask.classes[:, 47] == 1).all()
    sample = open_data(tmp_path / "data", labeled=False).train.with_parts("instances", "boxes").sample(0)
    assert sample.boxes[:, 5].tolist() == [1, 2]  # the crowd is not learned
    assert check(tmp_path / "data").faults == ()


def test_a_mask_that_does_not_fit_is_found(tmp_path):
    file = tmp_path / "data" / "annotations" / "instances_train2017.json"
    rows = [annotation(3, {"size": [48, 48], "counts": [5, 5]}), annotation(7, [[1, 2, 3, 4]], image=2)]
    expected = [
        ("train2017/1.jpg", file, "train2017/1.jpg", 3, 10, "2,304"),
        ("train2017/2.jpg", file, "train2017/2.jpg", 7, 2),
    ]
    assert_faults(outlined(tmp_path / "data", *rows), expected)


def test_numbers_of_coco_beyond_floats(tmp_path):
    rows = [
        annotation(3, SQUARE, area=10**400),
        annotation(4, SQUARE, area=float("inf")),
        annotation(5, SQUARE, area=-1),
    ]
    objects = find_source(outlined(tmp_path / "data", *rows)).train.images.objects(0)
    assert objects.areas.tolist() == [16 * 12] * 4
    outlined(
        tmp_path / "data", annotation(6, [[1, 2, 10**400, 4, 5, 6]]), annotation(7, SQUARE, bbox=[10**400, 1, 2, 3])
    )
    kinds = {kind: detail for _, kind, detail in faults_of(tmp_path / "data")}
    assert len(kinds) == 2
    assert any_has(kinds.values(), "annotation 6")


@pytest.mark.parametrize("name", ["../../secret.jpg", "{outside}", "a/../../../secret.jpg"])
def test_coco_names_images_of_its_own_folder_alone(tmp_path, name):
    root = outlined(tmp_path / "data")
    (tmp_path / "secret.jpg").write_bytes(jpeg(make_image(0)))
    file = root / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"][0]["file_name"] = name.format(outside=tmp_path / "secret.jpg")
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=facts("instances_train2017.json", "file_name", "secret.jpg")):
        find_source(root)
    # Another spelling of a path in the folder is the same picture.
    content["images"][0]["file_name"] = str(root / "train2017" / "1.jpg")
    content["images"][1]["file_name"] = "../train2017/./2.jpg"
    file.write_text(json.dumps(content))
    images = find_source(root).train.images
    assert [images.key(i) for i in range(2)] == ["train2017/1.jpg", "train2017/2.jpg"]


def test_entries_of_one_image_are_joined(tmp_path):
    root = outlined(tmp_path / "data", *(annotation(10 + i, SQUARE, image=100 + i) for i in range(3)))
    file = root / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"] += [{"id": 100 + i, "file_name": f"{'./' * i}1.jpg"} for i in range(3)]
    file.write_text(json.dumps(content))
    images = find_source(root).train.images
    assert len(images) == len({images.key(i) for i in range(len(images))})
    assert len(images.boxes(0)) == 4
    assert [where for where, _, detail in faults_of(root) if has_facts(detail, 4)] == ["train2017/1.jpg"]


def test_masks_of_some_alone_are_not_learned(tmp_path):
    source = find_source(outlined(tmp_path / "data", annotation(3, [])))
    assert any_has(source.notes, 3, "train")
    assert not source.train.images.tells_objects_apart


# VOC


def xml(*objects):
    rows = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for name, x0, y0, x1, y1, difficult in objects
    )
    return f"<annotation><filename>any.jpg</filename>{rows}</annotation>"


def make_voc(root):
    image_files(root, "JPEGImages", "abcd")
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for name in "abcd":
        (root / "Annotations" / f"{name}.xml").write_text(xml(("cat", 1, 1, 10, 20, 0), ("dog", 5, 6, 48, 40, 1)))
    (root / "ImageSets" / "Main" / "train.txt").write_text("a\nb\nc\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("d\n")
    return root


def test_boxes_of_voc(tmp_path):
    source = find_source(make_voc(tmp_path / "voc"))
    assert (source.name, len(source.train), len(source.val)) == ("voc (VOC boxes)", 3, 1)
    objects = source.train.images.objects(0)
    assert source.train.images.object_names == ("cat", "dog")
    assert objects.boxes.tolist() == [[0, 0, 10, 20, 0], [4, 5, 48, 40, 1]]
    assert objects.crowd.tolist() == [False, True]
    assert check(tmp_path / "voc").faults == ()


def test_faults_of_voc(tmp_path):
    root = make_voc(tmp_path / "voc")
    notes = root / "Annotations"
    (notes / "a.xml").write_text("<annotation><object></annotation>")
    (notes / "b.xml").write_text(xml(("cat", 30, 30, 60, 60, 0)))
    (notes / "c.xml").write_text('<!DOCTYPE x [<!ENTITY a "b">]>' + xml())
    (notes / "d.xml").rename(notes / "e.xml")
    (root / "ImageSets" / "Main" / "val.txt").write_text("b\n")
    kinds = {where: kind for where, kind, _ in faults_of(root)}
    assert kinds.keys() == {*(f"JPEGImages/{name}.jpg" for name in "abcd"), "Annotations/e.xml"}
    assert kinds["JPEGImages/a.jpg"] == kinds["JPEGImages/c.jpg"]
    assert len(set(kinds.values())) == 4


# YOLO


def make_yolo(root, line="1 0.5 0.5 0.25 0.5", names="names: [cat, dog]\n"):
    image_files(root / "images", "train", "abc")
    image_files(root / "images", "val", "d")
    for path in ("train/a", "train/b", "val/d"):
        (root / "labels" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "labels" / f"{path}.txt").write_text(f"{line}\n")
    if names:
        (root / "data.yaml").write_text(names)
    return root


def test_boxes_of_yolo(tmp_path):
    source = find_source(make_yolo(tmp_path / "yolo"))
    assert (source.name, len(source.train), len(source.val)) == ("yolo (YOLO boxes)", 3, 1)
    images = source.train.images
    assert images.object_names == ("cat", "dog")
    assert images.boxes(0).tolist() == [[18, 10, 30, 30, 1]]
    assert images.boxes(2).shape == (0, 5)  # no text file: nothing in it
    assert check(tmp_path / "yolo").faults == ()


def test_other_layouts_and_names_of_yolo(tmp_path):
    root = tmp_path / "yolo"
    for split in ("train", "valid"):
        image_files(root / split, "images", "ab")
        (root / split / "labels").mkdir()
        (root / split / "labels" / "a.txt").write_text("3 0.5 0.5 1 1\n")
    source = find_source(root)
    assert (len(source.train), len(source.val)) == (2, 2)
    assert source.train.images.object_names == ("0", "1", "2", "3")
    (root / "data.yaml").write_text("names:\n  0: one\n  1: two\n  2: three\n  3: four\n")
    assert find_source(root).train.images.object_names[3] == "four"
    (root / "data.yaml").write_text("names: 3\n")
    with pytest.raises(DataError, match=facts("data.yaml", "names", 3)):
        find_source(root)


@pytest.mark.parametrize("names", ["{0: a, b: c}", "{null: a, 0: b}", "{1: a, 2: b}", "[a, null]", "[[a]]", "{}", "[]"])
def test_names_of_yolo_that_are_none(tmp_path, names):
    with pytest.raises(DataError, match=r"data\.yaml: .*names"):
        find_source(make_yolo(tmp_path / "yolo", names=f"names: {names}\n"))


def test_polygons_of_yolo_are_masks(tmp_path):
    source = find_source(make_yolo(tmp_path / "yolo", line="0 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75"))
    images = source.train.images
    assert source.name == "yolo (YOLO polygons)"
    assert images.tells_objects_apart
    assert images.boxes(0).tolist() == [[12, 10, 36, 30, 0]]
    assert images.objects(0).areas.tolist() == [24 * 20]
    assert (images.mask(0).instances[10:30, 12:36] == 1).all()
    assert check(tmp_path / "yolo").faults == ()


def test_faults_of_yolo(tmp_path):
    root = make_yolo(tmp_path / "yolo")
    (root / "labels/train/a.txt").write_text("0 0.5 0.5\n")
    (root / "labels/train/b.txt").write_text("7 0.5 0.5 0.1 0.1\n0 0.9 0.5 0.4 0.2\n0 0.5 0.5 0 0.1\n")
    (root / "labels/val/d.txt").write_text("cat 0.5 0.5 0.1 0.1\n")
    (root / "labels/train/c.txt").write_text("0" + " 0.5" * 30_000 + "\n")
    expected = [
        ("images/train/a.jpg",),
        ("images/train/b.jpg", 7),
        ("images/train/b.jpg",),
        ("images/train/b.jpg",),
        ("images/train/c.jpg", "15,000", "10,000"),
        ("images/val/d.jpg", "cat"),
    ]
    assert_faults(root, expected)
    kinds = {(where, kind) for where, kind, _ in faults_of(root)}
    assert (len(kinds), len({kind for _, kind in kinds})) == (6, 4)  # the other three images share a kind


@pytest.mark.parametrize("number", ["1_0", "٣", "nan", "inf", "0x1"])
def test_numbers_are_plain_digits(tmp_path, number):
    root = make_yolo(tmp_path / "yolo", line=f"1 0.5 0.5 {number} 0.5")
    assert any_has((detail for *_, detail in faults_of(root)), f"{number}")
    root = make_voc(tmp_path / "voc")
    (root / "Annotations" / "a.xml").write_text(xml(("cat", 1, 1, number, 20, 0)))
    assert {where for where, *_ in faults_of(root)} == {"JPEGImages/a.jpg"}
    rows = annotation(3, SQUARE, bbox=["1", number, 3, 4]), annotation(4, [[1, 2, number, 4, 5, 6]])
    assert len({kind for _, kind, _ in faults_of(outlined(tmp_path / "coco", *rows))}) == 2


# Masks of objects' numbers


def test_masks_of_objects_numbers(tmp_path):
    root = tmp_path / "PennFudanPed"
    image_files(root, "PNGImages", ["one", "two", "three"])
    (root / "PedMasks").mkdir()
    for name in ("one", "two", "four"):
        ids = np.zeros((40, 48), np.uint8)
        ids[5:20, 4:10] = 1
        ids[8:30, 20:40] = 3  # numbers may be missing
        Image.fromarray(ids).save(root / "PedMasks" / f"{name}_mask.png")
    source = find_source(root)
    images = source.train.images
    assert source.name.startswith("PennFudanPed (")
    assert images.object_names == ("pedestrian",)
    assert images.boxes(0).tolist() == [[4, 5, 10, 20, 0], [20, 8, 40, 30, 0]]
    objects = images.objects(0)
    assert [mask.area for mask in objects.masks] == [15 * 6, 22 * 20]
    assert {where for where, *_ in faults_of(root)} == {"PNGImages/three.jpg", "PedMasks/four_mask.png"}
    sample = open_data(root, labeled=False, val_fraction=0.5).train.with_parts("instances", "boxes").sample(0)
    assert set(np.unique(sample.layers["instances"].numbers)) == {0, 1, 2}
