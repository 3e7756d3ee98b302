"""The claims of the papers: tables that `benchmarks/papers.py` trains, verdicts, and the committed results."""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchloom.training.run import make_plan
from patchloom_runtime.errors import UsageError
from tests.messages import missing
from tools import results

BENCHMARKS = results.ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))  # its scripts import each other by name
import multi30k  # noqa: E402
import paper_grafit  # noqa: E402
import paper_pruning  # noqa: E402
import paper_seeds  # noqa: E402
import paper_speed  # noqa: E402
import papers  # noqa: E402
from paper_tables import TABLES, Claim  # noqa: E402

MEASURED = results.RESULTS / "papers"
CLAIM = Claim("A is better than B", ("A",), ("B",))


def lines_of(**variants: list[float]) -> list[dict[str, str]]:
    """Runs by variant, one value of top-1 per seed."""
    return [
        {"variant": name, "seed": str(seed), "top1": str(value)}
        for name, values in variants.items()
        for seed, value in enumerate(values)
    ]


# The tables -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> papers.Worker:
    folder = tmp_path_factory.mktemp("arrays")
    for split in ("train", "val", "test"):
        np.save(folder / f"{split}.npy", np.zeros((200, 32, 32, 3), np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(200) % papers.CLASSES)
    return papers.Worker(folder, "cpu", 0, folder / "teacher", {})


@pytest.mark.parametrize("name", TABLES)
def test_every_variant_can_be_planned(name: str, worker: papers.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[name]
    steps = set()
    for variant in table.variants:
        settings = worker.settings(papers.Task(name, variant, 0, table.lr, 10))
        if settings.changes.pop("objective.teacher", None):  # a run folder, which training the teacher makes
            settings.changes["objective.distillation"] = "labels" if "distilled" in str(settings.model) else "none"
        plan = make_plan(settings, "cpu")
        steps.add(round(plan.recipe.schedule.epochs * plan.recipe.train_share))
        assert plan.recipe.schedule.warmup_epochs <= plan.recipe.schedule.epochs / 5, variant
    assert steps == {10}, "the variants of a table have equal steps"


@pytest.mark.parametrize("name", TABLES)
def test_the_claims_of_a_table_name_its_variants(name: str) -> None:
    table = TABLES[name]
    heads = {f"{variant}, {head}" for variant in table.variants for head in papers.HEADS.values()}
    for claim in table.claims:
        named = {*claim.better, *claim.worse, *(claim.gains_over or ())}
        assert named <= {*table.variants, *heads}, claim.text


# Runs that are missing ------------------------------------------------------------------------------------------------


def given(out: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"out": out, "epochs": 10, "lr": None, "seeds": 2} | changes)


def line(variant: str, seed: int, **changes: Any) -> dict[str, Any]:
    values = {"top1": 5.0, "seconds": 1.0, "images_per_s": 100, "epochs": 10, "lr": 0.001}
    return {"variant": variant, "seed": seed} | values | changes


def test_a_killed_command_repeats_the_runs_that_are_missing(tmp_path: Path) -> None:
    tasks, waiting = papers.missing(["smlpnet"], given(tmp_path))
    runs = 2 * len(TABLES["smlpnet"].variants)
    assert [task.kind for task in tasks] == ["choice"] * len(papers.RATES)
    assert waiting == runs, "the runs wait for the choice of a learning rate"
    for task, top1 in zip(tasks, (1.0, 3.0, 2.0), strict=True):
        papers.store(tmp_path, task, [line(task.variant, 0, top1=top1, lr=task.lr)])
    tasks, waiting = papers.missing(["smlpnet"], given(tmp_path))
    assert (len(tasks), waiting) == (runs, 0)
    assert {task.lr for task in tasks} == {papers.RATES[1]}, "the best on held-out images"
    papers.store(tmp_path, tasks[0], [line(tasks[0].variant, 0)])
    papers.store(tmp_path, tasks[1], [line(tasks[1].variant, 0)])
    path = papers.csv_of(tmp_path, "smlpnet")
    path.write_text(path.read_text()[:-7])  # killed while it wrote
    assert papers.missing(["smlpnet"], given(tmp_path))[0] == tasks[1:]
    assert len(papers.read(path)) == 1


def test_runs_of_another_length_are_refused(tmp_path: Path) -> None:
    task = papers.Task("data_small", "ViT, 100%", 0, 0.001, 4)
    papers.store(tmp_path, task, [line("ViT, 100%", 0, epochs=4)])
    with pytest.raises(UsageError, match="4 epochs, not 10"):
        papers.missing(["data_small"], given(tmp_path))


def test_the_cost_is_stated_once_a_run_is_finished() -> None:
    assert papers.cost_text(90, [], 3).endswith("90 runs")
    assert papers.cost_text(90, [10.0, 20.0, 300.0], 3).endswith("10:00")  # 90 × 20 s by three processes


# Verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([12.0, 12.1, 12.2], [10.0, 10.2, 10.1], "confirmed"),
        ([10.0, 10.2, 10.1], [12.0, 12.1, 12.2], "contradicted"),
        ([12.0, 10.0, 11.0], [10.5, 10.6, 10.4], "undecided"),
        ([12.0], [10.0], "not tested"),
        ([12.0, 12.1], [], "not tested"),
    ],
)
def test_a_verdict_follows_from_the_paired_interval(a: list[float], b: list[float], verdict: str) -> None:
    assert papers.judge(lines_of(A=a, B=b), CLAIM)[0] == verdict


