"""train, val and test: found in every kind of source, looked through together, and told from one another."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data, open_for
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import any_has, facts, has_facts

COUNTS = {"train": 4, "val": 2, "test": 3}


def draw(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((16, 16), 40 + 3 * seed).convert("RGB").save(path)
    return path


@pytest.fixture
def folders(tmp_path):
    for split, count in COUNTS.items():
        for name in ("ant", "bee"):
            for i in range(count):
                draw(tmp_path / "set" / split / name / f"{i}.png", i)
    return tmp_path / "set"


def labels_file(folders: Path) -> Path:
    lines = ["path,label,split"]
    for path in sorted(folders.rglob("*.png")):
        split, name, _ = path.relative_to(folders).parts
        lines.append(f"{path.relative_to(folders)},{name},{split}")
    (folders / "labels.csv").write_text("\n".join(lines))
    return folders / "labels.csv"


def parquet(folders: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in COUNTS:
        paths = sorted((folders / split).rglob("*.png"))
        columns = {"image": [p.read_bytes() for p in paths], "label": [p.parent.name for p in paths]}
        pq.write_table(pa.table(columns), folders.parent / f"a-{split}.parquet")
    return folders.parent / "a-*.parquet"


def parquet_column(folders: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = sorted(folders.rglob("*.png"))
    columns = {
        "image": [p.read_bytes() for p in paths],
        "label": [p.parent.name for p in paths],
        "split": [p.parent.parent.name for p in paths],
    }
    pq.write_table(pa.table(columns), folders.parent / "all.parquet")
    return folders.parent / "all.parquet"


def shards(folders: Path) -> Path:
    import io
    import tarfile

    for split in COUNTS:
        with tarfile.open(folders.parent / f"b-{split}.tar", "w") as archive:
            for number, path in enumerate(sorted((folders / split).rglob("*.png"))):
                for end, content in (("png", path.read_bytes()), ("cls", path.parent.name.encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{end}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return folders.parent / "b-*.tar"


@pytest.mark.parametrize("made", [Path, labels_file, parquet, parquet_column, shards])
def test_every_source_has_three_splits(folders, made):
    data = open_data(made(folders))
    assert data.test is not None
    assert {split: len(getattr(data, split)) for split in COUNTS} == {"train": 8, "val": 4, "test": 6}
    assert data.test.classes == data.train.classes
    source = open_for(made(folders), data.classes, split="test")
    assert len(source) == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_data_have_three_splits(folders):
    datasets = pytest.importorskip("datasets")
    rows = {}
    for split in COUNTS:
        paths = sorted((folders / split).rglob("*.png"))
        columns = {"image": [str(p) for p in paths], "label": [p.parent.name for p in paths]}
        rows[split] = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict(rows).save_to_disk(folders.parent / "saved")
    source = find_source(folders.parent / "saved")
    assert {split: len(listing) for split, listing in source.listings.items()} == {"train": 8, "val": 4, "test": 6}


def test_without_val_images_of_train_are_held_out_and_test_stays_unseen(folders):
    shutil.rmtree(folders / "val")
    data = open_data(folders)
    assert (len(data.train), len(data.val), len(data.test)) == (6, 2, 6)
    assert len(open_for(folders, data.classes)) == 6  # test, where nothing is said
    assert {split: len(open_for(folders, data.classes, split=split)) for split in ("train", "val", "test")} == {
        "train": 6, "val": 2, "test": 6,
    }  # fmt: skip
    assert check(folders).splits == {"train": 8, "test": 6}


def test_test_images_validate_where_the_user_says_so(folders):
    shutil.rmtree(folders / "val")
    data = open_data(folders, reading=Reading(val="test"))
    assert (len(data.train), len(data.val), data.test) == (8, 6, None)
    test = open_for(folders, data.classes, split="test")
    assert [test.key(i) for i in range(6)] == [data.val.key(i) for i in range(6)]


def test_a_split_that_is_not_there_is_refused(folders):
    classes = open_data(folders).classes
    shutil.rmtree(folders / "test")
    with pytest.raises(UsageError, match=facts("test", "train", "val")):
        open_for(folders, classes, split="test")
    with pytest.raises(UsageError, match=facts("train", "val")):
        open_for(folders, classes, split="all")


def test_check_looks_at_test_too(folders):
    shutil.copy(folders / "train" / "ant" / "0.png", folders / "test" / "ant" / "copy.png")
    shutil.copy(folders / "val" / "bee" / "0.png", folders / "test" / "bee" / "copy.png")
    (folders / "test" / "bee" / "broken.png").write_bytes(b"no picture")
    draw(folders / "test" / "wasp" / "0.png", 9)
    report = check(folders)
    assert report.splits == {"train": 8, "val": 4, "test": 10}
    assert [bad.place.split for bad in report.unreadable] == ["test"]
    assert report.stray_classes == {"wasp": 1}
    _, stray, *leaked = report.problems()
    assert has_facts(stray, "test", "'wasp'")
    assert [(has_facts(line, "train", "test"), has_facts(line, "val", "test")) for line in leaked] == [
        (True, False),
        (False, True),
    ]
    draw(folders / "val" / "wasp" / "1.png", 10)
    assert any_has(check(folders).problems(), "val", "test", "'wasp'")


def test_a_class_only_in_test_is_named_and_left_out(folders):
    draw(folders / "test" / "wasp" / "0.png", 9)
    data = open_data(folders)
    (note,) = data.notes
    assert has_facts(note, "test", "train", "'wasp'")
    assert len(data.test) == 6
    with pytest.raises(DataError, match=facts("test", "train", "'wasp'")):
        open_data(folders, strict=True)


@pytest.mark.parametrize(
    ("inside", "parts"),
    [("", ("test", 3)), ("unknown", ("test", "train", "'unknown'", 3, "'ant'", "'bee'"))],
)
def test_test_images_without_labels_do_not_stop_training(folders, inside, parts):
    shutil.rmtree(folders / "test")
    for i in range(3):
        draw(folders / "test" / inside / f"{i}.png", i)
    data = open_data(folders)
    assert data.test is None
    (note,) = data.notes
    assert has_facts(note, *parts)


def test_an_empty_test_folder_is_a_note(folders):
    shutil.rmtree(folders / "test")
    (folders / "test").mkdir()
    data = open_data(folders)
    assert data.test is None
    (note,) = data.notes
    assert has_facts(note, "test")


def test_a_folder_that_is_a_split_of_a_larger_set_is_read_as_there(tmp_path):
    nested = ("fruit/apple/golden", "fruit/apple/green", "fruit/pear", "milk")
    for split in ("train", "val", "test"):
        for seed, folder in enumerate(nested):
            draw(tmp_path / split / folder / "0.png", seed)
    shutil.rmtree(tmp_path / "test" / "fruit" / "apple" / "green")
    shutil.rmtree(tmp_path / "test" / "fruit" / "pear")
    model = open_data(tmp_path).classes
    source = open_for(tmp_path / "test", model)
    assert {source.key(i): model.names[source.labels[i]] for i in range(len(source))} == {
        "test/fruit/apple/golden/0.png": "golden",
        "test/milk/0.png": "milk",
    }
    (note,) = source.notes
    assert has_facts(note, "test", tmp_path.name)
    outer = open_data(tmp_path, level="coarse2").classes
    assert outer.names == ("fruit", "milk")
    assert len(open_for(tmp_path / "test", outer)) == 2


def test_a_taxonomy_beside_the_splits_counts_for_one_of_them(folders):
    (folders / "taxonomy.csv").write_text("class,size\nant,small\nbee,large\n")
    model = open_data(folders, level="size").classes
    assert sorted(set(open_for(folders / "test", model).labels.tolist())) == [0, 1]
    (folders / "taxonomy.csv").rename(folders.parent / "t.csv")
    given = open_for(folders / "test", model, reading=Reading(taxonomy=folders.parent / "t.csv"))
    assert len(given) == 6
