"""Write the fuzzer's first inputs, small files of every format that its targets read:

python -m tests.fuzz.corpus
"""

import argparse
import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from PIL import Image

from patchloom.data.annotations.faults import AnnotationFault
from patchloom.data.checking.scan_cache import ImageScan, ScanCache
from patchloom.data.checking.scan_parts import ROW, PartHeader, part_content
from patchloom.data.sources.shard_index import ShardSample, index_bytes
from patchloom.models.registry import create_model
from patchloom.recipes import get_recipe
from patchloom.runs.config import read_run_files
from patchloom.runs.locate import _row
from patchloom.runs.metrics import MetricsFile
from patchloom.runs.provenance import Provenance
from patchloom.runs.race import Race, RaceCandidate, Trial
from patchloom.runs.run_metadata import RunMetadata
from patchloom.runs.signature import write_signature
from patchloom.training.sweeps.record import RunResult
from patchloom_runtime.calibration import Calibration, DistanceRule, Promise, Reliability, ReliabilityBin
from patchloom_runtime.images.object_masks import ObjectMask
from patchloom_runtime.text.vocabulary import Vocabulary
from tests.fuzz.targets import (
    HERE,
    NETWORK,
    PART,
    PRIVATE_KEY,
    PUBLISHED,
    TARGETS,
    feed,
    make_index,
    make_run,
    make_shard_index,
    make_signed,
)
from tests.reliability.readers import annotated, labeled
from tests.reliability.readers.artifacts import make_artifact
from tests.reliability.readers.reader import CLASSES, pixels

Files = Iterator[tuple[str, bytes]]
BASE64 = "iVBORw0KGgo="
COMPRESSIONS: dict[str, Any] = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    """A picture as a file."""
    packed = io.BytesIO()
    picture.save(packed, form, **options)
    return packed.getvalue()


def images() -> Files:
    """One picture in every format, mode and form that is around."""
    picture = Image.fromarray(pixels(5, 12))
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        yield f"rgb.{form.lower()}", saved(picture, form)
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield f"{mode.replace(';', '')}.png", saved(picture.convert("L").convert(mode), "PNG")
    yield "palette.png", saved(picture.quantize(16), "PNG", transparency=3)
    yield "lzw.tiff", saved(picture, "TIFF", compression="tiff_lzw")
    yield "float.tiff", saved(picture.convert("F"), "TIFF")
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "turned.jpeg", saved(picture, "JPEG", exif=exif, progressive=True)
    yield "cmyk.jpeg", saved(picture.convert("CMYK"), "JPEG")
    frames = [Image.fromarray(pixels(number, 6)) for number in range(3)]
    for form in ("GIF", "PNG", "WEBP", "TIFF"):
        yield f"frames.{form.lower()}", saved(frames[0], form, save_all=True, append_images=frames[1:])


def masks() -> Files:
    """Masks of numbers, of objects, and in colors."""
    numbers = (pixels(0)[..., 0] % 3).astype(np.uint8)
    yield "numbers.png", saved(Image.fromarray(numbers), "PNG")
    yield "palette.png", saved(Image.fromarray(numbers * 100).quantize(8), "PNG")
    colors = np.array([(0, 0, 0), (128, 0, 0), (0, 128, 0)], np.uint8)
    yield "colors.png", saved(Image.fromarray(colors[numbers]), "PNG")


def of_reader(make: Any, *names: str) -> Files:
    """Files of a folder that the mutations begin with."""
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), Path(place))
        for name in names:
            path = next(Path(place).glob(name))
            yield path.name, path.read_bytes()


def names() -> Files:
    """Names of classes, with colors and without."""
    for name, text in annotated.PALETTES.items():
        yield name, text.encode()
    yield "classes.txt", b"sky\ngrass\nroad\n"
    yield "objectInfo150.txt", b"Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.15\t11664\t1172\t1\twall, house\n"
    yield "codes.csv", b"code,name\nn01440764,tench\nn01443537,goldfish\n"


def corrections() -> Files:
    """Corrections of labels, with a head and without."""
    yield "corrections.csv", b'path,action,label\nn01440764/0.png,relabel,"n01443537"\nn01443537/1.png,drop,\n'
    yield "plain.csv", b"n01440764/2.png,keep,\n"


