"""Class folders with the dirt that real ones have."""

import hashlib
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from patchloom.data.reading_options import Reading
from patchloom.data.sources.class_folders import open_folder
from patchloom.data.sources.labels_file import open_labels_file
from patchloom.data.sources.source import open_data, open_for
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts, has_facts


def draw(path):
    """A red picture that differs from those of other paths, since copies would be kept together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (255, *hashlib.sha256(os.fsencode(path)).digest()[:2])).save(path)
    return path


def names_of(images):
    return {images.key(i): images.classes.names[images.labels[i]] for i in range(len(images))}


@pytest.fixture
def clean(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("ant", "cat", "dog"):
            for i in range(count):
                draw(tmp_path / "clean" / split / name / f"{i}.png")
    return tmp_path / "clean"


def test_train_and_val_folders(clean):
    data = open_data(clean)
    assert data.name == "clean (class folders)"
    assert data.classes.names == ("ant", "cat", "dog")
    assert (len(data.train), len(data.val), data.notes) == (9, 6, ())
    assert names_of(data.val)["val/dog/1.png"] == "dog"
    assert data.train.read(0).getpixel((0, 0))[0] == 255
    assert data.train.where(0) == str(clean / "train" / "ant" / "0.png")


@pytest.mark.parametrize(("train", "val"), [("Training", "validation"), ("train", "valid"), ("train", "test")])
def test_other_names_of_the_splits(clean, train, val):
    (clean / "train").rename(clean / "t")
    (clean / "val").rename(clean / val)
    (clean / "t").rename(clean / train)
    data = open_data(clean, reading=Reading(val="test" if val == "test" else None))
    assert (len(data.train), len(data.val)) == (9, 6)


def test_other_folders_beside_the_splits_are_named(clean):
    draw(clean / "test" / "ant" / "0.png")
    draw(clean / "extra" / "ant" / "0.png")
    data = open_data(clean)
    assert (len(data.val), len(data.test)) == (6, 1)
    (note,) = data.notes
    assert has_facts(note, "extra")


def test_a_class_called_train_is_a_class(tmp_path):
    for name in ("bus", "train"):
        for i in range(3):
            draw(tmp_path / name / f"{i}.png")
    assert open_data(tmp_path).classes.names == ("bus", "train")


def test_a_class_only_in_val_shifts_no_label(clean):
    before = names_of(open_data(clean).val)
    draw(clean / "val" / "bee" / "0.png")
    data = open_data(clean)
    assert data.classes.names == ("ant", "cat", "dog")
    assert names_of(data.val) == before
    (note,) = data.notes
    assert has_facts(note, "val", "train", "'bee'")
    with pytest.raises(DataError, match=facts("val", "train", "'bee'")):
        open_data(clean, strict=True)


def test_an_empty_class_is_named_and_left_out(clean):
    (clean / "train" / "unicorn").mkdir()
    data = open_data(clean)
    assert data.classes.names == ("ant", "cat", "dog")
    (note,) = data.notes
    assert has_facts(note, "train", "'unicorn'")
    with pytest.raises(DataError, match=facts("train", "'unicorn'")):
        open_data(clean, strict=True)


def test_dirt_is_counted_and_named(clean):
    train = clean / "train"
    (train / "ant" / ".DS_Store").write_bytes(b"x")
    (train / "ant" / ".hidden.png").write_bytes(b"x")
    (train / "ant" / "notes.txt").write_text("x")
    (train / "cat" / "Thumbs.db").write_bytes(b"x")
    (train / "cat" / "README").write_text("x")
    (train / "dog" / "gone.jpg").symlink_to(train / "nowhere.jpg")
    os.mkfifo(train / "dog" / "pipe.jpg")
    draw(train / "loose.png")
    (train / "dog" / "empty.jpg").write_bytes(b"")
    data = open_data(clean)
    beside, others, not_files = data.notes
    assert has_facts(beside, "train", 1)
    assert has_facts(others, "train", "1 .db", "1 .txt")
    assert has_facts(not_files, "train", 2, "dog/gone.jpg", "dog/pipe.jpg")
    where = [data.train.where(i) for i in range(len(data.train))]
    with pytest.raises(DataError, match=r"dog/empty\.jpg"):
        data.train.read(where.index(str(train / "dog" / "empty.jpg")))


def test_nested_files_any_case_and_names_that_are_not_utf8(tmp_path):
    for name in ("a", "b"):
        for i in range(2):
            draw(tmp_path / name / "2024" / f"{i}.png").rename(tmp_path / name / "2024" / f"{i}.PNG")
    odd = os.fsdecode(b"caf\xe9.png")
    draw(tmp_path / "b" / "plain.png").rename(tmp_path / "b" / odd)
    data = open_data(tmp_path)
    everything = [*names_of(data.train).items(), *names_of(data.val).items()]
    assert ("a/2024/0.PNG", "a") in everything
    assert (f"b/{odd}", "b") in everything
    for images in (data.train, data.val):
        for i in range(len(images)):
            images.read(i)
            images.where(i).encode("utf-8")  # printable anywhere
    whole = open_folder(tmp_path).train.images
    assert r"caf\xe9.png" in " ".join(whole.where(i) for i in range(len(whole)))


def test_a_link_to_a_folder_above_ends_the_walk(clean):
    (clean / "train" / "ant" / "again").symlink_to(clean / "train")
    data = open_data(clean)
    assert len(data.train) == 9
    assert "ant/again" in data.notes[0]


def test_order_follows_names_not_the_file_system(clean, monkeypatch):
    forward = [open_data(clean).train.where(i) for i in range(9)]
    listing = os.scandir

    class Backwards:
        def __init__(self, path):
            with listing(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(os, "scandir", Backwards)
    assert [open_data(clean).train.where(i) for i in range(9)] == forward == sorted(forward)


def test_pickled_copy_reads_the_same(clean):
    train = open_data(clean).train
    copy = pickle.loads(pickle.dumps(train))
    assert np.array_equal(copy.read(4), train.read(4))
    assert copy.where(4) == train.where(4)


def test_too_little_to_classify(tmp_path):
    with pytest.raises(DataError, match=facts(tmp_path.name)):
        open_data(tmp_path)
    for i in range(4):
        draw(tmp_path / "cat" / f"{i}.png")
    with pytest.raises(DataError, match="'cat'"):
        open_data(tmp_path)


def test_images_without_labels_are_for_other_tasks(tmp_path):
    for i in range(5):
        draw(tmp_path / f"{i}.png")
    with pytest.raises(DataError, match=facts(5, "--labels")):
        open_data(tmp_path)
    data = open_data(tmp_path, labeled=False)
    assert (len(data.train), len(data.val), len(data.classes)) == (4, 1, 0)
    assert set(data.train.labels) == {-1}


def test_images_beside_an_empty_folder_are_images_without_labels(tmp_path):
    (tmp_path / "results").mkdir()
    draw(tmp_path / "a.png")
    with pytest.raises(DataError, match=facts(1, "--labels")):
        open_data(tmp_path)


def test_labels_file_with_levels_and_splits(tmp_path):
    lines = ["path,label,kind,split"]
    for split, count in (("train", 2), ("test", 1)):
        for label, kind in (("rose", "flower"), ("oak", "tree"), ("elm", "tree")):
            for i in range(count):
                draw(tmp_path / f"{split}{label}{i}.png")
                lines.append(f"{split}{label}{i}.png,{label},{kind},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    data = open_data(tmp_path, reading=Reading(labels=tmp_path / "labels.csv", val="test"))
    assert data.classes.names == ("elm", "oak", "rose")
    assert data.classes.levels == {"kind": (("flower", "tree"), (1, 1, 0))}
    assert names_of(data.val) == {"testrose0.png": "rose", "testoak0.png": "oak", "testelm0.png": "elm"}
    assert open_data(tmp_path / "labels.csv", level="kind").classes.names == ("flower", "tree")


def test_labels_file_faults(tmp_path):
    with pytest.raises(UsageError, match=r"none\.csv"):
        open_data(tmp_path, reading=Reading(labels=tmp_path / "none.csv"))
    draw(tmp_path / "a.png")
    file = tmp_path / "labels.tsv"
    file.write_text("path\tlabel\na.png\n")
    with pytest.raises(DataError, match=facts("line 2", "path,label")):
        open_labels_file(file)
    file.write_text("path\tlabel\na.png\tx\nb.png\ty\n")
    assert has_facts(open_labels_file(file).notes[-1], 2, "b.png")
    with pytest.raises(DataError, match=r"b\.png"):
        open_labels_file(file, strict=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.json", '{"cat": "animal", "dog": "animal", "oak": "plant"}'),
        ("t.yaml", "coarse: {cat: animal, dog: animal, oak: plant}"),
        ("t.csv", "class,coarse\ncat,animal\ndog,animal\noak,plant\n"),
    ],
)
def test_taxonomy_file_makes_levels_and_finds_nested_classes(tmp_path, name, text):
    data = tmp_path / "data"
    for folder in ("animal/cat", "animal/dog", "oak"):
        for i in range(3):
            draw(data / folder / f"{i}.png")
    (tmp_path / name).write_text(text)
    opened = open_data(data, reading=Reading(taxonomy=tmp_path / name))
    assert opened.classes.names == ("cat", "dog", "oak")
    assert opened.classes.levels == {"coarse": (("animal", "plant"), (0, 0, 1))}
    assert open_data(data, reading=Reading(taxonomy=tmp_path / name), level="coarse").classes.names == (
        "animal",
        "plant",
    )
    with pytest.raises(UsageError, match=facts("'corse'", "coarse")):
        open_data(data, reading=Reading(taxonomy=tmp_path / name), level="corse")


def test_a_stranger_to_the_taxonomy_is_named_at_evaluation(clean, tmp_path):
    (tmp_path / "t.json").write_text('{"ant": "small", "cat": "large", "dog": "large"}')
    model = open_data(clean, reading=Reading(taxonomy=tmp_path / "t.json"), level="coarse").classes
    draw(clean / "val" / "bee" / "0.png")
    source = open_for(clean, model, reading=Reading(taxonomy=tmp_path / "t.json"), level="coarse")
    assert names_of(source)["val/ant/0.png"] == "small"
    assert len(source) == 6
    assert "'bee' (1 image)" in source.notes[0]


def test_taxonomy_that_misses_a_class(clean, tmp_path):
    (tmp_path / "t.json").write_text('{"cat": "animal"}')
    with pytest.raises(DataError, match=facts("'coarse'", "'ant'", "'dog'")):
        open_data(clean, reading=Reading(taxonomy=tmp_path / "t.json"))
    (tmp_path / "t.json").write_text("[1, 2]")
    with pytest.raises(UsageError, match=r"t\.json"):
        open_data(clean, reading=Reading(taxonomy=tmp_path / "t.json"))
