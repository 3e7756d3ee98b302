"""docs/reliability.md: every goal and every fault has its row, and what a row is proved by exists."""

import re
from functools import lru_cache

import pytest

from tests.reliability.commands import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
GOALS = {*range(1, 18), 23, 24}
# The tables before this one are of trials; it has rates.
ROWS = re.findall(r"^\| .*\|$", PAGE.split("## What looking first costs")[0], re.MULTILINE)


def section(title: str) -> list[str]:
    body = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [row for row in body.splitlines() if re.match(r"\| \d+ \|", row)]


def numbers(title: str) -> list[int]:
    return [int(row.split("|")[1]) for row in section(title)]


def test_every_goal_has_its_row() -> None:
    assert numbers("Goals") == sorted(GOALS)


def test_faults_are_numbered_without_a_gap() -> None:
    faults = numbers("Faults, one by one")
    assert faults == list(range(1, len(faults) + 1))


def test_every_row_names_what_proves_it() -> None:
    rows = [row for row in ROWS if not row.startswith(("| # ", "| Action ", "| | By"))]
    assert len(rows) > len(GOALS) + 100
    proofs = [row.rstrip("| ").rpartition("| ")[2] for row in rows]
    assert [proof for proof in proofs if not proof.startswith(("`tests/", "`reliability.py "))] == []


@lru_cache
def source(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+::[^`]+)`", PAGE))))
def test_each_test_named_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert f"\ndef {test}(" in source(path)


def test_each_trial_named_exists() -> None:
    known = re.search(r"known = \[(.*)\]", source("benchmarks/reliability.py"))
    assert known
    trials = set(re.findall(r"`reliability\.py (\w+)`", PAGE))
    assert trials == set(re.findall(r'"(\w+)"', known[1]))