def labels() -> Files:
    """Tables of labels."""
    yield (
        "levels.csv",
        b"path,label,coarse_label,split\n0.png,a,x,train\n1.png,b,y,train\n2.png,a,x,val\n3.png,b,y,val\n",
    )
    yield "flags.csv", b"image,cat,dog\n0.png,1,0\n1.png,0,1\n2.png,1,0\n3.png,0,1\n"
    yield "tabs.tsv", b"\xef\xbb\xbffilename\tlabels\n0\tcat dog\n1\tdog\n2\tcat\n3\t\n"
    yield "spaces.txt", b"0.png 1\n1.png 2\n2.png 1\n3.png 2\n"
    yield "codes.csv", b'n01440764,"tench, Tinca tinca"\nn01443537,goldfish\n'
    yield "utf16.csv", "path;label\n0.png;é\n1.png;ü\n".encode("utf-16")


def taxonomy() -> Files:
    """Levels in each form, and ReaL's labels."""
    yield from of_reader(_make_levels, "levels.json", "levels.yaml", "levels.csv")
    yield "real.json", b"[[1], [2, 3], [], [4]]"


def _make_levels(seeds: Path, folder: Path) -> None:
    (seeds / "data").mkdir()
    (folder / "inner").mkdir()
    labeled.make_taxonomy(seeds, folder / "inner")
    for file in (folder / "inner").glob("levels.*"):
        file.rename(folder / file.name)


def parquet() -> Files:
    """Tables of pictures and of sentences."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def packed(columns: dict[str, Any], told: Any = None, **options: Any) -> bytes:
        table = pa.table(columns)
        table = table.replace_schema_metadata({"dataset_info": json.dumps(told)}) if told else table
        sink = io.BytesIO()
        pq.write_table(table, sink, **options)
        return sink.getvalue()

    images = [{"bytes": saved(Image.fromarray(pixels(n, 4)), "PNG"), "path": f"{n}.png"} for n in range(2)]
    told = {"label_names": list(CLASSES), "coarse_label_names": ["cold", "warm"], "ignore_index": None}
    columns = {"image": images, "label": [0, 1], "coarse_label": [0, 1], "split": ["train", "val"]}
    yield "levels.parquet", packed(columns, told, compression="none")
    yield "names.parquet", packed({"image": images, "label": ["a", "b"]}, compression="zstd")
    boxes = [[[0.0, 1.0, 2.0, 3.0]], []]
    objects = {"image": images, "mask": images, "objects": [{"bbox": box, "category": [0] * len(box)} for box in boxes]}
    yield "objects.parquet", packed(objects, compression="none")
    yield "text.parquet", packed({"en": ["a house", "two"], "de": ["ein Haus", "zwei"]}, compression="none")


def _members(folders: bool) -> Files:
    for number in range(2):
        picture = saved(Image.fromarray(pixels(number, 3)), "PNG")
        if folders:
            yield f"{CLASSES[number]}/{number}.png", picture
        else:
            yield f"{number}.png", picture
            yield f"{number}.cls", CLASSES[number].encode()


def tar(compression: str = "", *, folders: bool) -> bytes:
    """An archive with the least that a tar ends with."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in _members(folders):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    whole = packed.getvalue()[: end + 2 * tarfile.BLOCKSIZE]
    return COMPRESSIONS[compression](whole)


def tars() -> Files:
    """Shards and class folders, compressed and not."""
    yield "shard.tar", tar(folders=False)
    yield "folders.tar", tar(folders=True)
    for compression in ("gz", "bz2", "xz"):
        yield f"folders.tar.{compression}", tar(compression, folders=True)


def shards() -> Files:
    """The index of a shard, and the list of all shards."""
    samples = [ShardSample(f"{n}.png", 512 + 2048 * n, 1000, str(n % 2), f"train/{n}.png") for n in range(4)]
    yield "index.json", index_bytes([*samples, ShardSample("4.png", 9000, 100, None, None)], 10_240, "0" * 64)
    listed = {"train-000000.tar": {"bytes": 10_240, "sha256": "0" * 64, "samples": 5}}
    yield "shards.json", json.dumps({"format": 1, "shards": listed}).encode()


def zips() -> Files:
    """Class folders, and a labels file with its pictures."""
    for name, method in (
        ("stored", zipfile.ZIP_STORED),
        ("deflated", zipfile.ZIP_DEFLATED),
        ("bz2", zipfile.ZIP_BZIP2),
    ):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", method) as archive:
            for member, data in _members(True):
                archive.writestr(zipfile.ZipInfo(member), data, method)
            if name == "stored":
                archive.writestr(zipfile.ZipInfo("labels.csv"), b"path,label\nblue/0.png,a\nred/1.png,b\n")
        yield f"{name}.zip", packed.getvalue()


