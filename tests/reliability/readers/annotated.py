"""Readers of pictures with boxes or masks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.annotations.mask_classes import of_masks
from patchloom.data.checking.check import check
from patchloom.data.sources.source import find_source, open_data
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.object_masks import ObjectMask
from tests.reliability.readers.reader import Reader, checked, pixels


def make_coco(seeds: Path, folder: Path) -> None:
    """Pictures with boxes."""
    (folder / "data" / "train2017").mkdir(parents=True)
    (folder / "data" / "annotations").mkdir()
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "train2017" / f"{number}.png")
    boxes = [
        {"id": i, "image_id": i % 4, "category_id": 1 + i % 2, "bbox": [1, 2, 5.5, 6], "area": 30} for i in range(6)
    ]
    told = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 16, "height": 16} for i in range(4)],
        "annotations": boxes,
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    (folder / "data" / "annotations" / "instances_train2017.json").write_text(json.dumps(told))


def make_coco_masks(seeds: Path, folder: Path) -> None:
    """COCO's boxes with polygons, run lengths and packed run lengths."""
    make_coco(seeds, folder)
    place = folder / "data" / "annotations" / "instances_train2017.json"
    told = json.loads(place.read_text())
    inside = np.zeros((16, 16), bool)
    inside[2:8, 1:6] = True
    forms = ([[1, 2, 6, 2, 6, 8, 1, 8]], {"size": [16, 16], "counts": [18, 6, 10, 6, 216]},
             ObjectMask.of(inside).to_coco((16, 16)))  # fmt: skip
    for i, one in enumerate(told["annotations"]):
        one["segmentation"], one["iscrowd"] = forms[i % 3], int(i == 5)
    place.write_text(json.dumps(told))


def make_voc(seeds: Path, folder: Path) -> None:
    """Boxes in XML, and lists of pictures."""
    for place in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / "data" / place).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "JPEGImages" / f"{number}.jpg")
        objects = "".join(
            f"<object><name>{name}</name><difficult>{i}</difficult><bndbox><xmin>{2 + i}</xmin><ymin>3</ymin>"
            "<xmax>9</xmax><ymax>12</ymax></bndbox></object>"
            for i, name in enumerate(("cat", "dog"))
        )
        text = f"<annotation><size><width>16</width><height>16</height></size>{objects}</annotation>"
        (folder / "data" / "Annotations" / f"{number}.xml").write_text(text)
    for split, names in (("train", "0\n1\n2\n"), ("val", "3\n")):
        (folder / "data" / "ImageSets" / "Main" / f"{split}.txt").write_text(names)


def make_yolo(seeds: Path, folder: Path) -> None:
    """Polygons in shares of the pictures, and names."""
    for place in ("images", "labels"):
        (folder / "data" / place).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "images" / f"{number}.png")
        line = f"{number % 2} 0.1 0.2 0.8 0.25 0.5 0.75\n"
        (folder / "data" / "labels" / f"{number}.txt").write_text(line + "0 0.1 0.1 0.4 0.1 0.4 0.4 0.1 0.4\n")
    (folder / "data" / "data.yaml").write_text("train: images\nnc: 2\nnames: [cat, dog]\n")


def make_instances(seeds: Path, folder: Path) -> None:
    """Masks of objects' numbers."""
    for place in ("PNGImages", "PedMasks"):
        (folder / "data" / place).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "PNGImages" / f"{number}.png")
        ids = np.zeros((16, 16), np.uint8)
        ids[2:8, 3:9], ids[10:14, 1:5] = 1, 2
        Image.fromarray(ids).save(folder / "data" / "PedMasks" / f"{number}_mask.png")
    (folder / "data" / "classes.txt").write_text("person\n")


def make_masks(seeds: Path, folder: Path) -> None:
    """Pictures with masks."""
    for name in ("images", "masks"):
        (folder / "data" / name).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "images" / f"{number}.png")
        Image.fromarray(pixels(number)[..., 0] % 3).save(folder / "data" / "masks" / f"{number}.png")
    (folder / "data" / "classes.txt").write_text("sky\ngrass\nroad\n")


