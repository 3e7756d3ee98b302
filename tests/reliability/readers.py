"""Everything of patchloom that reads files, each with files to read and an answer that can be compared.

A reader is given a folder of its own, filled from `seeds`, of which one file is then changed. `repair` makes checksums
right again, as a stranger would who made the folder.
"""

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchloom import cli
from patchloom.data.checking.check import check
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.pictures.object_masks import ObjectMask
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sets import Listing
from patchloom.data.sources.masked import of_masks
from patchloom.data.sources.source import find_source, open_data
from patchloom.data.text.pairs import open_parallel
from patchloom.deployment.classifier import load
from patchloom.deployment.index import index, open_index
from patchloom.deployment.translator import load_translator
from patchloom.errors import CheckpointError, DataError, PatchloomError
from patchloom.evaluation.labels import read_real_labels
from patchloom.judging.several_runs import evaluate
from patchloom.models.registry import create_model
from patchloom.models.weights_table import weights_named
from patchloom.runs import checksums, metrics, named
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import refuse_bad, weights_digest
from patchloom.tasks.image_networks import initialise
from patchloom.tasks.pages import report_run
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.table import task_of_run
from patchloom.tasks.verify import verify
from patchloom.training.run import run_training, silent
from tests import translation_runs

TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
CLASSES = ("blue", "red")
PICTURES = 6  # of each class
NETWORK: dict[str, Any] = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 1, "num_classes": 2}

Files = dict[str, str]  # pattern below the reader's folder → kind of mutation


@dataclass(frozen=True)
class Reader:
    """A way in."""

    make: Callable[[Path, Path], None]  # seeds, folder: fills the folder
    read: Callable[[Path, Path], Any]  # seeds, folder → answer
    files: Files
    repair: Callable[[Path, Path], None] | None = None  # folder, the file that was changed
    ours: bool = False  # patchloom wrote the files: a changed byte must not change the answer
    notices: bool = False  # any changed byte is to be noticed
    writes: bool = False  # into the folder
    share: float = 1.0  # of the cases, beside those of others
    command: Callable[[Path, Path], tuple[Any, ...]] | None = None  # seeds, folder → what a user would type


# Seeds --------------------------------------------------------------------------------------------------------------


def settings(data: Path, out: Path, **changes: Any) -> TrainingSettings:
    """A training of a second."""
    values: dict[str, Any] = {"recipe": "small_images", "epochs": 2, "batch": 4, "size": 16, "workers": 0} | changes
    return TrainingSettings(data=str(data), out=str(out), device="cpu", changes=TINY, **values)


def pixels(number: int, side: int = 16) -> np.ndarray:
    """A picture of noise."""
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)


def make_seeds(seeds: Path) -> None:
    """Everything readers begin with."""
    for number, name in enumerate(CLASSES):
        (seeds / "data" / name).mkdir(parents=True)
        for i in range(PICTURES):
            Image.fromarray(pixels(100 * number + i)).save(seeds / "data" / name / f"{i}.png")
    with redirect_stdout(io.StringIO()):
        run_training(settings(seeds / "data", seeds / "run"), say=silent)
        run_training(translation_runs.settings(seeds / "translator"), say=silent)
    index(str(seeds / "run"), [seeds / "data"], out=seeds / "index", device="cpu")


DETECTOR = {"model.options.dim": 16, "detect.channels": 8, "detect.hidden": 8, "detect.proposals": 8}
DETECTOR |= {"detect.regions": 4, "detect.min_score": 0.0, "detect.most": 3, "model.options.depth": 1}
SEGMENTER = TINY | {"segment.channels": 8, "segment.auxiliary_channels": 8}


def _dense_run(seeds: Path, name: str) -> Path:
    """A run that answers at every place, trained when it is first asked for: not every test needs one."""
    folder = seeds / name
    if not folder.exists():
        task, model, changes = {
            "detector": ("detect", "patchconvnet_s20", DETECTOR),
            "segmenter": ("segment", "resmlp_s12", SEGMENTER),
        }[name]
        given = TrainingSettings(
            data="shapes:count=16,size=32", task=task, level="coarse", model=model, out=str(seeds / f"{name}-begun"),
            device="cpu", workers=0, epochs=1, batch=8, size=32, changes=changes,
        )  # fmt: skip
        with redirect_stdout(io.StringIO()):
            run_training(given, say=silent)
        (seeds / f"{name}-begun").rename(folder)
    return folder


