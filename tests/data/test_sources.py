"""Every kind of source, what `open_data` takes a name for, and matching to a model's classes."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from patchloom.data.datasets import ClassTable
from patchloom.data.reading_options import Reading
from patchloom.data.sources import torchvision_sets
from patchloom.data.sources.source import open_data, open_for
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import any_has, facts, has_facts


def image_bytes(value: int = 0, size: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def folder(root, classes, count=5):
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(image_bytes(i))
    return root


# ---- tar shards


def shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def numbered_shards(tmp_path):
    for number in range(4):
        members = []
        for i in range(6):
            key = f"{number}{i:03d}"
            members += [(f"{key}.png", image_bytes(10 * number + i)), (f"{key}.cls", str(i % 3).encode())]
        shard(tmp_path / f"a-train-{number:03d}.tar", members)
    shard(tmp_path / "a-val-000.tar", [("v.png", image_bytes(99)), ("v.json", b'{"label": 2, "text": "x"}')])
    return tmp_path


def test_shards_are_read_at_their_offsets(tmp_path):
    data = open_data(numbered_shards(tmp_path))
    assert data.name.startswith(f"{tmp_path.name} (")
    assert data.classes.names == ("0", "1", "2")
    assert (len(data.train), data.val.labels.tolist()) == (24, [2])
    assert [data.train.read(i).getpixel((0, 0))[0] for i in (23, 0, 8)] == [35, 0, 12]
    assert data.train.where(8) == f"{tmp_path / 'a-train-001.tar'}, 1002.png"
    copy = pickle.loads(pickle.dumps(data.train))
    assert np.array_equal(copy.read(23), data.train.read(23))


def test_brace_pattern_and_class_names(tmp_path):
    numbered_shards(tmp_path)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    data = open_data(str(tmp_path / "a-train-{001..002}.tar"))
    assert data.name.startswith("a-train-{001..002}.tar (")
    assert len(data.train) + len(data.val) == 12
    assert data.classes.names == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ([("../x.png", image_bytes())], "../x.png"),
        ([("/etc/x.png", image_bytes())], "/etc/x.png"),
        ([("x.png", "/etc/passwd")], "x.png"),
        ([("x.png", image_bytes()), ("x.jpg", image_bytes())], "x.jpg"),
        ([("x.png", image_bytes()), ("x.json", b"{")], "x.json"),
        ([("x.txt", b"hello")], "bad.tar"),
    ],
)
def test_shards_that_are_refused(tmp_path, members, name):
    with pytest.raises(DataError, match=facts("bad.tar", name)):
        open_data(shard(tmp_path / "bad.tar", members))


@pytest.mark.parametrize("pattern", ["x-{0..999999999}.tar", "{0..999}-{0..999}.tar", "{a,b}{0..99999}.tar"])
def test_a_pattern_of_too_many_names_is_refused(pattern):
    with pytest.raises(UsageError, match="100,000"):
        open_data(pattern)


def images_and_labels(tmp_path):
    """A shard of ten pictures with labels, its whole bytes, and where its headers are."""
    members = [pair for i in range(10) for pair in ((f"{i}.png", image_bytes(i)), (f"{i}.cls", str(i % 2).encode()))]
    path = shard(tmp_path / "a.tar", members)
    with tarfile.open(path) as archive:
        headers = [member.offset for member in archive]
    return path, path.read_bytes(), headers


def test_a_damaged_header_is_not_taken_for_the_end_of_a_shard(tmp_path):
    path, whole, headers = images_and_labels(tmp_path)
    rng = np.random.default_rng(0)
    for header in headers:
        for at in (header, header + 150, header + int(rng.integers(512))):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"a\.tar"):
                open_data(path)
    damaged = bytearray(whole)
    damaged[headers[4]] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=facts("a.tar", f"{headers[4]:,}", 15, "2.cls")):
        open_data(path)


def test_a_shard_that_was_cut_is_noticed_wherever_the_cut_is(tmp_path):
    path, whole, headers = images_and_labels(tmp_path)
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last member
    for cut in [*headers[1:], *(header + 512 for header in headers), end, end + 512, *range(77, end, 997)]:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.tar"):
            open_data(path)
    path.write_bytes(whole[: end + 1024])
    assert len(open_data(path).train) + len(open_data(path).val) == 10


def test_unfinished_and_compressed_shards(tmp_path):
    path = shard(tmp_path / "a.tar", [("x.png", image_bytes(3, size=300) * 20)])
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=facts("x.png", 3000)):
        open_data(path)
    with tarfile.open(tmp_path / "b.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"\.tar"):
        open_data(tmp_path / "b.tar")


# ---- torchvision


class Attack:
    def __reduce__(self):
        return os.mkdir, ("escaped",)


def test_a_pickled_set_cannot_call_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta").write_bytes(pickle.dumps({"a": Attack()}))
    with pytest.raises(DataError, match=facts("meta", "posix.mkdir")):
        torchvision_sets._unpickle(tmp_path / "meta")
    assert not (tmp_path / "escaped").exists()
    for protocol in range(6):
        (tmp_path / "meta").write_bytes(pickle.dumps({"a": np.arange(6).reshape(2, 3), "b": ["c"]}, protocol))
        assert torchvision_sets._unpickle(tmp_path / "meta")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def fake_cifar(root, monkeypatch, name, count=40):
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    base = root / kind.base_folder
    base.mkdir()
    classes = 10 if name == "cifar10" else 100

    def dump(file, content):
        (base / file).write_bytes(pickle.dumps(content))
        return [file, hashlib.md5((base / file).read_bytes()).hexdigest()]

    def batch(start):
        labels = [i % classes for i in range(start, start + count)]
        entry = {"data": np.full((count, 3072), start, dtype=np.uint8)}
        if name == "cifar10":
            return entry | {"labels": labels}
        return entry | {"fine_labels": labels, "coarse_labels": [label // 5 for label in labels]}

    count = max(count, classes)
    train = [dump(file, batch(7)) for file, _ in kind.train_list]
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", [dump(kind.test_list[0][0], batch(9))])
    names = {
        kind.meta["key"]: [f"c{i:02d}" for i in range(classes)],
        "coarse_label_names": [f"g{i:02d}" for i in range(20)],
    }
    _, md5 = dump(kind.meta["filename"], names)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5})
    return len(train) * count, count


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, monkeypatch, name):
    sizes = fake_cifar(tmp_path, monkeypatch, name)
    data = open_data(f"torchvision:{name}@{tmp_path}", reading=Reading(val="test"))
    assert data.name == f"{name} (torchvision)"
    assert (len(data.train), len(data.val)) == sizes
    assert data.train.read(0).getpixel((0, 0)) == (7, 7, 7)
    assert data.classes.names[data.train.labels[0]] == "c07"
    same = open_data(name, root=tmp_path, reading=Reading(val="test"))
    assert np.array_equal(same.val.labels, data.val.labels)
    if name == "cifar100":
        names, coarse = data.classes.levels["coarse"]
        assert (len(names), names[coarse[data.classes.names.index("c57")]]) == (20, "g11")


def test_pets_and_food(tmp_path):
    pets = tmp_path / "oxford-iiit-pet"
    (pets / "images").mkdir(parents=True)
    (pets / "annotations").mkdir()
    for split in ("trainval", "test"):
        rows = [("Abyssinian", 1, 1), ("american_bulldog", 2, 2)]
        lines = [f"{breed}_{split} {label} {species} 1" for breed, label, species in rows]
        (pets / "annotations" / f"{split}.txt").write_text("\n".join(lines))
        for breed, _, _ in rows:
            (pets / "images" / f"{breed}_{split}.jpg").write_bytes(image_bytes(4))
    data = open_data("oxford_pets", root=tmp_path, reading=Reading(val="test"))
    assert data.classes.names == ("Abyssinian", "American Bulldog")
    assert data.classes.levels == {"species": (("Cat", "Dog"), (0, 1))}
    assert data.val.where(1) == str(pets / "images" / "american_bulldog_test.jpg")
    assert data.val.read(1).size == (16, 16)

    food = tmp_path / "food-101"
    (food / "meta").mkdir(parents=True)
    for split in ("train", "test"):
        (food / "meta" / f"{split}.json").write_text(json.dumps({"pie": [f"pie/{split}"], "soup": [f"soup/{split}"]}))
        for dish in ("pie", "soup"):
            (food / "images" / dish).mkdir(parents=True, exist_ok=True)
            (food / "images" / dish / f"{split}.jpg").write_bytes(image_bytes(5))
    data = open_data("food101", root=tmp_path, reading=Reading(val="test"))
    assert (data.classes.names, data.val.labels.tolist()) == (("pie", "soup"), [0, 1])
    assert data.train.where(1) == str(food / "images" / "soup" / "train.jpg")


def test_flowers_train_on_train_and_val(tmp_path, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    from torchvision import datasets

    base = tmp_path / "flowers-102"
    (base / "jpg").mkdir(parents=True)
    scipy_io.savemat(base / "imagelabels.mat", {"labels": [1, 2, 1, 2, 1, 2]})
    scipy_io.savemat(base / "setid.mat", {"trnid": [1, 2], "valid": [3, 4], "tstid": [5, 6]})
    for i in range(1, 7):
        (base / "jpg" / f"image_{i:05d}.jpg").write_bytes(image_bytes(i))
    files = {key: (name, None) for key, (name, _) in datasets.Flowers102._file_dict.items()}
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", files)
    data = open_data("flowers102", root=tmp_path, reading=Reading(val="test"))
    assert (data.train.labels.tolist(), data.val.labels.tolist()) == ([0, 1, 0, 1], [0, 1])
    assert data.classes.names == ("pink primrose", "hard-leaved pocket orchid")


def test_imagenet_and_inaturalist_are_class_folders(tmp_path):
    for split in ("train", "val"):
        folder(tmp_path / "in" / split, ["n01440764", "n02102040"], count=2)
    assert open_data("imagenet", root=tmp_path / "in").classes.names == ("n01440764", "n02102040")
    species = [f"{i:05d}_Animalia_Chordata_Aves_Order{i}_Family{i}_Genus{i}_name" for i in range(2)]
    for split in ("2021_train", "2021_valid"):
        folder(tmp_path / "inat" / split, species, count=2)
    data = open_data("inaturalist", root=tmp_path / "inat")
    assert data.classes.levels["class"] == (("Aves",), (0, 0))
    assert data.classes.levels["order"] == (("Order0", "Order1"), (0, 1))


def test_torchvision_set_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="torchvision:cifar10@/path"):
        open_data("cifar10")
    with pytest.raises(UsageError, match=facts(tmp_path / "none")):
        open_data("cifar10", root=tmp_path / "none")
    with pytest.raises(UsageError, match=facts("cifar10", tmp_path)):
        open_data("cifar10", root=tmp_path)
    with pytest.raises(UsageError, match=facts("imagenet", tmp_path, "train", "val")):
        open_data("imagenet", root=tmp_path)
    with pytest.raises(UsageError, match=r"'cifar1000'.*cifar100\b"):
        open_data("torchvision:cifar1000")
    assert not list(tmp_path.iterdir())


# ---- Hugging Face


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_saved_hugging_face_data(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})

    def rows(values):
        images = [{"bytes": image_bytes(v), "path": None} for v in values]
        images[-1] = {"bytes": image_bytes(1)[:45], "path": "torn.jpg"}
        return datasets.Dataset.from_dict({"image": images, "label": [v % 2 for v in values]}, features=features)

    datasets.DatasetDict(train=rows([4, 5, 6, 7]), test=rows([8, 9])).save_to_disk(tmp_path / "saved")
    data = open_data(tmp_path / "saved", reading=Reading(val="test"))
    assert data.name == "saved (Hugging Face)"
    assert (data.classes.names, data.train.labels.tolist()) == (("no", "yes"), [0, 1, 0, 1])
    assert data.val.read(0).getpixel((0, 0)) == (8, 0, 0)
    assert pickle.loads(pickle.dumps(data.train)).read(1).getpixel((0, 0)) == (5, 0, 0)
    with pytest.raises(DataError, match=facts("saved", "row 1", "torn.jpg", 45)):
        data.val.read(1)
    assert open_data(f"hf:{tmp_path / 'saved'}").classes.names == ("no", "yes")


# ---- what a name is taken for


def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch):
    folder(tmp_path / "digits", ["one", "two"])
    monkeypatch.chdir(tmp_path)
    assert open_data("digits").name == "digits (class folders)"


def test_wrong_path_names_its_neighbours(tmp_path):
    folder(tmp_path / "flowers", ["a", "b"])
    with pytest.raises(UsageError, match=facts("flowesr", "flowers")):
        open_data(tmp_path / "flowesr")
    with pytest.raises(UsageError, match=facts("flower/train", "flowers")):
        open_data(tmp_path / "flower" / "train")
    with pytest.raises(UsageError, match="digits"):
        open_data("digit")
    with pytest.raises(UsageError, match=r"\*\.parquet"):
        open_data(tmp_path / "*.parquet")
    (tmp_path / "a.rar").write_bytes(b"x")
    with pytest.raises(UsageError, match=facts("a.rar", ".parquet", ".zip", ".tar")):
        open_data(tmp_path / "a.rar")


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    for module, spec, extra in (
        ("pyarrow.parquet", tmp_path / "a.parquet", "parquet"),
        ("sklearn.datasets", "digits", "digits"),
        ("datasets", "hf:user/name", "stream"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=rf"pip install 'patchloom\[{extra}\]'"):
            open_data(spec)


def test_heavy_libraries_are_imported_late():
    heavy = {"torch", "torchvision", "pyarrow", "datasets", "sklearn", "scipy"}
    code = f"import sys, patchloom.data.sources.source; print(sorted({heavy!r} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# ---- evaluation against a model's classes


def named(images):
    return {images.key(i): images.classes.names[images.labels[i]] for i in range(len(images))}


def test_labels_are_matched_to_the_model_by_name(tmp_path):
    folder(tmp_path / "new", ["bee", "cat", "dog"], count=2)
    model = ClassTable(("dog", "ant", "cat"))
    source = open_for(tmp_path / "new", model)
    assert source.classes is model
    assert named(source) == {"cat/0.png": "cat", "cat/1.png": "cat", "dog/0.png": "dog", "dog/1.png": "dog"}
    whole, stranger = source.notes
    assert "--split val" in whole
    assert has_facts(stranger, "'bee'", 2)
    with pytest.raises(DataError, match="'bee'"):
        open_for(tmp_path / "new", model, strict=True)
    with pytest.raises(DataError, match="'x'"):
        open_for(tmp_path / "new", ClassTable(("x",)))


def test_choice_of_split(tmp_path):
    folder(tmp_path / "plain", ["a", "b"], count=10)
    trained = open_data(tmp_path / "plain", seed=3)
    assert len(open_for(tmp_path / "plain", trained.classes)) == 20
    held_out = open_for(tmp_path / "plain", trained.classes, split="val", seed=3)
    assert named(held_out) == named(trained.val)
    assert not any_has(held_out.notes, "--split val")
    assert named(open_for(tmp_path / "plain", trained.classes, split="train", seed=3)) == named(trained.train)
    folder(tmp_path / "two" / "train", ["a", "b"], count=3)
    folder(tmp_path / "two" / "val", ["b"], count=2)
    assert named(open_for(tmp_path / "two", trained.classes)) == {"val/b/0.png": "b", "val/b/1.png": "b"}
    assert len(open_for(tmp_path / "two", trained.classes, split="train")) == 6
    with pytest.raises(UsageError, match=facts("train", "val")):
        open_for(tmp_path / "two", trained.classes, split="all")
    with pytest.raises(UsageError, match=facts("split", "'tset'", "train", "val", "test", "all")):
        open_for(tmp_path / "two", trained.classes, split="tset")


def test_a_coarse_model_is_evaluated_on_its_level():
    coarse = open_data("shapes:count=32", level="coarse").classes
    source = open_for("shapes:count=32", coarse, level="coarse")
    assert np.bincount(source.labels).tolist() == [4, 4, 4, 4]
