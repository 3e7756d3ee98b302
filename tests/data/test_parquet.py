"""Parquet files: labels, names, levels, splits, annotations; usable after fork and pickle."""

import io
import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.reading_options import Reading
from patchloom.data.sources import parquet
from patchloom.data.sources.parquet import open_parquet
from patchloom.data.sources.source import open_data, open_for
from patchloom_runtime.errors import DataError
from tests.data.facts import facts, has_facts

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SHARED = Path(__file__).parents[3] / "shared" / "data"
with_real_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data in {SHARED}")


def png(value: int, mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, (value, 0, 0) if mode == "RGB" else value).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, info: dict | None = None, **columns) -> Path:
    metadata = {"dataset_info": json.dumps(info)} if info else None
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path, compression="zstd")
    return path


INFO = {"label_names": ["cat", "dog", "oak"], "coarse_label_names": ["animal", "plant"]}


@pytest.fixture
def files(tmp_path):
    for n, (name, labels) in enumerate((("train-0of2", [0, 1, 2]), ("train-1of2", [2, 1, 0]), ("test", [1, 2, 0]))):
        write(
            tmp_path / f"s-{name}.parquet",
            INFO,
            image=[png(10 * label + n) for label in labels],
            label=pa.array(labels, pa.uint8()),
            coarse_label=pa.array([label // 2 for label in labels], pa.uint8()),
        )
    return tmp_path


def test_files_named_by_split(files):
    data = open_data(files, reading=Reading(val="test"))
    assert data.name == f"{files.name} (parquet)"
    assert data.classes.names == ("cat", "dog", "oak")
    assert data.classes.levels == {"coarse": (("animal", "plant"), (0, 0, 1))}
    assert data.train.labels.tolist() == [0, 1, 2, 2, 1, 0]
    assert data.val.labels.tolist() == [1, 2, 0]
    assert [data.train.read(i).getpixel((0, 0))[0] for i in range(6)] == [0, 10, 20, 21, 11, 1]
    assert data.train.where(4) == f"{files / 's-train-1of2.parquet'}, row 1"
    assert open_data(files / "s-train-*.parquet", level="coarse").classes.names == ("animal", "plant")


def test_pickled_copy_opens_its_files_again(files):
    train = open_data(files, reading=Reading(val="test")).train
    stored = pickle.dumps(train)
    assert png(21) not in stored
    assert pickle.loads(stored).read(3).getpixel((0, 0)) == (21, 0, 0)


def first_pixel(images, index, answers):
    answers.put(images.read(index).getpixel((0, 0)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_read_the_same(files, method):
    train = open_data(files, reading=Reading(val="test")).train
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    worker = context.Process(target=first_pixel, args=(train, 2, answers))
    worker.start()
    assert answers.get(timeout=30) == (20, 0, 0)
    worker.join(timeout=30)
    assert worker.exitcode == 0


def test_split_column_struct_images_and_names_as_labels(tmp_path):
    path = write(
        tmp_path / "all.parquet",
        image=[{"bytes": png(i), "path": f"{i}.png"} for i in range(6)],
        label=["b", "a", "b", "a", "b", "a"],
        split=["train", "train", "train", "validation", "validation", "other"],
    )
    data = open_data(path)
    assert data.classes.names == ("a", "b")
    assert (data.train.labels.tolist(), data.val.labels.tolist()) == ([1, 0, 1], [0, 1])
    assert data.val.read(0).getpixel((0, 0)) == (3, 0, 0)
    (note,) = data.notes
    assert has_facts(note, "other")


def test_the_same_name_in_two_folders(tmp_path):
    for split, count in (("train", 4), ("test", 2)):
        (tmp_path / split).mkdir()
        write(tmp_path / split / "0000.parquet", INFO, image=[png(1)] * count, label=[0, 1] * (count // 2))
    data = open_data(tmp_path / "*" / "0000.parquet", reading=Reading(val="test"))
    assert (len(data.train), len(data.val)) == (4, 2)


def test_hugging_face_metadata_names_the_classes(tmp_path):
    table = pa.table({"img": [png(i) for i in range(10)], "label": [0, 1] * 5})
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    data = open_data(tmp_path / "a.parquet")
    assert data.classes.names == ("no", "yes")
    assert (len(data.train), len(data.val)) == (8, 2)


def test_faults_are_located(tmp_path):
    path = write(tmp_path / "a.parquet", INFO, image=[png(1)] * 3, label=[0, 1, 9])
    with pytest.raises(DataError, match=facts("a.parquet, row 2", 9, "0…2")):
        open_data(path)
    write(path, INFO, image=[png(1), b"", None, png(2), png(3), png(4)], label=[0, 0, 1, 1, 0, 1])
    data = open_data(path)
    assert (len(data.train), len(data.val)) == (2, 2)
    assert has_facts(data.notes[0], 2, f"{path}, row 1", f"{path}, row 2", "'image'")
    everything = open_for(path, data.classes)
    with pytest.raises(DataError, match=r"a\.parquet, row 1"):
        everything.read(1)
    with pytest.raises(DataError, match=facts("a.parquet, row 2", "'image'")):
        everything.read(2)
    write(path, INFO, picture=[png(1)], label=[0])
    with pytest.raises(DataError, match=facts("picture", "label", "'image'")):
        open_data(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_data(path)
    write(tmp_path / "c.parquet", INFO, image=[png(1)] * 2, label=[0, 1], coarse_label=[0, 0])
    write(tmp_path / "c.parquet", INFO, image=[png(1)] * 2, label=[0, 0], coarse_label=[0, 1])
    with pytest.raises(DataError, match=facts("row 1", "'cat'", "'animal'", "'plant'")):
        open_data(tmp_path / "c.parquet")


def test_equal_images_are_not_unpacked(tmp_path):
    """A million rows of one image: 340 kB that would be 3 GB."""
    rows = 1_000_000
    numbers = pa.array(np.zeros(rows, np.int32))
    images = pa.DictionaryArray.from_arrays(numbers, pa.array([png(7, size=(200, 200))]))
    file = write(tmp_path / "a.parquet", image=images, label=pa.array(np.arange(rows) % 2, pa.int8()))
    stored = open_parquet([file], "a").train.images
    assert sum(table.nbytes for table in stored._tables) < 20 * rows
    assert stored.read(rows - 1).getpixel((0, 0)) == (7, 0, 0)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", image=[bytes(4_000_000 + i) for i in range(20)], label=[0, 1] * 10)
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", 1 << 20)
    with pytest.raises(DataError, match=facts("a.parquet", "80,0")):
        open_data(file)


@pytest.mark.parametrize(("labels", "given"), [([0, 10**9], "1000000000"), ([True, None], "True")])
def test_labels_that_are_no_class_numbers(tmp_path, labels, given):
    file = write(tmp_path / "a.parquet", image=[png(1), png(2)], label=labels)
    with pytest.raises(DataError, match=facts("a.parquet", "'label'", given)):
        open_data(file)


def test_files_that_do_not_belong_together(files):
    write(files / "s-train-2of2.parquet", {"label_names": ["x"]}, image=[png(1)], label=[0])
    with pytest.raises(DataError, match=r"s-train-2of2\.parquet"):
        open_data(files)


def test_masks_of_classes(tmp_path):
    info = {"label_names": ["sky", "road", "nothing"], "ignore_index": 2}
    path = write(
        tmp_path / "m.parquet", info, image=[png(i) for i in range(5)], mask=[png(i % 3, "L") for i in range(5)]
    )
    data = open_data(path)
    assert (len(data.train), len(data.val)) == (4, 1)
    assert set(data.train.labels) == {-1}
    images = data.train.images
    assert (images.mask_names, images.mask_ignore) == (("sky", "road", "nothing"), 2)
    mask = images.mask(4)
    assert (mask.classes.shape, set(mask.classes.flat), mask.instances) == ((8, 8), {1}, None)
    assert data.train.boxes(0) is None


def test_boxes_with_classes(tmp_path):
    path = write(
        tmp_path / "b.parquet",
        {"label_names": ["red", "white"]},
        image=[png(i) for i in range(3)],
        boxes=pa.array([[[0, 1, 4, 5], [2, 2, 6, 8]], [], [[0, 0, 8, 8]]], pa.list_(pa.list_(pa.int32()))),
        labels=pa.array([[1, 0], [], [1]], pa.list_(pa.uint8())),
    )
    images = open_data(path).train.images
    assert images.object_names == ("red", "white")
    assert images.boxes(0).tolist() == [[0, 1, 4, 5, 1], [2, 2, 6, 8, 0]]
    assert images.boxes(1).shape == (0, 5)
    assert images.mask(0) is None


def test_boxes_with_instance_masks(tmp_path):
    path = write(
        tmp_path / "i.parquet",
        {"label_names": ["background", "person"]},
        image=[png(i) for i in range(2)],
        mask=[png(3, "L")] * 2,
        boxes=[[[0, 0, 8, 8, 3]]] * 2,
    )
    images = open_data(path).train.images
    assert images.object_names == ("person",)
    assert images.boxes(0).tolist() == [[0, 0, 8, 8, 0]]
    mask = images.mask(0)
    assert (set(mask.classes.flat), set(mask.instances.flat)) == ({1}, {3})


@with_real_data
def test_real_photographs():
    data = open_data(SHARED / "imagenette160-*.parquet")
    assert (len(data.train), len(data.val)) == (2000, 500)
    assert data.classes.names[:2] == ("tench", "English springer")
    image = data.val.read(7)
    assert (image.mode, image.size) == ("RGB", (160, 160))


@with_real_data
@pytest.mark.parametrize(
    ("file", "sizes"),
    [("camvid-240x180-trainval", (367, 101)), ("bccd", (205, 87)), ("pennfudan-half", (136, 34))],
)
def test_real_annotations(file, sizes):
    data = open_data(SHARED / f"{file}.parquet")
    assert (len(data.train), len(data.val)) == sizes
    image, mask, boxes = data.train.read(0), data.train.mask(0), data.train.boxes(0)
    assert mask is not None or boxes is not None
    if mask is not None:
        assert mask.classes.shape == image.size[::-1]
        assert mask.classes.max() < len(data.train.images.mask_names)
    if boxes is not None:
        assert np.all(boxes[:, :2] < boxes[:, 2:4])
        assert np.all(boxes[:, 2:4] <= image.size)
        assert boxes[:, 4].max() < len(data.train.images.object_names)