def test_seeds_are_paired() -> None:
    # Each seed gains 1 ± 0.1 while the seeds differ by 10.
    (difference,) = papers.judge(lines_of(A=[11.0, 21.1, 30.9], B=[10.0, 20.0, 30.0]), CLAIM)[1]
    assert difference.verdict == "confirmed"
    assert difference.mean == pytest.approx(1.0)
    assert difference.high - difference.low < 1.0


def test_gains_are_compared() -> None:
    claim = Claim("A gains more than B", ("A, all",), ("B, all",), gains_over=("A, few", "B, few"))
    lines = lines_of(**{"A, all": [20.0, 20.1], "A, few": [10.0, 10.2], "B, all": [30.0, 30.1], "B, few": [25.0, 25.2]})
    verdict, (difference,) = papers.judge(lines, claim)
    assert (verdict, round(difference.mean, 6)) == ("confirmed", 5.0)
    assert difference.name == "(A, all − A, few) − (B, all − B, few)"


def test_a_claim_of_equality_needs_a_small_interval() -> None:
    claim = Claim("A is as good as B", ("A",), ("B",), within=1.0)
    assert papers.judge(lines_of(A=[10.0, 10.1], B=[10.1, 10.2]), claim)[0] == "confirmed"
    assert papers.judge(lines_of(A=[10.0, 14.0], B=[10.1, 10.2]), claim)[0] == "undecided"
    assert papers.judge(lines_of(A=[20.0, 20.1], B=[10.1, 10.2]), claim)[0] == "contradicted"


def test_the_order_of_networks_is_compared_by_pairs() -> None:
    here = {"a": 10.0, "b": 20.0, "c": 5.0}
    assert paper_speed.exchanged({"a": 3.0, "b": 2.0, "c": 1.0}, here) == ["a and b"]


# Committed results ----------------------------------------------------------------------------------------------------

CLAIMS = {claim["claim"]: claim for claims in results.claims().values() for claim in claims}


def committed() -> dict[str, str]:
    """Claim → the verdict of the runs that test it; a table for one CPU core gives way to the larger one."""
    tables = sorted(TABLES, key=lambda name: not name.endswith("_small"))
    claims = {name: TABLES[name].claims for name in tables}
    claims |= {"pruning": paper_pruning.CLAIMS, "multi30k": multi30k.CLAIMS, "grafit": paper_grafit.CLAIMS}
    verdicts: dict[str, str] = {}
    for name, each in claims.items():
        lines = papers.read(papers.csv_of(MEASURED, name))
        judged = {claim.text: papers.judge(lines, claim)[0] for claim in each}
        verdicts |= {text: verdict for text, verdict in judged.items() if verdict != "not tested"}
    return verdicts


def test_the_pages_state_the_verdicts_that_the_files_give() -> None:
    verdicts = committed()
    assert len(verdicts) >= 25
    assert {text: CLAIMS[text]["verdict"] for text in verdicts if text in CLAIMS} == verdicts


def test_the_statistics_of_many_seeds_follow_from_the_file() -> None:
    with (MEASURED / "seeds_statistics.csv").open(encoding="utf-8") as file:
        written = [(row["statistic"], row["verdict"]) for row in csv.DictReader(file)]
    found = paper_seeds.statistics(papers.read(MEASURED / "seeds.csv"))
    assert [(row[1], row[-1]) for row in found] == written


def test_the_docs_have_the_table_and_the_chart_of_every_file_of_runs(tmp_path: Path) -> None:
    text = (results.ROOT / "docs" / "results.md").read_text("utf-8")
    for name in TABLES:
        if name == "seeds" or not papers.csv_of(MEASURED, name).is_file():  # fifty seeds have a table of statistics
            continue
        rows = papers.render(name, MEASURED, tmp_path).partition("| claim |")[0].splitlines()[4:]
        assert missing(text, *filter(None, rows)) == [], name
    assert charts_that_differ(tmp_path) == []


def test_the_docs_have_the_tables_and_charts_of_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (results.ROOT / "docs" / "results.md").read_text("utf-8")
    lines = {line["network"]: line for line in papers.read(MEASURED / "speed.csv")}
    for place in paper_speed.PUBLISHED:
        paper_speed.compare(place, lines, tmp_path)
    printed = capsys.readouterr().out
    assert missing(text, *(row for row in printed.splitlines() if row.startswith("| `"))) == []
    assert charts_that_differ(tmp_path) == []


def test_the_docs_have_the_table_and_charts_of_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (results.ROOT / "docs" / "results.md").read_text("utf-8")
    arguments = ["paper_pruning.py", "--table-only", "--out", str(MEASURED), "--charts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    paper_pruning.main()
    assert missing(text, *(row for row in capsys.readouterr().out.splitlines() if row.startswith("|"))) == []
    assert charts_that_differ(tmp_path) == []


def charts_that_differ(folder: Path) -> list[str]:
    """The charts in a folder that are not those of the docs."""
    made = {path.name: path.read_text("utf-8") for path in folder.glob("*.svg")}
    docs = {path.name: path.read_text("utf-8") for path in (results.ROOT / "docs" / "papers").glob("*.svg")}
    assert made
    return [name for name, chart in made.items() if docs.get(name) != chart]
