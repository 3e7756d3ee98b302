"""Masks as segmentation reads them: names and colours from files beside them, VOC's and ADE20K's layouts."""

import json

import numpy as np
import pytest
from PIL import Image

from patchloom.data.annotations.mask_classes import ignored_number, of_masks
from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source
from patchloom.report.pictures.overlays import color_mask, index_image, palette
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts, has_facts
from tests.data.layouts import masks, photos
from tests.reliability.commands import class_folders

NUMBERS = np.array([[0, 1], [2, 255]], np.uint8).repeat(6, 0).repeat(6, 1)


def folder(root, masks="masks", images="images", splits=("train", "val"), mask=None, places=True):
    for i in range(4):
        split = splits[i % len(splits)] if places else ""
        for name, image, end in (
            (images, Image.new("RGB", (12, 12), (i, 0, 0)), "jpg"),
            (masks, mask or Image.fromarray(NUMBERS), "png"),
        ):
            (root / name / split).mkdir(parents=True, exist_ok=True)
            image.save(root / name / split / f"{i}.{end}")
    return root


def classes_of(root, **options):
    source = of_masks(find_source(root), **options)
    return source.train.names, source.train.images.mask(int(source.train.rows[0])).classes, source


@pytest.mark.parametrize("file", ["classes.txt", "labels.txt", "class_names.txt"])
def test_numbers_are_named_by_lines(file, tmp_path):
    (folder(tmp_path) / file).write_text("road\ncar\nsky\n")
    names, mask, source = classes_of(tmp_path)
    assert names == ("road", "car", "sky")
    assert np.array_equal(mask, NUMBERS)
    assert (len(source.train), len(source.val)) == (2, 2)
    assert ignored_number(source.train.images) == 255


def test_numbers_without_names_are_called_by_themselves(tmp_path):
    names, _, source = classes_of(folder(tmp_path))
    assert names == ("0", "1", "2")
    assert "classes.txt" in source.notes[-1]
    assert "--names" in source.notes[-1]
    assert has_facts(source.notes[-1], 0, 2)


@pytest.mark.parametrize("options", [{}, {"level": "all"}])
def test_one_class_is_nothing_to_learn(options, tmp_path):
    root = folder(tmp_path)
    (root / "classes.txt").write_text("person\n" if not options else "road\ncar\nsky\n")
    if options:
        (root / "taxonomy.csv").write_text("class,all\nroad,thing\ncar,thing\nsky,thing\n")
    with pytest.raises(DataError, match=facts("person" if not options else "thing", "--boxes")):
        classes_of(root, **options)


PALETTES = {
    "class_dict.csv": "name,r,g,b\nroad,120,144,176\nfast car,128,0,0\nsky,0,128,0\n",
    "labelmap.txt": "# label:color_rgb:parts:actions\nroad:120,144,176::\nfast car:128,0,0::\nsky:0,128,0::\n",
    "label_colors.txt": "120 144 176\troad\n128 0 0\tfast car\n0 128 0\tsky\n",
}


@pytest.mark.parametrize("file", PALETTES)
def test_colors_are_named_by_a_palette(file, tmp_path):
    inside = NUMBERS.clip(max=2)
    root = folder(tmp_path, mask=color_mask(inside, 3))
    (root / file).write_text(PALETTES[file])
    names, mask, _ = classes_of(root)
    assert names == ("road", "fast car", "sky")
    assert np.array_equal(mask, inside)
    assert not check(root).faults


def test_a_color_of_no_class_is_a_fault_with_its_file(tmp_path):
    root = folder(tmp_path, mask=color_mask(NUMBERS.clip(max=2), 3))
    (root / "class_dict.csv").write_text("name,r,g,b\nroad,120,144,176\ncar,128,0,0\n")
    fault = check(root).faults[0]
    assert has_facts(fault.detail, "#008000", 72)


def test_two_classes_of_one_color_are_refused(tmp_path):
    (folder(tmp_path) / "class_dict.csv").write_text("name,r,g,b\nroad,0,0,0\ncar,0,0,0\n")
    with pytest.raises(DataError, match=r"class_dict\.csv"):
        find_source(tmp_path)


