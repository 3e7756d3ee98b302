"""Masks and boxes with planted faults: each is found where it lies, and nothing else."""

import io
import json
import os
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from patchloom.data.annotations.paired_files import changed_with
from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source
from patchloom_runtime.errors import DataError, UsageError
from tests.conftest import SHARED
from tests.data.dirty import jpeg, make_image
from tests.data.facts import any_has, facts, has_facts
from tests.reliability.commands import command


def mask(value=1, size=(48, 48), mode="L"):
    pixels = Image.new("L", size)
    pixels.paste(value, (4, 4, 20, 20))
    return pixels.convert(mode)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_masks(root, names=("ground", "tree")):
    for i, split in enumerate(("train", "train", "train", "val", "val")):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        (root / "images" / split / f"{i}.jpg").write_bytes(jpeg(make_image(i)))
        mask().save(root / "masks" / split / f"{i}.png")
    if names:
        (root / "classes.txt").write_text("\n".join(names) + "\n")
    return root


def faults_of(root):
    return {(os.path.relpath(fault.where, root), fault.kind, fault.detail) for fault in check(root).faults}


def assert_faults(root, expected):
    """Compare the places of all faults, and the facts in the detail of each."""
    faults = faults_of(root)
    assert Counter(where for where, *_ in faults) == Counter(where for where, *_ in expected)
    for where, *parts in expected:
        assert any_has((detail for at, _, detail in faults if at == where), *parts), (where, faults)


def test_masks_without_fault(tmp_path):
    report = check(make_masks(tmp_path / "data"))
    assert report.name.startswith("data (")
    assert report.splits == {"train": 3, "val": 2}
    assert (report.faults, report.problems(strict=True), report.classes) == ((), [], {})
    listing = report.listings["train"]
    assert listing.images.mask_names == ("ground", "tree")
    assert np.unique(listing.images.mask(0).classes).tolist() == [0, 1]


def test_faults_of_masks(tmp_path):
    root = make_masks(tmp_path / "data")
    (root / "images/train/new.jpg").write_bytes(jpeg(make_image(50)))
    mask().save(root / "masks/val/old.png")
    mask(size=(48, 40)).save(root / "masks/train/0.png")
    mask(value=7).save(root / "masks/train/1.png")
    mask(mode="RGB").save(root / "masks/train/2.png")
    mask(value=255).save(root / "masks/val/3.png")  # not labelled, which is no fault
    (root / "masks/val/4.png").write_bytes(b"")
    rgb, empty = root / "masks/train/2.png", root / "masks/val/4.png"
    expected = [
        ("images/train/new.jpg", "train/new", "masks"),
        ("masks/val/old.png", "val/old", "images"),
        ("images/train/0.jpg", "48×40", "48×48"),
        ("images/train/1.jpg", 7, 256, "0…1", 255),
        ("images/train/2.jpg", rgb, "RGB", 8),
        ("images/val/4.jpg", empty),
    ]
    assert_faults(root, expected)
    report = check(root)
    assert len({fault.kind for fault in report.faults}) == 5  # the last two are of one kind
    (unread,) = {
        fault.kind for fault in report.faults if has_facts(fault.detail, rgb) or has_facts(fault.detail, empty)
    }
    assert any_has(report.problems(), unread, 2)


def test_masks_of_16_bits_and_of_palettes(tmp_path):
    """A palette's numbers are read as they are; 16 bits are refused by name, and so are single bits."""
    root = make_masks(tmp_path / "data")
    palette = mask().copy()
    palette.putpalette([value for i in range(256) for value in (i, 255 - i, 7)])
    palette.save(root / "masks/train/0.png")
    with Image.open(root / "masks/train/0.png") as remaining:
        assert remaining.mode == "P"
    assert_faults(root, [])
    assert np.unique(find_source(root).train.images.mask(0).classes).tolist() == [0, 1]
    wrong = mask(value=9).copy()
    wrong.putpalette(palette.getpalette())
    wrong.save(root / "masks/train/0.png")
    wide, single = root / "masks/train/1.png", root / "masks/train/2.png"
    Image.fromarray(np.asarray(mask()).astype(np.uint16)).save(wide)
    mask().convert("1").save(single)
    expected = [
        ("images/train/0.jpg", 9, 256, "0…1", 255),
        ("images/train/1.jpg", wide, "I;16", 8),
        ("images/train/2.jpg", single, 1, 8),
    ]
    assert_faults(root, expected)