def kept_looks() -> Files:
    """The cache of `check`, with a picture that cannot be read."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", place)
        seen = ScanCache("/data")
        seen.path.parent.mkdir(parents=True)
        with closing(sqlite3.connect(seen.path)) as database:
            database.execute("PRAGMA page_size = 512")
            database.execute("VACUUM")
        seen.write([((b"a.png", 10, 5), ImageScan("damaged"))])
        yield "one.sqlite", seen.path.read_bytes()


def scan_parts() -> Files:
    """A part of a check, with a picture that cannot be read and one with a fault."""
    rows = np.zeros(3, ROW)
    rows["width"], rows["height"], rows["flags"] = (0, 5, 6), (0, 5, 6), (4, 1, 2)
    header = PartHeader(
        key=PART, rows=3, text_bytes=0, prefix="/data/", splits={"train": 2, "val": 1},
        kind="classes", counts={"train": {"cat": 1}, "val": {"cat": 1}}, empty_classes=("dog",), task="classify",
        annotated=(), notes=("note",), modes=("RGB",), errors={0: "damaged"},
        faults={2: (AnnotationFault("no objects", "none"),)},
    )  # fmt: skip
    yield "three.part", part_content(header, rows, ["", "cat", "cat"], ["/data/a.jpg", "/data/b.jpg", "/data/c/ü.jpg"])


def typed() -> Files:
    """Patterns, changes, grids, data by name."""
    yield "patterns", rb"{label}_*.jpg" + b"\n" + rb"(?P<label>\D+)\d" + b"\n*/{label}/{}?.png\n"
    yield "changes", b"optim.lr=1e-3\naugment.mixup=0\nmodel.options.dim=16\nobjective.method=dino\n"
    yield "grids", b"optim.lr=1e-3,3e-4 seed=0,1\nepochs=1,2\nmodel=resmlp_s12\ncount=2000,size=64\n'a b' c\n"


def sentences() -> Files:
    """Lines and pairs of lines."""
    yield "pairs.tsv", b"a house\tein Haus\ttatoeba\ntwo\tzwei\n\nthree\t\n"
    yield "lines", b"a house\ntwo\n\nthree\n"
    yield "latin1", "é\nü\n".encode("latin-1")
    yield "lines.gz", gzip.compress(b"a house\ntwo\n\nthree\n", mtime=0)


def vocabulary() -> Files:
    """What sentencepiece learns from a few lines."""
    lines = [f"{word} {number}" for word in ("one", "two", "house") for number in range(9)]
    yield "learned.model", Vocabulary.train(lines, 300).to_bytes()


def requests() -> Files:
    """Bodies of both protocols."""
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [BASE64]}
    yield "infer", json.dumps({"id": "1", "inputs": [tensor], "outputs": [{"name": "label"}]}).encode()
    shown = {"name": "image", "shape": [1, 1, 1, 3], "datatype": "UINT8", "data": [[[[1, 2, 3]]]]}
    yield "pixels", json.dumps({"inputs": [shown], "parameters": {"top": 2}}).encode()
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 7}}
    head = json.dumps({"inputs": [text], "parameters": {"binary_data_output": True}}).encode()
    yield "binary", f"{len(head)}\n".encode() + head + b"\x03\0\0\0one"
    yield "images", json.dumps({"images": [BASE64], "top": 2}).encode()
    yield "lines", json.dumps({"lines": ["one", "two"], "beams": 2}).encode()
    yield "query", b"top=2&level=coarse\none\ntwo"


def run_files() -> Files:
    """The files of a run that say what it is."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place)
        make_run(run)
        for name in ("config.json", "labels.json", "checksums.json"):
            yield name, (run / name).read_bytes()
        config = json.loads((run / "config.json").read_bytes())
        assert read_run_files(run).labels == CLASSES
    del config["preprocessing"], config["level"]
    options = {"vocabulary": 300, "dim": 16}
    told = {"source": "en", "target": "de", "longest": [9, 9], "vocabulary": ""}
    yield "translator.json", json.dumps(config | told | {"options": options}).encode()
    yield "names.json", json.dumps([["azure", "navy"], ["scarlet"]]).encode()


