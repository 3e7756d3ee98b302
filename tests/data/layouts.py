"""Public datasets as they lie on disk once downloaded and unpacked, with a few tiny images each.

Each function builds one layout below a root and returns what a person would give as DATA; its decorator says what that
person expects: how it is read, the task, the classes, the splits and the ignored mask value, or the error and the
commands that it offers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from tests.data.dirty import jpeg, make_image

SIZE = (32, 24)
CAMVID = (
    "Sky",
    "Building",
    "Pole",
    "Road",
    "Pavement",
    "Tree",
    "SignSymbol",
    "Fence",
    "Car",
    "Pedestrian",
    "Bicyclist",
)


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    name: str
    build: Callable[[Path], Path]
    reading: str = ""  # part of what stands in brackets behind the name of the source
    task: str = ""
    classes: int | tuple[str, ...] = 0
    splits: dict[str, int] | None = None
    ignore: int | None = None  # the value of masks as they are stored
    note: Sequence[str] = ()  # facts in the notes
    error: type[PatchloomError] | None = None
    says: Sequence[str] = ()  # parts of the error: the commands that it offers


LAYOUTS: list[Layout] = []


def layout(**expected: object) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def add(build: Callable[[Path], Path]) -> Callable[[Path], Path]:
        LAYOUTS.append(Layout(build.__name__, build, **expected))  # type: ignore[arg-type]
        return build

    return add


# Files ----------------------------------------------------------------------------------------------------------------


def photos(root: Path, *paths: str, size: tuple[int, int] = SIZE) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        image = make_image(sum(path.encode()) + len(path), size)
        if file.suffix.lower() in (".jpg", ".jpeg"):
            file.write_bytes(jpeg(image))
        else:
            image.save(file)


def masks(root: Path, *paths: str, values: Sequence[int] = (0, 1, 2), colors: Sequence[int] = ()) -> None:
    """Stripes of numbers, or of colors (flat RGB triples) by number."""
    stripes = np.array(values, np.uint8).repeat(-(-SIZE[0] // len(values)))[: SIZE[0]]
    numbers = np.tile(stripes, (SIZE[1], 1))
    image = Image.fromarray(numbers)
    if colors:
        image = Image.fromarray(np.array(colors, np.uint8).reshape(-1, 3)[numbers])
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / path)


def text(root: Path, **contents: str) -> None:
    """Files by path, with __ for / and ___ for a dot."""
    for name, content in contents.items():
        write(root, name.replace("___", ".").replace("__", "/"), content)


def write(root: Path, path: str, content: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content if isinstance(content, str) else json.dumps(content))


def mat(root: Path, path: str, **arrays: object) -> None:
    from scipy.io import savemat

    (root / path).parent.mkdir(parents=True, exist_ok=True)
    savemat(root / path, arrays)


def coco_of(names: Sequence[str], categories: Sequence[str] = ("cat", "dog"), first: int = 1, boxes: bool = True):
    images = [{"id": i, "file_name": name, "width": SIZE[0], "height": SIZE[1]} for i, name in enumerate(names, first)]
    box = {"bbox": [2, 3, 10, 8], "area": 80, "iscrowd": 0} if boxes else {}
    entries = [
        {"id": i, "image_id": i, "category_id": 1 + i % len(categories)} | box for i, _ in enumerate(names, first)
    ]
    return {
        "images": images,
        "annotations": entries,
        "categories": [{"id": i, "name": n} for i, n in enumerate(categories, 1)],
    }


def voc_xml(name: str, *objects: tuple[str, int, int, int, int], size: tuple[int, int] = SIZE) -> str:
    rows = "".join(
        f"<object><name>{label}</name><difficult>0</difficult><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for label, x0, y0, x1, y1 in objects
    )
    width, height = size
    sizes = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}</filename>{sizes}{rows}</annotation>"


# Class folders and lists of labels ------------------------------------------------------------------------------------


@layout(reading="class folders", task="classify", classes=("n01440764", "n01443537"), splits={"train": 4, "val": 2})
def imagenet(root: Path) -> Path:
    for name in ("n01440764", "n01443537"):
        photos(root, f"train/{name}/{name}_10026.JPEG", f"train/{name}/{name}_10027.JPEG")
        photos(root, f"val/{name}/ILSVRC2012_val_0000{name[-4:]}.JPEG")
    return root


@layout(reading="class folders", task="classify", classes=2, splits={"train": 4}, note=["val"])
def imagenet_with_a_flat_val(root: Path) -> Path:
    """As ILSVRC2012_img_val.tar unpacks."""
    for name in ("n01440764", "n01443537"):
        photos(root, f"train/{name}/{name}_10026.JPEG", f"train/{name}/{name}_10027.JPEG")
    photos(root, "val/ILSVRC2012_val_00000001.JPEG", "val/ILSVRC2012_val_00000002.JPEG")
    return root


@layout(error=UsageError, says=["--images ILSVRC/Data", "--boxes ILSVRC/Annotations"])
def imagenet_kaggle(root: Path) -> Path:
    """Class folders, and boxes of their images."""
    for name in ("n01440764", "n01443537"):
        for i in (26, 27):
            photos(root, f"ILSVRC/Data/CLS-LOC/train/{name}/{name}_{i}.JPEG")
            xml = voc_xml(f"{name}_{i}", (name, 2, 3, 12, 14))
            write(root, f"ILSVRC/Annotations/CLS-LOC/train/{name}/{name}_{i}.xml", xml)
    write(root, "LOC_train_solution.csv", "ImageId,PredictionString\nn01440764_26,n01440764 2 3 12 14\n")
    return root


@layout(error=DataError, says=["--labels"])
def coco_captions(root: Path) -> Path:
    """Folders that are named as splits are no classes."""
    photos(root, "train2017/000000000009.jpg", "train2017/000000000025.jpg", "val2017/000000000139.jpg")
    write(root, "annotations/captions_train2017.json", {"images": [], "annotations": []})
    return root


@layout(reading="class folders", task="classify", classes=("airplane", "automobile"), splits={"train": 4, "test": 2})
def cifar10(root: Path) -> Path:
    for name in ("airplane", "automobile"):
        photos(root, f"train/{name}/0001.png", f"train/{name}/0002.png", f"test/{name}/0001.png")
    return root


@layout(reading="class folders", task="classify", classes=("Faces", "accordion"), splits={"train": 4})
def caltech101(root: Path) -> Path:
    for name in ("Faces", "accordion"):
        photos(root, *(f"101_ObjectCategories/{name}/image_000{i}.jpg" for i in (1, 2)))
        write(root, f"Annotations/{name}/annotation_0001.mat", "MATLAB 5.0 MAT-file")
    return root


@layout(reading="class folders", task="classify", classes=("apple_pie", "waffles"), splits={"train": 4, "test": 2})
def food101(root: Path) -> Path:
    root = root / "food-101"
    names = [f"{name}/{i}" for name in ("apple_pie", "waffles") for i in (1005649, 1011328, 101251)]
    photos(root, *(f"images/{name}.jpg" for name in names))
    test = [name for name in names if name.endswith("251")]
    train = [name for name in names if name not in test]
    text(root, meta__train___txt="\n".join(train), meta__test___txt="\n".join(test))
    text(root, meta__classes___txt="apple_pie\nwaffles\n", meta__labels___txt="Apple pie\nWaffles\n")
    write(root, "meta/train.json", {"apple_pie": train[:2], "waffles": train[2:]})
    write(root, "meta/test.json", {"apple_pie": test[:1], "waffles": test[1:]})
    text(root, README___txt="Food-101")
    return root


@layout(
    reading="class folders",
    task="classify",
    classes=("001.Black_footed_Albatross", "002.Laysan_Albatross"),
    splits={"train": 4, "test": 2},
    note=["train_test_split.txt"],
)
def cub200(root: Path) -> Path:
    root = root / "CUB_200_2011"
    classes = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    names = [f"{name}/{name[4:]}_00{i}_7.jpg" for name in classes for i in (46, 47, 48)]
    photos(root, *(f"images/{name}" for name in names))
    lines = {
        "images.txt": [f"{i} {name}" for i, name in enumerate(names, 1)],
        "image_class_labels.txt": [f"{i} {1 + (i > 3)}" for i in range(1, 7)],
        "train_test_split.txt": [f"{i} {int(i % 3 > 0)}" for i in range(1, 7)],
        "bounding_boxes.txt": [f"{i} 2.0 3.0 10.0 8.0" for i in range(1, 7)],
        "classes.txt": [f"{i} {name}" for i, name in enumerate(classes, 1)],
    }
    for file, content in lines.items():
        write(root, file, "\n".join(content) + "\n")
    write(root, "attributes/certainties.txt", "1 not visible\n")
    write(root, "parts/parts.txt", "1 back\n")
    return root


@layout(
    reading="labels file", task="classify", classes=("Acura RL Sedan 2012", "BMW M3 Coupe 2012"),
    splits={"train": 4, "test": 2},
)  # fmt: skip
def stanford_cars(root: Path) -> Path:
    photos(root, *(f"cars_train/0000{i}.jpg" for i in range(1, 5)), "cars_test/00001.jpg", "cars_test/00002.jpg")
    fields = [("bbox_x1", "O"), ("bbox_y1", "O"), ("bbox_x2", "O"), ("bbox_y2", "O"), ("class", "O"), ("fname", "O")]
    rows = [(1, 2, 20, 20, 1 + i % 2, f"0000{i}.jpg") for i in range(1, 5)]
    mat(root, "devkit/cars_train_annos.mat", annotations=np.array([rows], dtype=fields))
    mat(
        root,
        "devkit/cars_test_annos.mat",
        annotations=np.array([[(*r[:4], r[5]) for r in rows[:2]]], fields[:4] + fields[5:]),
    )
    mat(root, "devkit/cars_test_annos_withlabels.mat", annotations=np.array([rows[:2]], dtype=fields))
    names = np.array([["Acura RL Sedan 2012", "BMW M3 Coupe 2012"]], dtype=object)
    mat(root, "devkit/cars_meta.mat", class_names=names)
    return root


@layout(
    reading="class folders", task="classify", classes=("Acura RL Sedan 2012", "BMW M3 Coupe 2012"),
    splits={"train": 4, "test": 2},
)  # fmt: skip
def stanford_cars_in_folders(root: Path) -> Path:
    for name in ("Acura RL Sedan 2012", "BMW M3 Coupe 2012"):
        photos(root, *(f"car_data/car_data/train/{name}/0000{i}.jpg" for i in (1, 2)))
        photos(root, f"car_data/car_data/test/{name}/00009.jpg")
    text(root, names___csv="Acura RL Sedan 2012\nBMW M3 Coupe 2012\n")
    text(root, anno_train___csv="00001.jpg,1,2,20,20,1\n", anno_test___csv="00009.jpg,1,2,20,20,1\n")
    return root


@layout(reading="labels file", task="classify", classes=2, splits={"train": 2, "val": 2, "test": 4})
def flowers102(root: Path) -> Path:
    photos(root, *(f"jpg/image_0000{i}.jpg" for i in range(1, 9)))
    mat(root, "imagelabels.mat", labels=np.array([[1, 2] * 4], np.uint8))
    mat(root, "setid.mat", trnid=np.array([[1, 2]]), valid=np.array([[3, 4]]), tstid=np.array([[5, 6, 7, 8]]))
    return root


@layout(reading="COCO", task="classify", classes=("0", "1"), splits={"train": 4, "val": 2})
def inaturalist2018(root: Path) -> Path:
    names = [f"train_val2018/Aves/{2820 + i % 2}/a{i}.jpg" for i in range(6)]
    photos(root, *names)
    for split, own in (("train", names[:4]), ("val", names[4:])):
        images = [{"id": i, "file_name": name, "width": 32, "height": 24} for i, name in enumerate(own)]
        entries = [{"id": i, "image_id": i, "category_id": i % 2} for i in range(len(own))]
        categories = [{"id": i, "name": str(i)} for i in (0, 1)]
        write(
            root, f"{split}2018.json", {"info": {}, "images": images, "annotations": entries, "categories": categories}
        )
    return root


@layout(
    reading="COCO", task="classify", classes=("Prunella modularis", "Prunella vulgaris", "Salvia pratensis"),
    splits={"train": 6, "val": 3},
)  # fmt: skip
def inaturalist2018_taxonomy(root: Path) -> Path:
    """Numbers for names in the lists, and a file of categories, as published."""
    ranks = ("kingdom", "phylum", "class", "order", "family", "genus", "name")
    rows = (
        "Animalia Chordata Aves Passeriformes Prunellidae Prunella Prunella-modularis",
        "Plantae Tracheophyta Magnoliopsida Lamiales Lamiaceae Prunella Prunella-vulgaris",
        "Plantae Tracheophyta Magnoliopsida Lamiales Lamiaceae Salvia Salvia-pratensis",
    )
    described = [dict(zip(ranks, row.split(), strict=True)) for row in rows]
    described = [{**entry, "id": i, "name": entry["name"].replace("-", " ")} for i, entry in enumerate(described)]
    write(root, "categories.json", described)
    names = [f"train_val2018/{rows[i % 3].split()[0]}/{i % 3}/a{i}.jpg" for i in range(9)]
    photos(root, *names)
    for split, own in (("train", names[:6]), ("val", names[6:])):
        images = [{"id": i, "file_name": name, "width": 32, "height": 24} for i, name in enumerate(own)]
        entries = [{"id": i, "image_id": i, "category_id": i % 3} for i in range(len(own))]
        categories = [{"id": i, "name": str(i)} for i in range(3)]
        content = {"info": {}, "images": images, "annotations": entries, "categories": categories}
        write(root, f"{split}2018.json", content)
    return root


@layout(reading="class folders", task="classify", classes=("AnnualCrop", "Forest"), splits={"train": 4})
def eurosat(root: Path) -> Path:
    for name in ("AnnualCrop", "Forest"):
        photos(root, *(f"2750/{name}/{name}_{i}.jpg" for i in (1, 2)))
    return root


@layout(
    reading="class folders", task="classify", classes=("banded", "dotted"),
    splits={"train": 2, "val": 2, "test": 2}, note=["train1.txt"],
)  # fmt: skip
def dtd(root: Path) -> Path:
    root = root / "dtd"
    for name in ("banded", "dotted"):
        photos(root, *(f"images/{name}/{name}_000{i}.jpg" for i in range(3)))
    for fold in (1, 2):
        for i, split in enumerate(("train", "val", "test")):
            own = [f"{name}/{name}_000{(i + fold - 1) % 3}.jpg" for name in ("banded", "dotted")]
            write(root, f"labels/{split}{fold}.txt", "\n".join(own) + "\n")
    write(root, "labels/labels_joint_anno.txt", "banded/banded_0000.jpg banded \n")
    write(root, "imdb/imdb.mat", "MATLAB 5.0 MAT-file")
    return root


@layout(reading="class folders", task="classify", classes=("airfield", "attic"), splits={"train": 4, "val": 2})
def places365_standard(root: Path) -> Path:
    for name in ("airfield", "attic"):
        photos(root, *(f"train/{name}/0000000{i}.jpg" for i in (1, 2)), f"val/{name}/Places365_val_00000001.jpg")
    text(root, train___txt="train/airfield/00000001.jpg\n", val___txt="val/airfield/Places365_val_00000001.jpg\n")
    return root


@layout(reading="labels file", task="classify", classes=("/a/airfield", "/a/attic"), splits={"train": 4, "val": 2})
def places365_lists(root: Path) -> Path:
    for name in ("airfield", "attic"):
        photos(root, *(f"data_256/a/{name}/0000000{i}.jpg" for i in (1, 2)))
    photos(root, "val_256/Places365_val_00000001.jpg", "val_256/Places365_val_00000002.jpg")
    lines = [f"/a/{name}/0000000{i}.jpg {n}" for n, name in enumerate(("airfield", "attic")) for i in (1, 2)]
    text(root, places365_train_standard___txt="\n".join(lines) + "\n")
    text(root, places365_val___txt="Places365_val_00000001.jpg 1\nPlaces365_val_00000002.jpg 0\n")
    text(root, categories_places365___txt="/a/airfield 0\n/a/attic 1\n")
    return root


@layout(reading="class folders", task="classify", classes=2, splits={"train": 4})
def stanford_dogs(root: Path) -> Path:
    """Its boxes are XML without an extension, which is no kind of file that is read."""
    for name in ("n02085620-Chihuahua", "n02085782-Japanese_spaniel"):
        photos(root, *(f"Images/{name}/{name[:9]}_{i}.jpg" for i in (1, 2)))
        write(root, f"Annotation/{name}/{name[:9]}_1", voc_xml("x", ("Chihuahua", 1, 2, 10, 12)))
    return root


@layout(reading="labels file", task="classify", classes=("cat", "dog"), splits={"train": 4}, note=["train.csv"])
def kaggle_csv(root: Path) -> Path:
    photos(root, *(f"train/{i:04x}.jpg" for i in range(4)), *(f"test/{i:04x}.jpg" for i in range(8, 10)))
    text(root, train___csv="id,label\n" + "".join(f"{i:04x},{'cat' if i % 2 else 'dog'}\n" for i in range(4)))
    text(root, sample_submission___csv="id,label\n0008,cat\n0009,cat\n")
    return root


@layout(error=DataError, says=["--label-pattern", "'cat'", "'dog'"])
def kaggle_dogs_and_cats(root: Path) -> Path:
    photos(root, *(f"train/{name}.{i}.jpg" for name in ("cat", "dog") for i in range(3)), "test1/1.jpg", "test1/2.jpg")
    text(root, sampleSubmission___csv="id,label\n1,0\n2,0\n")
    return root


@layout(
    reading="class folders",
    task="classify",
    classes=("Brown-Cap-Mushroom", "Golden-Delicious", "Pink-Lady"),
    splits={"train": 6, "val": 3, "test": 3},
)
def grocery_store(root: Path) -> Path:
    """One class lies a folder deeper in val and test than in train."""
    root = root / "dataset"
    for split in ("train", "val", "test"):
        mushroom = "Vegetables" if split == "train" else "Vegetables/Mushroom"
        for folder in ("Fruit/Apple/Golden-Delicious", "Fruit/Apple/Pink-Lady", f"{mushroom}/Brown-Cap-Mushroom"):
            name = folder.rsplit("/", 1)[1]
            photos(root, *(f"{split}/{folder}/{name}_00{i}.jpg" for i in range(2 if split == "train" else 1)))
        write(root, f"{split}.txt", f"{split}/Fruit/Apple/Golden-Delicious/Golden-Delicious_000.jpg, 0, 0\n")
    photos(root, "iconic-images-and-descriptions/Fruit/Apple/Golden-Delicious/Golden-Delicious_Iconic.jpg")
    text(
        root,
        classes___csv="Class Name (str),Class ID (int),Coarse Class Name (str)\nGolden-Delicious,0,Apple\n",
    )
    return root


# Masks ----------------------------------------------------------------------------------------------------------------


@layout(
    reading="masks", task="segment", classes=("wall", "building"), splits={"train": 2, "val": 1},
    ignore=0,
    note=["(0)"],
)  # fmt: skip
def ade20k(root: Path) -> Path:
    root = root / "ADEChallengeData2016"
    for split, stems in (("training", ("ADE_train_1", "ADE_train_2")), ("validation", ("ADE_val_1",))):
        photos(root, *(f"images/{split}/{stem}.jpg" for stem in stems))
        masks(root, *(f"annotations/{split}/{stem}.png" for stem in stems))
    rows = ["1\t0.15\t11664\t1172\t1\twall", "2\t0.1\t6046\t612\t1\tbuilding, edifice"]
    text(root, objectInfo150___txt="\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
    text(root, sceneCategories___txt="ADE_train_1 airport_terminal\n")
    return root


@layout(
    reading="masks", task="segment", classes=19, splits={"train": 2, "val": 1, "test": 1}, ignore=255,
    note=["gtFine"],
)  # fmt: skip
def cityscapes(root: Path) -> Path:
    for split, city, count in (("train", "aachen", 2), ("val", "munster", 1), ("test", "berlin", 1)):
        for i in range(count):
            stem = f"{split}/{city}/{city}_00000{i}_000019"
            photos(root, f"leftImg8bit/{stem}_leftImg8bit.png")
            masks(root, f"gtFine/{stem}_gtFine_labelIds.png", values=(7, 8, 11, 0))
            masks(root, f"gtFine/{stem}_gtFine_instanceIds.png", values=(7, 8, 11, 0))
            masks(root, f"gtFine/{stem}_gtFine_color.png", values=(0, 1), colors=(128, 64, 128, 244, 35, 232))
            write(root, f"gtFine/{stem}_gtFine_polygons.json", {"imgHeight": 24, "imgWidth": 32, "objects": []})
    text(root, README="Cityscapes", license___txt="…")
    return root


def voc_files(root: Path) -> None:
    stems = ("2007_000032", "2007_000033", "2007_000039", "2008_000001")
    photos(root, *(f"JPEGImages/{stem}.jpg" for stem in stems))
    masks(root, *(f"SegmentationClass/{stem}.png" for stem in stems[:3]), values=(0, 1, 15, 255))
    masks(root, *(f"SegmentationObject/{stem}.png" for stem in stems[:3]), values=(0, 1, 2, 255))
    for stem in stems:
        write(root, f"Annotations/{stem}.xml", voc_xml(f"{stem}.jpg", ("person", 2, 3, 12, 14), ("cat", 1, 1, 9, 9)))
    lists = {"Segmentation/train": stems[:2], "Segmentation/val": stems[2:3]}
    lists |= {
        "Main/train": stems[:2],
        "Main/val": stems[2:],
        "Segmentation/trainval": stems[:3],
        "Main/trainval": stems,
    }
    for path, own in lists.items():
        write(root, f"ImageSets/{path}.txt", "\n".join(own) + "\n")
    write(root, "ImageSets/Main/cat_train.txt", "2007_000032  1\n2007_000033 -1\n")


@layout(error=UsageError, says=["--masks VOC2012/SegmentationClass", "--boxes VOC2012/Annotations"])
def pascal_voc(root: Path) -> Path:
    voc_files(root / "VOCdevkit" / "VOC2012")
    return root / "VOCdevkit"


@layout(
    reading="masks", task="segment", classes=CAMVID,
    splits={"train": 2, "val": 1, "test": 1}, ignore=11,
)  # fmt: skip
def camvid_segnet(root: Path) -> Path:
    root = root / "CamVid"
    for split, stems in (
        ("train", ("0001TP_006690", "0001TP_006720")),
        ("val", ("0016E5_07959",)),
        ("test", ("Seq05VD_f00000",)),
    ):
        photos(root, *(f"{split}/{stem}.png" for stem in stems))
        masks(root, *(f"{split}annot/{stem}.png" for stem in stems), values=(0, 1, 10, 11))
        lines = [f"/SegNet/CamVid/{split}/{stem}.png /SegNet/CamVid/{split}annot/{stem}.png" for stem in stems]
        write(root, f"{split}.txt", "\n".join(lines) + "\n")
    return root


@layout(
    reading="masks", task="segment", classes=("Animal", "Sky"), splits={"train": 3}, ignore=2,
    note=["Void"],
)  # fmt: skip
def camvid_701(root: Path) -> Path:
    stems = ("0001TP_006690", "0006R0_f00930", "Seq05VD_f00000")
    photos(root, *(f"701_StillsRaw_full/{stem}.png" for stem in stems))
    colors = (64, 128, 64, 128, 128, 128, 0, 0, 0)
    masks(root, *(f"LabeledApproved_full/{stem}_L.png" for stem in stems), colors=colors)
    text(root, label_colors___txt="64 128 64\tAnimal\n128 128 128\tSky\n0 0 0\t\tVoid\n")
    return root


@layout(reading="masks", task="segment", classes=3, splits={"train": 2, "val": 1}, ignore=255)
def coco128_semantic(root: Path) -> Path:
    """What is given holds masks alone; the images lie beside it."""
    for split, stems in (("train2017", ("000000000009", "000000000025")), ("val2017", ("000000000030",))):
        photos(root, *(f"images/{split}/{stem}.jpg" for stem in stems))
        masks(root, *(f"semantic_segmentation/masks/{split}/{stem}.png" for stem in stems))
    return root / "semantic_segmentation"


@layout(reading="masks", task="segment", classes=("urban", "water"), splits={"train": 3}, ignore=2)
def deepglobe(root: Path) -> Path:
    """Images and masks in one folder."""
    photos(root, *(f"train/{i}_sat.jpg" for i in (119, 855, 2334)))
    masks(root, *(f"train/{i}_mask.png" for i in (119, 855, 2334)), colors=(0, 255, 255, 0, 0, 255, 0, 0, 0))
    text(root, class_dict___csv="name,r,g,b\nurban,0,255,255\nwater,0,0,255\nunknown,0,0,0\n")
    return root


@layout(error=UsageError, says=["--masks .", "benign"])
def busi(root: Path) -> Path:
    """Class folders in which each image has its mask."""
    for name in ("benign", "malignant"):
        photos(root, *(f"{name}/{name} ({i}).png" for i in (1, 2)))
        masks(root, *(f"{name}/{name} ({i})_mask.png" for i in (1, 2)), values=(0, 255))
    return root


@layout(
    error=UsageError,
    says=["--label-pattern", "--masks annotations/trimaps", "--boxes annotations/xmls"],
)
def oxford_pets(root: Path) -> Path:
    return _pets(root, "images")


@layout(
    error=UsageError,
    says=["--label-pattern", "--masks annotations/trimaps", "--boxes annotations/xmls"],
)
def oxford_pets_resized(root: Path) -> Path:
    return _pets(root, "original")


def _pets(root: Path, images: str) -> Path:
    stems = [f"{name}_{i}" for name in ("Abyssinian", "american_bulldog") for i in (1, 2, 34)]
    photos(root, *(f"{images}/{stem}.jpg" for stem in stems))
    masks(root, *(f"annotations/trimaps/{stem}.png" for stem in stems), values=(1, 2, 3))
    for stem in stems[:4]:
        write(root, f"annotations/xmls/{stem}.xml", voc_xml(f"{stem}.jpg", ("cat", 2, 3, 12, 14)))
    lines = [f"{stem} {1 + (stem[0] == 'a')} 1 1" for stem in stems]
    write(root, "annotations/list.txt", "#Image CLASS-ID SPECIES BREED ID\n" + "\n".join(lines) + "\n")
    write(root, "annotations/trainval.txt", "\n".join(lines[:4]) + "\n")
    write(root, "annotations/test.txt", "\n".join(lines[4:]) + "\n")
    write(root, "annotations/README", "Oxford-IIIT Pets")
    return root


# Boxes ----------------------------------------------------------------------------------------------------------------


@layout(reading="VOC boxes", task="detect", classes=("cat", "person"), splits={"train": 2, "val": 2})
def voc_boxes(root: Path) -> Path:
    """VOC 2007 without its masks."""
    voc_files(root)
    for folder in ("SegmentationClass", "SegmentationObject"):
        for file in (root / folder).iterdir():
            file.unlink()
        (root / folder).rmdir()
    return root


@layout(reading="COCO boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1})
def coco(root: Path) -> Path:
    for split, names in (("train2017", ("000000000009.jpg", "000000000025.jpg")), ("val2017", ("000000000139.jpg",))):
        photos(root, *(f"{split}/{name}" for name in names))
        write(root, f"annotations/instances_{split}.json", coco_of(names))
        captions = {"images": [], "annotations": [{"image_id": 1, "id": 1, "caption": "a cat"}]}
        write(root, f"annotations/captions_{split}.json", captions)
        write(root, f"annotations/person_keypoints_{split}.json", coco_of(names, ["person"]))
    return root


@layout(reading="COCO boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1})
def lvis(root: Path) -> Path:
    """Images have an address in place of a file name, and those of val lie in COCO's train2017 too."""
    for split, names in (("train", ("000000000009.jpg", "000000000025.jpg")), ("val", ("000000000030.jpg",))):
        photos(root, *(f"train2017/{name}" for name in names))
        content = coco_of(names)
        for image in content["images"]:
            image["coco_url"] = f"http://images.cocodataset.org/train2017/{image.pop('file_name')}"
        write(root, f"lvis_v1_{split}.json", content)
    return root