def test_a_repaired_mask_is_noticed_although_its_image_is_the_same(tmp_path):
    root = make_masks(tmp_path / "data")
    mask(value=9).save(root / "masks/train/0.png")
    assert len(check(root).faults) == 1
    mask().save(root / "masks/train/0.png")
    again = check(root)
    assert (again.faults, again.decoded) == ((), 1)


def test_a_stamp_differs_when_either_file_does() -> None:
    image, before, after = (b"x", 10, 900), (b"y", 5, 100), (b"y", 5, 200)
    assert len({str(changed_with([one], [other])) for one, other in ((image, before), (image, after))}) == 2
    assert len({str(changed_with([one], [other])) for one, other in ((before, image), (after, image))}) == 2
    assert changed_with([None], [before]) == [None]


def test_masks_without_names_may_hold_any_number(tmp_path):
    root = make_masks(tmp_path / "data", names=())
    mask(value=200).save(root / "masks/train/0.png")
    assert check(root).faults == ()


def test_folders_that_do_not_fit(tmp_path):
    root = make_masks(tmp_path / "data")
    for file in (root / "masks").rglob("*.png"):
        file.rename(file.with_name(f"other{file.stem}.png"))
    with pytest.raises(DataError, match=facts("--images", "--masks")):
        check(root)
    with pytest.raises(UsageError, match="--masks masks"):
        check(root, reading=Reading(masks="masks"))
    with pytest.raises(DataError, match=facts("images", "masks")):
        check(root, reading=Reading(images="images", masks="masks"))


def make_coco(root, **changes):
    for split, numbers in (("train2017", (1, 2)), ("val2017", (3,))):
        (root / split).mkdir(parents=True, exist_ok=True)
        (root / "annotations").mkdir(exist_ok=True)
        for number in numbers:
            (root / split / f"{number}.jpg").write_bytes(jpeg(make_image(number)))
        content = {
            "images": [{"id": n, "file_name": f"{n}.jpg", "width": 48, "height": 48} for n in numbers],
            "categories": [{"id": 18, "name": "dog"}, {"id": 44, "name": "bottle"}],
            "annotations": [
                {"id": 10 * n, "image_id": n, "category_id": 44, "bbox": [3.2, 4, 10.5, 12]} for n in numbers
            ],
        }
        for name, more in changes.items() if split == "train2017" else ():
            content[name] = content[name] + more
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def test_boxes_without_fault(tmp_path):
    report = check(make_coco(tmp_path / "data"))
    assert report.name == "data (COCO boxes)"
    assert report.splits == {"train": 2, "val": 1}
    assert (report.faults, report.problems(strict=True)) == ((), [])
    images = report.listings["train"].images
    assert images.object_names == ("dog", "bottle")
    assert images.boxes(1).tolist() == [pytest.approx([3.2, 4, 13.7, 16, 1])]


def box(identity, bbox, image=1, category=18):
    return {"id": identity, "image_id": image, "category_id": category, "bbox": bbox}


