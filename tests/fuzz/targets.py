"""The fuzzer's targets: every reader of files that a stranger may have written, fed with bytes.

A target is a row of `TARGETS`: the readers of one format, each with the file that the bytes become and the files that
lie beside it. Only patchloom's own errors may come out of a reader; `benchmarks/fuzz.py` searches for inputs that
raise anything else, hang or take memory, and `test_fuzz.py` repeats the inputs that are kept.
"""

import gzip
import hashlib
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from PIL import Image
from safetensors.torch import save_file
from starlette.exceptions import HTTPException

from patchloom.cli.options import parse_pairs
from patchloom.cli.watch import drawn
from patchloom.data.annotations.box_formats import open_cvat, open_label_studio, open_labelme
from patchloom.data.annotations.mask_classes import has_masks, of_masks
from patchloom.data.annotations.mask_names import FILES as MASK_NAMES
from patchloom.data.annotations.mask_names import names_of_masks
from patchloom.data.buckets import mirror, remote_file
from patchloom.data.buckets.remote_file import AnyFile, RemoteFile
from patchloom.data.checking.scan_cache import ScanCache
from patchloom.data.checking.scan_parts import ScanPart, file_of
from patchloom.data.datasets import Source
from patchloom.data.labels.class_names import find_class_names, names_by_line
from patchloom.data.labels.label_pattern import read_pattern
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.builtin import open_shapes
from patchloom.data.sources.corrections import correct, read_corrections
from patchloom.data.sources.exclusions import read_list
from patchloom.data.sources.parquet import open_parquet
from patchloom.data.sources.shard_index import parse_index
from patchloom.data.sources.shards import check_shard_folder, open_shards
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import split_specs
from patchloom.data.text.pairs import open_parallel
from patchloom.data.text.sentences import check_sentences, find_sentences
from patchloom.data.trees.tree import FolderTree
from patchloom.evaluation.imagenet_labels import read_real_labels
from patchloom.inference import index_files
from patchloom.inference.index_rows import IndexRow
from patchloom.inference.shard_parts import read_record, with_shards
from patchloom.models.pretrained.downloads import _state_of
from patchloom.models.pretrained.table import weights_named
from patchloom.models.registry import create_model
from patchloom.recipes import get_recipe
from patchloom.recipes.choices import base_recipe
from patchloom.recipes.schema import Recipe, override
from patchloom.report.watch_page import write_watch_page
from patchloom.runs import checksums
from patchloom.runs.calibration import FEATURES, read_calibration
from patchloom.runs.checkpoints import read_checkpoint
from patchloom.runs.computed_labels import read_labels
from patchloom.runs.config import Preprocessing, read_run_files, write_run_files
from patchloom.runs.convert import read_names
from patchloom.runs.locate import _is_current
from patchloom.runs.metrics import MetricsFile, MetricsTail, damaged_lines, read_metrics
from patchloom.runs.out_of_fold import load_out_of_fold
from patchloom.runs.predictions import check_predictions
from patchloom.runs.provenance import Provenance, read_provenance
from patchloom.runs.race import race_choices, read_race
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.runs.signature import check_signature
from patchloom.runs.status import read_status
from patchloom.runs.watched import WatchedRun
from patchloom.runs.weights import load_network, read_weights
from patchloom.serving import inference_protocol
from patchloom.serving import requests as reading
from patchloom.serving.endpoints import endpoints_of
from patchloom.tasks.detection import run_files as detection
from patchloom.tasks.images.networks import initialize
from patchloom.tasks.multilabel import run_files as multilabel
from patchloom.tasks.provenance import OtherRunError, refuse_other_plugins
from patchloom.tasks.regression import run_files as regression
from patchloom.tasks.segmentation import run_files as segmentation
from patchloom.tasks.translation import run_files as translation
from patchloom.training.sweeps.grid import read_grid, settings_of
from patchloom.training.sweeps.page import write_sweep_page
from patchloom.training.sweeps.record import read_results
from patchloom.training.sweeps.table import Sweep, metric_of, rows_of
from patchloom_runtime.artifacts import artifact as artifact
from patchloom_runtime.engines.engine import ENGINES
from patchloom_runtime.engines.torch_program import TorchProgramGraph
from patchloom_runtime.errors import PatchloomError, ResourceError
from patchloom_runtime.images.decode import decode_frames, decode_ids, decode_shrunk, decode_with_facts, upright_size
from patchloom_runtime.text.vocabulary import Vocabulary
from patchloom_runtime.untrusted import own_sha256
from tests.reliability.readers import annotated, repairs
from tests.reliability.readers.artifacts import make_artifact, repair_artifact
from tests.reliability.readers.reader import pixels

