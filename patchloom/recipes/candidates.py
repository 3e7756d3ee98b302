"""Candidates of the automatic recipe, which a race compares on held-out training images.

A candidate is a set of recipe changes with a label. The first one is the automatic recipe itself. The rows were chosen
on held-out training images of several datasets (benchmarks/LOG.md, "Candidates"; benchmarks/candidates.py repeats it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from patchloom.recipes.fit import Facts
from patchloom.recipes.schema import Recipe

WEAK = {"augment.policy": "none", "augment.mixup": 0.0, "augment.cutmix": 0.0}
MIXED = {"augment.mixup": 0.2, "augment.cutmix": 0.0}


class Candidate(NamedTuple):
    """One row of a race."""

    name: str
    changes: Mapping[str, Any]  # recipe fields by their dotted keys


def narrowed(rows: Iterable[Candidate], fixed: Sequence[str]) -> list[Candidate]:
    """Return the rows without fields that start with one of `fixed`; of equal rows, the first."""
    kept: list[Candidate] = []
    for row in rows:
        changes = {key: value for key, value in row.changes.items() if not key.startswith(tuple(fixed))}
        if all(changes != other.changes for other in kept):
            kept.append(Candidate(row.name, changes))
    return kept


def classification_candidates(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """Return the candidates for classes of whole images."""
    del facts
    return [Candidate(recipe.model.name, {})]