def rules() -> Files:
    """What a run learned from held-out images: calibration, thresholds, the scale of its numbers."""
    promise = Promise(0.05, 0.9, 0.7, 0.91, 100)
    rules = Calibration(1.5, ("blue",), promise, DistanceRule(0.3, 2, 0.01, 50, (4, 3))).to_dict()
    measured = Reliability(0.5, (ReliabilityBin(10, 0.25, 0.5),)).to_dict()
    values = {"format": 1, "weights": "", "images": 10, "before": measured, "after": measured, "rules": rules}
    yield "calibration.json", json.dumps(values).encode()
    thresholds = {"format": 1, "shared": 0.5, "thresholds": {"a": 0.25, "b": 0.5}, "own": ["a"]}
    yield "thresholds.json", json.dumps(thresholds).encode()
    scale = {"format": 1, "mean": [0.5, 3.0], "std": [1.5, 2.0], "grades": []}
    yield "scale.json", json.dumps(scale).encode()


def progress() -> Files:
    """What a run that is training says of itself, and the race before it."""
    status = {"process": "0123abcd-1-2", "at": 1.5, "activity": "training", "step": 3, "values": {"loss": 0.5}}
    yield "status.json", json.dumps(status).encode()
    race = Race("0" * 64, 8, 2, "top1", [RaceCandidate("a", {"optim.lr": 0.1}, 3, [8, 16])], winner="a")
    race.trials.append(Trial(0, "a", 8, 50.0, 1.5, 0.1))
    yield "race.json", json.dumps({"format": 1, **asdict(race)}).encode()


def records() -> Files:
    """What a run or a sweep keeps of how it went."""
    yield "run.json", json.dumps(asdict(RunMetadata(data="photos", data_name="photos", epochs=3))).encode()
    plugins = {"loss": "focal 0123456789abcdef"}
    data = Provenance(("a", "b"), train=4, val=2, rows="0" * 64, contents="", plugins=plugins)
    yield "data.json", json.dumps(asdict(data)).encode()
    inside = np.zeros((6, 6), bool)
    inside[1:3, 2:5] = True
    box = {"bbox": [2, 1, 3, 2], "category": 0, "segmentation": ObjectMask.of(inside).to_coco((6, 6))}
    picture = {"key": "a.png", "size": [6, 6], "objects": [box | {"iscrowd": 0, "area": 6.0}]}
    found = {"classes": ["a"], "images": [picture | {"found": [box | {"score": 0.5}]}]}
    yield "detected.json", json.dumps(found).encode()
    judged = {
        "values": {"bleu": 1.0},
        "signature": "a",
        "chrf_signature": "b",
        "notes": [],
        "samples": [["a", "b", "c"]],
    }
    yield "translated.json", json.dumps(judged).encode()
    of_best = RunResult(
        data="digits", setting={"optim.lr": 0.1}, metric="top1", metrics={"top1": 50.5}, test={"top1": 3}
    )
    runs = {"a": of_best, "b": RunResult(data="digits", setting={"optim.lr": 0.2}, metric="top1", failed="why")}
    told = {name: asdict(result) for name, result in runs.items()}
    yield "sweep.json", json.dumps({"format": 1, "runs": told}).encode()
    yield "clusters.json", b"[0, 1]"
    yield "teacher_labels.json", b"[1, 0]"
    yield "fetched.json", json.dumps({"url": "https://a/b.pth", "mark": '"1-2"'}).encode()
    yield "published.json", json.dumps(_row(PUBLISHED)).encode()
    progress = {"step": 4, "epoch": 1, "best": 0.5, "best_weights": "model", "ended": ""}
    state = {"progress": progress, "steps_per_epoch": 4, "averaged": 0.0, "world": 1, "scaler": None}
    yield "state.json", json.dumps(state | {"optimizer": {"kind": "AdamW", "plain": {}}}).encode()


def metrics() -> Files:
    """Lines of a run's records."""
    with tempfile.TemporaryDirectory() as place:
        file = MetricsFile(Path(place, "metrics.jsonl"))
        file.begin(0)
        for step in range(3):
            record = {"step": step, "epoch": 1, "kind": "train", "weights": "model"}
            file.write(record | {"values": {"loss": 0.5}, "time": {"seconds": 0.1}})
        file.close()
        yield "three.jsonl", Path(place, "metrics.jsonl").read_bytes()


def tensors() -> Files:
    """Weights as safetensors."""
    from safetensors.torch import save

    yield "network.safetensors", save(_state())
    yield "kinds.safetensors", save({"a": torch.zeros(2, 1), "b": torch.zeros(3, dtype=torch.int64)})


