"""The papers' figures of several runs: two test sets with a fitted line, seeds, levels, branches by epoch."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patchloom.report.charts import Point, SeedRange, Series, histogram_chart, line_chart, range_chart, scatter_chart
from patchloom.report.pictures.branches import branch_epoch_charts
from patchloom.runs.branch_norms import add_branch_norms
from patchloom.runs.checksums import write_checked
from patchloom.runs.predictions import load_predictions
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.classification.comparison_figures import NO_LEVEL, level_charts, pareto_frontier
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.classification.levels import LevelEvaluation, LevelEvaluations
from patchloom.tasks.classification.seeds import SeedCloud, early_and_last
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.images.run_contents import count_cost, read_run
from patchloom.tasks.report import report_run
from tests.reliability.commands import command


@pytest.fixture(scope="module")
def numbered(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of `trained` in folders of class numbers, as in ImageNet-V2; blue is 0, red is 1."""
    root = tmp_path_factory.mktemp("matched") / "v2"
    for number, name in enumerate(("blue", "red")):
        shutil.copytree(trained / "data" / name, root / str(number))
    return root


def section(page: Path, name: str) -> str:
    return page.read_text("utf-8").partition(f'id="{name}"')[2].partition("</section>")[0]


# ImageNet-V2 ----------------------------------------------------------------------------------------------------------


def test_runs_are_drawn_on_val_and_v2(trained, numbered, tmp_path, monkeypatch, capsys) -> None:
    runs = [trained / name for name in ("a", "b", "vit")]
    page = tmp_path / "page.html"
    done = command(("report", *runs, "--data", numbered, "--v2", "--page", page), monkeypatch, capsys)
    assert done.code == 0, done.errors
    cloud = section(page, "cloud")
    for name, of in evaluate([str(run) for run in runs], str(numbered), v2=True).values().items():
        assert re.search(rf"<title>{name} · \w+ \([\d.]+, {of['top1']:.4g}\)", cloud)
    assert re.search(r">[^<]*\bv2\b[^<]*</text>", cloud)
    assert 'id="notes"' not in page.read_text("utf-8")


def test_val_can_be_passed_for_runs_without_predictions(run, trained, numbered, tmp_path) -> None:
    runs = [str(run(name)) for name in ("a", "b")]
    for folder in runs:
        (Path(folder) / "predictions.safetensors").unlink()
    page_options: dict[str, Any] = {"data": str(numbered), "v2": True, "out": tmp_path / "page.html"}
    assert section(report_runs(runs, **page_options), "cloud") == ""
    drawn = section(report_runs(runs, val=str(trained / "data"), **page_options), "cloud")
    assert re.search(r">[^<]*\bdata\b[^<]*</text>", drawn)
    assert drawn.count("<title>") >= 2


def test_one_run_is_reported_on_v2(run, numbered, monkeypatch, capsys) -> None:
    folder = run("a")
    done = command(("report", folder, "--data", numbered, "--v2"), monkeypatch, capsys)
    assert done.output.strip() == str(folder / "report-v2.html")
    top1 = evaluate(str(folder), str(numbered), v2=True).values()["a"]["top1"]
    assert f"{top1:.2f} %" in section(folder / "report-v2.html", "numbers")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--v2",), ("--v2", "--data")),
        (("--val", "x"), ("--val", "--data")),
        (("--data", "x", "--v2", "--split", "val"), ("--v2", "--split")),
        (("--data", "x", "--val", "y"), ("--val", "--split val")),
    ],
)
def test_options_that_nobody_would_read_are_refused(trained, monkeypatch, capsys, options, named) -> None:
    done = command(("report", trained / "a", *options), monkeypatch, capsys)
    assert done.code == 2
    assert [option for option in named if option not in done.errors] == []


# Fitted lines ---------------------------------------------------------------------------------------------------------