HERE = Path(__file__).parent
MOST_LETTERS = 3_000  # of a message
HANG_S = 10.0
PART = "data-0123456789abcdef"
PICTURES = 3  # frames of an animation that are looked at


@dataclass(frozen=True)
class Reader:
    """A file that the bytes become, and what reads it."""

    name: str  # below the reader's folder
    read: Callable[[Path], object]  # of the folder
    make: Callable[[Path], None] = lambda _: None  # fills the folder
    repair: Callable[[Path, Path], None] | None = None  # makes checksums right after the file was changed


@dataclass(frozen=True)
class Target:
    """The readers of one format."""

    kinds: tuple[str, ...]  # of the mutations that know the format
    readers: tuple[Reader, ...]


def feed(target: Target, folder: Path, data: bytes) -> list[str]:
    """Give the bytes to every reader of a target and return the files that were not refused.

    `folder` is made by the first call and used again by the next.
    """
    accepted = []
    for number, reader in enumerate(target.readers):
        own = folder / str(number)
        if not own.exists():
            own.mkdir()
            reader.make(own)
        path = own / reader.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if reader.repair:
            with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # nobody could
                reader.repair(own, path)
        with refusals(), warnings.catch_warnings():
            warnings.simplefilter("error")
            reader.read(own)
            accepted.append(reader.name)
    return accepted


@contextmanager
def refusals() -> Iterator[None]:
    """Let patchloom's own errors pass, if they are one line."""
    try:
        yield
    except PatchloomError as error:
        _check_error(error)
    except HTTPException as error:
        _check_status(error.status_code)


def _check_error(error: PatchloomError) -> None:
    assert not isinstance(error, ResourceError), error  # it took more memory than there is
    message = str(error)
    assert message
    assert "\n" not in message, message
    assert len(message) <= MOST_LETTERS, message[:200]


def _check_status(status: int) -> None:
    assert 400 <= status < 500, status


# Pictures -------------------------------------------------------------------------------------------------------------


def _pictures(folder: Path) -> None:
    data = (folder / "a").read_bytes()
    for read in (
        lambda: decode_with_facts(data, "a"),
        lambda: decode_shrunk(data, "a", lambda _: 4),
        lambda: list(islice(decode_frames(data, "a"), PICTURES)),
        lambda: upright_size(data, "a"),
        lambda: decode_ids(data, "a"),
    ):
        with refusals():
            read()


def _annotations(folder: Path) -> None:
    """All that training asks of pictures with masks or boxes."""
    _look_at(find_source(folder / "data"))


def _look_at(source: Source) -> None:
    for listing in source.listings.values():
        for row in listing.rows[:2].tolist():  # the first is the one whose file is changed
            with refusals():
                listing.images.mask(row)
            with refusals():
                if listing.images.boxes(row) is not None:
                    listing.images.objects(row)
    if has_masks(source.train.images):
        with refusals():  # masks of instances have no more than one class
            of_masks(source, reduce_zero_label=True)


def _of_tool(name: str, open_tool: Callable[[Path, Path], Source]) -> Reader:
    """A file of another tool, even if it no longer looks like one."""

    def read(folder: Path) -> None:
        _look_at(open_tool(folder / "data", folder / "data" / name))

    return Reader(f"data/{name}", read, _make_pictures)


