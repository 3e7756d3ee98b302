"""Users' data of any content: what they say or one line, and never a wait, whatever stands where a file is expected."""

import copy
import io
import json
import os
import random
import re
import signal
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data
from patchloom.data.text.pairs import open_parallel
from patchloom.models.registry import create_model
from patchloom.recipes import get_recipe, override
from patchloom.recipes.choices import base_recipe
from patchloom.recipes.plain_yaml import load_yaml
from patchloom.report.pictures.sheets import SheetCell, SheetRow, sheet
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.images.decode import decode
from patchloom_runtime.images.inputs import list_image_files
from patchloom_runtime.printable import printable
from patchloom_runtime.text.vocabulary import clean

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LIMIT_S = 20  # a wait for a pipe would have no end


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """What hangs fails."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"no answer within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def png(number: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (8, 8), (number * 20 % 256, number, 0) if mode == "RGB" else number).save(buffer, "PNG")
    return buffer.getvalue()


def class_folders(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for j in range(2):
            (root / name / f"{j}.png").write_bytes(png(2 * i + j))
    return root


def looked_at(spec: Path, **reading: str) -> None:
    """Check it and open it: whatever is wrong is one line."""
    said = []
    for use in (
        lambda: check(spec, reading=Reading(**reading), workers=1, cache=False).to_dict(),
        lambda: opened(spec),
    ):
        try:
            use()
        except PatchloomError as error:
            said.append(str(error))
    assert [line for line in said if not line or "\n" in line] == []


def opened(spec: Path) -> None:
    if (spec / "train.de").exists() or spec.suffix == ".tsv":
        list(open_parallel(spec).train)
    else:
        open_data(spec)


# What is no file ------------------------------------------------------------------------------------------------------


def test_a_pipe_among_pictures_is_left_out_and_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    os.mkfifo(root / "cat" / "pipe.png")
    (root / "cat" / "zero.png").symlink_to("/dev/zero")
    report = check(root, workers=1, cache=False)
    for fact in ("2", "cat/pipe.png", "cat/zero.png"):
        assert fact in report.notes[0]
    assert report.images == 4
    assert list(list_image_files([root / "cat"])) == [f"{root}/cat/{i}.png" for i in range(2)]


@pytest.mark.parametrize(
    "pipe",
    [
        "data/labels.csv",
        "data/a.parquet",
        "data/a.tar",
        "data/annotations/instances_train.json",
        "data/taxonomy.csv",
        "data/taxonomy.yaml",
        "data/classes.txt",
    ],
)
def test_a_pipe_in_place_of_a_file_is_one_line(tmp_path: Path, pipe: str) -> None:
    place = tmp_path / pipe
    place.parent.mkdir(parents=True)
    if place.name == "classes.txt":
        for folder, mode in (("images", "RGB"), ("masks", "L")):
            (tmp_path / "data" / folder).mkdir()
            (tmp_path / "data" / folder / "0.png").write_bytes(png(0, mode))
    os.mkfifo(place)
    with pytest.raises(PatchloomError, match=re.escape(place.name)):
        check(place if place.suffix == ".csv" and "labels" in pipe else tmp_path / "data", workers=1, cache=False)


def test_labels_recipes_and_text_that_are_pipes(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    for name in ("labels.csv", "recipe.yaml", "train.de", "train.en"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"labels\.csv"):
        check(root, reading=Reading(labels=tmp_path / "labels.csv"))
    with pytest.raises(UsageError, match=r"recipe\.yaml"):
        base_recipe(str(tmp_path / "recipe.yaml"), None)
    with pytest.raises(DataError, match=re.escape(tmp_path.name)):
        open_parallel(tmp_path)


# Links ----------------------------------------------------------------------------------------------------------------


def branching(folder: Path, levels: int) -> Path:
    """Folders of two links each to the next: 2^levels paths lead to the last."""
    for level in range(levels):
        (folder / f"level{level}").mkdir(parents=True)
        for way in "ab":
            (folder / f"level{level}" / way).symlink_to(folder / f"level{level + 1}")
    return class_folders(folder, f"level{levels}")


@pytest.mark.parametrize("inside", [True, False])
def test_links_that_branch_are_followed_once(tmp_path: Path, inside: bool) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    levels = branching(root / "dog" if inside else tmp_path / "elsewhere", 30)
    (root / "cat" / "more").symlink_to(levels / "level0")
    report = check(root, workers=1, cache=False)
    assert report.splits == {"train": 6}
    assert any("dog/level" in note if inside else "cat/more/a/" in note for note in report.notes)
    assert len(list(list_image_files([root]))) == 6
    looked_at(root, label_pattern="{label}.png")


def test_class_folders_may_be_links(tmp_path: Path) -> None:
    elsewhere = class_folders(tmp_path / "elsewhere", "a", "b", "c")
    root = tmp_path / "data"
    (root / "train").mkdir(parents=True)
    (root / "val").symlink_to(elsewhere)
    for name in "abc":
        (root / "train" / name).symlink_to(elsewhere / name)
    report = check(root, workers=1, cache=False)
    assert report.splits == {"train": 6, "val": 6}
    assert report.notes == ()


def test_a_class_that_links_to_another_is_left_out_and_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    (root / "kitten").symlink_to("cat")
    (root / "loop").symlink_to("..")
    report = check(root, workers=1, cache=False)
    assert (list(report.classes), report.empty_classes) == (["cat", "dog"], ())
    for fact in ("2", "kitten", "loop"):
        assert fact in report.notes[0]


@pytest.mark.parametrize("packed", [False, True])
def test_folders_in_folders_without_end(tmp_path: Path, packed: bool) -> None:
    place = tmp_path / ("deep.tar" if packed else "deep")
    if packed:
        with tarfile.open(place, "w") as archive:
            for name in ("a/" * 2000 + "0.png", "b/1.png"):
                member = tarfile.TarInfo(name)
                member.size = len(png(0))
                archive.addfile(member, io.BytesIO(png(0)))
    else:
        for level in range(0, 600, 200):
            os.makedirs(place / ("a/" * (level + 200)))
        class_folders(place, "b")
    with pytest.raises(DataError, match=r"\b100\b"):
        check(place, workers=1, cache=False)


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(DataError, match="Permission denied"):
        check(tmp_path, workers=1, cache=False)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none"))):
        check(tmp_path / "none", workers=1, cache=False)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "~nobody-of-that-name/x", "y/" * 3000])
def test_paths_that_are_none(tmp_path: Path, path: str) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    start = re.escape(printable(path)[:20])
    for reading in (Reading(labels=path), Reading(taxonomy=path)):
        with pytest.raises(PatchloomError, match=start):
            check(root, reading=reading)
    with pytest.raises(UsageError, match=start):
        check(path)
    with pytest.raises(UsageError, match=start):
        open_parallel(path)
    with pytest.raises(UsageError, match=f"{start}|{re.escape(path[:20])}"):
        base_recipe(f"{path}.yaml", None)


# Any value anywhere ---------------------------------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
VALUES = (None, True, -1, 10**30, float("inf"), 1.5, "x", "a\0b", "y" * 5000, [], {}, ["x"], {"x": 1}, DEEP)


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*at, key))


def changed(tree: Any) -> Iterator[Any]:
    """The tree with each of its values replaced by each of VALUES, and without it."""
    for at in places(tree):
        for value in (*VALUES, KeyError):
            new = copy.deepcopy(tree)
            node = new
            for key in at[:-1]:
                node = node[key]
            if not at:
                new = None if value is KeyError else value
            elif value is KeyError:
                del node[at[-1]]
            else:
                node[at[-1]] = value
            yield new


def damaged(content: bytes, number: int) -> Iterator[bytes]:
    """Flipped, cut, repeated, with strange bytes between; the same each time."""
    chance = random.Random(number)
    for _ in range(number):
        at = chance.randrange(len(content))
        strange = chance.choice([b"\0", b"\xff\xfe", b'"', b"\n", b"[", b","]) * chance.choice([1, 1000])
        yield chance.choice(
            [
                content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],
                content[:at],
                content[:at] + content[at : at + 40] * 20 + content[at:],
                content[:at] + strange + content[at:],
            ]
        )


COCO = {
    "images": [{"id": 0, "file_name": "0.png"}],
    "categories": [{"id": 1, "name": "cat"}],
    "annotations": [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 3, 3], "segmentation": [[1, 2, 3]]}],
}


def test_annotations_of_any_content(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train" / "0.png").write_bytes(png(0))
    file = tmp_path / "annotations" / "instances_train.json"
    for tree in list(changed(COCO))[::2]:
        file.write_text(json.dumps(tree))
        with suppress(PatchloomError):
            check(tmp_path, workers=1, cache=False)
    for content in (b"[" * 100_000, *damaged(json.dumps(COCO).encode(), 40)):
        file.write_bytes(content)
        looked_at(tmp_path)


def test_boxes_of_impossible_numbers_are_faults(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train" / "0.png").write_bytes(png(0))
    boxes = [{"image_id": 0, "category_id": 1, "bbox": [1, 1, 1e300, 3]}, {"image_id": [], "category_id": 1}]
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(COCO | {"annotations": boxes}))
    report = check(tmp_path, workers=1, cache=False)
    box, image = report.faults
    assert "bbox" in box.detail
    assert "image_id" in image.detail
    assert box.kind != image.kind


def parquet(path: Path, columns: dict[str, Any], **metadata: str | bytes) -> Path:
    images = pa.array([png(i) for i in range(4)])
    table = pa.table({"image": images, "label": pa.array([0, 1, 0, 1]), **columns})
    pq.write_table(table.replace_schema_metadata(metadata or None), path)
    return path


INFO = {"label_names": ["a", "b"], "coarse_label_names": ["x", "y"], "ignore_index": 255}
HUB = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}


def test_parquet_metadata_of_any_content(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    levels = {"coarse_label": pa.array([0, 1, 0, 1])}
    for key, tree in (("dataset_info", INFO), ("huggingface", HUB)):
        for new in list(changed(tree))[::3]:
            looked_at(parquet(file, levels, **{key: json.dumps(new)}))
        for content in (b"[" * 100_000, b"\xff", b"", b"9" * 5000):
            looked_at(parquet(file, levels, **{key: content}))
    with pytest.raises(DataError) as error:
        check(parquet(file, {}, dataset_info='{"label_names": 3}'))
    for fact in ("a.parquet", "dataset_info", "label_names", "3"):
        assert fact in str(error.value)


def test_parquet_columns_of_any_type(tmp_path: Path) -> None:
    kinds = {
        "null": pa.nulls(4),
        "numbers": pa.array([1, 2, 3, 4]),
        "large": pa.array([2**64 - 1, 0, 1, 2], pa.uint64()),
        "durations": pa.array([2**62] * 4, pa.duration("s")),
        "text": pa.array(list("abcd")),
        "some": pa.array([png(0), None, b"", b"x"]),
        "lists": pa.array([[1], [2, 3], [], None]),
        "boxes": pa.array([[[1, 1, 3, 3]], [[1, 1]], [], None]),
        "struct": pa.array([{"bytes": png(0)}, {"bytes": None}, None, {"bytes": b""}]),
        "struct of numbers": pa.array([{"bytes": 1}] * 4),
        "nested": pa.array([{"bytes": {"bytes": png(0)}}] * 4),
        "dictionary": pa.array(list("abab")).dictionary_encode(),
    }
    info = json.dumps({"label_names": ["a", "b"]})
    for column in ("image", "label", "coarse_label", "split", "mask", "boxes", "labels"):
        for values in kinds.values():
            beside = {"boxes": kinds["boxes"]} if column == "labels" else {}
            looked_at(parquet(tmp_path / "a.parquet", {**beside, column: values}, dataset_info=info))


def test_parquet_of_any_bytes(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", {}, dataset_info=json.dumps(INFO)).read_bytes()
    (tmp_path / "b.parquet").unlink(missing_ok=True)
    pq.write_table(pa.table({"translation": [{"de": "x", "en": "y"}, {"de": "z", "en": "w"}]}), tmp_path / "t.parquet")
    text = (tmp_path / "t.parquet").read_bytes()
    for content in (*damaged(whole, 60), *damaged(text, 90)):
        (tmp_path / "a.parquet").write_bytes(content)
        looked_at(tmp_path / "a.parquet")


def test_parquet_whose_columns_are_described_wrongly_does_not_end_the_process(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", {}).read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer, footer + 40):  # the schema
        (tmp_path / "a.parquet").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        looked_at(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "label", [b"[" * 100_000, b"9" * 5000, b"\xff", b'{"label": []}', b'{"label": 1e400}', '"१"'.encode(), b""]
)
def test_labels_of_shards_of_any_content(tmp_path: Path, label: bytes) -> None:
    for number, (member, names) in enumerate((("0.json", b"a\nb"), ("0.cls", b"a\nb"), ("0.txt", label))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "classes.txt").write_bytes(names)
        with tarfile.open(folder / "a.tar", "w") as shard:
            for name, content in (("0.png", png(0)), (member, label), ("1.png", png(1)), ("1.cls", b"1")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                shard.addfile(info, io.BytesIO(content))
        looked_at(folder)


def test_tars_of_any_bytes(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("é" * 120 + ".png", "1.png"):
            member = tarfile.TarInfo(name)
            member.size = len(png(0))
            archive.addfile(member, io.BytesIO(png(0)))
    long_names = bytes(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT)).replace(b"0", b"L", 0)
    for content in (*damaged(packed.getvalue(), 150), long_names * 5):
        (tmp_path / "a.tar").write_bytes(content)
        looked_at(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "content",
    [
        b"path,label\n0.png," + b"x" * (2 << 20),
        b'path,label\n"0.png,a\n' + b"1.png,b\n" * 50_000,
        b"," * 500_000,
        b"a " * 500_000,
        b"path,label\n0.png,a\0b\n1.png,\xff\n",
        b"path,label\n" + b"x/" * 3000 + b".png,a\na\0b.png,b\n",
        b"\xff\xfe" + b"\xd8" * 99,
    ],
)
def test_label_tables_of_any_content(tmp_path: Path, content: bytes) -> None:
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    (tmp_path / "labels.csv").write_bytes(content)
    looked_at(tmp_path / "labels.csv")


def test_taxonomies_of_any_content(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", "a", "b")
    trees = [{"family": {"a": "x", "b": "y"}}, [{"class": "a", "family": "x"}]]
    for end in ("json", "yaml"):
        for tree in trees:
            for new in changed(tree):
                (root / f"taxonomy.{end}").write_text(json.dumps(new))
                with suppress(PatchloomError):
                    read_taxonomy(root / f"taxonomy.{end}")
        (root / f"taxonomy.{end}").write_text("[" * 100_000)
        with pytest.raises(UsageError, match=rf"taxonomy\.{end}"):
            open_data(root)
        (root / f"taxonomy.{end}").unlink()


def test_class_names_of_masks_of_any_content(tmp_path: Path) -> None:
    for folder, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(png(0, mode))
    for content, facts in (
        (b"\xff\xfe", ["UTF-8"]),
        (b"\n" * 3000, ["3,000", "256"]),
        (b"x" * (2 << 20), ["2,097,152", "1,048,576"]),
    ):
        (tmp_path / "classes.txt").write_bytes(content)
        with pytest.raises(DataError) as error:
            check(tmp_path)
        for fact in ("classes.txt", *facts):
            assert fact in str(error.value)


def test_an_endless_line_of_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_bytes(b"x" * ((1 << 24) + 1))
    (tmp_path / "train.en").write_bytes(b"y\n")
    with pytest.raises(DataError) as error:
        open_parallel(tmp_path)
    for fact in ("train.de", "16,777,216"):
        assert fact in str(error.value)
    assert any("16,777,216" in fault.detail for fault in check(tmp_path).faults)


# Recipes and messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["!!timestamp 1", "!!binary é", "!!int x", "!!float x", "!!bool 1", "!!omap 1", "!!set 1", "!!int ''"]
)
def test_a_tag_on_what_it_is_not_made_for_is_one_line(value: str) -> None:
    with pytest.raises(ValueError, match=r"^.+$") as raised:
        load_yaml(f"seed: {value}\n")
    assert raised.type is ValueError


def test_a_recipe_of_any_size_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "recipe.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="1,099,511,627,776"):
        base_recipe(str(tmp_path / "recipe.yaml"), None)


@pytest.mark.parametrize("digits", [300, 5000])  # Python shows no more than 4,300
def test_numbers_of_any_length_are_one_line(digits: int) -> None:
    with pytest.raises(UsageError, match=rf"^[^\n]*optim\.lr[^\n]*\b{4 * digits:,}\b[^\n]*$"):
        override(get_recipe("small_images"), {"optim.lr": int("f" * digits, 16)})


@pytest.mark.parametrize(
    ("option", "value"),
    [("dim", -16), ("dim", 0), ("patch_size", -8), ("patch_size", 0), ("depth", -1), ("channels", 0), ("channels", -3)],
)
def test_sizes_that_no_network_has_are_named(option: str, value: int) -> None:
    with pytest.raises(UsageError) as error:
        create_model("resmlp_s12", image_size=16, **{option: value})
    for fact in (option, str(value)):
        assert fact in str(error.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("resmlp_s12", {"depth": 10**12}), ("smlpnet_t", {"depths": [1, 1, 10**12, 1]})],
)
def test_networks_without_end_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        create_model(name, **options)
    for fact in (*options, str(10**12), "512"):
        assert fact in str(error.value)


def test_what_torch_refuses_names_the_options() -> None:
    with pytest.raises(UsageError) as error:
        create_model("mixer_s16", image_size=32, channel_dim=-4)
    for fact in ("mixer_s16", "channel_dim", "-4"):
        assert fact in str(error.value)


def test_long_messages_lose_their_middle(tmp_path: Path) -> None:
    said = str(DataError("start " + "x" * 100_000 + " end"))
    assert len(said) < 2_100
    assert said.startswith("start ")
    assert said.endswith(" end")
    with pytest.raises(DataError) as raised:
        open_data(str(parquet(tmp_path / "data.parquet", {"label": [b"x" * 1_000_000] * 4})))
    assert len(raised.value.args[0]) < 500
    with pytest.raises(DataError, match=r"split.*xxx.*…") as raised:
        open_data(str(parquet(tmp_path / "data.parquet", {"split": [b"x" * 1_000_000] * 4})))
    assert len(raised.value.args[0]) < 500


def test_a_png_that_says_wrongly_that_it_moves_is_read(tmp_path: Path) -> None:
    whole = png(0)
    chunk = b"acTL" + bytes(40)
    at = whole.index(b"IDAT") - 4
    data = whole[:at] + (40).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + whole[at:]
    assert decode(data, "a.png").tobytes() == decode(whole, "b.png").tobytes()


def test_half_a_character_is_read_as_unknown() -> None:
    assert clean("a\ud800 b") == "a\ufffd b"


def test_captions_of_any_length_take_a_page() -> None:
    drawn = sheet([SheetRow("x" * 100_000, [SheetCell(Image.new("RGB", (8, 8)), "y" * 100_000)])])
    assert drawn.width < 3_000


def coco_image(
    root: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]], size: tuple[int, int]
) -> Path:
    (root / "train").mkdir(parents=True)
    (root / "annotations").mkdir()
    Image.new("L", size).save(root / "train" / "0.png")
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    (root / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return root


def test_thousands_of_objects_on_a_large_image(tmp_path: Path) -> None:
    def annotation(i: int) -> dict[str, Any]:
        x, y = i % 60 * 100, i // 60 * 79
        outline = [[x, y, x + 50, y, x + 50, y + 20, x, y + 20]]
        return {"id": i, "image_id": 0, "category_id": 1, "bbox": [x, y, 50, 20], "segmentation": outline}

    images = [{"id": 0, "file_name": "0.png"}]
    many = coco_image(tmp_path / "many", images, [annotation(i) for i in range(3_000)], (6_000, 4_000))
    assert check(many, workers=1, cache=False).faults == ()
    too_many = coco_image(tmp_path / "too-many", images, [annotation(i % 3_000) for i in range(10_001)], (60, 40))
    faults = check(too_many, workers=1, cache=False).faults
    assert len({fault.kind for fault in faults}) == 2  # one for its mask, one for its boxes
    for fact in ("instances_train.json", "train/0.png", "10,001", "10,000"):
        assert all(fact in fault.detail for fault in faults), fact


def test_a_hundred_thousand_references_to_one_image(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": "0.png"} for i in range(100_000)]
    report = check(coco_image(tmp_path / "data", images, [], (600, 400)), workers=1, cache=False)
    assert report.images == 1
    assert len([fault for fault in report.faults if "100,000" in fault.detail]) == 1


def test_labels_in_the_data_name_nothing_outside(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", "cat", "dog")
    (tmp_path / "secret.png").write_bytes(png(9))
    lines = "path,label\ncat/0.png,cat\ndog/0.png,dog\n../secret.png,cat\n"
    (root / "labels.csv").write_text(f"{lines}{tmp_path / 'secret.png'},dog\n")
    for spec, reading in ((root, Reading(labels=root / "labels.csv")), (root / "labels.csv", Reading())):
        report = check(spec, reading=reading, workers=1, cache=False)
        assert report.images == 2
        assert any(all(fact in note for fact in ("2", "4", "../secret.png")) for note in report.notes)
    # A list elsewhere is the user's own.
    (tmp_path / "own.csv").write_text(f"{lines.replace('../', str(tmp_path) + '/')}")
    report = check(root, reading=Reading(labels=tmp_path / "own.csv"), workers=1, cache=False)
    assert report.images == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_saved_dataset_names_nothing_outside(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "secret.png").write_bytes(png(9))
    named = [{"bytes": None, "path": str(tmp_path / name)} for name in ("secret.png", "saved/own.png")]
    paths = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    rows = datasets.Dataset.from_dict({"image": [{"bytes": png(0), "path": None}, *named], "label": [0, 1, 1]})
    rows.cast(datasets.Features({"image": paths, "label": datasets.ClassLabel(names=["no", "yes"])})).save_to_disk(
        tmp_path / "saved"
    )
    (tmp_path / "saved" / "own.png").write_bytes(png(3))
    # The library itself would store the bytes of an image column.
    about = tmp_path / "saved" / "dataset_info.json"
    content = json.loads(about.read_text())
    content["features"]["image"] = {"_type": "Image"}
    about.write_text(json.dumps(content))
    report = check(tmp_path / "saved", workers=1, cache=False)
    (one,) = report.unreadable
    for fact in ("secret.png", str(tmp_path / "saved")):
        assert fact in one.reason