def test_the_line_fits_by_least_squares_and_stays_in_the_frame() -> None:
    cloud = SeedCloud(("a", "b", "c", "d"), (70.0, 72.0, 74.0, 80.0), (60.0, 61.0, 65.0, 68.0))
    assert cloud.line == pytest.approx(np.polyfit(cloud.first, cloud.second, 1))
    assert SeedCloud(("a", "b"), (1.0, 2.0), (1.0, 2.0)).line is None  # any two points are on a line
    assert SeedCloud(("a", "b", "c"), (1.0, 1.0, 1.0), (1.0, 2.0, 3.0)).line is None
    points = [Point(x, y) for x, y in zip(cloud.first, cloud.second, strict=True)]
    chart = scatter_chart(points, x_label="x", y_label="y", line=(2.0, -80.0))  # at 60 where x is 70, 80 where x is 80
    frame = [float(n) for n in re.findall(r'd="M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)', chart)[0]]
    x1, y1, x2, y2 = (float(n) for n in re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" style', chart)[0])
    assert (x1, y1, y2) == pytest.approx((frame[0], frame[3], frame[1]))
    assert frame[0] < x2 < frame[2]


# Cost -----------------------------------------------------------------------------------------------------------------


def test_the_frontier_has_the_points_that_nothing_as_cheap_beats() -> None:
    points = [(2.0, 70.0), (1.0, 60.0), (3.0, 65.0), (1.0, 55.0), (4.0, 70.0), (8.0, 71.0)]
    assert pareto_frontier(points) == [(1.0, 60.0), (2.0, 70.0), (8.0, 71.0)]


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    points = [Point(10.0**power, power, str(power)) for power in range(3)]
    chart = scatter_chart(points, x_label="x", y_label="y", log=True, path=[(1.0, 0.0), (100.0, 2.0)])
    xs = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02)
    start, end = (float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+L([\d.]+) [\d.]+" style', chart)[0])
    assert (start, end) == pytest.approx((xs[0], xs[2]), abs=0.01)


def test_runs_are_drawn_by_the_cost_of_their_training(trained, tmp_path) -> None:
    records = {name: read_run_metadata(trained / name) for name in ("a", "vit")}
    for name, record in records.items():
        contents = read_run(trained / name)
        counted = count_cost(contents)
        assert record is not None
        assert counted is not None
        assert record.images_seen > 0
        assert record.training_multiply_adds == 3 * record.images_seen * counted.multiply_adds
    assert contents.files.recipe is not None
    epochs = contents.files.recipe.schedule.epochs
    assert records["vit"].images_seen % epochs == 0  # type: ignore[union-attr]
    drawn = section(report_runs([str(trained / name) for name in records], out=tmp_path / "page.html"), "costs")
    for name, record in records.items():
        own = load_predictions(trained / name).report.top(1)
        x = re.escape(f"{record.training_multiply_adds / 1e9:.4g}")  # type: ignore[union-attr]
        assert re.search(rf"<title>{name} · \w+ \({x}, {own:.4g}\)", drawn)


def test_runs_without_a_recorded_cost_are_not_drawn_by_it(run, tmp_path) -> None:
    folders = [run("a"), run("vit")]
    for folder in folders:
        record = read_run_metadata(folder)
        assert record is not None
        old = {
            key: value for key, value in asdict(record).items() if key not in ("images_seen", "training_multiply_adds")
        }
        write_checked(folder, {"run.json": json.dumps(old).encode()})
    drawn = section(report_runs([str(folder) for folder in folders], out=tmp_path / "page.html"), "costs")
    assert drawn.count("<svg") == 1  # of inference


# Seeds ----------------------------------------------------------------------------------------------------------------


def seeds(run, tmp_path: Path, tops: list[list[float]]) -> list[str]:
    """Copies of one run with other seeds, whose records have these top-1 values per epoch."""
    folder = run("a")
    recipe = (folder / "recipe.yaml").read_text()
    result = []
    for seed, top1 in enumerate(tops):
        other = Path(shutil.copytree(folder, tmp_path / f"seed{seed}"))
        write_checked(other, {"recipe.yaml": re.sub(r"(?m)^seed:.*$", f"seed: {seed}", recipe).encode()})
        lines = [
            {"kind": "evaluation", "weights": "model", "epoch": epoch, "step": epoch, "values": {"top1": value}}
            for epoch, value in enumerate(top1, start=1)
        ]
        (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result.append(str(other))
    return result


def test_seeds_have_their_figures(run, tmp_path) -> None:
    tops = [[10, 20, 29, 40], [12, 18, 31, 42], [11, 22, 30, 41], [9, 19, 28, 39]]
    runs = seeds(run, tmp_path, tops)
    page = report_runs(runs, out=tmp_path / "page.html")
    drawn = section(page, "seeds")
    assert re.search(r"<td[^>]*>top1</td>\s*<td[^>]*>40.50</td>\s*<td[^>]*>1.29</td>\s*<td[^>]*>39.00</td>", drawn)
    assert re.search(r">[^<]*40\.50[^<]*1\.29[^<]*</text>", drawn)
    r = np.corrcoef([top[2] for top in tops], [top[3] for top in tops])[0, 1]
    assert re.search(rf"<h3>[^<]*3[^<]*{r:.2f}</h3>", drawn)
    assert [at.epoch for at in early_and_last([Path(folder) for folder in runs])] == [2, 3]
    # Two seeds, or runs that differ in more, have no spread to draw.
    assert section(report_runs(runs[:2], out=page), "seeds") == ""
    recipe = (Path(runs[0]) / "recipe.yaml").read_text()
    changed = re.sub(r"(?m)^(\s+)weight_decay:.*$", r"\1weight_decay: 0.123", recipe)
    assert changed != recipe
    write_checked(Path(runs[0]), {"recipe.yaml": changed.encode()})
    assert section(report_runs(runs, out=page), "seeds") == ""


def test_a_histogram_counts_every_run_and_its_gaussian_is_highest_at_the_mean() -> None:
    values = np.random.default_rng(0).normal(79.7, 0.1, 100).tolist()
    chart = histogram_chart(values, x_label="top-1")
    counts = [int(n) for n in re.findall(r"(\d+) \w+</title>", chart)]
    assert sum(counts) == 100
    assert len(counts) >= 10
    xs, ys = zip(
        *(map(float, p.split()) for p in re.findall(r'd="M([^"]+)" class="c1"', chart)[0].split("L")), strict=True
    )
    tick = dict(re.findall(r'<text x="([\d.]+)" y="211.0" text-anchor="middle">([\d.]+)</text>', chart))
    (x1, v1), *_, (x2, v2) = sorted((float(x), float(v)) for x, v in tick.items())
    peak = v1 + (xs[int(np.argmin(ys))] - x1) / (x2 - x1) * (v2 - v1)
    assert peak == pytest.approx(np.mean(values), abs=0.02)
    assert re.search(r">[^<]*5\.00[^<]*0\.00[^<]*</text>", histogram_chart([5.0, 5.0, 5.0], x_label="top-1"))


def test_a_range_has_its_mean_deviation_and_extremes() -> None:
    chart = range_chart([SeedRange(1, 50.0, 5.0, 40.0, 60.0), SeedRange(2, 70.0, 1.0, 68.0, 72.0)], y_label="top-1, %")
    titles = re.findall("<title>(.*?)</title>", chart)
    for value, epoch in ((50, 1), (40, 1), (72, 2), (55, 1)):  # mean, least, most, mean + deviation
        assert any(title.endswith(f" {value}, epoch {epoch}") for title in titles)


# Levels ---------------------------------------------------------------------------------------------------------------


def test_accuracy_by_granularity_has_a_line_per_recipe() -> None:
    def at(level: str | None, coarse: float, fine: float) -> LevelEvaluation:
        values = {"knn10_top1": fine, "map": fine / 2, "knn10_top1_coarse": coarse, "map_coarse": coarse / 2}
        return LevelEvaluation(level, 10, values)

    def run(recipe: str) -> Any:
        return SimpleNamespace(files=SimpleNamespace(recipe=SimpleNamespace(name=recipe), network="resmlp_s12"))

    levels = {"coarse": 20, "fine": 100}
    runs = {"d": at(None, 30, 20), "c": at("coarse", 80, 60), "f": at("fine", 90, 70), "g": at("coarse", 85, 65)}
    recipes = {"d": run("dino"), "c": run("resmlp"), "f": run("resmlp"), "g": run("grafit")}
    charts = dict(level_charts(LevelEvaluations(levels, runs, ()), recipes))
    assert len(charts) == 4
    same, finest = (chart for title, chart in charts.items() if "kNN" in title)  # the level trained at comes first
    for text in ("resmlp 80", "resmlp 70", "grafit 85"):
        assert f"<title>{text}, " in same
    for text in ("dino 20, ", "resmlp 60", "resmlp 70", "grafit 65"):
        assert f"<title>{text}" in finest
    assert "dino" not in same
    assert f">{NO_LEVEL}</text>" in finest
    assert ">coarse (20)</text>" in same


def test_long_names_along_an_axis_are_tilted_and_have_room() -> None:
    def drawn(names: tuple[str, ...]) -> str:
        return line_chart([Series("a", [(0.0, 1.0), (1.0, 2.0)])], x_label="level", y_label="top-1, %", x_names=names)

    assert "rotate(-35)" not in drawn(("coarse", "fine"))
    ranks = (
        "kingdom (6)",
        "phylum (25)",
        "class (57)",
        "order (272)",
        "family (1118)",
        "genus (4401)",
        "species (8142)",
    )
    tilted = drawn(ranks)
    assert tilted.count("rotate(-35)") == 7
    height = float(re.findall(r'viewBox="0 0 360 (\d+)"', tilted)[0])
    assert height > float(re.findall(r'viewBox="0 0 360 (\d+)"', drawn(("coarse", "fine")))[0])
    assert "<title>a 2, level phylum (25)</title>" in tilted


# Branches -------------------------------------------------------------------------------------------------------------


def test_branches_by_epoch_are_darker_as_training_goes_on(run, tmp_path) -> None:
    folders = [run("a"), run("b")]
    for folder in folders:
        for epoch in (1, 2, 3):
            add_branch_norms(folder, epoch, {"tokens": [0.1 * epoch, 0.2], "channels": [0.3, None]})
    (kind, chart), (other, _) = branch_epoch_charts({"a": {1: {"tokens": [0.1], "channels": [0.2]}}})
    assert (kind, other) == ("tokens", "channels")
    assert "<title>epoch 1 10, layer 1</title>" in chart
    alone = section(report_run(folders[0]), "pictures")
    tokens = re.search(r"<h3>[^<]*epoch[^<]*tokens</h3>(.*?)</figure>", alone, re.DOTALL)[1]
    assert [float(n) for n in re.findall(r'class="c0" opacity="([\d.]+)"', tokens)[:2]] == [0.43, 0.72]
    assert tokens.count("epoch 3</text>") == 1
    both = section(report_runs([str(folder) for folder in folders], out=tmp_path / "page.html"), "branches")
    assert "a, epoch 3</text>" in both
    assert "b, epoch 3</text>" in both
    assert "epoch 1</text>" not in both


def test_damaged_norms_are_a_note(run) -> None:
    folder = run("a")
    add_branch_norms(folder, 1, {"tokens": [0.1]})
    (folder / "pictures" / "branch_norms.json").write_text("{")
    page = report_run(folder)
    assert "branch_norms.json" in section(page, "notes")
