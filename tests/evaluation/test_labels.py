import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.datasets import ClassTable
from patchloom.evaluation.imagenet_labels import open_v2, read_real_labels, real_accuracy, real_labels_of
from patchloom_runtime.errors import DataError, UsageError

REAL = [[], [3], [1, 4], [0], [2, 5, 6]]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=20))
def test_real_accuracy_is_its_definition(images):
    predictions, labels = zip(*images, strict=True)
    counted = [(p, right) for p, right in images if right]
    if not counted:
        with pytest.raises(DataError):
            real_accuracy(predictions, labels)
        return
    expected = 100 * sum(p in right for p, right in counted) / len(counted)
    assert real_accuracy(np.array(predictions), labels) == pytest.approx(expected)


def test_images_without_labels_do_not_count():
    assert real_accuracy([0, 3, 4, 9, 5], REAL) == 75


def test_labels_are_found_by_file_name(tmp_path):
    (tmp_path / "real.json").write_text(json.dumps(REAL))
    real = read_real_labels(tmp_path / "real.json")
    assert real == [tuple(labels) for labels in REAL]
    names = ["val/n02/ILSVRC2012_val_00000005.JPEG", "val/n01/ILSVRC2012_val_00000002.JPEG"]
    assert real_labels_of(names, real) == [(2, 5, 6), (3,)]
    for strange in ("val/cat.jpg", "ILSVRC2012_val_00000006.JPEG", "ILSVRC2012_val_00000000.JPEG"):
        with pytest.raises(DataError) as error:
            real_labels_of([strange], real)
        assert strange in str(error.value)
        assert "5" in str(error.value)


def test_wrong_real_files_are_told(tmp_path):
    path = tmp_path / "real.json"
    with pytest.raises(UsageError, match=r"real\.json"):
        read_real_labels(path)
    for text in ("[1, 2]", "[[1], ", '[["cat"]]', "7"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"real\.json"):
            read_real_labels(path)
    with pytest.raises(UsageError) as error:
        real_accuracy([1, 2], REAL)
    assert "2" in str(error.value)
    assert "5" in str(error.value)


def test_v2_folders_are_class_numbers(tmp_path):
    """Sorted as text the folders are 0, 1, 10, 11, 2: a class must not become its place in that list."""
    for number in (0, 1, 2, 10, 11):
        (tmp_path / str(number)).mkdir()
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / str(number) / "picture.png")
    classes = ClassTable(tuple(f"n{number:08d}" for number in range(12)))
    result = open_v2(tmp_path, classes)
    assert result.classes is classes
    assert sorted(result.labels.tolist()) == [0, 1, 2, 10, 11]
    for position, label in enumerate(result.labels):
        assert result.read(position).getpixel((0, 0))[0] == label


def test_other_folders_are_not_v2(tmp_path):
    for folder in ("0", "12"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / folder / "picture.png")
    with pytest.raises(DataError, match="12"):
        open_v2(tmp_path, ClassTable(tuple("abcdefghijkl")))
    (tmp_path / "12").rename(tmp_path / "cat")
    with pytest.raises(DataError) as error:
        open_v2(tmp_path, ClassTable(tuple("abcdefghijkl")))
    assert "cat" in str(error.value)
    assert "12" in str(error.value)
