"""The files of benchmarks/results: all are right and rendered, and a wrong one is refused in one line that says why."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.messages import missing
from tests.models.test_counts import PUBLISHED
from tools import results

PAPERS = results.ROOT / "docs" / "papers"
FOLDERS = {"results": results.MEASUREMENT, "networks": results.NETWORK, "claims": results.CLAIMS}
CLAIM = {"claim": "A is better than B", "place": "table 1", "published": "2, 1"}


def wrong(folder: str, changes: dict[str, Any], tmp_path: Path) -> Path:
    """A file of a form with some fields changed; None removes a field."""
    source = results.RESULTS if folder == "results" else results.RESULTS / folder
    good = json.loads(min(source.glob("*.json")).read_text("utf-8"))
    path = tmp_path / folder / "mine.json"
    path.parent.mkdir()
    path.write_text(json.dumps({name: value for name, value in (good | changes).items() if value != "absent"}))
    return path


def test_every_file_is_right_and_every_page_is_rendered() -> None:
    assert len(results.measurements()) >= 5
    assert len(results.networks()) >= 10
    assert set(results.claims()) == {page.stem for page in PAPERS.glob("*.md")} - {"index"}
    assert results.main(["--check"]) == 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_form_is_described(folder: str) -> None:
    text = (results.RESULTS / "README.md").read_text("utf-8")
    assert missing(text, *(f"`{field}`" for field in FOLDERS[folder])) == []
    assert missing(text, *(f"`{field}`" for field in results.CLAIM), *results.VERDICTS) == []


@pytest.mark.parametrize(
    ("folder", "changes", "facts"),
    [
        ("results", {"commit": ""}, ["commit"]),
        ("results", {"date": "yesterday"}, ["date", "yesterday", "YYYY-MM-DD"]),
        ("results", {"date": "2026-13-01"}, ["date", "2026-13-01", "YYYY-MM-DD"]),
        ("results", {"results": [{"tool": "a"}]}, ["value", "result 1"]),
        ("results", {"results": [{"tool": "a", "value": float("nan")}]}, ["value", "NaN", "number"]),
        ("results", {"speed": 3}, ["speed", "title"]),
        ("networks", {"description": "wide | deep"}, ["description", "wide | deep"]),
        ("networks", {"remark": "<script>"}, ["remark", "<script>"]),
        ("networks", {"command": "```"}, ["command", "one line"]),
        ("networks", {"values": [123.0], "interval": [120, 130], "metric": "% top-1"}, ["values", "123", "100"]),
        ("networks", {"network": "absent"}, ["network", "missing"]),
        ("networks", {"epochs": "many"}, ["epochs", "many", "whole number"]),
        ("networks", {"parameters": True}, ["parameters", "true"]),
        ("networks", {"seeds": [0, 0]}, ["seeds", "different"]),
        ("networks", {"seeds": [0, 1]}, ["1 values", "2 seeds"]),
        ("networks", {"interval": [90.0, 80.0]}, ["interval", "lower"]),
        ("networks", {"values": [5.0]}, ["mean", "interval"]),
        ("networks", {"epochs": None}, ["epochs", "reason"]),
        ("networks", {"missing": {}}, ["log_sha256", "reason"]),
        ("networks", {"log_sha256": "abc"}, ["log_sha256", "64"]),
        ("claims", {"claims": [CLAIM | {"verdict": "true"}]}, ["verdict", "true", "undecided"]),
        ("claims", {"claims": [CLAIM | {"verdict": "confirmed"}]}, ["seeds"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(
    folder: str, changes: dict[str, Any], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wrong(folder, changes, tmp_path)
    assert results.main([str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert missing(lines[0], "mine.json", *facts) == []


def test_a_file_outside_of_the_folders_is_checked_by_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = wrong("networks", {}, tmp_path)
    path = inside.rename(tmp_path / "mine.json")
    assert results.main([str(path)]) == 0
    path.write_text(path.read_text().replace('"epochs": ', '"epochs": -'))
    assert results.main([str(path)]) == 1
    assert missing(capsys.readouterr().err, "mine.json", "epochs", "whole number") == []


def test_a_file_that_is_no_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text("top-1: 80")
    assert results.main([str(tmp_path / "mine.json")]) == 1
    assert "mine.json" in capsys.readouterr().err


def test_a_network_with_a_log_and_seeds_is_read(tmp_path: Path) -> None:
    changes = {"seeds": [0, 1, 2], "values": [80.0, 81.0, 82.0], "interval": [78.5, 83.5], "log_sha256": "0" * 64}
    path = wrong("networks", changes, tmp_path)
    entry = json.loads(path.read_text("utf-8"))
    del entry["missing"]["log_sha256"]
    path.write_text(json.dumps(entry))
    assert results.mean(results.read(path)) == 81.0


# The command that docs/leaderboard.md gives to strangers.
def test_the_files_of_the_leaderboard_can_be_checked_alone() -> None:
    for path in (results.RESULTS / "networks").glob("*.json"):
        assert results.main([str(path)]) == 0


def test_the_networks_of_the_papers_have_their_published_costs() -> None:
    costs = {name: row for name, options, size, *row in PUBLISHED if not options and size == 224}
    listed = set()
    for page in PAPERS.glob("*.md"):
        for name, parameters, madds in re.findall(
            r"(?m)^\| `(\w+)` \| ([\d,]+) \| ([\d.]+) G \|", page.read_text("utf-8")
        ):
            listed.add(name)
            assert int(parameters.replace(",", "")) == costs[name][0]
            assert madds == f"{costs[name][1]:.2f}"
    assert listed == set(costs)


def test_the_summary_has_patchloom_in_its_own_column() -> None:
    rows = [line.strip("| ").split(" | ") for line in results.summary().splitlines()[2:]]
    assert len(rows) == len(results.measurements())
    assert [row[0] for row in rows if len(row) != 3 or "patchloom" in row[2]] == []