def tables() -> Files:
    """Decisions, scores and counts as safetensors."""
    from safetensors.numpy import save

    whole = {name: np.arange(2, dtype=np.int32) for name in ("index", "labels", "predictions", "ranks")}
    real = {name: np.full(2, 0.5, np.float32) for name in ("confidence", "losses")}
    about = {"format": 1, "fingerprint": "a", "classes": list(CLASSES)}
    yield "decisions.safetensors", save({**whole, **real}, {"patchloom": json.dumps(about)})
    folds = {"keys": np.frombuffer(b"a.png\0b.png", np.uint8), "labels": whole["labels"], "folds": whole["labels"] + 1}
    folds |= {"probabilities": np.full((2, 2), 0.5, np.float32), "distances": np.ones(2, np.float32)}
    trained = {"format": 1, "classes": list(CLASSES), "weights": ["0", "1"]}
    yield "out_of_fold.safetensors", save(folds, {"patchloom": json.dumps(trained)})
    counts = {"index": (2,), "counts": (2, 2, 3), "confusion": (2, 2)}
    columns = {name: np.ones(shape, np.int64) for name, shape in counts.items()}
    yield "segmented.safetensors", save(columns, {"patchloom": json.dumps(about)})
    scores = np.eye(2, dtype=np.float32)
    scored = {"index": whole["index"].astype(np.int64), "targets": scores, "scores": scores}
    yield "labeled.safetensors", save(scored, {"patchloom": json.dumps(about)})
    numbers = {"index": scored["index"], "targets": scores.astype(np.float64), "predictions": scores.astype(np.float64)}
    of_numbers = {"format": 1, "fingerprint": "a", "names": ["a", "b"]}
    yield "numbers.safetensors", save(numbers, {"patchloom": json.dumps(of_numbers)})


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("resmlp_s12", **NETWORK)


def _state() -> dict[str, torch.Tensor]:
    return _network().state_dict()


def pth() -> Files:
    """Checkpoints of torch in each of its formats, and plain pickles."""
    some = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    for name, value, new in (("new", {"model": some}, True), ("old", some, False), ("list", [some, 1, "x"], True),
                             ("network", _state(), False)):  # fmt: skip
        packed = io.BytesIO()
        torch.save(value, packed, _use_new_zipfile_serialization=new)
        yield f"{name}.pth", packed.getvalue()
    yield "plain.pth", pickle.dumps({"a": [1, 2.5, None], "b": ("x", b"y")})
    yield "code.pth", pickle.dumps(print)


def opcodes() -> Files:
    """The pickles of checkpoints, without their storages."""
    state = _state()
    trained = {"model": state, "epoch": 3, "lr": 0.5, "args": argparse.Namespace(name="a"), "best": np.float64(0.5)}
    for name, value in (("state", state), ("trained", trained), ("parameters", dict(_network().named_parameters()))):
        packed = io.BytesIO()
        torch.save(value, packed)
        with zipfile.ZipFile(packed) as archive:
            yield f"{name}.pkl", archive.read("archive/data.pkl")