def _make_pictures(folder: Path) -> None:
    (folder / "data").mkdir()
    _make_images(folder / "data")


def _in_bucket(name: str, open_files: Callable[[list[AnyFile], str], Source]) -> Reader:
    """A file in a bucket, of which ranges are read."""

    def read(folder: Path) -> None:
        data = (folder / name).read_bytes()
        file = RemoteFile(f"s3://bucket/{name}", len(data), hashlib.sha256(data).hexdigest())
        ranges = mock.patch.object(
            remote_file, "read_spans", lambda spans: [data[span.start : span.end] for span in spans]
        )
        nothing_else = mock.patch.object(remote_file, "list_folder", return_value=[])
        with ranges, nothing_else, mock.patch.dict(os.environ, {"PATCHLOOM_CACHE_GIB": "0"}):
            images = open_files([file], "bucket").train.images
            rows = range(min(len(images), 4))
            with refusals():
                images.prefetch(rows)
            for row in rows:
                images.key(row)
                with refusals():
                    images.read(row)

    return Reader(name, read)


def _check_shards(folder: Path) -> None:
    (folder / "train-000000.tar").write_bytes(bytes(10_240))
    check_shard_folder([folder / "train-000000.tar", folder / "shards.json"], "folder")


def _mask_names(folder: Path) -> None:
    names_of_masks([folder], ["0.png"], lambda: {0, 1})


def _of_seeds(make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """The folder of a reader of the mutations that needs no seeds."""
    return lambda folder: make(folder, folder)


def _make_colored(folder: Path) -> None:
    annotated.make_palettes(folder, folder)
    (folder / "class_dict").rename(folder / "data")


def _annotated(name: str, make: Callable[[Path, Path], None]) -> Reader:
    return Reader(f"data/{name}", _annotations, _of_seeds(make))


# Labels and archives --------------------------------------------------------------------------------------------------


def _make_images(folder: Path) -> None:
    for number in range(4):
        Image.fromarray(pixels(number, 8)).save(folder / f"{number}.png")


def _make_classes(folder: Path) -> None:
    for number in range(4):
        place = folder / "data" / ("n01440764", "n01443537")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, 8)).save(place / f"{number}.png")


def _corrected(folder: Path) -> None:
    correct(find_source(str(folder / "data")), folder / "corrections.csv")


def _source(name: str, **how: object) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        source = find_source(str(folder / name), reading=Reading(**how))  # type: ignore[arg-type]
        for listing in source.listings.values():
            for row in listing.rows[:4].tolist():
                listing.images.where(row)
                for ask in (listing.images.read, listing.images.boxes, listing.images.mask):
                    with refusals():
                        ask(row)

    return read


def _kept_looks(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    seen = ScanCache("/data")
    (folder / "a.sqlite").replace(_made(seen.path))
    seen.read()
    seen.count()


def _scan_part(folder: Path) -> None:
    """All that a join asks of a part."""
    part = ScanPart(folder, PART)
    rows = part.rows()
    with refusals():
        part.stored.texts(np.arange(len(rows)))
    for row in range(len(rows)):
        part.scan(rows, row)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# Text -----------------------------------------------------------------------------------------------------------------


@cache
def _recipe() -> Recipe:
    return get_recipe("deit", "deit_s")


def _typed(folder: Path) -> None:
    """What a user types: a pattern, a change of a recipe, a grid, data by name."""
    for line in (folder / "typed").read_bytes().decode("utf-8", "surrogateescape").splitlines()[:8]:
        for read in (
            lambda text: read_pattern(text).label("cat_1.jpg"),
            lambda text: override(_recipe(), parse_pairs([text])),
            lambda text: len(settings_of(read_grid(text.split(" ")[:3]))),
            split_specs,
            open_shapes,
        ):
            with refusals():
                read(line)


def _recipe_file(folder: Path) -> None:
    recipe = base_recipe(str(folder / "recipe.yaml"), None)
    assert recipe is not None
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def _sentences(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        check_sentences(find_sentences(folder / name))
        text = open_parallel(str(folder / name), source="en", target="de")
        list(text.train)

    return read


def _make_german(folder: Path) -> None:
    (folder / "text").mkdir()
    (folder / "text" / "train.de").write_text("ein Haus\nzwei\n\ndrei\n")


def _gzipped(folder: Path, file: Path) -> None:
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 1))
    file.unlink()


