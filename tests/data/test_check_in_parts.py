"""A check in parts finds what a check in memory finds, whoever makes the parts and however little memory there is."""

import csv
import itertools
import json
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom import disk
from patchloom.data.checking import duplicates, joined_check, large_check, part_sources, sorted_rows
from patchloom.data.checking.check import check
from patchloom.data.checking.check_report import FirstItems, total_of
from patchloom.data.checking.duplicates import (
    equal_groups,
    levels_of,
    linked,
    may_be_similar,
    similar_colors,
    similar_pairs,
)
from patchloom.data.checking.joined_check import SCRATCH_BYTES, join_parts
from patchloom.data.checking.part_sources import PartSources, ShardSource, SliceSource, list_part_sources
from patchloom.data.checking.scan_parts import ROW, PartHeader, ScanPart, file_of, key_of, part_content
from patchloom.data.checking.sorted_rows import RowSorter
from patchloom.data.packing import pack
from patchloom.report.check_page import write_check_page
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError
from tests.data.dirty import jpeg, make_dirty, make_image
from tests.data.test_check import make_parquet
from tests.forked import Forked
from tests.messages import refused


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def little_memory(patch: pytest.MonkeyPatch, rows: int = 5, compared: int = duplicates.COMPARED) -> None:
    """Let everything be done in blocks of a few rows."""
    patch.setattr(sorted_rows, "ROWS_IN_MEMORY", rows)
    patch.setattr(sorted_rows, "_FEWEST", 1)
    patch.setattr(joined_check, "_BLOCK", 3)
    patch.setattr(joined_check, "_CHECK_OF_PAIRS", 2)
    for module in (duplicates, joined_check):
        patch.setattr(module, "COMPARED", compared)


def plain(value):
    """A report without what differs by design: rows count in the shard, parts are what was decoded."""
    if isinstance(value, dict):
        return {
            name: plain(one)
            for name, one in value.items()
            if name not in ("row", "decoded", "counts", "lists", "folder", "notes")
        }
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


REPORT = {"check.json", "duplicates.csv", "faults.csv", "near_duplicates.csv", "odd.csv", "unreadable.csv"}


# Sorting and grouping -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1)), max_size=9), max_size=6),
    st.integers(1, 7),
    st.integers(1, 2),
    st.booleans(),
)
def test_rows_are_sorted_in_runs(blocks, memory, by, numbered):
    if numbered:
        numbers = itertools.count()
        blocks = [[(first, next(numbers), last) for first, last in block] for block in blocks]
    rows, columns = [row for block in blocks for row in block], 2 + numbered
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as scratch:
        little_memory(patch, memory)
        sorter = RowSorter(Path(scratch), columns, by=2 if numbered else by, numbered=numbered)
        for block in blocks:
            sorter.add(np.array(block, dtype=np.uint64).reshape(-1, columns))
        found = [tuple(row) for block in sorter.blocks() for row in block.tolist()]
        assert list(Path(scratch).iterdir()) == []
    assert sorted(found) == sorted(rows)
    assert found == sorted(rows) or not numbered
    assert [row[:by] for row in found] == sorted(row[:by] for row in rows)


def make_part(folder: Path, file: Path, thumbnails: np.ndarray, digests: np.ndarray, labels: list[int]) -> None:
    rows = np.zeros(len(thumbnails), ROW)
    rows["thumbnail"], rows["digest"], rows["row"] = thumbnails, digests, np.arange(len(rows))
    rows["width"] = rows["height"] = 9
    header = PartHeader(
        key=key_of(ShardSource(file, "")), rows=len(rows), text_bytes=0, prefix=f"{file}, ", splits={"": len(rows)},
        kind="classes", counts={"": {}}, empty_classes=(), task="classify", annotated=(),
        notes=(), modes=("RGB",), errors={}, faults={},
    )  # fmt: skip
    names = [f"{file}, {row}" for row in range(len(rows))]
    (folder / file_of(header.key)).write_bytes(part_content(header, rows, list(map(str, labels)), names))


