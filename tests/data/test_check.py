"""`check` on folders with planted faults: each is found, with its path and reason, and nothing else."""

import errno
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.checking import duplicates, scan, scan_cache
from patchloom.data.checking.check import check
from patchloom.data.checking.duplicates import MAX_BITS, linked, near_pairs, similar_pairs
from patchloom.data.checking.scan_cache import ImageScan, ScanCache, taking_turns
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data
from patchloom_runtime.errors import DataError, ResourceError, UsageError
from patchloom_runtime.images.decode import read_file
from tests.data.dirty import jpeg, make_clean, make_dirty, make_image, make_shift
from tests.data.facts import any_has, facts, has_facts
from tests.data.test_sources import shard


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch):
    """Files decoded so far, by name."""
    names = []
    decode = scan.decode_with_facts

    def noting(data, where):
        names.append(os.path.basename(where))
        return decode(data, where)

    monkeypatch.setattr(scan, "decode_with_facts", noting)
    return names


def below(root, groups):
    return [{os.path.relpath(place.where, root) for place in group} for group in groups]


def test_clean_has_nothing_wrong(tmp_path):
    report = check(make_clean(tmp_path / "clean"))
    assert report.problems(strict=True) == []
    assert (report.unreadable, report.odd, report.duplicates, report.near_duplicates, report.notes) == ((),) * 5
    assert report.splits == {"train": 12, "val": 6}
    assert report.classes["ant"] == {"train": 4, "val": 2}
    assert (report.widths, report.heights, report.balance) == ((48, 48, 48), (48, 48, 48), (4, 4))


def test_every_planted_fault_is_found(tmp_path):
    root = make_dirty(tmp_path / "dirty")
    report = check(root)
    reasons = {os.path.relpath(bad.place.where, root): bad.reason for bad in report.unreadable}
    size = (root / "train/ant/truncated.jpg").stat().st_size
    assert reasons.keys() == {f"train/ant/{name}" for name in ("truncated.jpg", "empty.jpg", "text.jpg", "strip.png")}
    assert has_facts(reasons["train/ant/truncated.jpg"], size, "JPEG")
    assert has_facts(reasons["train/ant/text.jpg"], "text")
    assert has_facts(reasons["train/ant/strip.png"], "3000×2", 4)
    odd = {(os.path.relpath(odd.place.where, root), odd.kind): odd.read_as for odd in report.odd}
    expected = {
        ("train/cat/cmyk.jpg", "CMYK"): ("RGB",),
        ("train/cat/deep.png", "16-bit"): ("0…65535", "0…255"),
        ("train/cat/alpha.png", "alpha"): (),
        ("train/cat/turned.jpg", "EXIF rotation"): (),
        ("train/cat/moving.gif", "animated"): (),
        ("train/cat/moving.gif", "palette"): ("RGB",),
        ("train/dog/wide.png", "strip"): ("400×40", "10%"),
        ("train/dog/tiny.png", "tiny"): ("8×8", 48),
    }
    assert odd.keys() == expected.keys()
    for key, parts in expected.items():
        assert has_facts(odd[key], *parts)
    assert below(root, report.leaks()) == [{"train/dog/0.jpg", "val/dog/copy.jpg"}]
    assert below(root, report.conflicts()) == [{"train/ant/1.jpg", "train/cat/also.jpg"}]
    assert len(report.duplicates) == 2
    assert below(root, report.near_duplicates) == [{"train/dog/2.jpg", "train/dog/again.jpg"}]
    assert report.empty_classes == ("unicorn",)
    assert report.stray_classes == {"zebra": 1}
    (note,) = report.notes
    assert has_facts(note, "train", ".txt")
    unread, empty, stray, leaked, _ = report.problems()
    assert has_facts(unread, 4)
    assert has_facts(empty, "'unicorn'")
    assert has_facts(stray, "val", "'zebra'")
    assert has_facts(leaked, "train", "val")
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["unreadable"][0]["place"]["split"] == "train"
    assert plain["problems"] == report.problems()


def test_shift_names_the_class_that_only_val_has(tmp_path):
    report = check(make_shift(tmp_path / "shift"))
    assert report.stray_classes == {"bee": 1}
    (problem,) = report.problems(strict=True)
    assert has_facts(problem, "val", "'bee'")


def test_a_class_of_unreadable_files_is_empty(tmp_path):
    root = make_clean(tmp_path / "data")
    for split in ("train", "val"):
        for file in (root / split / "cat").iterdir():
            file.write_bytes(b"")
    assert check(root).empty_classes == ("cat",)


def test_the_same_pixels_in_another_format_are_duplicates(tmp_path):
    root = make_clean(tmp_path / "data")
    Image.open(root / "train/ant/0.jpg").save(root / "val/ant/other.png")
    assert below(root, check(root).leaks()) == [{"train/ant/0.jpg", "val/ant/other.png"}]