def make_dense(seeds: Path, folder: Path, *, name: str) -> None:
    """A run of one of the tasks at every place, without its checkpoints, under the name of all runs."""
    shutil.copytree(
        _dense_run(seeds, name),
        folder / "run",
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns("checkpoints", "*.html"),
    )


def make_outside(outside: Path) -> None:
    """What lies beside a reader's folder: links and names lead there, and nobody may change it."""
    outside.mkdir()
    Image.fromarray(pixels(77)).save(outside / "secret.png")
    (outside / "secret.json").write_text('{"secret": true}')
    (outside / "secret.txt").write_text("secret\n")


def _copy(name: str, seeds: Path, folder: Path) -> None:
    shutil.copytree(seeds / name, folder / name, copy_function=shutil.copyfile)


def _queries(seeds: Path) -> list[str]:
    return [str(seeds / "data" / "blue" / "0.png"), str(seeds / "data" / "red" / "1.png")]


# Runs ---------------------------------------------------------------------------------------------------------------

RUN_FILES = {"run/config.json": "json", "run/labels.json": "json", "run/recipe.yaml": "yaml"}
RUN_FILES |= {"run/weights.safetensors": "safetensors", "run/checksums.json": "json"}
RECORDS = {"run/run.json": "json", "run/data.json": "json", "run/metrics.jsonl": "jsonl"}
RECORDS |= {"run/predictions.safetensors": "safetensors"}
CHECKPOINTS = {
    f"run/checkpoints/*/{name}": kind for name, kind in (("*.safetensors", "safetensors"), ("*.json", "json"))
}
TEXT_FILES = {name.replace("run/", "translator/"): kind for name, kind in RUN_FILES.items() if "labels" not in name}
TEXT_FILES |= {"translator/vocabulary.model": "bytes"}


def repair_run(folder: Path, file: Path) -> None:
    """Make the checksums of a changed file of a run right."""
    run = next(inside for inside in (folder / "run", folder / "translator") if inside.is_dir())
    if file.parent.parent.name == "checkpoints":
        _repair_checkpoint(file)
    elif file.name == "weights.safetensors":
        _repair_weights(file)
    elif file.name == "metrics.jsonl":
        lines = [_parsed(line) for line in file.read_bytes().splitlines()]
        told = [
            {name: value for name, value in line.items() if name not in ("crc32", "after")}
            for line in lines
            if isinstance(line, dict)
        ]
        for line in told:
            if isinstance(line.get("time"), dict):
                line["time"].pop("crc32", None)
        written = metrics.MetricsFile(file)
        written._last = 0
        file.write_bytes(b"".join(map(written._next, told)))
    elif file.name == checksums.FILE:
        values = _parsed(file.read_bytes())
        file.write_bytes(checksums._packed(values["sha256"]))
    else:
        known = _parsed((run / checksums.FILE).read_bytes())["sha256"]
        known[file.name] = [hashlib.sha256(file.read_bytes()).hexdigest()]
        (run / checksums.FILE).write_bytes(checksums._packed(known))
        if file.name == "vocabulary.model":
            config = json.loads((run / "config.json").read_bytes())
            config["vocabulary"] = known[file.name][0]
            (run / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
            repair_run(folder, run / "config.json")


def _parsed(data: bytes) -> Any:
    return json.loads(data)


def _repair_weights(file: Path) -> None:
    from safetensors.torch import load as unpack

    data = file.read_bytes()
    digest = weights_digest(unpack(data))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"patchloom": json.dumps({"sha256": digest})}
    packed = json.dumps(header).encode()
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + data[8 + length :])


def _repair_checkpoint(file: Path) -> None:
    manifest = file.parent / "manifest.json"
    digests = _parsed(manifest.read_bytes())["sha256"]
    if file != manifest:
        digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    from patchloom.runs.checkpoints import _manifest

    manifest.write_bytes(_manifest(digests))