def test_vocs_lists_say_the_splits_and_its_names_are_known(tmp_path):
    root = folder(tmp_path, "SegmentationClass", "JPEGImages", places=False, mask=index_image(NUMBERS, 21))
    Image.new("RGB", (12, 12)).save(root / "JPEGImages" / "without.jpg")
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("0\n1\n2\n")
    (lists / "val.txt").write_text("3\n")
    names, mask, source = classes_of(root)
    assert (len(names), names[1], names[20]) == (21, "aeroplane", "tvmonitor")
    assert np.array_equal(mask, NUMBERS)
    assert (len(source.train), len(source.val)) == (3, 1)
    assert not check(root).faults


def test_ade20k_begins_at_one(tmp_path):
    root = folder(tmp_path, "annotations", splits=("training", "validation"))
    rows = ["1\t0.15\t11664\t1172\t1\twall", "2\t0.1\t6046\t612\t1\tbuilding, edifice"]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
    names, mask, source = classes_of(root, reduce_zero_label=True)
    assert names == ("wall", "building")
    assert np.unique(mask).tolist() == [0, 1, 255]
    assert (mask[NUMBERS == 0] == 255).all()
    assert (mask[NUMBERS == 2] == 1).all()
    Image.fromarray(NUMBERS + (NUMBERS == 1) * np.uint8(40)).save(root / "annotations" / "training" / "0.png")
    assert 41 in source.train.images.mask(0).classes  # left as it is, to be named by check
    assert (len(source.train), len(source.val)) == (2, 2)


def test_shapes_have_their_ground_as_a_class():
    names, _, source = classes_of("shapes:count=20,size=16")
    assert (len(names), names[0], names[1]) == (17, "background", "triangle")
    assert (source.train.labels == -1).all()


def test_a_level_joins_classes_and_leaves_the_ground():
    names, coarse, _ = classes_of("shapes:count=20,size=32", level="coarse")
    _, fine, _ = classes_of("shapes:count=20,size=32")
    assert names == ("background", "polygon", "round", "star", "line")
    families = np.array([0, *([1] * 4 + [2] * 4 + [3] * 4 + [4] * 4)])
    assert np.array_equal(coarse, families[fine])
    with pytest.raises(UsageError, match=facts("'coarser'", "coarse")):
        classes_of("shapes:count=20,size=32", level="coarser")


def test_data_without_masks_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"images/"):
        of_masks(find_source(class_folders(tmp_path / "classes")))


def test_the_palette_is_vocs_without_its_black():
    assert palette(3).tolist()[1:] == [[128, 0, 0], [0, 128, 0]]
    assert sum(palette(3)[0].tolist()) > 300
    assert len({tuple(color) for color in palette(256).tolist()}) == 256


def test_index_images_hold_the_numbers_of_many_classes():
    numbers = np.arange(12, dtype=np.int16).reshape(3, 4) * 100
    assert np.array_equal(np.asarray(index_image(numbers, 2000)), numbers)


def test_polygons_of_coco_are_masks_too(tmp_path):
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        Image.new("RGB", (12, 12)).save(tmp_path / split / "a.png")
        entries = {"id": 1, "image_id": 1, "category_id": 7, "bbox": [2, 2, 4, 6], "area": 24, "iscrowd": 0}
        content = {
            "images": [{"id": 1, "file_name": "a.png", "width": 12, "height": 12}],
            "annotations": [entries | {"segmentation": [[2, 2, 6, 2, 6, 8, 2, 8]]}],
            "categories": [{"id": 7, "name": "cup"}],
        }
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    names, mask, source = classes_of(tmp_path)
    expected = np.zeros((12, 12), int)
    expected[2:8, 2:6] = 1
    assert names == ("background", "cup")
    assert np.array_equal(mask, expected)
    assert (len(source.train), len(source.val)) == (1, 1)


def test_a_mask_of_gigabytes_is_not_read(tmp_path) -> None:
    photos(tmp_path, "images/a.jpg", "images/b.jpg")
    masks(tmp_path, "masks/a.png", "masks/b.png")
    with (tmp_path / "masks" / "b.png").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    assert len(find_source(tmp_path, reading=Reading(images="images", masks="masks")).train) == 2


def test_a_line_of_many_numbers_is_no_color(tmp_path) -> None:
    photos(tmp_path, "images/a.jpg")
    masks(tmp_path, "masks/a.png")
    (tmp_path / "classes.txt").write_text("7 x " * 60_000 + "\nroad\ncar\n")
    assert find_source(tmp_path).train.images.mask_names
