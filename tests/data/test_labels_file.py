"""Labels files as people have them; what was understood is said."""

import pytest
from PIL import Image

from patchloom.data.reading_options import Reading
from patchloom.data.sources.labels_file import open_labels_file
from patchloom.data.sources.source import find_source
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import any_has, facts, has_facts

PATHS = {"a.png": "cat", "b.png": "dog", "c.png": "cat", "d.png": "dog"}


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for path in PATHS:
        draw(root / path)
    return root


def labels_of(listing):
    return {
        listing.images.key(int(row)): listing.names[label] if label >= 0 else ""
        for row, label in zip(listing.rows, listing.labels, strict=True)
    }


def open_text(photos, text, name="labels.csv", **options):
    content = text if isinstance(text, bytes) else text.encode()
    (photos / name).write_bytes(content)
    return open_labels_file(photos / name, **options)


def rows(separator=",", header="path,label", prefix="", suffix=""):
    lines = [header.replace(",", separator)] if header else []
    return "\n".join([*lines, *(f"{prefix}{path}{suffix}{separator}{label}" for path, label in PATHS.items())])


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.txt"])
@pytest.mark.parametrize("header", ["", "path,label", "Image,Species", "file_name,category", "ID,Target", "x,y z"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_headers_and_separators(photos, name, header, separator):
    assert labels_of(open_text(photos, rows(separator, header), name).train) == PATHS


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + rows().encode(),
        rows().replace("\n", "\r\n").encode() + b"\r\n\r\n",
        "\ufeff".encode("utf-16-le") + rows("\t").encode("utf-16-le"),
        rows().replace("cat", '"cat"').encode(),
        rows(", ").encode(),
        rows(" ", "").encode(),
        ("# a comment\n" + rows()).encode(),
        b"path,label\n./a.png,cat\n.\\b.png,dog\nc.png,cat\nd.png,dog",
        rows(prefix="photos/").encode(),
        rows(prefix="photos\\").encode(),
        rows(prefix="C:\\Users\\me\\photos\\").encode(),
        rows(prefix="/elsewhere/photos/").encode(),
        b"id,label\na,cat\nb,dog\nc,cat\nd,dog\n",
        b"label,path\ncat,a.png\ndog,b.png\ncat,c.png\ndog,d.png\n",
    ],
)
def test_bytes_and_paths(photos, content):
    assert labels_of(open_text(photos, content).train) == PATHS


def test_what_was_understood_is_said(photos):
    source = open_text(photos, "image;species;set\na.png;cat;train\nb.png;dog;train\nc.png;cat;val\nd.png;dog;val\n")
    (note,) = source.notes
    assert has_facts(note, "labels.csv", "'image'", "'species'", 2, "'set'", ";")
    assert labels_of(source.val) == {"c.png": "cat", "d.png": "dog"}
    source = open_text(photos, rows(" ", ""), "list.txt")
    (note,) = source.notes
    assert has_facts(note, "list.txt", 1, 2)


def test_absolute_paths_and_a_file_elsewhere(photos, tmp_path):
    assert labels_of(open_text(photos, rows(prefix=f"{photos}/")).train) == PATHS
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "l.csv").write_text(rows(prefix="../photos/"))
    source = open_labels_file(tmp_path / "lists" / "l.csv", photos)
    assert labels_of(source.train) == PATHS
    (tmp_path / "lists" / "l.csv").write_text("path,label\na.png,cat\nb.png,dog\n")
    source = open_labels_file(tmp_path / "lists" / "l.csv", photos)
    assert has_facts(source.notes[-1], 2, "photos")


def test_a_name_without_extension_must_fit_one_file(photos):
    Image.new("RGB", (8, 8)).save(photos / "a.jpg")
    source = open_text(photos, "id,label\na,cat\nb,dog\nc,cat\nd,dog\n")
    assert has_facts(source.notes[-1], 4, " a")
    assert "a.jpg" not in labels_of(source.train)