def _vocabulary(folder: Path) -> None:
    vocabulary = Vocabulary.from_bytes((folder / "vocabulary.model").read_bytes())
    vocabulary.decode(vocabulary.encode("two houses 12 é"))
    [vocabulary.piece(number) for number in range(min(len(vocabulary), 300))]


def _requests(folder: Path) -> None:
    """HTTP bodies; where the first line is a number, it is the length of the JSON before the tensors."""
    data = (folder / "body").read_bytes()
    first, _, rest = data.partition(b"\n")
    length, body = (first.decode(), rest) if first.isdigit() else ("", data)
    endpoints = {**endpoints_of("classification", ("predict", "search")), **endpoints_of("translation", ("translate",))}
    for endpoint in endpoints.values():
        for kind in (reading.JSON, "text/plain", "application/octet-stream"):
            with refusals():
                reading.inputs_and_options(endpoint, kind, first, body)
            with refusals():
                inference_protocol.read(endpoint, kind, body, length)


# Runs -----------------------------------------------------------------------------------------------------------------

NETWORK = {"image_size": 16, "patch_size": 8, "dim": 4, "depth": 1, "num_classes": 2}
SHOWN = Preprocessing((0.5,) * 3, (0.5,) * 3, (16, 16), 1.0)
PUBLISHED = weights_named("resmlp_s12:in1k")
PRIVATE_KEY = ec.derive_private_key(12345, ec.SECP256R1())


def make_run(folder: Path) -> None:
    """The folder of an untrained run."""
    torch.manual_seed(0)
    network = create_model("resmlp_s12", **NETWORK)
    write_run_files(folder, network, SHOWN, None, ("blue", "red"), task="classification")
    save_file(network.state_dict(), folder / "weights.safetensors")


def _make_plain_run(folder: Path) -> None:
    """The same without checksums, as earlier versions left it."""
    make_run(folder)
    (folder / checksums.FILE).unlink()


def _make_features(folder: Path) -> None:
    """The stored vectors that a distance rule names."""
    save_file({"vectors": torch.eye(4, 3, dtype=torch.float16)}, folder / FEATURES)


def _make_translator(folder: Path) -> None:
    shutil.copyfile(HERE / "corpus" / "vocabulary" / "learned.model", folder / "vocabulary.model")


def _published(folder: Path) -> None:
    _is_current(folder, PUBLISHED)


def _other_names(folder: Path) -> None:
    files = read_run_files(folder)
    files.labels_as(["navy"])
    assert len(files.table) == len(files.labels)


def _metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    read_metrics(path)
    damaged_lines(path)
    tail = MetricsTail(path)
    tail.update()
    assert len(tail.records) <= len(read_metrics(path))
    metrics = MetricsFile(path)
    metrics.begin(3)
    metrics.write({"step": 1, "epoch": 1, "kind": "train", "weights": "model", "values": {"loss": 0.5}, "time": {}})
    metrics.close()
    assert read_metrics(path)


def _repair_metrics(folder: Path, file: Path) -> None:
    (folder / "run").mkdir(exist_ok=True)
    repairs.repair_run(folder, file)


def _repair_state(folder: Path, file: Path) -> None:
    """The manifest of a checkpoint whose state was changed."""
    from patchloom.runs.checkpoints import _manifest

    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "manifest.json").write_bytes(_manifest(digests))