def read_run(seeds: Path, folder: Path) -> Any:
    """Classes and probabilities, to the bit."""
    classifier = load(folder / "run", device="cpu")
    return classifier.labels, classifier.predict(_queries(seeds), top=9)


def read_decisions(seeds: Path, folder: Path) -> Any:
    """What `evaluate RUN` says."""
    found = evaluate(folder / "run")
    report = found.evaluations["run"].report
    return found.values(), report.classes, report.predictions.tolist(), report.losses.tolist()


def read_scores(seeds: Path, folder: Path) -> Any:
    """What `evaluate RUN` says of a detector or a segmenter, from what it kept of val."""
    return task_of_run(folder / "run").evaluate({"run": folder / "run"}, None, split=None, device="cpu").values


def make_named(seeds: Path, folder: Path) -> None:
    """A run whose classes have other names, and the row of the table that its weights came from."""
    _copy("run", seeds, folder)
    names = json.dumps([["azure", "navy"], ["scarlet"]]).encode()
    checksums.write_checked(folder / "run", {"names.json": names})
    (folder / "run" / named.ORIGIN).write_text(json.dumps(named._row(_PUBLISHED), indent=1))


_PUBLISHED = weights_named("resmlp_s12:in1k")


def read_named(seeds: Path, folder: Path) -> Any:
    """Its classes by all their names, and whether it is the folder of the published weights."""
    files = read_run_files(folder / "run")
    return files.table, files.labels_as(["navy", "scarlet"]), named._is_made(folder / "run", _PUBLISHED)


def read_report(seeds: Path, folder: Path) -> Any:
    """The page; damage that it tells of is as good as refused."""
    page = report_run(folder / "run", out=folder / "page.html").read_text()
    (folder / "page.html").unlink()
    return _unless_told(page, folder)


def _unless_told(page: str, folder: Path) -> str:
    """The page; an error where one of its notes names a file of the folder."""
    if f"<li>{folder}" in page:
        raise CheckpointError("told on the page")
    return page


def read_checkpoint(seeds: Path, folder: Path) -> Any:
    """What a resume would go on from."""
    found = find_checkpoint(folder / "run")
    if found is None:
        raise CheckpointError("there is none")
    if found.notes:
        raise CheckpointError(found.notes[0])
    return found.snapshot.values, {part: weights_digest(named) for part, named in found.snapshot.tensors.items()}


def resume(seeds: Path, folder: Path) -> Any:
    """The weights after another epoch."""
    said: list[str] = []
    run_training(settings(seeds / "data", folder / "run", epochs=3), say=said.append)
    if any("skipped" in line for line in said):
        raise CheckpointError("said")
    return load(folder / "run", device="cpu").predict(_queries(seeds), top=9)


def verified(seeds: Path, folder: Path) -> Any:
    """Nothing, where nothing is wrong."""
    found = verify(next(folder.iterdir()))
    if found.wrong or found.missing or found.without_checksum:
        raise CheckpointError(f"wrong: {found.wrong}"[:200])
    return "whole"


def read_translator(seeds: Path, folder: Path) -> Any:
    """Translations of two lines, with scores."""
    lines = ["one hundred and two", "seven"]
    return list(load_translator(folder / "translator", device="cpu").translate(lines, beams=2))


def read_text_report(seeds: Path, folder: Path) -> Any:
    """The page of a translator."""
    page = report_run(folder / "translator", out=folder / "page.html").read_text()
    (folder / "page.html").unlink()
    return _unless_told(page, folder)


# Indexes and the cache ----------------------------------------------------------------------------------------------


def repair_index(folder: Path, file: Path) -> None:
    """Make the checksums in `index.json` right."""
    path = folder / "index" / "index.json"
    values = _parsed(path.read_bytes())
    if file != path:
        field = "vectors_sha256" if file.suffix == ".npy" else "rows_sha256"
        values["parts"][0][field] = hashlib.sha256(file.read_bytes()).hexdigest()
    values["own_sha256"] = checksums.own_sha256(values)
    path.write_text(json.dumps(values, indent=1) + "\n")


