"""Zip and tar files as data: class folders, splits, a labels file inside; and what is refused."""

import gzip
import io
import os
import pickle
import stat
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from patchloom.data.checking.survey import survey
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data
from patchloom.data.trees import compressed_tar
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.decode import MAX_FILE_BYTES
from tests.data.facts import facts, has_facts


def make_image(value=0, size=16):
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value, value // 2, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def members(prefix="", splits=("",), classes=("cat", "dog"), count=4):
    names = [f"{prefix}{split}{name}/{i}.png" for split in splits for name in classes for i in range(count)]
    return {name: make_image(7 * i) for i, name in enumerate(names)}


def zipped(path, files, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tarred(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def packed(path, files):
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(path.suffix, "w")
    return zipped(path, files) if path.suffix == ".zip" else tarred(path, files, mode)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def labels_of(listing):
    return {
        listing.images.key(int(row)): listing.names[label]
        for row, label in zip(listing.rows, listing.labels, strict=True)
    }


KINDS = ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.xz"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("prefix", ["", "a/", "./top/data/"])
def test_class_folders_of_every_kind(tmp_path, name, prefix):
    files = members(prefix)
    source = find_source(packed(tmp_path / name, files))
    assert source.name == "a (class folders)"
    assert labels_of(source.train) == {f"{name}/{i}.png": name for name in ("cat", "dog") for i in range(4)}
    images = pickle.loads(pickle.dumps(source.train.images))
    for row, content in zip(range(8), files.values(), strict=True):
        assert images.encoded(row) == content
        assert np.array_equal(images.read(row), Image.open(io.BytesIO(content)))
    assert images.where(0).startswith(f"{tmp_path / name}, ")


def test_splits_and_nothing_is_written_beside(tmp_path):
    path = zipped(tmp_path / "a.zip", members("flowers/", ("train/", "val/", "test/")))
    data = open_data(path)
    assert (len(data.train), len(data.val), len(data.test)) == (8, 8, 8)
    assert sorted(os.listdir(tmp_path)) == ["a.zip"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2])
def test_other_ways_to_pack(tmp_path, method):
    assert open_data(zipped(tmp_path / "a.zip", members(), method)).train.read(0).size == (16, 16)


def test_a_labels_file_inside_or_outside(tmp_path):
    table = "file,species\n" + "\n".join(f"{i}.png,{'cat' if i % 2 else 'dog'}" for i in range(4))
    images = {f"photos/{i}.png": make_image(i) for i in range(4)}
    inside = zipped(tmp_path / "in.zip", images | {"photos/labels.csv": table.encode()})
    wanted = {f"{i}.png": "cat" if i % 2 else "dog" for i in range(4)}
    assert labels_of(find_source(inside).train) == wanted
    assert labels_of(find_source(inside, reading=Reading(labels="labels.csv")).train) == wanted
    (tmp_path / "l.csv").write_text(table)
    outside = tarred(tmp_path / "out.tar", images)
    assert labels_of(find_source(outside, reading=Reading(labels=tmp_path / "l.csv")).train) == wanted


def test_a_pattern_for_names_inside(tmp_path):
    path = zipped(tmp_path / "a.zip", {f"{name}_{i}.png": make_image(i) for name in ("cat", "dog") for i in range(2)})
    assert find_source(path, reading=Reading(label_pattern="{label}_*")).train.names == ("cat", "dog")


def test_dirt_of_archives_is_passed_over(tmp_path):
    files = members("top/") | {"__MACOSX/top/cat/._0.png": b"x", "top/.DS_Store": b"x", "top/cat/Thumbs.db": b"x"}
    source = find_source(zipped(tmp_path / "a.zip", files))
    assert len(source.train) == 8
    (note,) = source.notes
    assert has_facts(note, ".db")
    windows = {name.replace("/", "\\"): content for name, content in members().items()}
    assert len(find_source(zipped(tmp_path / "b.zip", windows)).train) == 8


def test_a_scan_of_an_archive_is_remembered(tmp_path):
    source = find_source(zipped(tmp_path / "a.zip", members()))
    assert survey(source).decoded == 8
    assert survey(source).decoded == 0


@pytest.mark.parametrize("name", ["../x.png", "/etc/x.png", "a/../../x.png", "C:/x.png"])
@pytest.mark.parametrize("kind", ["a.zip", "a.tar"])
def test_paths_that_leave_the_archive(tmp_path, name, kind):
    with pytest.raises(DataError, match=facts(name)):
        find_source(packed(tmp_path / kind, members() | {name: make_image()}))


def test_links_are_not_followed(tmp_path):
    path = tmp_path / "a.zip"
    zipped(path, members())
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("cat/link.png")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    source = find_source(path)
    assert len(source.train) == 8
    assert "cat/link.png" in source.notes[0]


def test_encrypted_members_are_named(tmp_path):
    path = zipped(tmp_path / "a.zip", members())
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=facts(8, "cat/0.png")):
        find_source(path)