def test_faults_of_boxes(tmp_path):
    boxes = [
        box(100, [5, 5, 0, 4]),
        box(101, [5, 5, -3, 4]),
        box(102, [40, 40, 20, 4]),
        box(103, [-6, 5, 10, 4]),
        box(104, [40, 40, 8.3, 8.4]),  # less than half a pixel outside
        box(105, [1, 1, 4, 4], image=77),
        box(106, [1, 1, 4, 4], category=3),
        box(107, [1, 1, 4]),
        box(108, [1, 1, float("nan"), 4]),
    ]
    root = make_coco(tmp_path / "data", annotations=boxes, images=[{"id": 9, "file_name": "gone.jpg"}])
    file = "annotations/instances_train2017.json"
    expected = [
        ("train2017/1.jpg", "x 5…5", "y 5…9"),
        ("train2017/1.jpg", "x 5…2", "y 5…9"),
        ("train2017/1.jpg", "x 40…60", "y 40…44", "48×48"),
        ("train2017/1.jpg", "x -6…4", "y 5…9", "48×48"),
        (f"{file}, annotation 105", "image_id", 77),
        (f"{file}, annotation 106", "category_id", 3),
        (f"{file}, annotation 107", "bbox", "[1, 1, 4]"),
        (f"{file}, annotation 108", "bbox", "[1, 1, nan, 4]"),
        ("train2017/gone.jpg", "instances_train2017.json"),
    ]
    assert_faults(root, expected)
    assert len({fault.kind for fault in check(root).faults}) == 6


def test_images_without_objects_are_named_and_no_fault(tmp_path, capsys, monkeypatch):
    root = make_coco(tmp_path / "data", images=[{"id": 8, "file_name": "8.jpg", "width": 48, "height": 48}])
    (root / "train2017" / "8.jpg").write_bytes(jpeg(make_image(8)))
    report = check(root)
    assert (report.faults, report.problems(strict=True)) == ((), [])
    assert [os.path.basename(odd.place.where) for odd in report.odd] == ["8.jpg"]
    text = command(("check", root), monkeypatch, capsys)
    assert text.code == 0
    assert has_facts(text.output, 1, "train2017/8.jpg")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        ("[]", "images, annotations, categories"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', r"images\[0\].*'file_name'"),
        (
            '{"images": [{"id": 1, "file_name": "x"}], "annotations": [], "categories": []}',
            r"instances_train2017\.json",
        ),
    ],
)
def test_annotations_that_are_none(tmp_path, content, message):
    root = make_coco(tmp_path / "data")
    (root / "annotations/instances_train2017.json").write_text(content)
    with pytest.raises(DataError, match=message):
        check(root)


def test_faults_in_parquet_columns(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "image": [jpeg(make_image(i)) for i in range(4)],
            "boxes": [[[0, 0, 8, 8]], [[9, 9, 9, 12]], [[0, 0, 99, 8]], [[1, 1, 2, 2]]],
            "labels": [[0], [0], [0], [5]],
        }
    )
    info = {"dataset_info": json.dumps({"label_names": ["cell"]})}
    pq.write_table(table.replace_schema_metadata(info), tmp_path / "b.parquet")
    first, second, third = check(tmp_path / "b.parquet").faults
    assert first.where == f"{tmp_path / 'b.parquet'}, row 1"
    assert len({first.kind, second.kind, third.kind}) == 3
    masks = pa.table({"image": table["image"], "mask": [png(mask(value)) for value in (0, 1, 1, 3)]})
    pq.write_table(
        masks.replace_schema_metadata({"dataset_info": json.dumps({"label_names": ["a", "b"]})}), tmp_path / "m.parquet"
    )
    (fault,) = check(tmp_path / "m.parquet").faults
    assert has_facts(fault.detail, 3, 256, "0…1")


def test_the_drawn_set_has_no_fault():
    assert check("shapes:count=32,size=32").faults == ()


@pytest.mark.skipif(not (SHARED / "data" / "bccd.parquet").is_file(), reason="no real data in ../shared/data")
def test_two_boxes_of_bccd_have_no_area():
    kinds = [fault.kind for fault in check(SHARED / "data" / "bccd.parquet").faults]
    assert (len(kinds), len(set(kinds))) == (2, 1)
