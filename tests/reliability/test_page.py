"""docs/reliability.md: every goal and every fault has its row, and what a row is proved by exists."""

import re
from functools import lru_cache

import pytest

from tests.reliability.commands import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
GOALS = {*range(1, 18), 23, 24}
FAULTS = {*range(1, 108)}
# The tables before this one are of trials; it has rates.
ROWS = re.findall(r"^\| .*\|$", PAGE.split("## What looking first costs")[0], re.MULTILINE)


def section(title: str) -> list[str]:
    body = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [row for row in body.splitlines() if re.match(r"\| \d+ \|", row)]


@pytest.mark.parametrize(("title", "expected"), [("Goals", GOALS), ("Faults, one by one", FAULTS)])
def test_every_one_has_its_row(title: str, expected: set[int]) -> None:
    rows = section(title)
    assert [int(row.split("|")[1]) for row in rows] == sorted(expected)


def test_every_row_names_what_proves_it() -> None:
    rows = [row for row in ROWS if not row.startswith(("| # ", "| Done ", "| | By"))]
    assert len(rows) > len(GOALS) + len(FAULTS)
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