def yolo_files(root: Path, splits: Sequence[str] = ("train2017", "val2017"), labels: str = "labels") -> None:
    for i, split in enumerate(splits):
        photos(root, f"images/{split}/00000000000{i}.jpg", f"images/{split}/00000000001{i}.jpg")
        write(root, f"{labels}/{split}/00000000000{i}.txt", "1 0.5 0.5 0.25 0.5\n")
        write(root, f"{labels}/{split}/00000000001{i}.txt", "0 0.4 0.4 0.25 0.5\n2 0.5 0.5 0.5 0.5\n")


YAML = """path: ../datasets/coco128
train: images/train2017
val: images/val2017
test:
names:
  0: cat
  1: dog
  2: cow
"""


@layout(reading="YOLO boxes", task="detect", classes=("cat", "dog", "cow"), splits={"train": 2, "val": 2})
def yolo_v5(root: Path) -> Path:
    yolo_files(root)
    text(root, coco128___yaml=YAML, LICENSE="AGPL", README___txt="COCO128")
    return root


@layout(reading="YOLO boxes", task="detect", classes=("cat", "dog", "cow"), splits={"train": 2, "val": 2})
def yolo_v8_yaml(root: Path) -> Path:
    """The yaml is given, and its folder of data lies beside."""
    yolo_files(root / "coco128")
    text(root, animals___yml=YAML)
    return root / "animals.yml"