def search(seeds: Path, folder: Path) -> Any:
    """What is found for two pictures."""
    return open_index(folder / "index", device="cpu").search(_queries(seeds), top=5)


def grow(seeds: Path, folder: Path) -> Any:
    """What is found once a picture was added."""
    Image.fromarray(pixels(500)).save(folder / "new.png")
    built = index(str(seeds / "run"), [seeds / "data", folder / "new.png"], out=folder / "index", device="cpu")
    return built.embedded, built.unchanged, [found.hits for found in built.index.search(_queries(seeds), top=5)]


def make_cache(seeds: Path, folder: Path) -> None:
    """Pictures, one of them damaged, and what a look at them left."""
    _copy("data", seeds, folder)
    (folder / "data" / "red" / "7.png").write_bytes(b"damaged")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    check(str(folder / "data"), workers=1)
    cache = next((folder / "cache" / "patchloom" / "check").glob("*.sqlite"))
    cache.rename(cache.with_suffix(".x"))  # a later look begins a new file, and this one is put back
    cache.with_suffix(".x").rename(cache)


def read_cached(seeds: Path, folder: Path) -> Any:
    """What `check` says, twice: what it makes of the cache must not last."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    first, second = (
        {name: value for name, value in check(str(folder / "data"), workers=1).to_dict().items() if name != "decoded"}
        for _ in range(2)
    )
    return first, second


# Data ---------------------------------------------------------------------------------------------------------------


def _rows(listing: Listing) -> Iterator[tuple[Any, ...]]:
    for row, label in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
        try:
            picture = hashlib.sha256(listing.pictures.read(row).tobytes()).hexdigest()
        except DataError:
            picture = "unreadable"
        yield listing.pictures.key(row), listing.names[label] if label >= 0 else "", picture


def look_through(
    seeds: Path,
    folder: Path,
    *,
    name: str,
    reading: Callable[[Path], Reading] = lambda _: AS_IT_IS,
    labelled: bool = True,
) -> Any:
    """What `check` and training make of data; what `check` calls a problem is as good as refused."""
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "seen")
    report = check(str(folder / name), reading=reading(folder), workers=1, cache=False)
    told = report.problems()
    splits = open_data(str(folder / name), reading=reading(folder), labelled=labelled)
    rows = {split: list(_rows(listing)) for split, listing in report.listings.items()}
    if told:
        raise DataError("; ".join(told))
    shown = {key: value for key, value in report.to_dict().items() if key not in ("decoded", "near_duplicates")}
    return shown, rows, splits.train.labels.tolist(), splits.classes


def make_labels(seeds: Path, folder: Path) -> None:
    """A table beside pictures."""
    rows = ["path,label,coarse_label,split"]
    for number in range(8):
        Image.fromarray(pixels(number)).save(folder / f"{number}.png")
        rows.append(
            f"{number}.png,{CLASSES[number % 2]},{'warm' if number % 2 else 'cold'},{'val' if number > 5 else 'train'}"
        )
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


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


def make_masks(seeds: Path, folder: Path) -> None:
    """Pictures with masks."""
    for name in ("images", "masks"):
        (folder / "data" / name).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(pixels(number)).save(folder / "data" / "images" / f"{number}.png")
        Image.fromarray(pixels(number)[..., 0] % 3).save(folder / "data" / "masks" / f"{number}.png")
    (folder / "data" / "classes.txt").write_text("sky\ngrass\nroad\n")


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


PALETTES = {
    "class_dict.csv": "name,r,g,b\nroad,0,0,0\nfast car,128,0,0\nsky,0,128,0\n",
    "labelmap.txt": "# label:color_rgb:parts:actions\nroad:0,0,0::\nfast car:128,0,0::\nsky:0,128,0::\n",
    "label_colors.txt": "0 0 0\troad\n128 0 0\tfast car\n0 128 0\tsky\n",
}


def make_palettes(seeds: Path, folder: Path) -> None:
    """Masks in colours, named by each kind of file."""
    colours = np.array([(0, 0, 0), (128, 0, 0), (0, 128, 0)], np.uint8)
    for file, text in PALETTES.items():
        root = folder / file.partition(".")[0]
        for place in ("images", "masks"):
            (root / place).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(pixels(number)).save(root / "images" / f"{number}.png")
            Image.fromarray(colours[pixels(number)[..., 0] % 3]).save(root / "masks" / f"{number}.png")
        (root / file).write_text(text)


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


def read_objects(seeds: Path, folder: Path) -> Any:
    """What `check` and training make of pictures with objects; what `check` calls a problem is as good as refused."""
    told = look_through_annotated(seeds, folder)
    splits = open_data(str(folder / "data"), labelled=False)
    parts = [part for part in ("instances", "boxes") if part == "boxes" or splits.train.pictures.tells_objects_apart]
    found = []
    for images in (splits.train, splits.val):
        shown = images.showing(*parts)
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
        pictures = source.train.pictures
        found.append((source.train.names, [pictures.mask(int(row)).classes.tolist() for row in source.train.rows]))
        if told := report.problems():
            raise DataError("; ".join(told))
    return found


def look_through_annotated(seeds: Path, folder: Path) -> Any:
    """What `check` says of pictures with masks or boxes."""
    report = check(str(folder / "data"), workers=1, cache=False)
    if told := report.problems():
        raise DataError("; ".join(told))
    return {key: value for key, value in report.to_dict().items() if key != "decoded"}


def _png(number: int) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(pixels(number)).save(packed, "PNG")
    return packed.getvalue()


def _members(folders: bool) -> Iterator[tuple[str, bytes]]:
    for number in range(6):
        if folders:
            yield f"{CLASSES[number % 2]}/{number}.png", _png(number)
        else:
            yield f"{number:04}.png", _png(number)
            label = CLASSES[number % 2]
            yield (
                (f"{number:04}.json", json.dumps({"label": label}).encode())
                if number > 3
                else (f"{number:04}.cls", label.encode())
            )


def make_tar(seeds: Path, folder: Path, *, name: str, folders: bool = False) -> None:
    """Shards, or an archive of class folders."""
    with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w", format=tarfile.USTAR_FORMAT) as archive:
        for member, data in _members(folders):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def make_zip(seeds: Path, folder: Path) -> None:
    """An archive of class folders."""
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in _members(True):
            archive.writestr(zipfile.ZipInfo(member), data)


def make_parquet(seeds: Path, folder: Path) -> None:
    """A table of pictures, with names of classes and a level."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 8
    columns: dict[str, Any] = {
        "image": [{"bytes": _png(number), "path": f"{number}.png"} for number in range(count)],
        "label": [number % 2 for number in range(count)],
        "coarse_label": [number % 2 for number in range(count)],
        "split": ["train" if number < 6 else "val" for number in range(count)],
    }
    told = {"label_names": list(CLASSES), "coarse_label_names": ["cold", "warm"]}
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"dataset_info": json.dumps(told)}), folder / "data.parquet"
    )


