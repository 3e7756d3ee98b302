"""Classes that a person takes for one: merged where nobody can have meant two, named otherwise."""

import csv
import unicodedata

import numpy as np
import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.sources.source import open_data, open_for
from patchloom_runtime.errors import DataError
from tests.data.facts import any_has, facts

COMPOSED, DECOMPOSED = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")


def table(tmp_path, *labels: str):
    """A labels file with two pictures per label."""
    rows = []
    for number, label in enumerate(labels):
        for i in range(2):
            pixels = np.random.default_rng((number, i)).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}-{i}.png")
            rows.append([f"{number}-{i}.png", label])
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *rows])
    return tmp_path / "labels.csv"


@pytest.mark.parametrize(("one", "other", "name"), [("cat", "cat ", "cat"), (COMPOSED, DECOMPOSED, COMPOSED)])
def test_spaces_and_unicode_form_make_no_class(tmp_path, one, other, name):
    data = open_data(table(tmp_path, one, other, "dog"), val_fraction=0.3)
    assert data.classes.names == tuple(sorted([name, "dog"]))
    assert len(data.train) + len(data.val) == 6


def test_a_model_of_one_form_is_tested_on_the_other(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    classes = open_data(table(tmp_path / "a", COMPOSED, "dog")).classes
    tested = open_for(table(tmp_path / "b", DECOMPOSED, "dog"), classes)
    assert (len(tested), sorted(set(tested.labels.tolist()))) == (4, [0, 1])


@pytest.mark.parametrize("other", ["Cat", "cat\u200b", "ｃat"])
def test_names_that_look_alike_stay_apart_and_are_named(tmp_path, other):
    file = table(tmp_path, "cat", other, "dog")
    report = check(file)
    assert len(report.classes) == 3
    assert len(report.problems()) == 1
    assert any_has(open_data(file).notes, "'cat'", 2)


@pytest.mark.parametrize("value", ["nan", "NA", "N/A", "null"])
def test_missing_values_of_a_spreadsheet_are_named(tmp_path, value):
    file = table(tmp_path, value, "cat", "dog")
    assert len(check(file).problems()) == 1
    assert any_has(open_data(file).notes, f"'{value}'", 2)


def test_labels_that_train_refuses_do_not_pass_check(tmp_path):
    file = table(tmp_path, "", "cat", "dog")
    with pytest.raises(DataError, match=facts(2, 6)):
        open_data(file)
    assert check(file).problems()


def test_a_split_column_of_numbers_is_said(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table(tmp_path, "a", "b")
    images = [file.read_bytes() for file in sorted(tmp_path.glob("*.png"))]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 0, 1], "split": [0, 0, 1, 2]}), tmp_path / "a.parquet")
    assert any_has(check(tmp_path / "a.parquet").notes, "'0'", 2, "'1'", "'2'", "train", "val", "test")


def test_a_table_without_rows_is_refused(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    empty = pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())})
    pq.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet"):
        check(tmp_path / "a.parquet")