@layout(reading="YOLO boxes", task="detect", classes=("0", "1", "2"), splits={"train": 2, "val": 2})
def yolo_without_names(root: Path) -> Path:
    yolo_files(root, ("train", "val"))
    return root


@layout(error=UsageError, says=["--boxes labels", "--boxes labels_coco91"])
def coco128_with_two_label_sets(root: Path) -> Path:
    yolo_files(root)
    yolo_files(root, labels="labels_coco91")
    text(root, coco128___yaml=YAML)
    return root


@layout(
    error=UsageError,
    says=["--boxes instance_segmentation/labels", "--boxes object_detection/labels"],
)
def coco128_with_two_folders(root: Path) -> Path:
    for name in ("object_detection", "instance_segmentation"):
        yolo_files(root / name)
    return root


@layout(error=UsageError, says=["--boxes labels", "--masks semantic_segmentation/masks"])
def coco128_root(root: Path) -> Path:
    yolo_files(root)
    masks(root, *(f"semantic_segmentation/masks/{s}2017/00000000000{i}.png" for i, s in enumerate(("train", "val"))))
    return root


@layout(
    reading="boxes", task="detect", classes=("Container", "Tortoise"), splits={"train": 2, "val": 1},
    note=["class-descriptions-boxable.csv"],
)  # fmt: skip
def open_images(root: Path) -> Path:
    head = (
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
    )
    for split, own in (("train", ("000a1", "000b2")), ("validation", ("000c3",))):
        photos(root, *(f"{split}/{name}.jpg" for name in own))
        rows = [f"{name},xclick,/m/011k0{7 + i % 2},1,0.25,0.5,0.25,0.75,0,0,0,0,0\n" for i, name in enumerate(own)]
        write(root, f"{split}-annotations-bbox.csv", "".join([head, "\n", *rows]))
    write(root, "class-descriptions-boxable.csv", "/m/011k07,Tortoise\n/m/011k08,Container\n")
    return root