def make_text(seeds: Path, folder: Path) -> None:
    """Parallel text: two files, and a table."""
    (folder / "data").mkdir()
    for language, word in (("en", "house"), ("de", "Haus")):
        for split, count in (("train", 12), ("val", 4)):
            lines = [f"{split} {word} {'x ' * n}{n}" for n in range(count)]
            (folder / "data" / f"{split}.{language}").write_text("\n".join(lines) + "\n")


def read_text(seeds: Path, folder: Path) -> Any:
    """What `check` and training make of pairs of sentences."""
    report = check(str(folder / "data"), workers=1)
    text = open_parallel(str(folder / "data"), source="en", target="de")
    if told := report.problems():
        raise DataError("; ".join(told))
    return report.to_dict(), [list(text.train), list(text.val), text.left_out]


def make_taxonomy(seeds: Path, folder: Path) -> None:
    """Class folders with a taxonomy in each of its forms."""
    _copy("data", seeds, folder)
    table = {"family": {"blue": "cold", "red": "warm"}, "order": {"blue": "colour", "red": "colour"}}
    (folder / "levels.json").write_text(json.dumps(table))
    (folder / "levels.yaml").write_text("family:\n  blue: cold\n  red: warm\norder:\n  blue: colour\n  red: colour\n")
    (folder / "levels.csv").write_text("class,family,order\nblue,cold,colour\nred,warm,colour\n")