def signature() -> Files:
    """A valid signature."""
    with tempfile.TemporaryDirectory() as place:
        make_signed(Path(place))
        private = Path(place, "private.pem")
        private.write_bytes(PRIVATE_KEY.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
        write_signature(Path(place, "run"), private)
        yield "model.sig", Path(place, "run", "model.sig").read_bytes()


def bucket() -> Files:
    """A shard and a table."""
    yield "shard.tar", tar(folders=False)
    yield "names.parquet", dict(parquet())["names.parquet"]


def tools() -> Files:
    """Boxes of other tools."""
    value = {"x": 25, "y": 50, "width": 25, "height": 25, "rotation": 0, "rectanglelabels": ["cat"]}
    sides = {"original_width": 16, "original_height": 16}
    outline = {"points": [[1, 2], [50, 60], [1, 60]], "polygonlabels": ["dog"]}
    result = [
        {"type": "rectanglelabels", **sides, "value": value},
        {"type": "polygonlabels", **sides, "value": outline},
    ]
    task = {"id": 1, "data": {"image": "/data/upload/1/8f3b2c1d-0.png"}, "annotations": [{"id": 1, "result": result}]}
    yield "project.json", json.dumps([task]).encode()
    boxes = '<box label="dog" xtl="2.5" ytl="3" xbr="7" ybr="8"/><polygon label="cat" points="1,2;5,6;1,6"/>'
    image = f'<image id="0" name="0.png" width="8" height="8">{boxes}</image>'
    names = "".join(f"<label><name>{name}</name></label>" for name in ("cat", "dog"))
    head = f"<version>1.1</version><meta><task><labels>{names}</labels></task></meta>"
    yield "annotations.xml", f'<?xml version="1.0" encoding="utf-8"?><annotations>{head}{image}</annotations>'.encode()
    shapes = [
        {"label": "cat", "points": [[2, 3], [7, 3], [7, 6]], "shape_type": "polygon", "group_id": None},
        {"label": "dog", "points": [[2, 3], [7, 6]], "shape_type": "rectangle"},
    ]
    about = {
        "version": "5.0.1",
        "flags": {},
        "imagePath": "0.png",
        "imageData": None,
        "imageHeight": 8,
        "imageWidth": 8,
    }
    yield "labelme.json", json.dumps(about | {"shapes": shapes}).encode()
    yield (
        "boxes.csv",
        b"filename,width,height,class,xmin,ymin,xmax,ymax\n0.png,8,8,cat,2,3,7,6\n1.png,8,8,dog,1,1,4,4\n",
    )


def npz() -> Files:
    """Flax's weights."""
    for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
        packed = io.BytesIO()
        save(packed, **{"head/kernel": np.ones((2, 2), np.float32), "head/bias": np.zeros(2, np.float32)})
        yield f"{name}.npz", packed.getvalue()
    packed = io.BytesIO()
    np.savez_compressed(packed, **{name: tensor.numpy() for name, tensor in _state().items()})
    yield "network.npz", packed.getvalue()


def index() -> Files:
    """The description, the rows and the vectors of an index."""
    with tempfile.TemporaryDirectory() as place:
        make_index(Path(place))
        for path in sorted(Path(place, "index").iterdir()):
            yield path.name, path.read_bytes()


def shard_index() -> Files:
    """The rows of a shard, and the record of its part."""
    with tempfile.TemporaryDirectory() as place:
        make_shard_index(Path(place))
        for path in sorted(Path(place, "index").iterdir()):
            yield path.name, path.read_bytes()


def program() -> Files:
    """A product and a sum as torch.export saves them."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.GELU())
    exported = torch.export.export(Named(module), (torch.zeros(1, 4),))
    exported.example_inputs = None
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # with paths of this machine
    packed = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(exported, packed)
    yield "small.pt2", packed.getvalue()


class Named(torch.nn.Module):
    """A network whose output has a name."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The output by name."""
        return {"logits": self.inner(values)}


CORPUS: dict[str, Any] = {
    "images": images,
    "masks": masks,
    "coco": lambda: of_reader(annotated.make_coco_masks, "data/annotations/*.json"),
    "voc": lambda: of_reader(annotated.make_voc, "data/Annotations/0.xml", "data/ImageSets/Main/train.txt"),
    "yolo": lambda: of_reader(annotated.make_yolo, "data/labels/0.txt", "data/data.yaml"),
    "tools": tools,
    "names": names,
    "corrections": corrections,
    "labels": labels,
    "taxonomy": taxonomy,
    "parquet": parquet,
    "tar": tars,
    "bucket": bucket,
    "shards": shards,
    "zip": zips,
    "cache": kept_looks,
    "scan_part": scan_parts,
    "typed": typed,
    "recipe": lambda: iter([("deit.yaml", get_recipe("deit", "deit_s").to_yaml().encode())]),
    "sentences": sentences,
    "vocabulary": vocabulary,
    "requests": requests,
    "config": run_files,
    "rules": rules,
    "records": records,
    "progress": progress,
    "metrics": metrics,
    "safetensors": tensors,
    "tables": tables,
    "pth": pth,
    "pickle": opcodes,
    "npz": npz,
    "signature": signature,
    "index": index,
    "rows": lambda: (file for file in shard_index() if file[0].endswith(".parquet")),
    "parts": lambda: (file for file in shard_index() if file[0].startswith("shard-")),
    "copies": lambda: iter([("objects.json", json.dumps({"a": [4, "1", 10**9]}).encode())]),
    "onnx": lambda: of_reader(make_artifact, "artifact/model.onnx"),
    "pt2": program,
    "artifact": lambda: of_reader(make_artifact, "artifact/artifact.json", "artifact/labels.json"),
}


def main() -> None:
    """Write the files that are missing, and print which readers take each."""
    for target, make in CORPUS.items():
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            for name, data in make():
                path = folder / name
                if not path.exists():
                    path.write_bytes(data)
                print(f"{target}/{name}: {len(data)} bytes, {feed(TARGETS[target], Path(scratch), data)}")


if __name__ == "__main__":
    main()
