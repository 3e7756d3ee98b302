"""Every input that the fuzzer keeps goes through its target once: nothing but patchloom's own errors comes out."""

from pathlib import Path

import pytest

from patchloom_runtime.errors import DataError
from tests.fuzz.targets import HERE, TARGETS, Reader, Target, feed
from tests.reliability.mutations import KINDS


def inputs(kind: str, target: str) -> list[Path]:
    return sorted((HERE / kind / target).glob("*"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # targets set it


@pytest.mark.parametrize("target", TARGETS)
def test_every_kept_input_is_read_or_refused_in_one_line(target: str, tmp_path: Path) -> None:
    for path in inputs("corpus", target) + inputs("regressions", target):
        feed(TARGETS[target], tmp_path, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_the_fuzzer_begins_with_files_that_are_read(target: str, tmp_path: Path) -> None:
    files = inputs("corpus", target)
    assert files
    assert all(path.stat().st_size < 8 << 10 for path in files)
    accepted = {name for path in files for name in feed(TARGETS[target], tmp_path, path.read_bytes())}
    assert accepted == {reader.name for reader in TARGETS[target].readers}
    assert set(TARGETS[target].kinds) <= set(KINDS)


def test_every_kept_input_is_of_a_target() -> None:
    folders = {path.name for kind in ("corpus", "regressions") for path in (HERE / kind).glob("*")}
    assert folders == set(TARGETS)


def raises(error: Exception) -> Target:
    def read(folder: Path) -> None:
        raise error

    return Target(("bytes",), (Reader("a", read),))


def test_only_errors_of_patchloom_pass(tmp_path: Path) -> None:
    assert feed(raises(DataError("a: damaged")), tmp_path, b"x") == []
    assert feed(Target(("bytes",), (Reader("a", Path.exists),)), tmp_path, b"x") == ["a"]
    with pytest.raises(KeyError):
        feed(raises(KeyError("a")), tmp_path, b"x")
    with pytest.raises(AssertionError):
        feed(raises(DataError("")), tmp_path, b"x")


def test_checksums_are_made_right_before_a_file_is_read(tmp_path: Path) -> None:
    changed = (HERE / "corpus" / "index" / "index.json").read_bytes().replace(b'"run"', b'"other"')
    assert feed(TARGETS["index"], tmp_path, changed) == ["index/index.json"]