@layout(reading="COCO boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1, "test": 1})
def roboflow_coco(root: Path) -> Path:
    for split, names in (("train", ("a.jpg", "b.jpg")), ("valid", ("c.jpg",)), ("test", ("d.jpg",))):
        photos(root, *(f"{split}/{name}" for name in names))
        write(root, f"{split}/_annotations.coco.json", coco_of(names))
    text(root, README___roboflow___txt="exported", README___dataset___txt="https://universe.roboflow.com")
    return root


@layout(reading="YOLO boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1, "test": 1})
def roboflow_yolo(root: Path) -> Path:
    for split, names in (("train", "ab"), ("valid", "c"), ("test", "d")):
        photos(root, *(f"{split}/images/{name}.jpg" for name in names))
        for name in names:
            write(root, f"{split}/labels/{name}.txt", "1 0.5 0.5 0.25 0.5\n")
    text(root, data___yaml="train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['cat', 'dog']\n")
    return root


@layout(reading="VOC boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1, "test": 1})
def roboflow_voc(root: Path) -> Path:
    for split, names in (("train", "ab"), ("valid", "c"), ("test", "d")):
        photos(root, *(f"{split}/{name}.jpg" for name in names))
        for name in names:
            write(root, f"{split}/{name}.xml", voc_xml(f"{name}.jpg", ("cat", 2, 3, 12, 14), ("dog", 1, 1, 9, 9)))
    return root


@layout(reading="class folders", task="classify", classes=("cat", "dog"), splits={"train": 4, "val": 2, "test": 2})
def roboflow_folders(root: Path) -> Path:
    for name in ("cat", "dog"):
        photos(root, f"train/{name}/a.jpg", f"train/{name}/b.jpg", f"valid/{name}/c.jpg", f"test/{name}/d.jpg")
    text(root, README___roboflow___txt="exported")
    return root


@layout(reading="boxes", task="detect", classes=("cat", "dog"), splits={"train": 2, "val": 1})
def roboflow_csv(root: Path) -> Path:
    for split, names in (("train", "ab"), ("valid", "c")):
        photos(root, *(f"{split}/{name}.jpg" for name in names))
        rows = [f"{name}.jpg,32,24,{label},2,3,12,14\n" for name in names for label in ("cat", "dog")]
        write(root, f"{split}/_annotations.csv", "filename,width,height,class,xmin,ymin,xmax,ymax\n" + "".join(rows))
    return root


@layout(reading="Label Studio", task="detect", classes=("cat", "dog"), splits={"train": 3})
def label_studio(root: Path) -> Path:
    photos(root, *(f"images/{name}.jpg" for name in "abc"))
    tasks = []
    for i, name in enumerate("abc"):
        value = {"x": 25, "y": 50, "width": 25, "height": 25, "rotation": 0, "rectanglelabels": ["cat" if i else "dog"]}
        result = [{"type": "rectanglelabels", "original_width": 32, "original_height": 24, "value": value}]
        data = {"image": f"/data/upload/1/8f3b2c1d-{name}.jpg"}
        tasks.append({"id": i, "data": data, "annotations": [{"id": i, "result": result}]})
    write(root, "project-1-at-2024-05-01-10-00-12345678.json", tasks)
    return root


@layout(reading="CVAT boxes", task="detect", classes=("cat", "dog"), splits={"train": 3})
def cvat(root: Path) -> Path:
    photos(root, *(f"images/{name}.jpg" for name in "abc"))
    labels = "".join(f"<label><name>{name}</name></label>" for name in ("cat", "dog"))
    box = '<box label="dog" occluded="0" xtl="2.5" ytl="3" xbr="12" ybr="14" z_order="0"></box>'
    images = "".join(
        f'<image id="{i}" name="{name}.jpg" width="32" height="24">{box}</image>' for i, name in enumerate("abc")
    )
    head = f"<version>1.1</version><meta><task><labels>{labels}</labels></task></meta>"
    text(root, annotations___xml=f'<?xml version="1.0" encoding="utf-8"?><annotations>{head}{images}</annotations>')
    return root


@layout(reading="LabelMe", task="detect", classes=("cat", "dog"), splits={"train": 3})
def labelme(root: Path) -> Path:
    photos(root, *(f"{name}.jpg" for name in "abc"))
    for i, name in enumerate("abc"):
        points = [[2, 3], [12, 3], [12, 14], [2, 14]]
        shapes = [{"label": "cat" if i else "dog", "points": points, "shape_type": "polygon", "group_id": None}]
        content = {"version": "5.0.1", "flags": {}, "shapes": shapes, "imagePath": f"{name}.jpg", "imageData": None}
        write(root, f"{name}.json", content | {"imageHeight": 24, "imageWidth": 32})
    return root


@layout(reading="objects", task="detect", classes=("pedestrian",), splits={"train": 3})
def penn_fudan(root: Path) -> Path:
    root = root / "PennFudanPed"
    for i in (1, 2, 3):
        photos(root, f"PNGImages/FudanPed0000{i}.png")
        masks(root, f"PedMasks/FudanPed0000{i}_mask.png")
        write(
            root,
            f"Annotation/FudanPed0000{i}.txt",
            "# Compatible with PASCAL Annotation Version 1.00\n",
        )
    return root
