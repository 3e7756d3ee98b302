"""Every reader is given files that somebody changed: it answers as before, or says in one line why not.

Some of the cases of `benchmarks/mutations.py`, which goes through 20,000.
"""

import importlib.util
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from patchloom_runtime.errors import DataError
from tests.fuzz.targets import TARGETS
from tests.reliability import feeding
from tests.reliability.feeding import FAILED, OTHERWISE, REFUSED, SAME, Case, Feeder, cases_of
from tests.reliability.mutations import KINDS, edit, of_json, to_json
from tests.reliability.readers.seeds import make_seeds
from tests.reliability.readers.table import READERS

COUNT = 120
SLOW = ("detector report", "segmenter report")  # whole pages with intervals
NEEDS = {
    "parquet": "pyarrow",
    "index of shards": "pyarrow",
    "translator": "sentencepiece",
    "translator report": "sentencepiece",
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What readers begin with."""
    folder = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        make_seeds(folder)
    return folder


@pytest.fixture(scope="module")
def feeder(seeds: Path, tmp_path_factory: pytest.TempPathFactory):
    """One process for all cases."""
    feeder = Feeder(tmp_path_factory.mktemp("fed"), seeds)
    yield feeder
    feeder.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in READERS])
def test_changed_files_are_answered_or_refused(name: str, feeder: Feeder) -> None:
    if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"needs {NEEDS[name]}")
    cases = [case for case in cases_of(COUNT) if case.reader == name]
    verdicts = [feeder.verdict(case) for case in cases]
    assert [
        f"{one.mutation} → {one.failure} {one.detail}; {one.case}" for one in verdicts if one.outcome == FAILED
    ] == []
    assert {one.outcome for one in verdicts} <= {SAME, OTHERWISE, REFUSED}
    # The mutations reach the reader; of a cache that cannot be used, nobody hears.
    assert name == "cache" or len(verdicts) < 3 or any(one.outcome != SAME for one in verdicts)


# The harness sees what it is there to see ---------------------------------------------------------------------------


def raises(seeds: Path, folder: Path) -> str:
    """A bug."""
    return {}["x"]


def hangs(seeds: Path, folder: Path) -> None:
    """Waits for ever."""
    while folder.exists():
        pass


def dies(seeds: Path, folder: Path) -> None:
    """Ends without a word."""
    os._exit(7)


def eats(seeds: Path, folder: Path) -> int:
    """Takes more than it may."""
    before = feeding._memory("VmHWM")  # this alone is more, whatever the process gives back meanwhile
    return len(bytearray(b"x") * (before + (1 << 29)))


def touches(seeds: Path, folder: Path) -> None:
    """Writes beside its folder."""
    (folder.parent / "outside" / "secret.txt").write_text("mine\n")


def litters(seeds: Path, folder: Path) -> None:
    """Writes into its folder."""
    (folder / "litter").touch()


class TwoLinesError(DataError):
    """What no error of patchloom's says."""

    def __str__(self) -> str:
        return "one\ntwo"


def says_two_lines(seeds: Path, folder: Path) -> None:
    """Complains at length."""
    raise TwoLinesError


def believes(seeds: Path, folder: Path) -> bytes:
    """Takes whatever it finds."""
    return (folder / "real.json").read_bytes() if (folder / "real.json").is_file() else b""


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(raises, "KeyError"), (hangs, "hang"), (dies, "died"), (eats, "memory"), (touches, "outside touched"),
     (litters, "written into the folder"), (says_two_lines, "more than a line"), (believes, "changed answer")],
)  # fmt: skip
def test_faults_of_a_reader_are_seen(fault, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(seeds: Path, folder: Path) -> object:
        """Well, as long as the file is as it was made."""
        path = folder / "real.json"
        whole = not path.is_symlink() and path.is_file() and path.read_bytes() == b"[[1], [2, 3], [], [4]]"
        return b"[[1], [2, 3], [], [4]]" if whole else fault(seeds, folder)

    monkeypatch.setitem(READERS, "odd", replace(READERS["real labels"], read=read, ours=fault is believes))
    monkeypatch.setattr(feeding, "LIMIT_S", 1.0 if fault is hangs else 10.0)
    monkeypatch.setattr(feeding, "LIMIT_BYTES", 50 << 20)
    odd = Feeder(tmp_path, tmp_path)
    verdict = odd.verdict(Case("odd", 0))
    odd.close()
    assert (verdict.outcome, verdict.failure[0]) == (FAILED, kind)
    assert verdict.mutation.startswith("real.json: ")


def test_a_case_is_the_same_each_time() -> None:
    data = b'{"a": [1, 2, {"b": null}], "c": "d"}'
    for number in range(50):
        one, other = (of_json(data, random.Random(number)) for _ in range(2))
        assert one == other


def test_a_tree_is_changed_in_one_place() -> None:
    tree = {"a": [1, 2, {"b": None}], "c": "d"}
    said = {edit(tree, random.Random(number))[1] for number in range(200)}
    assert len(said) > 60
    assert tree == {"a": [1, 2, {"b": None}], "c": "d"}
    assert to_json(tree) == '{"a": [1, 2, {"b": null}], "c": "d"}'


def test_every_kind_of_mutation_is_used() -> None:
    used = {kind for reader in READERS.values() for kind in reader.files.values()}
    fuzzed = {kind for target in TARGETS.values() for kind in target.kinds}
    assert used | fuzzed == set(KINDS)
