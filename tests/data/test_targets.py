"""Labels and numbers of whole images: from files to batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.data.annotations.image_labels import of_labels, of_numbers
from patchloom.data.augmentation.mixing import Blend
from patchloom.data.batches.decoded_dataset import DeviceLoader, decode_all, make_evaluation_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.checking.check import check
from patchloom.data.checking.survey import survey
from patchloom.data.datasets import ClassTable, LabeledImages, Listing, Splits
from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.reading_options import Reading
from patchloom.data.sources.builtin import ArrayImages
from patchloom.data.sources.source import find_source, open_data
from patchloom.data.splits import fold_numbers, make_splits, match, share_of_train, split_rows
from patchloom.data.targets import ImageTargets, hold_out_labels, joined, labels_of_lists
from patchloom.runs.provenance import provenance_of
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import test_transform as as_tested
from patchloom_runtime.images.samples import UNLABELED
from tests.data.layouts import photos

COUNT = 24
TAGS = [("cat",), ("cat", "dog"), ("dog", "cow"), ()]  # of the images in turn


def write(root, header, cells, name="labels.csv"):
    root.mkdir(exist_ok=True)
    photos(root, *(f"{i:02d}.png" for i in range(len(cells))))
    lines = [header, *(f"{i:02d}.png,{cell}" for i, cell in enumerate(cells))]
    (root / name).write_text("\n".join(lines))
    return root


def tagged(root, separator="|"):
    return write(root, "path,tags", [f'"{separator.join(TAGS[i % 4])}"' for i in range(COUNT)])


def expected(names=("cat", "cow", "dog")):
    return np.array([[float(name in TAGS[i % 4]) for name in names] for i in range(COUNT)], np.float32)


def images(targets, count=None):
    count = count or len(targets.values)
    arrays = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), np.uint8)
    labels = np.full(count, UNLABELED)
    return LabeledImages(ArrayImages(arrays, "x"), np.arange(count), labels, ClassTable(targets.names), targets=targets)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["|", ";", ", "])
def test_cells_with_several_labels(separator, tmp_path):
    source = find_source(tagged(tmp_path / "photos", separator))
    train = source.train
    assert train.names == train.targets.names == ("cat", "cow", "dog")
    assert not train.is_classified
    assert np.array_equal(train.targets.values, expected())
    assert task_of_data(source)[0] == "multilabel"


def test_columns_of_0_and_1(tmp_path):
    cells = [",".join(str(int(name in TAGS[i % 4])) for name in ("dog", "cat", "cow")) for i in range(COUNT)]
    source = find_source(write(tmp_path / "photos", "path,dog,cat,cow", cells))
    assert source.train.names == ("dog", "cat", "cow")
    assert np.array_equal(source.train.targets.values, expected(("dog", "cat", "cow")))
    assert task_of_data(source)[0] == "multilabel"


@pytest.mark.parametrize(("negative", "other"), [("0", math.nan), ("", 0.0)])
def test_minus_one_is_unknown_where_0_means_no(negative, other, tmp_path):
    """CheXpert has 1, 0 and −1 for uncertain; CelebA has 1 and −1."""
    cells = [f"{'1' if i % 2 else '-1'},{'1' if i % 3 else negative}" for i in range(12)]
    targets = find_source(write(tmp_path / "photos", "path,smile,hat", cells)).train.targets
    assert np.array_equal(targets.values[:, 0], np.where(np.arange(12) % 2, 1, other), equal_nan=True)
    assert np.array_equal(np.isnan(targets.values[:, 1]), (np.arange(12) % 3 == 0) & (negative == ""))


def test_chosen_columns_are_labels_or_numbers(tmp_path):
    root = write(
        tmp_path / "photos", "path,sky,ground,age,height", [f"blue,grass,{i},{i / 2}" for i in range(11)] + ["grey,,,1"]
    )

    def read(columns):
        source = find_source(root / "labels.csv", reading=Reading(label_column=columns))
        return source.train.targets, task_of_data(source)[0]

    labels, task = read("sky,ground")
    assert (labels.names, task) == (("blue", "grass", "grey"), "multilabel")
    assert labels.values[-1].tolist() == [0, 0, 1]
    numbers, task = read("height, age")
    assert (numbers.names, task) == (("height", "age"), "regress")
    assert numbers.values[3].tolist() == [1.5, 3]
    assert np.isnan(numbers.values[-1]).tolist() == [False, True]
    for wrong in ("sky,age", "sky,aeg", "path,sky"):
        with pytest.raises(UsageError, match="--label-column"):
            read(wrong)


def test_few_rows_with_several_labels_keep_classes_and_labels(tmp_path):
    source = find_source(write(tmp_path / "photos", "path,label", ["cat|dog", *["cat", "dog"] * 6]))
    assert source.train.is_classified
    assert task_of_data(source)[0] == "classify"
    labels = of_labels(source).train
    assert labels.targets.values[0].tolist() == [1, 1]
    assert labels.targets.values.sum() == 14


def test_classes_and_numbers_of_one_column(tmp_path):
    source = find_source(write(tmp_path / "photos", "path,label", [str(i % 3) for i in range(12)]))
    assert task_of_data(source)[0] == "classify"
    assert of_numbers(source).train.targets.values[:, 0].tolist() == [float(i % 3) for i in range(12)]
    assert np.array_equal(of_labels(source).train.targets.values, np.eye(3)[np.arange(12) % 3])
    with pytest.raises(UsageError, match="numbers"):
        of_numbers(find_source(tagged(tmp_path / "tagged")))


def test_a_number_beyond_float32_is_refused(tmp_path):
    with pytest.raises(DataError, match="1e\\+300"):
        find_source(write(tmp_path / "photos", "path,age", ["1.5", "1e300"]))


def test_lists_by_split_share_their_labels(tmp_path):
    root = write(tmp_path / "photos", "path,tags", ["a|b", "b|c", "a", "a|b"], "train.csv")
    photos(root, "04.png", "05.png")
    (root / "val.csv").write_text("path,tags\n04.png,c|d\n05.png,a|d\n")
    source = find_source(root)
    assert source.train.names == source.val.names == ("a", "b", "c", "d")
    assert source.val.targets.values.tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    splits = make_splits(source)
    assert splits.classes.names == ("a", "b", "c")  # d has no image in train
    assert splits.val.targets.values.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert any("'d'" in note for note in splits.notes)
    with pytest.raises(DataError, match="'d'"):
        make_splits(source, strict=True)


def test_a_file_listed_twice_with_other_labels_is_refused(tmp_path):
    root = tagged(tmp_path / "photos")
    with (root / "labels.csv").open("a") as file:
        file.write('\n00.png,"cat|dog"')
    with pytest.raises(DataError, match=r"00\.png"):
        find_source(root)


def test_objects_and_masks_are_labels_of_the_image():
    source = find_source("shapes:count=20,size=32")
    labels = of_labels(replace(source, train=replace(source.train, labels=np.full(len(source.train), UNLABELED))))
    listing = labels.train
    for position, row in enumerate(listing.rows[:10].tolist()):
        present = {listing.images.object_names[int(n)] for n in listing.images.boxes(row)[:, 4]}
        assert set(listing.labels_of(position)) == present


def test_check_counts_labels(tmp_path):
    report = check(tagged(tmp_path / "photos"))
    assert report.task == "multilabel"
    assert {name: sum(of.values()) for name, of in report.classes.items()} == {"cat": 12, "cow": 6, "dog": 12}


def test_parquet_and_hugging_face_lists_and_decimals(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    photos(tmp_path, *(f"{i}.png" for i in range(4)))
    pictures = [(tmp_path / f"{i}.png").read_bytes() for i in range(4)]
    lists, decimals = [["b", "a"], [], ["a"], None], [0.5, 1.0, None, 2.5]
    for column, values, kind in (("labels", lists, "labels"), ("label", decimals, "numbers")):
        file = tmp_path / f"{kind}.parquet"
        arrow.parquet.write_table(arrow.table({"image": pictures, column: values}), file)
        features = datasets.Features(
            {"image": datasets.Image(), column: datasets.Value("float32") if kind == "numbers" else datasets.Sequence(
                datasets.ClassLabel(names=["a", "b"]))}
        )  # fmt: skip
        stored = [{"bytes": one, "path": None} for one in pictures]
        rows = {"image": stored, column: values if kind == "numbers" else [[1, 0], [], [0], None]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / kind)
        for place in (file, tmp_path / kind):
            targets = find_source(place).train.learned
            assert targets.kind == kind
            wanted = [[1, 1], [0, 0], [1, 0], [math.nan] * 2] if kind == "labels" else [[0.5], [1], [math.nan], [2.5]]
            assert np.array_equal(targets.values, wanted, equal_nan=True)


# Operations -----------------------------------------------------------------------------------------------------------


def test_every_operation_keeps_rows_and_targets_together(tmp_path):
    root = tagged(tmp_path / "photos")
    (root / "05.png").write_bytes(b"broken")
    truth = {f"{i:02d}.png": row.tolist() for i, row in enumerate(expected())}
    splits = open_data(root)
    assert len(splits.train) + len(splits.val) == COUNT - 1
    for part in (splits.train, splits.val, share_of_train(splits, 0.5).train):
        for i in range(len(part)):
            assert part.targets.values[i].tolist() == truth[part.key(i)]
    listed = tmp_path / "list"
    listed.write_text("00.png\n07.png\n")
    rest = find_source(root, reading=Reading(exclude=listed)).train
    assert len(rest) == COUNT - 2
    assert all(rest.targets.values[i].tolist() == truth[rest.images.key(int(row))] for i, row in enumerate(rest.rows))
    readable = survey(find_source(root)).readable().train
    assert len(readable.targets.values) == len(readable) == COUNT - 1


def test_sources_are_joined_by_label(tmp_path):
    write(tmp_path / "a", "path,tags", ["x|y", "y", "x|y"])
    write(tmp_path / "b", "path,tags", ["y|z", "z", "y|z"])
    train = find_source([tmp_path / "a", tmp_path / "b"]).train
    assert train.targets.values.tolist() == [[1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1], [0, 1, 1]]
    write(tmp_path / "c", "path,label", ["x", "z", "x"])
    with pytest.raises(DataError, match="several labels"):
        find_source([tmp_path / "a", tmp_path / "c"])
    columns = ImageTargets("labels", ("x",), np.ones((1, 1), np.float32))
    both = joined([columns, ImageTargets("labels", ("y",), np.zeros((1, 1), np.float32))])
    assert np.array_equal(both.values, [[1, math.nan], [math.nan, 0]], equal_nan=True)


def test_targets_are_matched_by_name():
    targets = labels_of_lists([["b"], ["a", "c"], None], "x")
    listing = Listing(images(targets).images, np.arange(3), np.full(3, UNLABELED), targets.names, targets=targets)
    matched = match(listing, ClassTable(("c", "d", "a")))
    assert np.array_equal(matched.targets.values, [[0, 0, 0], [1, 0, 1], [math.nan] * 3], equal_nan=True)
    assert "'b'" in matched.notes[0]
    with pytest.raises(DataError, match="'e'"):
        match(listing, ClassTable(("e",)))


def test_names_that_look_alike_are_merged():
    targets = labels_of_lists([["cat", "cat "], ["cat "], ["dog"]], "x")
    assert targets.renamed([name.strip() for name in targets.names]).values.tolist() == [[1, 0], [1, 0], [0, 1]]


def test_changed_targets_change_the_provenance(tmp_path):
    root = tagged(tmp_path / "photos")
    before = provenance_of(open_data(root)).rows
    text = (root / "labels.csv").read_text()
    (root / "labels.csv").write_text(text.replace('"dog|cow"', '"dog"', 1))
    assert provenance_of(open_data(root)).rows != before


# Held-out splits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_every_label_keeps_its_share_on_both_sides(seed):
    rng = np.random.default_rng(seed)
    values = (rng.random((300, 12)) < np.geomspace(0.008, 0.6, 12)).astype(np.float32)
    targets = ImageTargets("labels", tuple("abcdefghijkl"), values)
    kept, held_out = split_rows(images(targets), 0.2, seed)
    assert sorted([*kept, *held_out]) == list(range(300))
    assert 50 <= len(held_out) <= 70
    for total, held in zip(values.sum(0), values[held_out].sum(0), strict=True):
        if total >= 2:
            assert 1 <= held < total
        assert abs(held - 0.2 * total) <= max(2, 0.05 * total)
    again = split_rows(images(targets), 0.2, seed)[1]
    assert np.array_equal(held_out, again)
    assert not np.array_equal(held_out, split_rows(images(targets), 0.2, seed + 1)[1])


def test_folds_spread_every_label():
    values = (np.random.default_rng(0).random((200, 6)) < np.geomspace(0.03, 0.6, 6)).astype(np.float32)
    for targets in (ImageTargets("labels", tuple("abcdef"), values), ImageTargets("numbers", tuple("abcdef"), values)):
        folds = fold_numbers(images(targets), 4, 0)
        assert np.bincount(folds)[1:].tolist() == pytest.approx([50] * 4, abs=6)
        if targets.kind == "labels":
            held_out = np.array([values[folds == number].sum(axis=0) for number in (1, 2, 3, 4)])
            assert np.all(np.ptp(held_out, axis=0) <= np.maximum(2, 0.15 * values.sum(axis=0)))


def test_copies_stay_on_one_side():
    values = np.tile(np.eye(3, dtype=np.float32), (20, 1))
    copies = [list(range(i, i + 6)) for i in range(0, 60, 6)]
    held_out = hold_out_labels(copies, values, 0.3)
    for group in copies:
        assert len(set(held_out[group].tolist())) == 1
    assert held_out.sum() == 18


def test_numbers_are_held_out_from_their_whole_range():
    values = np.random.default_rng(0).normal(size=(200, 1)).astype(np.float32)
    values[7] = math.nan
    targets = ImageTargets("numbers", ("age",), values)
    _, held_out = split_rows(images(targets), 0.1, 0)
    assert len(held_out) == 20
    tenths = np.nanquantile(values, np.linspace(0, 1, 11))
    counts = np.histogram(values[held_out], tenths)[0]
    assert counts.tolist() == [2] * 10 or np.abs(counts - 2).max() <= 1


def test_a_smaller_share_of_train_is_part_of_a_larger_one():
    rng = np.random.default_rng(0)
    targets = ImageTargets("labels", ("rare", "common"), (rng.random((80, 2)) < [0.03, 0.5]).astype(np.float32))
    data = images(targets)
    splits = Splits("x", data, data)
    shares = [set(share_of_train(splits, share).train.rows.tolist()) for share in (0.05, 0.2, 0.6)]
    assert shares[0] <= shares[1] <= shares[2]
    assert all(targets.values[sorted(share)].sum(axis=0).min() >= 1 for share in shares)
    assert [len(share) for share in shares[1:]] == pytest.approx([16, 48], abs=1)


# Batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_targets_of_their_images(workers):
    values = np.random.default_rng(0).random((20, 3), np.float32)
    values[4, 1] = math.nan
    data = images(ImageTargets("numbers", tuple("abc"), values))
    loader = Loader(data, as_tested(8, 1.0), batch_size=6, workers=workers, seed=3)
    store = decode_all(data, as_tested(8, 1.0), "cpu")
    for batches in (loader.epoch(1), DeviceLoader(store, None, 8, batch_size=6, seed=3).epoch(1)):
        for batch in batches:
            wanted = torch.from_numpy(values[batch.index.numpy()])
            assert torch.equal(batch.targets.nan_to_num(-1), wanted.nan_to_num(-1))
            assert torch.equal(batch.to("cpu").targets.isnan(), wanted.isnan())
    loader.close()


def test_a_broken_image_has_no_targets_in_evaluation():
    data = images(labels_of_lists([["a"], ["b"], ["a", "b"]], "x"))

    class Broken(ArrayImages):
        def read(self, index):
            if index == 1:
                raise DataError("broken")
            return super().read(index)

    broken = replace(data, images=Broken(np.zeros((3, 8, 8, 3), np.uint8), "x"))
    loader = make_evaluation_loader(broken, 8, 1.0, batch_size=3, device=torch.device("cpu"), workers=0)
    (batch,) = loader.epoch(0)
    assert batch.targets.isnan().all(dim=1).tolist() == [False, True, False]


def test_blended_targets_are_the_mean_of_both_images():
    targets = torch.tensor([[1.0, 0.0], [0.0, math.nan], [1.0, 1.0]])
    blended = Blend(0.75).vectors(targets)
    assert torch.equal(blended.nan_to_num(-1), torch.tensor([[1.0, 0.25], [0.0, -1.0], [1.0, 0.75]]))
    assert Blend().vectors(targets) is targets
