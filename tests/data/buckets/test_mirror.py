"""Copies of folders in buckets: what is downloaded, uploaded, refused, and in which order."""

import json
import os
import shutil

import pytest

from patchloom.data.buckets import mirror as module
from patchloom.data.buckets.mirror import Mirror
from patchloom_runtime.errors import BucketError, CheckpointError, UsageError
from tests.data.buckets.servers import request
from tests.messages import refused


def contents(folder) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def machine(bucket, tmp_path, monkeypatch):
    """Return the copy of a folder on one of several machines."""

    def of(name: str) -> Mirror:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return Mirror(f"{bucket.url}/runs/a")

    return of


def test_a_folder_moves_to_another_machine_and_back(machine):
    first = machine("first")
    folder = first.pull()
    (folder / "deep").mkdir()
    (folder / "deep" / "manifest.json").write_bytes(b"{}")
    (folder / "metrics.jsonl").write_bytes(b"1\n")
    (folder / ".lock").write_bytes(b"here")
    first.push()
    second = machine("second")
    assert contents(second.pull()) == {"deep/manifest.json": b"{}", "metrics.jsonl": b"1\n"}
    (second.folder / "metrics.jsonl").write_bytes(b"1\n2\n")
    shutil.rmtree(second.folder / "deep")
    second.push()
    assert "deep/manifest.json" in second.names()
    second.push(removable=lambda name: name.startswith("deep/"))
    assert contents(first.pull()) == {"metrics.jsonl": b"1\n2\n"}


@pytest.mark.parametrize(
    "known",
    [
        '{"../secret": [4, "1", 1000000000]}',
        '{"{root}/secret": [4, "1", 1000000000]}',
        '{"a": [4, "1"]}',
        '{"a": [4, 1, 1000000000]}',
        '{"a\\u0000": [4, "1", 1000000000], "\\ud800": [4, "1", 1000000000]}',
        "{",
    ],
)
def test_a_damaged_list_of_what_is_known_is_made_again(machine, known: str):
    one = machine("first")
    (one.pull() / "a").write_bytes(b"abcd")
    one.push()
    secret = one.folder.parent / "secret"
    secret.write_bytes(b"abcd")
    os.utime(secret, ns=(10**9, 10**9))
    (one.folder.parent / "objects.json").write_text(known.replace("{root}", str(secret.parent)))
    one.pull()
    one.push()
    assert secret.read_bytes() == b"abcd"
    assert contents(one.folder) == {"a": b"abcd"}
    assert list(json.loads((one.folder.parent / "objects.json").read_text())) == ["a"]


def test_only_changes_are_transferred(machine, bucket):
    one = machine("first")
    folder = one.pull()
    for name in ("a", "b"):
        (folder / name).write_bytes(bytes(1000))
    one.push()
    (folder / "b").write_bytes(b"other")
    written = []
    original = module.put_version
    module.put_version = lambda url, *rest, **options: written.append(url) or original(url, *rest, **options)
    try:
        one.push()
    finally:
        module.put_version = original
    assert written == [f"{bucket.url}/runs/a/b"]
    bucket.proxy.reads.clear()
    one.pull()
    assert not [path for path in bucket.proxy.reads if path.endswith(("/a/a", "/a/b"))]


def test_files_that_make_others_count_are_uploaded_last(machine, monkeypatch):
    one = machine("first")
    folder = one.pull()
    for name in ("index.json", "manifest.json", "z.npy"):
        (folder / name).write_bytes(name.encode())
    original = module.put_version

    def fails(url, *rest, **options):
        if url.endswith("manifest.json"):
            raise BucketError("cut")
        return original(url, *rest, **options)

    monkeypatch.setattr(module, "put_version", fails)
    with pytest.raises(BucketError):
        one.push()
    assert one.names() == ["z.npy"]
    monkeypatch.setattr(module, "put_version", original)
    one.push()
    assert sorted(one.names()) == ["index.json", "manifest.json", "z.npy"]


def test_two_machines_do_not_mix_their_files(machine):
    first, second = machine("first"), machine("second")
    for one, text in ((first, b"one"), (second, b"two")):
        one.folder.mkdir(parents=True)
        (one.folder / "run.json").write_bytes(text)
    first.push()
    with refused(UsageError, "runs/a/run.json"):
        second.push()
    (second.folder / "run.json").write_bytes(b"one")  # equal: for instance a reply that was lost
    second.push()


def test_an_object_that_changed_replaces_the_copy_and_a_change_here_stays(machine, bucket):
    one = machine("first")
    (one.pull() / "a").write_bytes(b"first")
    one.push()
    (one.folder / "a").write_bytes(b"here")
    one.pull()
    assert contents(one.folder) == {"a": b"here"}
    request(bucket.server, "PUT", f"/{bucket.name}/runs/a/a", b"there")
    one.pull()
    assert contents(one.folder) == {"a": b"there"}


def test_large_files_are_uploaded_in_parts_and_cut_downloads_repeated(machine, bucket, monkeypatch):
    monkeypatch.setattr(module, "_CREATED_BYTES", 1000)
    monkeypatch.setattr(module, "_SPAN_BYTES", 1 << 20)
    data = bytes(range(256)) * (6 << 12)
    one = machine("first")
    (one.pull() / "lists.faiss").write_bytes(data)
    one.push()
    two = machine("second")
    bucket.proxy.faults.extend(["", "cut", "500", "cut"])
    assert contents(two.pull()) == {"lists.faiss": data}
    assert not bucket.proxy.faults


def test_names_that_leave_the_folder_are_refused(machine, monkeypatch):
    one = machine("first")
    facts = module.ObjectFacts(f"{one.url}/../../evil", 1, "v")
    monkeypatch.setattr(module, "list_tree", lambda _: [facts])
    with refused(CheckpointError, "'..'"):
        one.pull()


def test_a_web_server_is_refused():
    with refused(UsageError, "https://example.org/run"):
        Mirror("https://example.org/run")


def test_a_copy_that_somebody_removed_removes_nothing_in_the_bucket(machine):
    one = machine("first")
    (one.pull() / "a").write_bytes(b"1")
    one.push()
    shutil.rmtree(one.folder)
    one.push(removable=lambda _: True)
    assert one.names() == ["a"]
    assert contents(one.pull()) == {"a": b"1"}