def test_a_name_alone_is_found_in_the_folder_of_its_split(photos):
    for split in ("train", "test"):
        draw(photos / split / "0001.png")
        draw(photos / split / "0002.png")
    (photos / "test.csv").write_text("id\n0001\n0002\n")
    source = open_text(photos, "id,breed\n0001,cat\n0002,dog\n", "train.csv")
    assert labels_of(source.train) == {"train/0001.png": "cat", "train/0002.png": "dog"}
    assert any_has(source.notes, "test.csv")


def test_the_label_column_can_be_chosen(photos):
    text = "image,genus,colour\na.png,felis,red\nb.png,canis,red\nc.png,felis,blue\nd.png,canis,blue\n"
    with pytest.raises(UsageError, match=facts("genus", "colour", "--label-column")):
        open_text(photos, text)
    assert labels_of(open_text(photos, text, label_column="Colour").train)["a.png"] == "red"
    with pytest.raises(UsageError, match=facts("'genu'", "--label-column", "image", "genus")):
        open_text(photos, text, label_column="genu")
    assert labels_of(open_text(photos, rows(header=""), label_column="2").train) == PATHS
    with pytest.raises(UsageError, match=facts("'genus'", "--label-column", 1, 2)):
        open_text(photos, rows(header=""), label_column="genus")


def test_the_column_of_a_labels_file_in_the_folder_can_be_chosen(photos):
    text = "image,genus,colour\na.png,felis,red\nb.png,canis,red\nc.png,felis,blue\nd.png,canis,blue\n"
    with pytest.raises(UsageError, match="--label-column"):
        find_source(photos, reading=Reading(label_column="colour"))
    (photos / "labels.csv").write_text(text)
    assert labels_of(find_source(photos, reading=Reading(label_column="colour")).train)["a.png"] == "red"


def test_words_are_preferred_to_numbers_and_other_columns_are_levels_or_left_out(photos):
    text = (
        "filename,label,class_name,family,photographer,width\n"
        "a.png,0,lion,felid,ann,1\nb.png,1,wolf,canid,bob,2\nc.png,2,lynx,felid,ann,3\nd.png,0,lion,felid,bob,4\n"
    )
    source = open_text(photos, text)
    assert source.train.names == ("lion", "lynx", "wolf")
    assert source.train.levels == {"family": {"lion": "felid", "wolf": "canid", "lynx": "felid"}}
    assert any_has(source.notes, "labels.csv", "label, width")
    assert any_has(source.notes, "labels.csv", "'photographer'", "'lion'", "'ann'", "'bob'")


def test_number_codes_are_ordered_as_numbers(photos):
    source = open_text(photos, "path,label\na.png,10\nb.png,2\nc.png,2\nd.png,1\n")
    assert source.train.names == ("1", "2", "10")


@pytest.mark.parametrize("cell", ["cat|dog", "cat;dog", '"cat, dog"', "\"['cat', 'dog']\""])
def test_of_several_labels_the_first_counts(photos, cell):
    text = f"path,label\na.png,{cell}\nb.png,dog\nc.png,cat\nd.png,dog\n"
    source = open_text(photos, text)
    assert labels_of(source.train) == PATHS
    assert any_has(source.notes, "labels.csv", 4)
    with pytest.raises(DataError, match=facts("labels.csv", 4)):
        open_text(photos, text, strict=True)


def test_commas_in_names_are_no_lists(photos):
    source = open_text(photos, 'path,label\na.png,"tench, Tinca tinca"\nb.png,"goldfish, Carassius"\nc.png,ray\n')
    assert source.train.names == ("goldfish, Carassius", "ray", "tench, Tinca tinca")