def test_a_member_never_unpacks_to_more_than_it_says(tmp_path):
    path = zipped(tmp_path / "a.zip", members() | {"cat/bomb.png": bytes(10_000_000)})
    data = bytearray(path.read_bytes())
    at = data.index(b"cat/bomb.png", data.index(b"PK\x01\x02")) - 46
    data[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    source = find_source(path)
    row = [source.train.images.key(i) for i in range(9)].index("cat/bomb.png")
    with pytest.raises(DataError, match=r"cat/bomb\.png"):
        source.train.images.read(row)
    data[at + 24 : at + 28] = (MAX_FILE_BYTES + 1).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=facts("cat/bomb.png", "268,435,457")):
        find_source(path).train.images.read(row)
    assert len(survey(find_source(path)).unreadable) == 1


def test_damaged_archives(tmp_path):
    path = zipped(tmp_path / "a.zip", members())
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"a\.zip"):
        find_source(path)
    (tmp_path / "b.tar").write_bytes(b"nothing" * 999)
    with pytest.raises(DataError, match=r"b\.tar"):
        find_source(tmp_path / "b.tar")
    tar = tarred(tmp_path / "d.tar", members())
    data = bytearray(tar.read_bytes())
    data[3072 : 3072 + 20] = b"\xff" * 20  # a header in the middle
    tar.write_bytes(bytes(data))
    with pytest.raises(DataError, match=facts("d.tar", "3,072")):
        find_source(tar)
    gz = packed(tmp_path / "c.tar.gz", members())
    gz.write_bytes(gz.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"c\.tar\.gz"):
        find_source(gz)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [1 << 32, 1 << 62])
def test_a_header_that_declares_gigabytes_is_not_read(tmp_path, kind, size):
    header = tarfile.TarInfo("long")
    header.type, header.size = kind, size
    path = tarred(tmp_path / "a.tar", members())
    path.write_bytes(path.read_bytes()[:1024] + header.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(DataError, match=str(path)):
        find_source(path)


def test_an_archive_without_images(tmp_path):
    with pytest.raises(DataError, match=r"\.txt"):
        find_source(zipped(tmp_path / "a.zip", {"x/readme.txt": b"x"}))


# Compressed tars ------------------------------------------------------------------------------------------------------


def test_a_compressed_tar_is_unpacked_once(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.tar.gz", members())
    note = find_source(path).notes[0]
    [copy] = (tmp_path / "cache" / "patchloom" / "archives").glob("*.tar")
    assert has_facts(note, "a.tar.gz", copy, "0.0 MB")
    before = copy.stat().st_mtime_ns
    find_source(path)
    assert copy.stat().st_mtime_ns == before
    packed(path, members(classes=("cat", "dog", "owl")))
    assert find_source(path).train.names == ("cat", "dog", "owl")
    assert len(list(copy.parent.glob("*.tar"))) == 1


def test_compressed_tars_that_are_bombs_or_do_not_fit(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.tar.gz", {"cat/0.png": bytes(4_000_000)})
    monkeypatch.setattr(compressed_tar, "_ALWAYS_ALLOWED_BYTES", 1_000_000)
    with pytest.raises(DataError, match=facts("a.tar.gz", "1.0 MB")):
        find_source(path)
    monkeypatch.setattr(compressed_tar, "_ALWAYS_ALLOWED_BYTES", 1 << 30)
    monkeypatch.setattr(compressed_tar, "_MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(ResourceError, match=r"a\.tar\.gz"):
        find_source(path)
    assert not list((tmp_path / "cache" / "patchloom" / "archives").glob("*-*"))


def test_web_dataset_stays_what_it_was(tmp_path):
    files = {}
    for i in range(4):
        files |= {f"shard/{i:03d}.png": make_image(i), f"shard/{i:03d}.cls": str(i % 2).encode()}
    for name in ("a.tar", "a.tar.gz"):
        assert find_source(packed(tmp_path / name, files)).train.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz"])
def test_errors_and_keys_of_a_compressed_shard_name_the_original(tmp_path, name):
    """Not the uncompressed copy in the cache folder, whose name changes with the file."""
    samples = {f"{i:04d}{end}": data for i in range(3) for end, data in ((".png", make_image(i)), (".cls", b"0"))}
    path = tarred(tmp_path / name, samples, "w:gz")
    (tmp_path / "classes.txt").write_text("cat\n")
    listing = find_source(path).train
    assert listing.names == ("cat",)
    assert listing.images.key(0) == f"{name}/0000.png"
    assert listing.images.where(0) == f"{path}, 0000.png"
    plain = bytearray(gzip.decompress(path.read_bytes()))
    plain[1024 + 300] ^= 0xFF  # in the header of the second member
    path.write_bytes(gzip.compress(plain))
    with pytest.raises(DataError, match=facts(path)) as error:
        find_source(path)
    assert "patchloom/archives" not in str(error.value)
