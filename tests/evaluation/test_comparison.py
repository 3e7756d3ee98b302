"""Intervals, paired comparisons, kept decisions and spreads, each against a slow version of its definition."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom.data.sources.source import open_data
from patchloom.evaluation.classification import ClassificationReport
from patchloom.evaluation.comparison import bootstrap_difference, compare, holm, mcnemar
from patchloom.evaluation.intervals import student, wilson
from patchloom.runs.predictions import FILE, Predictions, fingerprint, load_predictions, save_predictions
from patchloom.tasks.classification.seeds import cloud, epoch_values, final_values, spread_by_epoch, spreads
from patchloom_runtime.errors import CheckpointError, UsageError


def report(right: list[bool] | np.ndarray, **changes) -> ClassificationReport:
    """Three classes; an image that is not right is put one class too far."""
    ranks = np.where(right, 0, 1).astype(np.int64)
    labels = np.arange(len(ranks)) % 3
    values = {"classes": ("a", "b", "c"), "index": np.arange(len(ranks)), "labels": labels}
    values |= {"predictions": (labels + ranks) % 3, "ranks": ranks}
    values |= {"confidence": np.linspace(0.4, 1, len(ranks), dtype=np.float32), "losses": ranks.astype(np.float32)}
    return ClassificationReport(**(values | changes))


# Intervals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "factor"), [(2, 12.7062), (3, 4.30265), (5, 2.77645), (10, 2.26216), (100, 1.98422)])
def test_the_interval_of_a_mean_has_students_factor(runs, factor):
    """Factors from the table of Student's t, 97.5 %."""
    values = np.random.default_rng(runs).normal(80, 3, runs)
    low, high = student(values)
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(factor * values.std(ddof=1) / np.sqrt(runs), rel=1e-5)


@given(images=st.integers(1, 3000), share=st.floats(0, 1))
def test_wilsons_interval_is_where_the_test_of_a_share_does_not_reject(images, share):
    """Its ends are the p with |right/images − p| = z·√(p(1 − p)/images)."""
    right = round(share * images)
    low, high = (end / 100 for end in wilson(right, images))
    assert 0 <= low <= right / images + 1e-12
    assert right / images - 1e-12 <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(right / images - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / images), abs=1e-6)


def test_known_intervals():
    assert wilson(20, 20) == pytest.approx((83.89, 100), abs=0.01)
    assert wilson(8, 10) == pytest.approx((49.02, 94.33), abs=0.01)  # Wilson's interval as statistics tables print it
    assert report([True] * 8 + [False] * 2).top_interval() == wilson(8, 10)
    assert report([True] * 8 + [False] * 2).top_interval(2) == wilson(10, 10)


# Pairs --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 8), st.integers(0, 8))
def test_mcnemar_is_a_fair_coin_thrown_for_each_uneven_image(only_first, only_second):
    throws, gap = only_first + only_second, abs(only_first - only_second)
    outcomes = list(product((-1, 1), repeat=throws)) if throws <= 10 else None
    if outcomes is None:
        expected = sum(math.comb(throws, k) for k in range(throws + 1) if abs(throws - 2 * k) >= gap) / 2**throws
    else:
        expected = sum(abs(sum(outcome)) >= gap for outcome in outcomes) / len(outcomes)
    assert mcnemar(only_first, only_second) == pytest.approx(expected)


def test_mcnemar_of_many_images():
    assert mcnemar(0, 0) == 1
    assert mcnemar(2000, 2000) == 1
    # The normal limit with continuity correction: z = (|b − c| − 1)/√(b + c).
    assert mcnemar(10_300, 10_000) == pytest.approx(math.erfc(299 / math.sqrt(2 * 20_300)), rel=1e-3)
    assert mcnemar(0, 5000) == 0  # too small for a float, and no error


def test_the_bootstrap_is_one_over_images():
    generator = np.random.default_rng(0)
    first, second = generator.random(300) < 0.8, generator.random(300) < 0.7
    gains = first.astype(float) - second
    drawn = [100 * generator.choice(gains, len(gains)).mean() for _ in range(4000)]
    expected = np.quantile(drawn, [0.025, 0.975])
    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    result = bootstrap_difference(only_first, only_second, 300)
    np.testing.assert_allclose(result, expected, atol=0.6)
    assert bootstrap_difference(only_first, only_second, 300) == result
    assert bootstrap_difference(only_first, only_second, 300, seed=1) != result
    assert bootstrap_difference(0, 0, 300) == (0, 0)


