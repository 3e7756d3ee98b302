"""Sentence pairs with planted faults: each is found with its file and line, whatever the pairs are kept in."""

import gzip

import pytest

from patchloom.data.checking.check import check
from patchloom_runtime.errors import DataError
from tests.conftest import SHARED
from tests.data.facts import facts, has_facts

GERMAN = [f"Der Hund Nummer {i} läuft über die Wiese." for i in range(20)]
ENGLISH = [f"Dog number {i} runs across the meadow." for i in range(20)]


def write(root, split="train", german=GERMAN, english=ENGLISH, ending=""):
    root.mkdir(parents=True, exist_ok=True)
    for language, lines in (("de", german), ("en", english)):
        content = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        (root / f"{split}.{language}{ending}").write_bytes(gzip.compress(content) if ending else content)
    return root


def told(report):
    return [(fault.where.rpartition("/")[2], fault.kind, fault.detail) for fault in report.faults]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_pairs_without_fault(tmp_path, ending):
    root = write(tmp_path / "data", ending=ending)
    write(root, "val", ["Ein Satz."], ["A sentence."], ending)
    report = check(root)
    assert report.name.startswith("data (")
    assert report.unit == "pair"
    assert report.splits == {"train": 20, "val": 1}
    assert (report.faults, report.odd, report.duplicates, report.problems(strict=True)) == ((), (), (), [])


def test_faults_of_parallel_files(tmp_path):
    german, english = list(GERMAN), list(ENGLISH)
    german[3] = ""
    german[5] = b"Stra\xdfe und Haus"
    english[7] = " \t"
    german[9] = "@@"
    german[11], english[11] = "", ""
    report = check(write(tmp_path / "data", german=[*german, "Noch einer."], english=english))
    expected = [
        ("train.de, line 4", "empty sentence", ENGLISH[3]),
        ("train.de, line 6", "not UTF-8", 5, "0xdf"),
        ("train.en, line 8", "empty sentence", GERMAN[7]),
        ("train.de, line 12", "empty sentence"),
        ("train.en, line 12", "empty sentence"),
        ("train.de", "line counts differ", "train.de", 21, "train.en", 20),
    ]
    for (where, kind, detail), (expected_where, expected_kind, *parts) in zip(told(report), expected, strict=True):
        assert (where, kind) == (expected_where, expected_kind)
        assert has_facts(detail, *parts)
    (odd,) = report.odd
    assert odd.place.where.endswith("train.de, line 10")
    assert odd.kind == "uneven sides"
    assert has_facts(odd.read_as, 2, 36)
    empty, undecoded, _ = report.problems()
    assert has_facts(empty, 4)
    assert has_facts(undecoded, "UTF-8")


def test_repeated_pairs_and_leaks(tmp_path):
    root = write(tmp_path / "data", german=[*GERMAN, GERMAN[2]], english=[*ENGLISH, ENGLISH[2]])
    write(root, "val", ["Ein Satz."], ["A sentence."])
    write(root, "test_2016", [GERMAN[4], GERMAN[5]], [ENGLISH[4], "Another translation of it."])
    report = check(root)
    places = [[(place.split, place.row) for place in group] for group in report.duplicates]
    assert places == [[("train", 2), ("train", 20)], [("train", 4), ("test_2016", 0)]]
    assert report.leaks() == [report.duplicates[1]]
    (problem,) = report.problems()
    assert has_facts(problem, "train", "test")


def test_tab_separated_pairs(tmp_path):
    lines = [f"{english}\t{german}\tCC BY" for english, german in zip(ENGLISH, GERMAN, strict=True)]
    lines[6] = "no second field"
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    report = check(tmp_path / "pairs.tsv.gz")
    assert report.splits == {"train": 20}
    ((where, kind, detail),) = told(report)
    assert (where, kind) == ("pairs.tsv.gz, line 7", "empty sentence")
    assert has_facts(detail, lines[6])


def test_a_line_may_hold_any_other_separator(tmp_path):
    odd = "one\ttwo\u2028three\x0cfour\x85five"
    report = check(write(tmp_path / "data", german=[odd, "b"], english=["x\r", "y"]))
    assert (report.splits, report.faults) == ({"train": 2}, ())


@pytest.mark.parametrize("nested", [True, False])
def test_pairs_in_parquet(tmp_path, nested):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    german = [*GERMAN[:-1], None]
    if nested:
        rows = [{"de": d, "en": e} for d, e in zip(german, ENGLISH, strict=True)]
        table = pa.table({"id": list(range(20)), "translation": rows})
    else:
        table = pa.table({"de": german, "en": ENGLISH})
    pq.write_table(table, tmp_path / "train.parquet")
    pq.write_table(table.slice(0, 2), tmp_path / "test.parquet")
    report = check(tmp_path)
    assert report.splits == {"train": 20, "test": 2}
    column = "translation.de" if nested else "de"
    ((where, kind, detail),) = told(report)
    assert (where, kind) == (f"train.parquet, {column}, row 19", "empty sentence")
    assert has_facts(detail, ENGLISH[19])
    assert len(report.leaks()) == 2


def test_a_damaged_archive_is_named(tmp_path):
    root = write(tmp_path / "data", ending=".gz")
    whole = (root / "train.en.gz").read_bytes()
    (root / "train.en.gz").write_bytes(whole[:-12])
    ((where, _, detail), *_) = told(check(root))
    assert where == "train.en.gz"
    assert detail


@pytest.mark.parametrize("header", ["path\tlabel\n", "", "Image Name\tSpecies\n"])
def test_a_labels_file_is_no_pair_of_sentences(tmp_path, header):
    (tmp_path / "labels.tsv").write_text(f"{header}a.png\tcat\n")
    with pytest.raises(DataError, match=r"a\.png"):
        check(tmp_path / "labels.tsv")


def test_notes_and_code_are_no_languages(tmp_path):
    for name in ("a.md", "a.py", "a.js"):
        (tmp_path / name).write_text("x\n")
    with pytest.raises(DataError, match=facts(tmp_path.name)):
        check(tmp_path)


@pytest.mark.skipif(not (SHARED / "data" / "multi30k").is_dir(), reason="no real data in ../shared/data")
def test_what_is_odd_in_multi30k():
    report = check(SHARED / "data" / "multi30k")
    assert report.splits["train"] == 29_000
    assert report.problems(strict=True) == []
    assert [odd.place.row for odd in report.odd] == [16_509, 16_663]  # '@@' for a German sentence
    assert len(report.duplicates) == 3