def _plugins(folder: Path) -> None:
    """What a run says of the user's parts, compared with a command that has none."""
    with suppress(OtherRunError):
        refuse_other_plugins(folder, Provenance(("a", "b"), train=4, val=2, rows="", contents=""))


def _watched(folder: Path) -> None:
    state = WatchedRun(folder).update()
    state.headline()
    state.numbers()
    drawn([(WatchedRun(folder), state)])
    write_watch_page(folder / "watch.html", [(state, [])], every_s=2.0)


def _make_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "weights.safetensors")


def _make_scale(folder: Path) -> None:
    """The scale by which the numbers of a run are read; without a checksum, as if restored by hand."""
    values = {"format": 1, "mean": [0.5, 3.0], "std": [1.5, 2.0], "grades": []}
    (folder / regression.SCALE).write_text(json.dumps(values))


def _make_swept(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "run.json").touch()


def _sweep(folder: Path) -> None:
    """The table and the page of a sweep, by its record."""
    runs, _ = read_results(folder)
    results = list(runs.values())
    found = Sweep(folder, rows_of([{"optim.lr": 0.1}, {"optim.lr": 0.2}], results), runs, metric_of(results))
    found.to_dict()
    write_sweep_page(found)


def _packed(folder: Path, file: Path) -> None:
    """Put a pickle into a checkpoint with the storages of the network."""
    storages = [tensor.numpy().tobytes() for tensor in create_model("resmlp_s12", **NETWORK).state_dict().values()]
    with zipfile.ZipFile(folder / "a.pth", "w") as archive:
        archive.write(file, "archive/data.pkl")
        for number, data in enumerate(storages):
            archive.writestr(f"archive/data/{number}", data)


def make_signed(folder: Path) -> None:
    """A folder with the public key of its signature. Nobody signs anything else with this private key."""
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    public = PRIVATE_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


def _signature(folder: Path) -> None:
    check_signature(folder / "run", folder / "public.pem")