def test_a_column_for_each_class(photos):
    text = "image,cat,dog,cow\na.png,1.0,0.0,0.0\nb.png,0,1,0\nc.png,1,0,0\nd.png,0,1,1\n"
    source = open_text(photos, text)
    assert labels_of(source.train) == PATHS
    assert has_facts(source.notes[0], 3, 2)
    assert has_facts(source.notes[1], 4)
    assert labels_of(open_text(photos, text, label_column="dog").train)["b.png"] == "1"


def test_rows_twice(photos):
    source = open_text(photos, rows() + "\na.png,cat")
    assert labels_of(source.train) == PATHS
    assert has_facts(source.notes[-1], "labels.csv", 1)
    with pytest.raises(DataError, match=facts("a.png", "'cat'", "'dog'")):
        open_text(photos, rows() + "\na.png,dog")


def test_latin_1_is_read_and_said(photos):
    source = open_text(photos, "path,label\na.png,pâté\nb.png,café\n".encode("latin-1"))
    assert source.train.names == ("café", "pâté")
    assert "latin-1" in source.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "path,label"),
        ("hello", facts("'hello'", "path,label")),
        ("path,label\n", "'path,label'"),
        ("path,label\nnone.png,cat\n", r"none\.png"),
        ("path,note\na.png,\nb.png,\n", "'path,note'"),
    ],
)
def test_what_cannot_be_understood_is_one_line(photos, text, said):
    with pytest.raises((DataError, UsageError), match=said) as error:
        open_text(photos, text)
    assert "\n" not in str(error.value)


# Lists by split -------------------------------------------------------------------------------------------------------


def grocery(root):
    """As the Grocery Store data set has them: lists by split, numbers named by classes.csv."""
    classes = [("Golden", 0, "Apple", 0), ("Royal", 1, "Apple", 0), ("Banana", 2, "Banana", 1)]
    lines = ["Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int),Iconic Image Path (str)"]
    lines += [f"{name},{i},{coarse},{j},/icons/{name}.jpg" for name, i, coarse, j in classes]
    (root / "classes.csv").write_text("\n".join(lines))
    for split in ("train", "val", "test"):
        rows = []
        for name, i, coarse, j in classes:
            draw(root / split / "Fruit" / coarse / f"{name}_1.jpg")
            rows.append(f"{split}/Fruit/{coarse}/{name}_1.jpg, {i}, {j}")
        (root / f"{split}.txt").write_text("\n".join(rows))


def test_lists_of_all_splits_with_named_numbers(tmp_path):
    grocery(tmp_path)
    source = open_labels_file(tmp_path / "val.txt", tmp_path)
    assert source.train.names == ("Banana", "Golden", "Royal")
    assert source.train.levels == {"coarse": {"Golden": "Apple", "Royal": "Apple", "Banana": "Banana"}}
    assert set(labels_of(source.train)) == {
        "train/Fruit/Apple/Golden_1.jpg", "train/Fruit/Apple/Royal_1.jpg", "train/Fruit/Banana/Banana_1.jpg",
    }  # fmt: skip
    assert len(source.val) == 3
    assert has_facts(source.notes[0], "val.txt", 1, 2, "classes.csv", 3)


def test_one_list_alone_says_what_is_missing(tmp_path):
    grocery(tmp_path)
    (tmp_path / "val.txt").unlink()
    (tmp_path / "test.txt").unlink()
    source = open_labels_file(tmp_path / "train.txt", tmp_path)
    assert any_has(source.notes, "train.txt", "val", "test")
    assert source.val is None
    assert has_facts(source.notes[-1], 6)


def test_names_by_line_for_numbers(photos):
    (photos / "classes.txt").write_text("great dane\nlynx\n")
    source = open_text(photos, "a.png 0\nb.png 1\nc.png 0\nd.png 1\n", "train.txt")
    assert source.train.names == ("great dane", "lynx")
    (photos / "classes.txt").write_text("1 great dane\n2 lynx\n")
    assert open_text(photos, "a.png 1\nb.png 2\n", "train.txt").train.names == ("great dane", "lynx")