def read_taxonomies(seeds: Path, folder: Path) -> Any:
    """The levels that data get by each of the files."""
    found = []
    for name in ("levels.json", "levels.yaml", "levels.csv"):
        splits = open_data(str(folder / "data"), reading=Reading(taxonomy=folder / name), level="family")
        found.append((read_taxonomy(folder / name), splits.classes, splits.train.labels.tolist()))
    return found


def make_real(seeds: Path, folder: Path) -> None:
    """ReaL's labels."""
    (folder / "real.json").write_text(json.dumps([[1], [2, 3], [], [4]]))


# Recipes ------------------------------------------------------------------------------------------------------------


def make_recipe(seeds: Path, folder: Path) -> None:
    """The recipe of a run, as a user would edit it."""
    shutil.copyfile(seeds / "run" / "recipe.yaml", folder / "recipe.yaml")


def plan_by_recipe(seeds: Path, folder: Path) -> Any:
    """What `train --dry-run` plans."""
    given = TrainingSettings(
        data=str(seeds / "data"),
        out=str(folder.parent / "planned"),
        recipe=str(folder / "recipe.yaml"),
        device="cpu",
        workers=0,
    )
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "seen")
    from patchloom.training.run import make_plan

    plan = make_plan(given, "cpu")
    return plan.recipe, [str(choice) for choice in plan.choices]


# Weights of others --------------------------------------------------------------------------------------------------