def _start_from(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        initialize(create_model("resmlp_s12", **NETWORK), str(folder / name))

    return read


# Indices and artifacts ------------------------------------------------------------------------------------------------


def make_index(folder: Path) -> None:
    """An index of three files."""
    place = folder / "index"
    place.mkdir()
    rows = [IndexRow(f"/data/{number}.png", "red", 100, 5) for number in range(3)]
    part = index_files.write_part(place, "part-00000", np.ones((3, 4), np.float32), rows)
    about = index_files.IndexMetadata("run", "0" * 64, {"mean": [0.5]}, 4, labels={"red": 3}, parts=(part,))
    index_files.write_about(place, about)


def make_shard_index(folder: Path) -> None:
    """An index of a shard, and the record of its part."""
    place = folder / "index"
    place.mkdir()
    rows = [IndexRow(f"/data/a.tar, {number}.png", "red", 0, 0) for number in range(3)]
    part = index_files.write_part(place, "part", np.ones((3, 4), np.float32), rows, of_shard=True)
    named = replace(part, name="part-a")  # the digest in its name depends on the version of pyarrow
    for end in (".npy", ".parquet"):
        (place / f"{part.name}{end}").rename(place / f"{named.name}{end}")
    about = index_files.IndexMetadata("run", "0" * 64, {"mean": [0.5]}, 4, labels={"red": 3}, parts=(named,))
    index_files.write_about(place, about)
    record = {
        "format": 2, "key": "a", "part": "part-a", "shard": "/data/a.tar", "state": [10_240, 5], "rows": 3,
        "vectors_sha256": part.vectors_sha256, "rows_sha256": part.rows_sha256, "labels": {"red": 3},
        "levels": {"warmth": {"red": "warm"}}, "unreadable": {"/data/a.tar, 3.png": "truncated"}, "parquet": True,
    }  # fmt: skip
    (place / "shard-a.json").write_text(json.dumps(record | {"own_sha256": own_sha256(record)}))


def _shard_record(folder: Path) -> None:
    """The index that a record becomes a part of is one that can be read."""
    place = folder / "index"
    about = index_files.read_about(place)
    for before in (about, replace(about, parts=(), labels={})):
        joined = with_shards(before, [read_record(place, "a")], place)
        index_files.write_about(folder, joined)
        index_files.read_about(folder)


def _repair_own(_: Path, file: Path) -> None:
    values = json.loads(file.read_bytes())
    values["own_sha256"] = own_sha256({name: value for name, value in values.items() if name != "own_sha256"})
    file.write_text(json.dumps(values))


BUCKET = "s3://bucket/index"
COPY = f"patchloom/folders/{hashlib.blake2b(BUCKET.encode(), digest_size=10).hexdigest()}"


def _make_copy(folder: Path) -> None:
    """A copy of a folder in a bucket, whose file is as `objects.json` says."""
    _made(folder / COPY / "index" / "a").write_bytes(b"abcd")
    os.utime(folder / COPY / "index" / "a", ns=(10**9, 10**9))


def _copy(folder: Path) -> None:
    """The copy is made equal to the bucket again, whatever was known of it."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    copy, there = mirror.Mirror(BUCKET), [mirror.ObjectFacts(f"{BUCKET}/a", 4, "1")]
    requests = {
        "list_tree": lambda _: there,
        "read_exactly": lambda spans: [b"abcd" for _ in spans],
        "put_version": lambda *_, **__: "1",
        "delete": lambda _: None,
    }
    with mock.patch.multiple(mirror, **requests):
        copy.pull()
        copy.push(removable=lambda _: True)
    assert (copy.folder / "a").read_bytes() == b"abcd"


def _index(folder: Path) -> None:
    place = folder / "index"
    stored = index_files.StoredVectors(place, index_files.read_about(place))
    for part in stored.about.parts:
        stored.all_rows(part)
    stored.labels()
    stored.files(torch.arange(min(len(stored), 3)))


def _artifact(folder: Path) -> None:
    artifact.load(folder / "artifact", threads=1)


def _indexed(name: str) -> Reader:
    return Reader(f"index/{name}", _index, make_index, repairs.repair_index)


def _graph(folder: Path) -> None:
    """The answers of a graph that somebody changed."""
    ENGINES["onnx"].open(folder, 1)(np.zeros((1, 16, 16, 3), np.uint8))


def _program(folder: Path) -> None:
    program = TorchProgramGraph(folder / "model.pt2", 1 << 30, HANG_S)
    program(torch.zeros(1, 4))


def _of_artifact(name: str) -> Reader:
    return Reader(f"artifact/{name}", _artifact, _of_seeds(make_artifact), repair_artifact)


TARGETS: dict[str, Target] = {
    "images": Target(("png", "jpg"), (Reader("a", _pictures),)),
    "masks": Target(
        ("png",),
        (
            _annotated("masks/0.png", annotated.make_masks),
            _annotated("PedMasks/0_mask.png", annotated.make_instances),
            Reader("data/masks/0.png", _annotations, _make_colored),
        ),
    ),
    "coco": Target(("json",), (_annotated("annotations/instances_train2017.json", annotated.make_coco_masks),)),
    "voc": Target(
        ("text",),
        (
            _annotated("Annotations/0.xml", annotated.make_voc),
            _annotated("ImageSets/Main/train.txt", annotated.make_voc),
        ),
    ),
    "yolo": Target(
        ("text", "yaml"),
        (_annotated("labels/0.txt", annotated.make_yolo), _annotated("data.yaml", annotated.make_yolo)),
    ),
    "names": Target(
        ("text", "csv"),
        (
            *(Reader(name, _mask_names) for name in (*MASK_NAMES, "objectInfo150.txt")),
            Reader("classes.txt", lambda folder: names_by_line(folder / "classes.txt")),
            Reader("classes.csv", lambda folder: list(find_class_names([(FolderTree(folder), "")]))),
            Reader("names.txt", lambda folder: read_names(folder / "names.txt")),
            Reader("left_out.tsv", lambda folder: read_list(folder / "left_out.tsv")),
        ),
    ),
    "corrections": Target(
        ("csv", "text"),
        (
            Reader("corrections.csv", lambda folder: read_corrections(folder / "corrections.csv")),
            Reader("corrections.csv", _corrected, _make_classes),
        ),
    ),
    "labels": Target(
        ("csv", "text"),
        (
            Reader("labels.csv", _source("labels.csv"), _make_images),
            Reader("labels.tsv", _source("labels.tsv"), _make_images),
            Reader("train.txt", _source("", labels="train.txt"), _make_images),
            Reader("data/classes.csv", _source("data"), _make_classes),
        ),
    ),
    "shards": Target(
        ("json",),
        (
            Reader("index.json", lambda folder: parse_index((folder / "index.json").read_bytes(), 10_240, "a.tar")),
            Reader("shards.json", _check_shards),
        ),
    ),
    "bucket": Target(
        ("tar", "parquet", "bytes"), (_in_bucket("a.tar", open_shards), _in_bucket("a.parquet", open_parquet))
    ),
    "tools": Target(
        ("json", "csv", "text"),
        (
            _of_tool("project.json", lambda root, file: open_label_studio(root, [file], "a")),
            _of_tool("annotations.xml", lambda root, file: open_cvat(root, [file], "a")),
            _of_tool("0.json", lambda root, file: open_labelme(root, {"": [("0.png", file.name)]}, "a")),
            *(
                Reader(f"data/{name}", _annotations, _make_pictures)
                for name in ("project.json", "annotations.xml", "0.json", "boxes.csv")
            ),
        ),
    ),
    "taxonomy": Target(
        ("json", "yaml", "csv"),
        (
            *(
                Reader(f"levels{end}", lambda folder, end=end: read_taxonomy(folder / f"levels{end}"))
                for end in (".json", ".yaml", ".csv")
            ),
            Reader("real.json", lambda folder: read_real_labels(folder / "real.json")),
        ),
    ),
    "parquet": Target(
        ("parquet",),
        (
            Reader("data.parquet", _source("data.parquet")),
            Reader("text.parquet", lambda folder: check_sentences(find_sentences(folder / "text.parquet"))),
        ),
    ),
    "tar": Target(
        ("tar", "bytes"),
        (Reader("data.tar", _source("data.tar")), Reader("data.tar.gz", _source("data.tar.gz"))),
    ),
    "zip": Target(("zip",), (Reader("data.zip", _source("data.zip")),)),
    "scan_part": Target(
        ("bytes",),
        (
            Reader(file_of(PART), _scan_part),
            Reader(file_of(PART), _scan_part, repair=lambda _, file: repairs.repair_part(file)),
        ),
    ),
    "cache": Target(("bytes",), (Reader("a.sqlite", _kept_looks),)),
    "typed": Target(("text",), (Reader("typed", _typed),)),
    "recipe": Target(
        ("yaml",),
        (
            Reader("recipe.yaml", _recipe_file),
            Reader("recipe.yaml", lambda folder: read_run_files(folder).recipe, _make_plain_run),
        ),
    ),
    "sentences": Target(
        ("text",),
        (
            Reader("pairs.tsv", _sentences("pairs.tsv")),
            Reader("text/train.en", _sentences("text"), _make_german),
            Reader("text/train.en", _sentences("text"), _make_german, _gzipped),
            Reader("text/train.en.gz", _sentences("text"), _make_german),
        ),
    ),
    "vocabulary": Target(("bytes",), (Reader("vocabulary.model", _vocabulary),)),
    "requests": Target(("json", "bytes"), (Reader("body", _requests),)),
    "config": Target(
        ("json",),
        (
            Reader("config.json", read_run_files, _make_plain_run),
            Reader("config.json", load_network, _make_plain_run),
            Reader("config.json", translation.read_translation_files, _make_translator),
            Reader("labels.json", read_run_files, _make_plain_run),
            Reader("names.json", _other_names, _make_plain_run),
            Reader("checksums.json", read_run_files, make_run),
        ),
    ),
    "rules": Target(
        ("json",),
        (
            Reader("calibration.json", read_calibration, _make_features),
            Reader("thresholds.json", lambda folder: multilabel.read_thresholds(folder, ("a", "b"))),
            Reader("scale.json", lambda folder: regression.read_scale(folder, ("a", "b"))),
        ),
    ),
    "progress": Target(
        ("json",),
        (
            Reader(".status.json", read_status),
            Reader(".status.json", _watched),
            Reader("race.json", read_race),
            Reader("race.json", race_choices),
        ),
    ),
    "records": Target(
        ("json",),
        (
            Reader("run.json", read_run_metadata),
            Reader("data.json", read_provenance),
            Reader("data.json", _plugins),
            Reader("val.json", detection.read_val),
            Reader("val.json", translation.read_val),
            Reader("sweep.json", _sweep, _make_swept),
            Reader("published.json", _published, _make_plain_run),
            Reader("fetched.json", lambda folder: _state_of(folder / "fetched.json", "https://a/b.pth")),
            Reader("teacher_labels.json", lambda folder: read_labels(folder / "teacher_labels.json", 2, 2)),
            Reader("clusters.json", lambda folder: read_labels(folder / "clusters.json", 2, 2)),
            Reader("state.json", read_checkpoint, _make_weights, _repair_state),
        ),
    ),
    "metrics": Target(
        ("jsonl",),
        (Reader("metrics.jsonl", _metrics), Reader("metrics.jsonl", _metrics, repair=_repair_metrics)),
    ),
    "safetensors": Target(
        ("safetensors",),
        (
            Reader("weights.safetensors", lambda folder: read_weights(folder / "weights.safetensors")),
            Reader("weights.safetensors", load_network, _make_plain_run),
            Reader("a.safetensors", _start_from("a.safetensors")),
        ),
    ),
    "tables": Target(
        ("safetensors",),
        (
            Reader("predictions.safetensors", check_predictions),
            Reader("out_of_fold.safetensors", load_out_of_fold),
            Reader("segmented.safetensors", segmentation.read_segmented),
            Reader("labeled.safetensors", multilabel.read_val_labels),
            Reader("numbers.safetensors", regression.read_val_numbers, _make_scale),
        ),
    ),
    "pth": Target(("zip", "bytes"), (Reader("a.pth", _start_from("a.pth")),)),
    "pickle": Target(("pickle", "bytes"), (Reader("data.pkl", _start_from("a.pth"), repair=_packed),)),
    "signature": Target(("json", "bytes"), (Reader("run/model.sig", _signature, make_signed),)),
    "npz": Target(("zip",), (Reader("a.npz", _start_from("a.npz")),)),
    "index": Target(("json", "npy"), (_indexed("index.json"), _indexed("part-00000.json"), _indexed("part-00000.npy"))),
    "rows": Target(
        ("parquet", "bytes"), (Reader("index/part-a.parquet", _index, make_shard_index, repairs.repair_index),)
    ),
    "parts": Target(
        ("json",), (Reader("index/shard-a.json", _shard_record, make_shard_index, _repair_own),)
    ),
    "copies": Target(("json",), (Reader(f"{COPY}/objects.json", _copy, _make_copy),)),
    "onnx": Target(("bytes",), (Reader("model.onnx", _graph),)),
    "pt2": Target(("zip", "bytes"), (Reader("model.pt2", _program),)),
    "artifact": Target(("json",), (_of_artifact("artifact.json"), _of_artifact("labels.json"))),
}  # fmt: skip