def test_a_near_copy_across_splits_and_labels_is_wrong_only_where_strict(tmp_path):
    root = make_clean(tmp_path / "data")
    (root / "val/cat/near.jpg").write_bytes(jpeg(Image.open(root / "train/ant/0.jpg"), quality=60))
    report = check(root)
    assert report.problems() == []
    assert (len(report.leaks(near=True)), len(report.conflicts(near=True))) == (1, 1)
    leaked, _ = report.problems(strict=True)
    assert has_facts(leaked, "train", "val")


def test_flat_images_are_no_near_duplicates(tmp_path):
    root = make_clean(tmp_path / "data")
    for level in range(100, 110):
        Image.new("RGB", (48, 48), (level,) * 3).save(root / "train/ant" / f"flat{level}.png")
    report = check(root)
    assert (report.duplicates, report.near_duplicates) == ((), ())


def test_a_made_split_keeps_copies_together(tmp_path):
    root = tmp_path / "data"
    for name in ("ant", "cat"):
        (root / name).mkdir(parents=True)
        for i in range(10):  # five pictures, each twice: the second saved again for every other
            again = jpeg(make_image(i // 2 + 50 * (name == "cat")), quality=90 if i % 4 < 2 else 60 + 30 * (i % 2))
            (root / name / f"{i}.jpg").write_bytes(again)
    report = check(root)
    assert report.splits == {"train": 20}
    assert (len(report.duplicates), len(report.near_duplicates)) == (6, 4)
    assert report.problems() == []
    data = open_data(root)
    held_out = {data.val.where(i) for i in range(len(data.val))}
    (note,) = data.notes
    assert has_facts(note, "val", 4, 20, 0)
    for group in (*report.duplicates, *report.near_duplicates):
        assert len({place.where in held_out for place in group}) == 1


def test_a_second_check_decodes_nothing_and_a_changed_file_again(tmp_path, decoded):
    root = make_dirty(tmp_path / "data")
    first = check(root)
    assert first.decoded == first.images
    decoded.clear()
    second = check(root)
    assert (second.decoded, decoded) == (0, [])
    assert {**second.to_dict(), "decoded": 0} == {**first.to_dict(), "decoded": 0}
    (root / "train/ant/0.jpg").write_bytes(jpeg(make_image(500, (64, 64))))
    third = check(root)
    assert (third.decoded, decoded) == (1, ["0.jpg"])
    assert third.widths[2] == 400
    assert third.classes == first.classes
    check(root, cache=False)
    assert len(decoded) > 10


def make_parquet(root, seed):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir(exist_ok=True)
    for split, count in (("train", 6), ("val", 4)):
        images = [jpeg(make_image(seed + i)) for i in range(count)]
        pq.write_table(pa.table({"image": images, "label": ["a", "b"] * (count // 2)}), root / f"{split}.parquet")
        seed += count
    return root


def make_shards(root, seed):
    root.mkdir(exist_ok=True)
    for split, count in (("train", 6), ("val", 4)):
        members = {}
        for i in range(count):
            members |= {f"{i}.jpg": jpeg(make_image(seed + i)), f"{i}.cls": b"ab"[i % 2 : i % 2 + 1]}
        shard(root / f"{split}.tar", members.items())
        seed += count
    return root


def make_saved(root, seed):
    datasets = pytest.importorskip("datasets")

    def rows(first, count):
        images = [{"bytes": jpeg(make_image(first + i)), "path": None} for i in range(count)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        return datasets.Dataset.from_dict({"image": images, "label": ["a", "b"] * (count // 2)}, features=features)

    datasets.DatasetDict({"train": rows(seed, 6), "test": rows(seed + 6, 4)}).save_to_disk(root)
    return root


@pytest.mark.parametrize("make", [make_parquet, make_shards, make_saved])
def test_files_of_many_images_are_remembered_too(tmp_path, make, decoded):
    root = make(tmp_path / "data", 0)
    first = check(root)
    assert (first.decoded, len(decoded)) == (10, 10)
    again = check(root)
    assert (again.decoded, len(decoded)) == (0, 10)
    assert {**again.to_dict(), "decoded": 10} == first.to_dict()
    make(root, 100)
    assert check(root).decoded == 10
    assert check(root).decoded == 0


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split, seed in (("train", 0), ("test", 4)):
        (tmp_path / split).mkdir()
        images = [jpeg(make_image(seed + i)) for i in range(4)]
        pq.write_table(pa.table({"image": images, "label": ["a", "b"] * 2}), tmp_path / split / "0.parquet")
        os.utime(tmp_path / split / "0.parquet", ns=(0, 12345))
    check(str(tmp_path / "*" / "0.parquet"))
    again = check(str(tmp_path / "*" / "0.parquet"))
    assert (again.decoded, again.leaks()) == (0, [])


def test_a_wait_for_a_stopped_process_is_said(tmp_path, monkeypatch, capsys):
    visible = ScanCache(str(tmp_path))
    held = "import sys, time; from patchloom.data.checking.scan_cache import ScanCache, taking_turns\n"
    held += "with taking_turns([ScanCache(sys.argv[1])], print): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    calls = []

    def waiting(number):
        calls.append(number)
        if len(calls) > 10:
            holder.kill()

    monkeypatch.setattr(scan_cache, "_POLL_EVERY_S", 0.01)
    with taking_turns([visible], waiting):
        pass
    holder.communicate()
    assert any_has(capsys.readouterr().err.splitlines(), holder.pid, f"kill -CONT {holder.pid}")


def test_of_two_processes_one_looks_and_the_other_waits(tmp_path):
    root = make_clean(tmp_path / "data")
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=decoded_by, args=(root, start, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    counts = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert counts == [0, 18]


def decoded_by(root, start, answers):
    look = scan.scan_image

    def slow(images, row):
        time.sleep(0.02)
        return look(images, row)

    scan.scan_image = slow
    start.wait()
    answers.put(check(root, workers=1).decoded)


def test_workers_end_when_the_process_they_work_for_is_killed(tmp_path):
    root = make_clean(tmp_path / "data")
    context = multiprocessing.get_context("spawn")
    parent = context.Process(target=look_for_ever, args=(root,))
    parent.start()
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 2)
    workers = children.read_text().split()
    parent.kill()
    parent.join()
    wait_until(lambda: not any(is_alive(worker) for worker in workers))


def look_for_ever(root):
    scan._FEW = scan._CHUNK = 1
    scan.scan_image = lambda *_: time.sleep(600)
    check(root, workers=2)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(there, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_who_waits_hears_how_far_the_other_is(tmp_path):
    remaining = ScanCache(str(tmp_path))
    remaining.write([((b"a", 1, 2), ImageScan()), ((b"b", 1, 2), ImageScan())])
    reports = []
    with taking_turns([remaining], reports.append):

        def stop(count):
            reports.append(count)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), taking_turns([remaining], stop):
            pass
    assert reports == [2]


def test_an_interrupted_check_goes_on_where_it_stopped(tmp_path):
    root = make_clean(tmp_path / "data")

    def stop(done, total):
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(root, progress=stop)
    assert check(root).decoded == 8


def test_a_file_repaired_at_the_same_size_is_noticed(tmp_path, decoded):
    root = make_clean(tmp_path / "data")
    file = root / "train/ant/0.jpg"
    whole = file.read_bytes()
    file.write_bytes(b"x" * len(whole))
    assert len(check(root).unreadable) == 1
    file.write_bytes(whole)
    os.utime(file, ns=(0, 12345))
    assert check(root).unreadable == ()


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_looked_at_again(tmp_path):
    root = make_clean(tmp_path / "data")
    file = root / "train/ant/0.jpg"
    status, whole = file.stat(), file.read_bytes()
    assert check(root).unreadable == ()
    (tmp_path / "other").write_bytes(b"x" * len(whole))
    os.replace(tmp_path / "other", file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(check(root).unreadable) == 1


MEMORY_IS_SHORT = """
import resource, sys
from pathlib import Path
from patchloom.data.checking.check import check
from patchloom_runtime.images.decode import read_file
check(sys.argv[1], workers=1, cache=False)  # everything that is needed is loaded
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 30 * 2**20,) * 2)
check(sys.argv[1], workers=1)
"""


@pytest.mark.parametrize("extension", ["png", "jpg", "webp", "tif", "gif"])
def test_a_lack_of_memory_is_no_fault_of_an_image_and_is_not_remembered(tmp_path, extension):
    root = make_clean(tmp_path / "data")
    (root / "train/ant/0.jpg").unlink()
    large = Image.new("RGB", (4900, 4900), "red")  # 72 MB decoded
    large.save(root / f"train/ant/large.{extension}")
    done = subprocess.run([sys.executable, "-c", MEMORY_IS_SHORT, str(root)], capture_output=True, text=True)
    assert has_facts(done.stderr, "ResourceError", f"{root}/train/ant/large.{extension}")
    assert check(root).unreadable == ()


def test_too_many_open_files_are_no_fault_of_an_image(tmp_path, monkeypatch):
    file = make_clean(tmp_path / "data") / "train/ant/0.jpg"

    def refuse(*arguments, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("os.open", refuse)
        with pytest.raises(ResourceError, match=facts("0.jpg", os.strerror(errno.EMFILE))):
            read_file(file, str(file))


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_damaged_cache_is_begun_anew(tmp_path, cache_home, damage, decoded):
    root = make_clean(tmp_path / "data")
    check(root)
    (file,) = cache_home.rglob("*.sqlite")
    file.write_bytes(damage)
    assert check(root).decoded == 18
    assert check(root).decoded == 0


def test_a_cache_of_other_columns_is_no_trouble(tmp_path, cache_home):
    root = make_clean(tmp_path / "data")
    check(root)
    (file,) = cache_home.rglob("*.sqlite")
    file.unlink()
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE sights (path, bytes)")
    database.execute("INSERT INTO sights VALUES (1, 2)")
    database.commit()
    database.close()
    assert check(root).decoded == 18


def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    root = make_clean(tmp_path / "data")
    assert check(root).decoded == check(root).decoded == 18


def test_nothing_is_written_into_the_data(tmp_path):
    root = make_dirty(tmp_path / "data")

    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]}

    before = state()
    check(root)
    check(root)
    assert state() == before


def test_pipes_are_named_and_never_opened(tmp_path):
    root = make_clean(tmp_path / "data")
    os.mkfifo(root / "train/ant/pipe.jpg")
    (root / "train/ant/gone.jpg").symlink_to(tmp_path / "nowhere")
    report = check(root)
    assert report.images == 18
    assert has_facts(report.notes[0], "ant/gone.jpg", "ant/pipe.jpg")


def test_several_processes_see_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "_FEW", 4)
    monkeypatch.setattr(scan, "_CHUNK", 5)
    root = make_dirty(tmp_path / "data")
    calls = []
    two = check(root, workers=2, cache=False, progress=lambda done, total: calls.append((done, total)))
    assert two.to_dict() == check(root, workers=1, cache=False).to_dict()
    assert calls == [(i, two.images) for i in range(two.images + 1)]


def test_sources_without_files(tmp_path):
    report = check("shapes:count=40,size=32")
    assert report.splits == {"train": 40, "val": 16}
    assert (report.unreadable, report.odd) == ((), ())


def test_a_labels_file_and_unlabeled_images(tmp_path):
    for i in range(4):
        make_image(i).save(tmp_path / f"{i}.png")
    assert check(tmp_path).classes == {}
    (tmp_path / "labels.csv").write_text("path,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b\n")
    assert check(tmp_path, reading=Reading(labels=tmp_path / "labels.csv")).classes == {
        "a": {"train": 2},
        "b": {"train": 2},
    }
    (tmp_path / "labels.csv").write_text("path,label\n0.png,a\n1.png,a\n")
    (problem,) = check(tmp_path / "labels.csv").problems()
    assert has_facts(problem, "'a'")


def test_no_data(tmp_path):
    with pytest.raises(UsageError, match=facts(tmp_path / "none")):
        check(tmp_path / "none")
    with pytest.raises(DataError, match=facts(tmp_path.name)):
        check(tmp_path)


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.sets(st.integers(0, 63), max_size=5)), max_size=25),
)
def test_near_pairs_are_those_of_all_pairs(bases, changes):
    hashes = list(bases)
    for base, bits in changes:
        if bases:
            hashes.append(bases[base % len(bases)] ^ sum(1 << bit for bit in bits))
    expected = [
        [i, j]
        for i in range(len(hashes))
        for j in range(i + 1, len(hashes))
        if (hashes[i] ^ hashes[j]).bit_count() <= MAX_BITS
    ]
    assert near_pairs(np.array(hashes, dtype=np.uint64)).tolist() == expected


def test_a_copy_among_many_images_with_one_hash_is_found(monkeypatch):
    monkeypatch.setattr(duplicates, "COMPARED", 4)
    rng = np.random.default_rng(0)
    pattern, count = rng.integers(0, 2, (8, 9, 1)), 60
    images = 20 + 3 * np.arange(count).reshape(-1, 1, 1, 1) + pattern * rng.integers(25, 40, (count, 1, 1, 3))
    images = np.concatenate([images, images[:1] + 1]).astype(np.uint8)
    found = similar_pairs([image.tobytes() for image in images]).tolist()
    assert [0, count] in found
    assert found == sorted(found)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12))
def test_linked_are_the_connected(count, edges):
    edges = [(a % count, b % count) for a, b in edges]
    reach = [{i} for i in range(count)]
    for _ in range(count):
        for a, b in edges:
            reach[a] |= reach[b]
            reach[b] |= reach[a]
    expected = sorted({tuple(sorted(group)) for group in reach if len(group) > 1})
    assert sorted(map(tuple, linked(count, np.array(edges, dtype=np.int64).reshape(-1, 2)))) == expected
