"""The three folders that other tools were tried on: "clean" (600 + 200 pictures), "dirty" and "shift".

From CIFAR-100 where it is in ../shared/data, else drawn. `check` finds every fault that was planted, with its path and
its reason, and nothing in the clean folder.
"""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.sources.source import find_source
from tests.conftest import SHARED
from tests.data.dirty import jpeg
from tests.data.facts import has_facts

CLASSES, TRAIN, VAL = 10, 60, 20
CIFAR = SHARED / "data" / "cifar100-test.parquet"


def make_clean(root):
    pytest.importorskip("pyarrow")
    listing = find_source(CIFAR if CIFAR.is_file() else "shapes:count=1280,size=32").train
    for number in [i for i, name in enumerate(listing.names) if name != "bee"][:CLASSES]:
        rows = listing.rows[listing.labels == number][: TRAIN + VAL]
        assert len(rows) == TRAIN + VAL
        for i, row in enumerate(rows.tolist()):
            folder = root / ("train" if i < TRAIN else "val") / listing.names[number]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:02d}.jpg").write_bytes(jpeg(listing.images.read(row), quality=95))
    return root


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return make_clean(tmp_path_factory.mktemp("folders") / "clean")


def class_folders(root):
    return sorted(folder for folder in (root / "train").iterdir() if folder.is_dir())


def image_of(folder):
    return Image.open(folder / "00.jpg").transpose(Image.Transpose.ROTATE_180)


def make_dirty(clean, root):
    shutil.copytree(clean, root)
    first, second, third, *_ = class_folders(root)
    whole = jpeg(image_of(first))
    (first / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (first / "empty.jpg").write_bytes(b"")
    (first / "text.jpg").write_text("not a picture, whatever its name says")
    image_of(second).convert("CMYK").save(second / "cmyk.jpg")
    grey = np.asarray(image_of(second).convert("L")).astype(np.uint16) * 200
    Image.fromarray(np.roll(grey, 7, axis=1)).save(second / "deep.png")
    image_of(third).convert("RGBA").save(third / "alpha.png")
    image_of(third).resize((3000, 2)).save(third / "strip.jpg")
    (root / "train" / ".DS_Store").write_bytes(b"Bud1")
    (first / ".DS_Store").write_bytes(b"Bud1")
    (root / "train" / "unicorn").mkdir()
    (root / "val" / "zebra").mkdir()
    (root / "val" / "zebra" / "only.jpg").write_bytes(jpeg(image_of(class_folders(root)[5])))
    shutil.copy(third / "03.jpg", root / "val" / third.name / "copied.jpg")
    return root


def make_shift(clean, root):
    shutil.copytree(clean, root)
    (root / "val" / "bee").mkdir()
    (root / "val" / "bee" / "only.jpg").write_bytes(jpeg(image_of(class_folders(root)[5])))
    return root


def test_nothing_is_wrong_with_clean(clean):
    report = check(clean)
    assert report.splits == {"train": CLASSES * TRAIN, "val": CLASSES * VAL}
    assert report.problems(strict=True) == []
    assert (report.unreadable, report.odd, report.duplicates, report.faults, report.notes) == ((),) * 5


def test_every_fault_planted_in_dirty_is_found(clean, tmp_path):
    root = make_dirty(clean, tmp_path / "dirty")
    first, second, third, *_ = (folder.name for folder in class_folders(root))
    report = check(root)
    size = (root / "train" / first / "truncated.jpg").stat().st_size
    expected = {
        f"train/{first}/truncated.jpg": (size, "JPEG"),
        f"train/{first}/empty.jpg": (),
        f"train/{first}/text.jpg": ("text",),
        f"train/{third}/strip.jpg": ("3000×2", 4),
    }
    reasons = {os.path.relpath(bad.place.where, root): bad.reason for bad in report.unreadable}
    assert reasons.keys() == expected.keys()
    for file, parts in expected.items():
        assert has_facts(reasons[file], *parts)
    assert {os.path.relpath(odd.place.where, root): odd.kind for odd in report.odd} == {
        f"train/{second}/cmyk.jpg": "CMYK",
        f"train/{second}/deep.png": "16-bit",
        f"train/{third}/alpha.png": "alpha",
    }
    assert [{os.path.relpath(place.where, root) for place in group} for group in report.leaks()] == [
        {f"train/{third}/03.jpg", f"val/{third}/copied.jpg"}
    ]
    assert (report.empty_classes, report.stray_classes) == (("unicorn",), {"zebra": 1})
    assert (report.conflicts(), report.notes) == ([], ())  # hidden files are nobody's business
    unread, empty, stray, leaked = report.problems(strict=True)
    assert has_facts(unread, 4)
    assert has_facts(empty, "'unicorn'")
    assert has_facts(stray, "val", "'zebra'")
    assert has_facts(leaked, "train", "val")


def test_the_class_that_shifts_labels_elsewhere_is_found(clean, tmp_path):
    root = make_shift(clean, tmp_path / "shift")
    report = check(root)
    assert report.stray_classes == {"bee": 1}
    (problem,) = report.problems(strict=True)
    assert has_facts(problem, "val", "'bee'")
