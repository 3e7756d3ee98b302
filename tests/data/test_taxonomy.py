"""Levels above the classes: from nested folders, files and columns; always a tree, and in order."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from patchloom.data.labels.taxonomy import from_fine_to_coarse, read_taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data, open_for
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import any_has, facts, has_facts

SPECIES = {
    "cat": ("felid", "mammal"),
    "lion": ("felid", "mammal"),
    "dog": ("canid", "mammal"),
    "carp": ("fish", "fish"),
}


def draw(path: Path, count: int = 3) -> None:
    path.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (8, 8), (len(path.name) * 9, i * 40, sum(path.name.encode()) % 256)).save(path / f"{i}.png")


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [("",), ("train", "val")])
def test_nested_folders_are_classes_in_coarser_ones(tmp_path, splits):
    for split in splits:
        for name, (family, group) in SPECIES.items():
            draw(tmp_path / split / group / family / name)
    data = open_data(tmp_path)
    assert data.classes.names == ("carp", "cat", "dog", "lion")
    assert list(data.classes.levels) == ["coarse1", "coarse2"]
    assert data.classes.levels["coarse1"] == (("canid", "felid", "fish"), (2, 1, 0, 1))
    assert data.classes.levels["coarse2"] == (("fish", "mammal"), (0, 1, 1, 1))
    assert any_has(data.notes, 4, "coarse1 (3)", "coarse2 (2)")
    assert open_data(tmp_path, level="coarse2").classes.names == ("fish", "mammal")


def test_one_level_above_is_called_coarse(tmp_path):
    for path in ("animal/cat", "animal/dog", "plant/oak"):
        draw(tmp_path / path)
    Image.new("RGB", (8, 8)).save(tmp_path / "stray.png")
    (tmp_path / "plant" / "elm").mkdir()
    data = open_data(tmp_path)
    assert any_has(data.notes, "train", "'elm'")
    assert data.classes.names == ("cat", "dog", "oak")
    assert data.classes.levels == {"coarse": (("animal", "plant"), (0, 0, 1))}
    assert has_facts(data.notes[0], 1)


def test_a_coarse_model_meets_data_that_are_nested(tmp_path):
    for path in ("animal/cat", "animal/dog", "plant/oak"):
        draw(tmp_path / path)
    model = open_data(tmp_path, level="coarse").classes
    source = open_for(tmp_path, model)
    assert source.labels.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_a_level_of_one_class_cannot_be_trained_at(tmp_path):
    for path in ("animal/cat", "animal/dog"):
        draw(tmp_path / path)
    assert open_data(tmp_path).classes.levels == {"coarse": (("animal",), (0, 0))}
    with pytest.raises(DataError, match=facts("'animal'", "'coarse'")):
        open_data(tmp_path, level="coarse")


# Files ----------------------------------------------------------------------------------------------------------------

LINES = "class,family,order\ncat,felid,mammal\nlion,felid,mammal\ndog,canid,mammal\ncarp,fish,fish\n"
RECORDS = [{"class": name, "order": order, "family": family} for name, (family, order) in SPECIES.items()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", LINES),
        ("t.tsv", LINES.replace(",", "\t")),
        ("t.json", json.dumps(RECORDS)),
        ("t.yaml", json.dumps(RECORDS)),
        (
            "t.yml",
            json.dumps({level: {r["class"]: r[level] for r in RECORDS} for level in ("order", "family")}),
        ),
    ],
)
def test_a_file_of_several_levels(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    levels = read_taxonomy(tmp_path / name)
    assert list(levels) == ["family", "order"]
    assert levels["family"] == {name: family for name, (family, _) in SPECIES.items()}
    assert levels["order"] == {name: order for name, (_, order) in SPECIES.items()}


def test_a_file_in_the_folder_is_found(tmp_path):
    for name in SPECIES:
        draw(tmp_path / name)
    (tmp_path / "taxonomy.csv").write_text(LINES)
    data = open_data(tmp_path)
    assert {level: names for level, (names, _) in data.classes.levels.items()} == {
        "family": ("canid", "felid", "fish"),
        "order": ("fish", "mammal"),
    }
    assert not any(".csv" in note for note in data.notes)
    with pytest.raises(UsageError, match=facts("'familly'", "family", "order")):
        open_data(tmp_path, level="familly")
    draw(tmp_path / "newt")
    with pytest.raises(DataError, match=facts("'family'", "'newt'")):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "parts"),
    [
        (LINES + "puma,felid,bird\n", DataError, ("'felid'", "'family'", "'mammal'", "'cat'", "'bird'")),
        (LINES + "cat,canid,mammal\n", DataError, ("'cat'", "'felid'", "'canid'", "'family'")),
        (LINES + "newt,amphibian\n", UsageError, ("row 6", 2, "class,family,order")),
        ("class,family,family\ncat,a,b\n", UsageError, ("class,family,family",)),
        ('{"cat": "felid", "cat": "canid"}', UsageError, ("'cat'", "'felid'", "'canid'")),
    ],
)
def test_files_that_are_refused(tmp_path, text, error, parts):
    path = tmp_path / ("t.json" if text.startswith("{") else "t.csv")
    path.write_text(text)
    with pytest.raises(error, match=path.name) as result:
        read_taxonomy(path)
    assert has_facts(result.value, *parts)
    assert "\n" not in str(result.value)


def test_aliases_are_refused_before_they_grow(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]  # 10¹⁰ values
    (tmp_path / "taxonomy.yaml").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=facts("taxonomy.yaml", "*a0")):
        read_taxonomy(tmp_path / "taxonomy.yaml")


def test_an_empty_cell_is_a_class_without_an_entry(tmp_path):
    for name in ("cat", "dog"):
        draw(tmp_path / name)
    (tmp_path / "taxonomy.csv").write_text("class,family\ncat,felid\ndog,\n")
    with pytest.raises(DataError, match=facts("'family'", "'dog'")):
        open_data(tmp_path)


def test_levels_of_two_sources_form_one_tree():
    levels = {"colour": {"a": "red", "b": "blue", "c": "red"}, "size": {"a": "big", "b": "big", "c": "small"}}
    with pytest.raises(DataError, match=facts("data", "'red'", "'colour'", "'big'", "'a'", "'small'", "'c'")):
        from_fine_to_coarse(levels, "data")


def test_a_labels_file_without_a_label_names_the_image(tmp_path):
    draw(tmp_path / "photos", count=4)
    lines = [
        "path,label,family",
        "photos/0.png,cat,felid",
        "photos/1.png,dog,canid",
        "photos/2.png,,",
        "photos/3.png,cat,",
    ]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=facts(4, "photos/2.png")):
        open_data(tmp_path / "labels.csv")
    unlabeled = open_data(tmp_path / "labels.csv", labeled=False)
    assert unlabeled.classes.levels == {"family": (("canid", "felid"), (1, 0))}


# Columns --------------------------------------------------------------------------------------------------------------


def test_label_columns_of_parquet_are_levels(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    names = [name for name in SPECIES for _ in range(2)]
    columns = {
        "image": [buffer.getvalue()] * 8,
        "label": names,
        "family_label": [["canid", "felid", "fish"].index(SPECIES[name][0]) for name in names],
        "order_label": [SPECIES[name][1] for name in names],
        "place_label": [10**12 + i % 2 for i in range(8)],
        "split": ["train", "val"] * 4,
    }
    info = json.dumps({"family_label_names": ["Canidae", "Felidae", "Pisces"]})
    pq.write_table(pa.table(columns).replace_schema_metadata({"dataset_info": info}), tmp_path / "a.parquet")
    data = open_data(tmp_path / "a.parquet")
    assert data.classes.levels == {
        "family": (("Canidae", "Felidae", "Pisces"), (2, 1, 0, 1)),
        "order": (("fish", "mammal"), (0, 1, 1, 1)),
    }
    (note,) = [note for note in data.notes if "place" in note]
    assert has_facts(note, "row 1", "'cat'", "'1000000000000'", "'1000000000001'", "place_label")


def test_a_genus_of_two_kingdoms(tmp_path):
    for split in ("2021_train", "2021_valid"):
        draw(tmp_path / split / "00001_Animalia_Chordata_Aves_Passeriformes_Prunellidae_Prunella_modularis")
        draw(tmp_path / split / "00002_Plantae_Tracheophyta_Magnoliopsida_Lamiales_Lamiaceae_Prunella_vulgaris")
    levels = open_data("inaturalist", root=tmp_path).classes.levels
    assert levels["family"][0] == ("Lamiaceae", "Prunellidae")
    assert len(levels["genus"][0]) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_label_columns_of_hugging_face_data_are_levels(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = [name for name in SPECIES for _ in range(2)]
    images = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(8)]
    columns = {"image": images, "label": names, "family_label": [SPECIES[name][0] for name in names]}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    data = open_data(tmp_path / "saved")
    assert data.classes.levels == {"family": (("canid", "felid", "fish"), (2, 1, 0, 1))}
    assert open_data(tmp_path / "saved", level="family", reading=Reading(val="test")).val.labels.tolist() == [
        1,
        1,
        1,
        1,
        0,
        0,
        2,
        2,
    ]


# ImageNet's coarse classes --------------------------------------------------------------------------------------------


def test_imagenet_has_127_coarse_classes_however_its_classes_are_called():
    levels = read_taxonomy(Path("imagenet127"))["coarse"]
    assert len(set(levels.values())) == 127
    spelled = (("n01440764", "tench, Tinca tinca", "tench"), ("n02012849", "crane bird"), ("n03126707", "crane"))
    of = ("soft-finned fish", "bird", "device")
    for names, coarse in zip(spelled, of, strict=True):
        assert {levels[name] for name in names} == {coarse}
    counts = Counter(coarse for name, coarse in levels.items() if re.fullmatch(r"n\d{8}", name))
    assert sum(counts.values()) == 1000
    # Those with most classes; 65 coarse classes have one alone.
    assert counts.most_common(3) == [("mammal", 218), ("device", 124), ("container", 92)]
    assert sum(count == 1 for count in counts.values()) == 65


def test_folders_named_by_wordnet_ids_are_trained_at_the_coarse_level(tmp_path):
    for name in ("n01440764", "n01443537", "n02085620"):
        draw(tmp_path / name)
    coarse = open_data(tmp_path, level="coarse", reading=Reading(taxonomy="imagenet127"))
    assert coarse.classes.names == ("mammal", "soft-finned fish")


def test_a_taxonomy_that_is_no_file_names_the_known_one(tmp_path):
    draw(tmp_path / "n01440764")
    with pytest.raises(UsageError, match=facts("imagenet-127", "imagenet127")):
        open_data(tmp_path, reading=Reading(taxonomy="imagenet-127"))
    draw(tmp_path / "spaceship")
    with pytest.raises(DataError, match=facts("'coarse'", "'spaceship'")):
        open_data(tmp_path, reading=Reading(taxonomy="imagenet127"))