def make_weights(seeds: Path, folder: Path) -> None:
    """The weights of one network in each format."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = create_model("resmlp_s12", **NETWORK).state_dict()
    save_file(state, folder / "a.safetensors", {"format": "pt"})
    torch.save({"model": state}, folder / "a.pth")
    np.savez(folder / "a.npz", **{name: tensor.numpy() for name, tensor in state.items()})


def start_from(seeds: Path, folder: Path) -> Any:
    """The weights that a training would start from, with each of the files."""
    found = []
    for name in ("a.safetensors", "a.pth", "a.npz"):
        network = create_model("resmlp_s12", **NETWORK)
        initialise(network, str(folder / name))
        refuse_bad(dict(network.state_dict()), name, CheckpointError)
        found.append(weights_digest(dict(network.state_dict())))
    return found


# Pictures -----------------------------------------------------------------------------------------------------------


def make_pictures(seeds: Path, folder: Path) -> None:
    """One picture in every format."""
    picture = Image.fromarray(pixels(5, 24))
    for end in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm"):
        picture.save(folder / f"a.{end}")
    picture.quantize(16).save(folder / "palette.png", transparency=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=exif, progressive=True)
    picture.save(folder / "packed.tif", compression="tiff_lzw")


_classifiers: dict[Path, Any] = {}


def predict(seeds: Path, folder: Path) -> Any:
    """What the run says of each picture; one that cannot be read is named."""
    if seeds not in _classifiers:
        _classifiers[seeds] = load(seeds / "run", device="cpu")
    answers = list(_classifiers[seeds].predict_files([folder]))
    if bad := [answer.error for answer in answers if answer.error]:
        raise DataError(bad[0])
    return [(os.path.basename(answer.path), answer.answers) for answer in answers]


# All ----------------------------------------------------------------------------------------------------------------


def _made(name: str) -> Callable[[Path, Path], None]:
    return partial(_copy, name)


def _predict_command(seeds: Path, folder: Path) -> tuple[Any, ...]:
    return ("predict", folder / "run", *_queries(seeds))


def _check(name: str) -> Callable[[Path, Path], tuple[Any, ...]]:
    return lambda _, folder: ("check", folder / name, "--json", "--workers", 1)


READERS: dict[str, Reader] = {
    "run": Reader(_made("run"), read_run, RUN_FILES, repair_run, ours=True, share=2, command=_predict_command),
    "decisions": Reader(
        _made("run"),
        read_decisions,
        {**RUN_FILES, "run/predictions.safetensors": "safetensors"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "report": Reader(
        _made("run"),
        read_report,
        {**RUN_FILES, **RECORDS},
        repair_run,
        ours=True,
        writes=True,
        command=lambda _, folder: ("report", folder / "run"),
    ),
    "checkpoint": Reader(_made("run"), read_checkpoint, CHECKPOINTS, repair_run, ours=True),
    "resume": Reader(
        _made("run"),
        resume,
        {**CHECKPOINTS, **RUN_FILES, **RECORDS},
        repair_run,
        writes=True,
        share=0.25,
        command=lambda seeds, folder: ("train", seeds / "data", "--out", folder / "run", "--epochs", 3),
    ),
    "verify": Reader(
        _made("run"),
        verified,
        {**RUN_FILES, **RECORDS, **CHECKPOINTS},
        repair_run,
        ours=True,
        notices=True,
        command=lambda _, folder: ("verify", folder / "run"),
    ),
    "translator": Reader(_made("translator"), read_translator, TEXT_FILES, repair_run, ours=True),
    "translator report": Reader(
        _made("translator"),
        read_text_report,
        {
            **TEXT_FILES,
            **{
                f"translator/{n}": k
                for n, k in (("run.json", "json"), ("val.json", "json"), ("metrics.jsonl", "jsonl"))
            },
        },
        repair_run,
        ours=True,
        writes=True,
        share=0.5,
    ),
    "index": Reader(
        _made("index"),
        search,
        {"index/index.json": "json", "index/*.npy": "npy", "index/part-*.json": "json"},
        repair_index,
        ours=True,
        share=2,
        command=lambda seeds, folder: ("search", folder / "index", *_queries(seeds)),
    ),
    "index grown": Reader(
        _made("index"),
        grow,
        {"index/index.json": "json", "index/*.npy": "npy", "index/part-*.json": "json"},
        repair_index,
        ours=True,
        writes=True,
        command=lambda seeds, folder: ("index", seeds / "run", seeds / "data", "--out", folder / "index"),
    ),
    "index verified": Reader(
        _made("index"),
        verified,
        {"index/index.json": "json", "index/*.npy": "npy", "index/part-*.json": "json"},
        repair_index,
        ours=True,
        notices=True,
        share=0.5,
        command=lambda _, folder: ("verify", folder / "index"),
    ),
    "cache": Reader(make_cache, read_cached, {"cache/patchloom/check/*.sqlite": "sqlite"}, ours=True, writes=True),
    "labels": Reader(
        make_labels,
        partial(look_through, name="labels.csv"),
        {"labels.csv": "csv"},
        share=2,
        command=_check("labels.csv"),
    ),
    "parquet": Reader(
        make_parquet,
        partial(look_through, name="data.parquet"),
        {"data.parquet": "parquet"},
        share=2,
        command=_check("data.parquet"),
    ),
    "shards": Reader(
        partial(make_tar, name="data.tar"),
        partial(look_through, name="data.tar"),
        {"data.tar": "tar"},
        share=2,
        command=_check("data.tar"),
    ),
    "tar": Reader(
        partial(make_tar, name="data.tar", folders=True),
        partial(look_through, name="data.tar"),
        {"data.tar": "tar"},
        command=_check("data.tar"),
    ),
    "tar.gz": Reader(
        partial(make_tar, name="data.tar.gz", folders=True),
        partial(look_through, name="data.tar.gz"),
        {"data.tar.gz": "bytes"},
        share=0.5,
        command=_check("data.tar.gz"),
    ),
    "zip": Reader(make_zip, partial(look_through, name="data.zip"), {"data.zip": "zip"}, command=_check("data.zip")),
    "coco": Reader(
        make_coco, look_through_annotated, {"data/annotations/*.json": "json"}, share=2, command=_check("data")
    ),
    "coco masks": Reader(make_coco_masks, read_objects, {"data/annotations/*.json": "json"}, command=_check("data")),
    "voc": Reader(
        make_voc,
        read_objects,
        {"data/Annotations/*.xml": "text", "data/ImageSets/Main/*.txt": "text"},
        command=_check("data"),
    ),
    "yolo": Reader(
        make_yolo, read_objects, {"data/labels/*.txt": "text", "data/data.yaml": "yaml"}, command=_check("data")
    ),
    "instances": Reader(
        make_instances,
        read_objects,
        {"data/PedMasks/*.png": "png", "data/classes.txt": "text"},
        command=_check("data"),
    ),
    "mask names": Reader(
        make_palettes,
        read_palettes,
        {"*/class_dict.csv": "csv", "*/labelmap.txt": "text", "*/label_colors.txt": "text", "*/masks/*.png": "png"},
        command=_check("class_dict"),
    ),
    "detector": Reader(
        partial(make_dense, name="detector"),
        read_scores,
        {"run/val.json": "json", "run/labels.json": "json", "run/config.json": "json"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "detector report": Reader(
        partial(make_dense, name="detector"),
        read_report,
        {**RUN_FILES, "run/val.json": "json", "run/run.json": "json"},
        repair_run,
        ours=True,
        writes=True,
        share=0.25,
    ),
    "segmenter": Reader(
        partial(make_dense, name="segmenter"),
        read_scores,
        {"run/segmented.safetensors": "safetensors", "run/labels.json": "json", "run/config.json": "json"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "segmenter report": Reader(
        partial(make_dense, name="segmenter"),
        read_report,
        {**RUN_FILES, "run/segmented.safetensors": "safetensors", "run/run.json": "json"},
        repair_run,
        ours=True,
        writes=True,
        share=0.25,
    ),
    "names": Reader(
        make_named,
        read_named,
        {"run/names.json": "json", "run/published.json": "json", "run/labels.json": "json"},
        repair_run,
        ours=False,
    ),
    "masks": Reader(
        make_masks,
        look_through_annotated,
        {"data/masks/*.png": "png", "data/classes.txt": "text"},
        command=_check("data"),
    ),
    "folders": Reader(
        _made("data"), partial(look_through, name="data"), {"data/*/*.png": "png"}, command=_check("data")
    ),
    "sentences": Reader(make_text, read_text, {"data/*.en": "text", "data/*.de": "text"}, command=_check("data")),
    "taxonomy": Reader(
        make_taxonomy,
        read_taxonomies,
        {"levels.json": "json", "levels.yaml": "yaml", "levels.csv": "csv"},
        share=2,
        command=lambda _, folder: ("check", folder / "data", "--json", "--taxonomy", folder / "levels.json"),
    ),
    "real labels": Reader(
        make_real, lambda _, folder: read_real_labels(folder / "real.json"), {"real.json": "json"}, share=0.5
    ),
    "recipe": Reader(make_recipe, plan_by_recipe, {"recipe.yaml": "yaml"}, share=2),
    "weights": Reader(
        make_weights, start_from, {"a.safetensors": "safetensors", "a.pth": "bytes", "a.npz": "zip"}, share=2
    ),
    "pictures": Reader(
        make_pictures,
        predict,
        {"*.png": "png", "*.jpg": "jpg", **{f"*.{e}": "bytes" for e in ("gif", "webp", "bmp", "tif*", "ppm")}},
        share=2,
        command=lambda seeds, folder: ("predict", seeds / "run", folder),
    ),
}


def run_command(arguments: tuple[Any, ...]) -> None:
    """A command inside this process; its error comes back as a PatchloomError, anything else as what it is."""
    out, errors = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["patchloom", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            cli.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    said = errors.getvalue()
    if code not in (0, 2, 3, 4, 5, 6) or "Traceback" in said:
        raise AssertionError(f"exit code {code}: {said[-300:]}") from None
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    if code in (2, 4, 5, 6) and arguments[0] != "verify" and (len(lines) != 1 or said.splitlines()[-1] != lines[0]):
        raise AssertionError(f"exit code {code} with {len(lines)} lines of error: {said[-300:]!r}")
    if code:
        raise PatchloomError(said)
