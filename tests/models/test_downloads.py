"""Fetching published files: once, whole, checked, resumed; what goes wrong is one line that says what to do by hand."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchloom.models.pretrained import downloads
from patchloom.models.pretrained.downloads import fetch_weights, url_path
from patchloom_runtime.errors import CheckpointError, ResourceError, UsageError
from tests.weights_server import Shelf, caches, in_hub_cache, served, tiny

DATA = bytes(range(256)) * 400
PLACE = "/weights.example/deit/"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    caches(monkeypatch, tmp_path)
    with served(Shelf()) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        yield shelf


def row(**more):
    return tiny(**more)[0]


def with_digits(data: bytes, digits: str | None = None) -> str:
    return f"https://weights.example/deit/resmlp-{digits or hashlib.sha256(data).hexdigest()[:8]}.pth"


def left(path: Path) -> list[str]:
    """What is beside the file, but for locks."""
    return sorted(each.name for each in path.parent.iterdir() if not each.name.endswith(".lock"))


def test_a_file_is_fetched_once_to_where_torch_hub_keeps_it(shelf, tmp_path, capsys) -> None:
    weights = row()
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    path = fetch_weights(weights)
    assert path == tmp_path / "torch" / "hub" / "checkpoints" / "resmlp_tiny.pth"
    assert path.read_bytes() == DATA
    output = capsys.readouterr().err
    assert "resmlp_s12:tiny" in output
    assert "https://weights.example/deit/resmlp_tiny.pth" in output
    assert fetch_weights(weights) == path
    assert len(shelf.requests) == 1
    assert left(path) == ["resmlp_tiny.pth"]
    assert capsys.readouterr().err == ""


def test_torch_hub_looks_at_the_same_place(shelf, monkeypatch) -> None:
    import torch

    assert str(url_path(row().url).parent) == os.path.join(torch.hub.get_dir(), "checkpoints")
    monkeypatch.delenv("TORCH_HOME")
    assert str(url_path(row().url).parent) == os.path.join(torch.hub.get_dir(), "checkpoints")


def test_googles_files_do_not_take_each_others_place() -> None:
    base = "https://storage.googleapis.com/mixer_models/"
    assert url_path(f"{base}sam/Mixer-B_16.npz").name == "sam-Mixer-B_16.npz"
    assert url_path(f"{base}imagenet1k/Mixer-B_16.npz").name == "imagenet1k-Mixer-B_16.npz"


@pytest.mark.parametrize("cuts", [[1000], [1000, 2000], []])
def test_a_transfer_that_breaks_off_goes_on(shelf, cuts) -> None:
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    shelf.cut_after = list(cuts)
    assert fetch_weights(row()).read_bytes() == DATA
    requests = [wanted for _, _, wanted in shelf.requests]
    assert requests == ["", "bytes=1000-", "bytes=3000-"][: len(cuts) + 1]


def broken_off(shelf) -> None:
    """A transfer of which 3,000 bytes have come."""
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    shelf.cut_after = [1000] * downloads.ATTEMPTS
    with pytest.raises(ResourceError, match="99,400"):
        fetch_weights(row())
    assert not url_path(row().url).exists()
    shelf.requests.clear()


def test_the_next_command_goes_on(shelf) -> None:
    broken_off(shelf)
    assert fetch_weights(row()).read_bytes() == DATA
    assert [wanted for _, _, wanted in shelf.requests] == ["bytes=3000-"]


def test_a_file_that_changed_meanwhile_begins_again(shelf) -> None:
    broken_off(shelf)
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = new = DATA[::-1]
    assert fetch_weights(row()).read_bytes() == new


def test_a_server_without_ranges_begins_again(shelf) -> None:
    broken_off(shelf)
    shelf.ranges = False
    assert fetch_weights(row()).read_bytes() == DATA


def test_more_than_there_is_begins_again(shelf) -> None:
    broken_off(shelf)
    path = url_path(row().url)
    path.with_name(f".{path.name}.partial").write_bytes(DATA + b"more")
    assert fetch_weights(row()).read_bytes() == DATA
    assert left(path) == ["resmlp_tiny.pth"]


def test_the_digits_in_a_name_are_checked(shelf) -> None:
    weights = row(url=with_digits(DATA))
    shelf.files[f"{PLACE}{weights.url.split('/')[-1]}"] = DATA
    assert fetch_weights(weights).read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing(shelf) -> None:
    weights = row(url=with_digits(DATA, "0123abcd"))
    shelf.files[f"{PLACE}resmlp-0123abcd.pth"] = DATA
    with pytest.raises(CheckpointError) as error:
        fetch_weights(weights)
    assert "resmlp_s12:tiny" in str(error.value)
    assert "0123abcd" in str(error.value)
    assert left(url_path(weights.url)) == []


def test_a_wrong_file_of_the_users_is_named_and_left(shelf) -> None:
    weights = row(url=with_digits(DATA, "0123abcd"))
    path = url_path(weights.url)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError) as error:
        fetch_weights(weights)
    assert str(path) in str(error.value)
    assert "resmlp_s12:tiny" in str(error.value)
    assert path.read_bytes() == b"mine"


def test_what_is_not_there_says_where_to_put_it(shelf) -> None:
    with pytest.raises(ResourceError) as raised:
        fetch_weights(row())
    facts = ("resmlp_s12:tiny", "https://weights.example/deit/resmlp_tiny.pth", "404", str(url_path(row().url)))
    assert [fact for fact in facts if fact not in str(raised.value)] == []
    assert left(url_path(row().url)) == []


def test_a_network_that_cannot_be_reached(shelf, monkeypatch) -> None:
    monkeypatch.setenv("PATCHLOOM_MIRROR", "http://127.0.0.1:1")
    with pytest.raises(ResourceError) as error:
        fetch_weights(row())
    assert "resmlp_s12:tiny" in str(error.value)
    assert row().url in str(error.value)
    assert str(url_path(row().url)) in str(error.value)


def test_a_hub_that_cannot_be_reached_is_noticed_at_once(shelf, monkeypatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("which tries for half a minute")
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ResourceError, match="timm/resmlp_tiny"):
        fetch_weights(row(hub="timm/resmlp_tiny", url=""))


def test_a_mirror_is_an_address(shelf, monkeypatch) -> None:
    monkeypatch.setenv("PATCHLOOM_MIRROR", "file:///etc")
    with pytest.raises(UsageError) as error:
        fetch_weights(row())
    assert "PATCHLOOM_MIRROR" in str(error.value)
    assert "file:///etc" in str(error.value)


def test_offline_asks_nobody_and_finds_what_is_here(shelf, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    with pytest.raises(ResourceError) as error:
        fetch_weights(row())
    assert "resmlp_s12:tiny" in str(error.value)
    assert "HF_HUB_OFFLINE" in str(error.value)
    hub = row(hub="timm/resmlp_tiny", url="")
    with pytest.raises(ResourceError) as error:
        fetch_weights(hub)
    assert "hf download timm/resmlp_tiny" in str(error.value)
    assert "model.safetensors" in str(error.value)
    link = in_hub_cache(tmp_path, "timm/resmlp_tiny", DATA)
    assert fetch_weights(hub) == link
    assert shelf.requests == []


def test_a_full_disk_is_one_line(shelf, monkeypatch) -> None:
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as within:
        within.setattr(downloads, "_copy", full)
        with pytest.raises(ResourceError) as error:
            fetch_weights(row())
        assert "resmlp_s12:tiny" in str(error.value)
        assert str(url_path(row().url)) in str(error.value)
    assert not url_path(row().url).exists()
    assert fetch_weights(row()).read_bytes() == DATA


def test_a_cache_that_cannot_be_written_is_one_line(shelf, tmp_path) -> None:
    (tmp_path / "torch").write_text("a file in its place")
    with pytest.raises(UsageError) as error:
        fetch_weights(row())
    assert "TORCH_HOME" in str(error.value)
    assert str(tmp_path / "torch") in str(error.value)


def hub_files(data: bytes) -> dict[str, bytes]:
    return {"/timm/resmlp_tiny/resolve/main/model.safetensors": data}


def test_a_repository_of_the_hub_is_fetched_by_its_library(shelf, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", shelf.address)
    shelf.hub, shelf.files = True, hub_files(DATA)
    weights = row(hub="timm/resmlp_tiny")
    path = fetch_weights(weights)
    assert path.read_bytes() == DATA
    assert path.is_relative_to(tmp_path / "hub" / "models--timm--resmlp_tiny")
    requests = len(shelf.requests)
    assert fetch_weights(weights) == path
    assert len(shelf.requests) == requests


def test_a_file_that_came_damaged_from_the_hub_is_removed(shelf, tmp_path, monkeypatch) -> None:
    def damaged(repository, name, **_):
        link = in_hub_cache(tmp_path, repository, DATA)
        Path(os.path.realpath(link)).write_bytes(DATA[::-1])
        return str(link)

    monkeypatch.setenv("HF_ENDPOINT", shelf.address)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", damaged)
    with pytest.raises(CheckpointError, match="timm/resmlp_tiny"):
        fetch_weights(row(hub="timm/resmlp_tiny", url=""))
    assert downloads.in_cache(row(hub="timm/resmlp_tiny", url="")) is None


def test_where_the_hub_has_it_not_the_authors_are_asked(shelf, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", shelf.address)
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    assert fetch_weights(row(hub="timm/resmlp_tiny")) == url_path(row().url)


FETCH = """
import sys
from patchloom.models.pretrained import downloads
from patchloom.models.pretrained.table import Weights
row = Weights(variant="resmlp_s12", tag="tiny", url="https://weights.example/deit/resmlp_tiny.pth",
              mean=(0.5,) * 3, std=(0.5,) * 3, crop_ratio=1.0)
print(downloads.fetch_weights(row))
"""


def test_of_two_processes_one_fetches(shelf) -> None:
    shelf.files[f"{PLACE}resmlp_tiny.pth"] = DATA
    both = [subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {one.communicate(timeout=60)[0].strip() for one in both} == {str(url_path(row().url))}
    assert len(shelf.requests) == 1