@given(data=st.data())
def test_groups_are_those_of_a_check_in_memory(tmp_path_factory, data):
    """Random thumbnails with planted copies: equal ones, near ones in chains, flat ones; runs longer than a window."""
    folder = tmp_path_factory.mktemp("parts")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bases = rng.integers(0, 256, (data.draw(st.integers(1, 4)), 216), dtype=np.uint8)
    bases[rng.random(len(bases)) < 0.2] = 90  # flat
    count = data.draw(st.integers(1, 40))
    thumbnails, digests = bases[rng.integers(0, len(bases), count)], rng.integers(0, 6, (count, 2), dtype=np.uint64)
    digests[:, 1] += (np.arange(count) * (rng.random(count) < 0.7) * 10).astype(np.uint64)  # most are alone
    noise = rng.integers(-9, 10, thumbnails.shape) * (rng.random((count, 1)) < 0.7) * (rng.random((count, 216)) < 0.3)
    thumbnails = np.clip(thumbnails + noise, 0, 255).astype(np.uint8)
    labels, cuts = rng.integers(1, 3, count).tolist(), sorted(rng.integers(0, count + 1, 2).tolist())
    sources = [ShardSource(Path(f"/none/{split}-{n}.tar"), split) for n, split in enumerate(("train", "train", "val"))]
    for source, start, end in zip(sources, [0, *cuts], [*cuts, count], strict=True):
        make_part(folder, source.file, thumbnails[start:end], digests[start:end], labels[start:end])
    with pytest.MonkeyPatch.context() as patch:
        little_memory(patch, data.draw(st.integers(1, 9)), compared=data.draw(st.integers(1, 5)))
        patch.setattr(joined_check, "MOST_GROUPS", 10_000)
        report = join_parts(PartSources("made", sources, None), folder)
        equal = equal_groups([digest.tobytes() for digest in digests])
        repeated = {i for group in equal for i in group[1:]}
        distinct = [i for i in range(count) if i not in repeated]
        near = linked(len(distinct), similar_pairs([thumbnails[i].tobytes() for i in distinct]))
    starts = dict(zip((str(source.file) for source in sources), [0, *cuts], strict=True))

    def positions(groups):
        return [[starts[one.where.split(", ")[0]] + int(one.where.split(", ")[1]) for one in group] for group in groups]

    expected = [[distinct[i] for i in group] for group in near]
    assert positions(report.duplicates) == equal
    assert positions(report.near_duplicates) == expected
    split = ["train" if i < cuts[1] else "val" for i in range(count)]
    for is_near, groups in ((False, equal), (True, expected)):
        assert len(report.conflicts(near=is_near)) == sum(len({labels[i] for i in group}) > 1 for group in groups)
        assert len(report.leaks(near=is_near)) == sum(len({split[i] for i in group}) > 1 for group in groups)
    assert names_of(folder) == REPORT | {file_of(key_of(source)) for source in sources}


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_no_similar_pair_is_dropped_by_its_levels(seed, noise):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 256, (200, 216)).clip(noise, 255 - noise)
    second = first + rng.integers(-1, 2, (200, 1)) * rng.integers(0, noise + 1, (200, 216))
    colors = np.concatenate([first, second]).astype(np.uint8)
    pairs = np.column_stack([np.arange(200), np.arange(200, 400)])
    levels = levels_of(colors)
    assert not np.any(similar_colors(colors, pairs) & ~may_be_similar(levels[:200], levels[200:]))
    assert not np.any(may_be_similar(levels[:200], levels_of(colors[:200] // 2)))


# Whole datasets -------------------------------------------------------------------------------------------------------


def make_shards(root: Path) -> Path:
    """Several shards per split: copies across them, an odd image, damaged ones and one of another size."""
    pack(make_dirty(root.parent / "folder"), out=root.parent / "packed", shard_size=1)
    originals = [root.parent / "packed" / f"{split}-000000.tar" for split in ("train", "val")]
    root.mkdir()
    for path in originals:
        for number in range(2):
            shutil.copy(path, root / f"{path.stem}-{number}.tar")
    return root


def make_tables(root: Path) -> Path:
    """Parquet files whose column names the splits, not all of them in each file."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    images = [jpeg(make_image(seed)) for seed in range(9)] + [jpeg(make_image(2), quality=60), b"damaged"]
    for number, splits in enumerate((["validation", "train", "extra"], ["train"], ["validation"])):
        split = [splits[i % len(splits)] for i in range(len(images))]
        table = {
            "image": images[::-1] if number else images,
            "label": ["a", "b", None] * 3 + ["b", "a"],
            "split": split,
        }
        pq.write_table(pa.table(table), root / f"{number}.parquet")
    return root


def make_bare(root: Path) -> Path:
    """A folder of images without classes."""
    root.mkdir()
    for number in range(12):
        (root / f"{number}.jpg").write_bytes(jpeg(make_image(number % 7)))
    return root


@pytest.mark.parametrize("make", [make_dirty, make_bare, make_shards, make_tables, partial(make_parquet, seed=0)])
def test_a_check_in_parts_finds_what_a_check_in_memory_finds(make, tmp_path, monkeypatch) -> None:
    root = make(tmp_path / "data")
    little_memory(monkeypatch)
    monkeypatch.setattr(joined_check, "MOST_GROUPS", 10_000)
    monkeypatch.setattr(part_sources, "SLICE_FILES", 4)
    report, whole = check(root, out=tmp_path / "check", workers=1), check(root)
    assert plain(report.to_dict(strict=True)) == plain(whole.to_dict(strict=True))
    assert report.decoded == whole.images
    for strict in (False, True):
        assert report.problems(strict=strict) == whole.problems(strict=strict)
    assert report.odd_counts() == whole.odd_counts()
    stored = json.loads((tmp_path / "check" / "check.json").read_text())
    assert stored["problems"] == whole.problems()
    assert report.notes == whole.notes


@pytest.mark.parametrize("make", [make_dirty, make_shards, make_tables, make_bare])
def test_shares_make_the_same_parts(make, tmp_path, monkeypatch) -> None:
    root = make(tmp_path / "data")
    monkeypatch.setattr(part_sources, "SLICE_FILES", 4)
    contents = []
    for count in (1, 2, 3):
        out = tmp_path / f"{count}"
        images = [check(root, out=out, part=f"{n}/{count}", workers=n).images for n in range(count, 0, -1)]
        assert sum(images) == sum(check(root, out=out, join=True).splits.values())
        assert check(root, out=out, part=f"1/{count}").images == 0  # nothing is made again
        contents.append({path.name: path.read_bytes() for path in out.glob("*.part")})
        assert names_of(out) == REPORT | contents[0].keys()
    assert len(contents[0]) > 2
    assert contents[0] == contents[1] == contents[2]
    monkeypatch.chdir(tmp_path)  # nor do parts depend on how the path is written
    assert check("data", out=tmp_path / "1").decoded == 0


def test_lists_have_what_the_report_leaves_out(tmp_path, monkeypatch) -> None:
    root = make_dirty(tmp_path / "data")
    for number in range(9):
        shutil.copy(root / "train/ant/0.jpg", root / f"train/ant/copy{number}.jpg")
    monkeypatch.setattr(joined_check, "MOST_LINES", 2)
    monkeypatch.setattr(joined_check, "MOST_GROUPS", 1)
    monkeypatch.setattr(joined_check, "MOST_MEMBERS", 3)
    report, whole = check(root, out=tmp_path / "check"), check(root)
    assert [total_of(group) for group in report.duplicates] == [10]
    assert (len(report.duplicates[0]), len(report.unreadable), len(report.odd)) == (3, 2, 2)
    assert report.problems(strict=True) == whole.problems(strict=True)
    counts = report.to_dict()["counts"]
    assert (counts["unreadable"], counts["odd"], counts["duplicates"]) == (4, len(whole.odd), len(whole.duplicates))
    texts = {name: (tmp_path / "check" / file).read_text() for name, file in report.lists.items()}
    lines = {name: list(csv.DictReader(text.splitlines())) for name, text in texts.items()}
    assert [line["image"] for line in lines["unreadable"]] == [bad.place.where for bad in whole.unreadable]
    assert [(line["image"], line["kind"]) for line in lines["odd"]] == [(o.place.where, o.kind) for o in whole.odd]
    copies = [(int(line["group"]), line["split"], line["label"], line["image"]) for line in lines["duplicates"]]
    groups = enumerate(whole.duplicates, 1)
    assert copies == [(number, p.split, p.label, p.where) for number, group in groups for p in group]


def test_a_changed_file_is_scanned_again_with_its_slice_alone(tmp_path, monkeypatch) -> None:
    root = make_bare(tmp_path / "data")
    monkeypatch.setattr(part_sources, "SLICE_FILES", 3)
    slices = len(list(list_part_sources(root).listed()))
    assert slices > 2
    assert check(root, out=tmp_path / "check").decoded == 12
    (root / "2.jpg").write_bytes(b"")
    report = check(root, out=tmp_path / "check")
    assert 0 < report.decoded < 12
    assert [bad.place.where for bad in report.unreadable] == [str(root / "2.jpg")]
    assert any("1 part" in note for note in report.notes)


def test_a_slice_ends_whatever_the_names_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(part_sources, "SLICE_FILES", 1 << 40)
    monkeypatch.setattr(part_sources, "_LONGEST", 4 / (1 << 40))
    sources = list(list_part_sources(make_bare(tmp_path / "data")).listed())
    assert [len(source.paths) for source in sources if isinstance(source, SliceSource)] == [4, 4, 4]


# Mistakes, damage, interruptions --------------------------------------------------------------------------------------


def test_a_join_waits_for_all_parts(tmp_path) -> None:
    root = make_shards(tmp_path / "data")
    check(root, out=tmp_path / "check", part="1/2")
    with refused(UsageError, 2, 4, "--join", "--part"):
        check(root, out=tmp_path / "check", join=True)
    assert REPORT.isdisjoint(names_of(tmp_path / "check"))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"part": "1/2"}, ["--out"]),
        ({"join": True}, ["--out"]),
        ({"out": "check", "part": "3/2"}, ["3/2"]),
        ({"out": "check", "part": "1/2", "join": True}, ["--join"]),
        ({"out": "check", "against": "other"}, ["--against"]),
    ],
)
def test_wrong_options_are_refused(options, facts, tmp_path) -> None:
    with refused(UsageError, *facts):
        check(make_bare(tmp_path / "data"), **options)


def test_what_has_no_parts_is_refused(tmp_path) -> None:
    with refused(UsageError, "digits", "--out"):
        check("digits", out=tmp_path / "check")
    with refused(UsageError, "--out"):
        check(np.zeros((4, 8, 8), np.uint8), out=tmp_path / "check")
    with pytest.raises(PatchloomError, match="missing") as missing:
        check(tmp_path / "missing", out=tmp_path / "check")
    assert "--out" not in str(missing.value)


def test_a_disk_that_is_too_small_is_noticed_before_any_work(tmp_path, monkeypatch) -> None:
    root = make_bare(tmp_path / "data")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12 * SCRATCH_BYTES - 1))
    with refused(ResourceError, tmp_path / "check"):
        check(root, out=tmp_path / "check", workers=1)
    assert all(name.endswith(".part") for name in names_of(tmp_path / "check"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign", "empty", "folder"])
def test_a_damaged_part_is_named(damage, tmp_path) -> None:
    root = make_shards(tmp_path / "data")
    check(root, out=tmp_path / "check")
    first, second = sorted((tmp_path / "check").glob("*.part"))[:2]
    content = bytearray(first.read_bytes())
    if damage == "flipped":
        content[-100] ^= 1
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "foreign":
        content = bytearray(second.read_bytes())
    elif damage == "empty":
        content.clear()
    first.unlink()
    if damage == "folder":
        first.mkdir()
    else:
        first.write_bytes(content)
    before = (tmp_path / "check" / "check.json").read_bytes()
    with refused(CheckpointError, first):
        check(root, out=tmp_path / "check", join=True)
    assert (tmp_path / "check" / "check.json").read_bytes() == before
    assert names_of(tmp_path / "check") > REPORT
    shutil.rmtree(first) if damage == "folder" else first.unlink()
    assert check(root, out=tmp_path / "check").decoded > 0


def stop_in(root: Path, out: Path, marker: Path, step: str, workers: int) -> None:
    """Check until a step has begun for the second time, and wait there."""
    calls = []

    def waiting(original, *inputs, **options):
        calls.append(1)
        if len(calls) == 2:
            marker.touch()
            time.sleep(600)
        return original(*inputs, **options)

    owner, name = {
        "part": (large_check, "atomic_write"),
        "list": (joined_check, "_cells"),
        "pairs": (joined_check, "near_in_runs"),
    }[step]
    setattr(owner, name, partial(waiting, getattr(owner, name)))
    check(root, out=out, workers=workers)


@pytest.mark.parametrize(("step", "workers"), [("part", 1), ("part", 2), ("list", 1), ("pairs", 1)])
def test_a_killed_check_goes_on_to_the_same_report(step, workers, tmp_path) -> None:
    root, out, marker = make_shards(tmp_path / "data"), tmp_path / "check", tmp_path / "marker"
    process = Forked(partial(stop_in, root, out, marker, step, workers))
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -9
    parts = {path: path.stat().st_mtime_ns for path in out.glob("*.part")}
    assert 0 < len(parts) < 4 if step == "part" else any(name.endswith(".tmp") for name in names_of(out))
    disk._swept.clear()  # as in a new process, which looks for what killed ones left
    report = check(root, out=out, workers=1)
    assert all(path.stat().st_mtime_ns == written for path, written in parts.items())
    alone = check(root, out=tmp_path / "alone", workers=1)
    assert plain(report.to_dict()) == plain(alone.to_dict())
    assert names_of(out) == names_of(tmp_path / "alone")
    for name in REPORT - {"check.json"}:
        assert (out / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


@pytest.mark.parametrize("make", [make_bare, make_tables])
def test_a_foreign_part_shows_no_other_file(make, tmp_path) -> None:
    """Its checksums are right, and it names images that are not of the data."""
    root, secret = make(tmp_path / "data"), tmp_path / "secret.jpg"
    secret.write_bytes(jpeg(make_image(0)))
    key = key_of(next(list_part_sources(root).listed()))
    check(root, out=tmp_path / "check", workers=1)
    part = ScanPart(tmp_path / "check", key)
    rows, names = part.rows().copy(), [str(secret), f"{root}/../secret.jpg", f"{root}/0.parquet, row 0"]
    rows["row"], rows["digest"] = 1 << 31, 1
    rows["width"] = rows["height"] = 9
    header = replace(part.header, prefix="", errors={})
    content = part_content(header, rows, ["a"] * len(rows), [names[i % 3] for i in range(len(rows))])
    part.path.write_bytes(content)
    report = check(root, out=tmp_path / "check", join=True)
    assert {place.where for group in report.duplicates for place in group} >= set(names)
    write_check_page(tmp_path / "check.html", report, problems=[])
    opened = [report.listing_of(place) for place in report.duplicates[0]]
    assert {one and one.images.key(0) for one in opened} <= {None, "0.parquet, row 0"}


def test_any_flipped_byte_is_noticed(tmp_path) -> None:
    (source,) = list_part_sources(make_bare(tmp_path / "data")).listed()
    check(tmp_path / "data", out=tmp_path / "check")
    path = tmp_path / "check" / file_of(key_of(source))
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(CheckpointError):
            ScanPart(tmp_path / "check", key_of(source)).rows()


def test_first_items_stay_a_tuple() -> None:
    items = FirstItems([1, 2], 5)
    assert (items, total_of(items), total_of([1, 2])) == ((1, 2), 5, 2)