@given(st.lists(st.floats(0, 1), max_size=6), st.sampled_from((0.05, 0.2)))
def test_holm_is_its_definition(p_values, error):
    """A test is significant where its adjusted p, the running maximum of (m − i)·p over sorted p, is small enough."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = {}, 0.0
    for place, i in enumerate(order):
        # The same division as a threshold, so that a p on the very edge is judged alike.
        largest = max(largest, float(p_values[i] > error / (len(p_values) - place)))
        adjusted[int(i)] = largest
    assert holm(p_values, error) == [adjusted[i] == 0 for i in range(len(p_values))]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([0.04], 0.05) == [True]
    assert holm([], 0.05) == []


def test_all_pairs_are_compared_on_the_same_images():
    generator = np.random.default_rng(0)
    base = generator.random(400) < 0.6
    better, same = base | (generator.random(400) < 0.3), base ^ (generator.random(400) < 0.02)
    result = compare({"better": report(better), "base": report(base), "same": report(same)})
    assert [(c.first, c.second) for c in result] == [("better", "base"), ("better", "same"), ("base", "same")]
    one = result[0]
    assert one.difference == pytest.approx(100 * (better.mean() - base.mean()))
    assert (one.only_first, one.only_second) == (int(np.sum(better & ~base)), 0)
    assert one.low < one.difference < one.high
    assert [c.significant for c in result] == [True, True, False]
    assert dict(one) == {
        "difference": one.difference, "difference_low": one.low, "difference_high": one.high,
        "only_first": one.only_first, "only_second": 0, "mcnemar_p": one.p_value, "significant": 1,
    }  # fmt: skip


def test_other_images_are_not_compared():
    whole = report([True] * 6)
    for other in (report([True] * 5), report([True] * 6, labels=np.zeros(6, np.int64))):
        with pytest.raises(UsageError) as error:
            compare({"a": whole, "b": other})
        assert "6" in str(error.value)
        assert str(len(other.index)) in str(error.value)


# Kept decisions -----------------------------------------------------------------------------------------------------


def test_kept_decisions_are_the_same_when_read(tmp_path):
    remaining = report(np.arange(30) % 4 > 0)
    path = save_predictions(tmp_path, Predictions(remaining, "0f"))
    assert path.stat().st_size < 30 * 24 + 800
    result = load_predictions(tmp_path)
    assert result.fingerprint == "0f"
    assert result.report.classes == remaining.classes
    assert dict(result.report) == dict(remaining)
    for name in ("index", "labels", "predictions", "ranks", "confidence", "losses"):
        column = getattr(result.report, name)
        assert column.dtype == getattr(remaining, name).dtype
        assert np.array_equal(column, getattr(remaining, name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checksums.json", FILE]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:200], lambda data: data[:0], lambda data: data.replace(b"ranks", b"runks")]
)
def test_a_damaged_file_is_told(tmp_path, damage):
    path = save_predictions(tmp_path, Predictions(report([True] * 9), "0f"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"predictions\.safetensors"):
        load_predictions(tmp_path)


def test_a_run_without_decisions_is_told(tmp_path):
    with pytest.raises(UsageError) as error:
        load_predictions(tmp_path)
    assert "predictions.safetensors" in str(error.value)
    assert "patchloom evaluate" in str(error.value)


def test_a_fingerprint_is_of_images_and_labels(tmp_path):
    from PIL import Image

    def make(folder, *names):
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / folder / name)
        return fingerprint(open_data(tmp_path / folder).val)

    train = ("train/a/1.png", "train/b/1.png")
    one = make("one", *train, "val/a/2.png", "val/b/3.png")
    assert make("elsewhere", *train, "val/a/2.png", "val/b/3.png") == one
    assert make("other-train", *train, "train/b/7.png", "val/a/2.png", "val/b/3.png") == one
    assert make("more", *train, "val/a/2.png", "val/b/3.png", "val/b/4.png") != one
    val = open_data(tmp_path / "one").val
    assert fingerprint(replace(val, labels=val.labels[::-1])) != one
    assert fingerprint(replace(val, rows=val.rows[::-1], labels=val.labels[::-1])) != one


# Seeds --------------------------------------------------------------------------------------------------------------


def write_metrics(folder, top1: list[float], ema: list[float] = ()) -> None:
    folder.mkdir()
    lines = [{"step": 0, "epoch": 0, "kind": "train", "weights": "model", "values": {"loss": 1.0}}]
    for weights, column in (("model", top1), ("ema", ema)):
        for epoch, value in enumerate(column, start=1):
            values = {"top1": value, "loss": 100 - value if value < 90 else None}
            lines.append({"step": epoch, "epoch": epoch, "kind": "evaluation", "weights": weights, "values": values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_spreads_of_runs_and_of_epochs(tmp_path):
    for name, column in (("s0", [10, 60, 70]), ("s1", [30, 62, 71, 72]), ("s2", [20, 58, 75])):
        write_metrics(tmp_path / name, column, ema=[99])
    folders = [tmp_path / name for name in ("s0", "s1", "s2")]
    assert epoch_values(folders[1]) == {1: 30, 2: 62, 3: 71, 4: 72}
    assert final_values(folders[1]) == {"top1": 72, "loss": 28}
    assert final_values(folders[1], "ema") == {"top1": 99}
    by_epoch = spread_by_epoch(folders)
    assert list(by_epoch) == [1, 2, 3]
    assert by_epoch[1].mean == 20
    assert by_epoch[1].std == pytest.approx(10)  # (100 + 100 + 0)/2, square root
    (top1, loss) = spreads({folder.name: final_values(folder) for folder in folders})
    assert (top1.name, loss.name) == ("top1", "loss")
    assert dict(top1) == {
        "top1_mean": pytest.approx(217 / 3), "top1_std": pytest.approx(math.sqrt(19 / 3)), "top1_min": 70,
        "top1_max": 75, "top1_runs": 3,
    }  # fmt: skip


def test_a_cloud_pairs_two_data_sets():
    result = cloud({"a": 1.0, "b": 2.0, "c": 4.0}, {"c": 3.0, "b": 2.0, "a": 2.5})
    assert result.runs == ("a", "b", "c")
    assert list(zip(result.first, result.second, strict=True)) == [(1, 2.5), (2, 2), (4, 3)]
    assert result.correlation == pytest.approx(np.corrcoef([1, 2, 4], [2.5, 2, 3])[0, 1])
    assert math.isnan(cloud({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0}).correlation)


def test_what_is_no_set_of_runs(tmp_path):
    with pytest.raises(UsageError, match="1"):
        spreads({"a": {"top1": 1.0}})
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        final_values(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": \n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        final_values(tmp_path)