PALETTES = {
    "class_dict.csv": "name,r,g,b\nroad,0,0,0\nfast car,128,0,0\nsky,0,128,0\n",
    "labelmap.txt": "# label:color_rgb:parts:actions\nroad:0,0,0::\nfast car:128,0,0::\nsky:0,128,0::\n",
    "label_colors.txt": "0 0 0\troad\n128 0 0\tfast car\n0 128 0\tsky\n",
}


def make_palettes(seeds: Path, folder: Path) -> None:
    """Masks in colours, named by each kind of file."""
    colors = np.array([(0, 0, 0), (128, 0, 0), (0, 128, 0)], np.uint8)
    for file, text in PALETTES.items():
        root = folder / file.partition(".")[0]
        for place in ("images", "masks"):
            (root / place).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(pixels(number)).save(root / "images" / f"{number}.png")
            Image.fromarray(colors[pixels(number)[..., 0] % 3]).save(root / "masks" / f"{number}.png")
        (root / file).write_text(text)


def look_through_annotated(seeds: Path, folder: Path) -> Any:
    """What `check` says of pictures with masks or boxes."""
    report = check(str(folder / "data"), workers=1, cache=False)
    if told := report.problems():
        raise DataError("; ".join(told))
    return {key: value for key, value in report.to_dict().items() if key != "decoded"}


def read_objects(seeds: Path, folder: Path) -> Any:
    """What `check` and training make of pictures with objects; what `check` calls a problem is as good as refused."""
    told = look_through_annotated(seeds, folder)
    splits = open_data(str(folder / "data"), labeled=False)
    parts = [part for part in ("instances", "boxes") if part == "boxes" or splits.train.images.tells_objects_apart]
    found = []
    for images in (splits.train, splits.val):
        shown = images.with_parts(*parts)
        for i in range(len(shown)):
            sample, objects = shown.sample(i), images.objects(i)
            masks = [mask.area for mask in objects.masks or ()]
            layers = {name: layer.numbers.tolist() for name, layer in sample.layers.items()}
            found.append((sample.boxes.tolist(), layers, objects.crowd.tolist(), objects.areas.tolist(), masks))
    return told, found


def read_palettes(seeds: Path, folder: Path) -> Any:
    """Names and numbers of masks in colours, as segmentation reads them."""
    found = []
    for file in PALETTES:
        root = folder / file.partition(".")[0]
        report = check(str(root), workers=1, cache=False)
        source = of_masks(find_source(str(root)), reduce_zero_label=False, level=None)
        pictures = source.train.images
        found.append((source.train.names, [pictures.mask(int(row)).classes.tolist() for row in source.train.rows]))
        if told := report.problems():
            raise DataError("; ".join(told))
    return found


ANNOTATED: dict[str, Reader] = {
    "coco": Reader(
        make_coco, look_through_annotated, {"data/annotations/*.json": "json"}, share=2, command=checked("data")
    ),
    "coco masks": Reader(make_coco_masks, read_objects, {"data/annotations/*.json": "json"}, command=checked("data")),
    "voc": Reader(
        make_voc,
        read_objects,
        {"data/Annotations/*.xml": "text", "data/ImageSets/Main/*.txt": "text"},
        command=checked("data"),
    ),
    "yolo": Reader(
        make_yolo, read_objects, {"data/labels/*.txt": "text", "data/data.yaml": "yaml"}, command=checked("data")
    ),
    "instances": Reader(
        make_instances,
        read_objects,
        {"data/PedMasks/*.png": "png", "data/classes.txt": "text"},
        command=checked("data"),
    ),
    "mask names": Reader(
        make_palettes,
        read_palettes,
        {"*/class_dict.csv": "csv", "*/labelmap.txt": "text", "*/label_colors.txt": "text", "*/masks/*.png": "png"},
        command=checked("class_dict"),
    ),
    "masks": Reader(
        make_masks,
        look_through_annotated,
        {"data/masks/*.png": "png", "data/classes.txt": "text"},
        command=checked("data"),
    ),
}
