"""Candidates of the automatic recipe, which a race compares on held-out training images.

A candidate is a set of recipe changes with a label. They are in the order in which they are worth trying: a short race
has only the first few. Rows from scratch state their augmentation, which the automatic recipe chooses by the number of
epochs. The rows for CPUs were chosen on held-out training images of several datasets (benchmarks/LOG.md, "Candidates";
benchmarks/candidates.py repeats it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from patchloom.recipes.auto import MILD_EPOCHS, SMALL_PIXELS, TINY_PIXELS
from patchloom.recipes.fit import Facts
from patchloom.recipes.schema import Recipe
from patchloom.recipes.small_images import fit_to_32_pixels

WEAK = {"augment.policy": "none", "augment.mixup": 0.0, "augment.cutmix": 0.0}
MILD = {"augment.policy": "three_augment", "augment.mixup": 0.2, "augment.cutmix": 0.0}


class Candidate(NamedTuple):
    """One row of a race."""

    name: str
    changes: Mapping[str, Any]  # recipe fields by their dotted keys
    most_epochs: int | None = None  # longer runs do not try it: a short trial would mislead


def narrowed(rows: Iterable[Candidate], fixed: Sequence[str]) -> list[Candidate]:
    """Return the rows without fields that start with one of `fixed`; of equal rows, the first."""
    kept: list[Candidate] = []
    for row in rows:
        changes = {key: value for key, value in row.changes.items() if not key.startswith(tuple(fixed))}
        if all(changes != other.changes for other in kept):
            kept.append(row._replace(changes=changes))
    return kept


def classification_candidates(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """Return the candidates for classes of whole images."""
    rows = _networks(recipe, facts)
    return rows + (UNEVEN_CLASSES if rows and recipe.balance.sampling == "sqrt" else [])


def _networks(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """Return networks, augmentation strengths and learning rates."""
    own, size = recipe.model.name, recipe.model.image_size
    if facts.pretrained and facts.device == "cpu":  # a trial would take a good part of the run
        return []
    if facts.pretrained:
        rates = [Candidate(f"learning rate {text}", {"optim.lr": recipe.optim.lr * by}) for text, by in RATES]
        return [Candidate(own, {}), *rates, Candidate("mild augmentation", MILD)]
    if size < TINY_PIXELS:  # digits and letters: a few seconds are enough for any network
        return []
    if facts.device == "cpu":
        mild = MILD if size >= SMALL_PIXELS else {**MILD, "augment.policy": "trivial"}
        rows = [Candidate(f"{own}, weak augmentation", WEAK), Candidate(f"{own}, mild augmentation", mild)]
        return [*SMALL_ON_CPU, *rows] if size < SMALL_PIXELS else [*rows, *LARGE_ON_CPU]
    # The augmentation of the others follows from the epochs that the winner will have.
    weak = Candidate(f"{own}, weak augmentation", WEAK, most_epochs=MILD_EPOCHS)
    return [Candidate(own, {}), weak, *(SMALL_ON_GPU if size < SMALL_PIXELS else LARGE_ON_GPU)]


def segmentation_candidates(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """Return the candidates for masks: backbones and the size of the windows."""
    default, side = Candidate(recipe.model.name, {}), recipe.model.image_size
    if facts.device == "cpu":
        larger = min(facts.image_size_median, 4 * side // 3) // 32 * 32
        window = {"model.image_size": larger, "augment.short_side": larger}
        return [default, Candidate(f"windows of {larger} px", window)] if larger > side else [default]
    smaller = side // 2 // 32 * 32
    rows = [Candidate("smlpnet_t", {"model.name": "smlpnet_t"})] if not facts.pretrained else []
    rows += [Candidate(f"windows of {smaller} px", {"model.image_size": smaller})] if smaller else []
    return [default, *rows]


def _options(name: str, **options: Any) -> dict[str, Any]:
    """Return the fields of a network."""
    return {"model.name": name, **{f"model.options.{key}": value for key, value in options.items()}}


def _network(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a network with weak augmentation."""
    return _options(name, **options) | WEAK


# Beside `auto`'s sampling by square roots, best first (docs/imbalance.md). All are remedies, so that all are judged by
# the mean class accuracy.
UNEVEN_CLASSES = [
    Candidate("adjusted logits", {"balance.sampling": "none", "balance.logit_adjustment": 1.0, **WEAK}),
    Candidate("classes equally often", {"balance.sampling": "balanced", **WEAK}),
]
RATES = (("×3", 3.0), ("÷3", 1 / 3))
LARGE_ON_GPU = (
    Candidate("smlpnet_t as published", _options("smlpnet_t")),
    Candidate("resmlp_s12", _options("resmlp_s12")),
    Candidate(
        "patchconvnet_s20, patches of 8",
        _options("patchconvnet_s20", stem="linear", patch_size=8, depth=12, scale_init=0.1),
    ),
    Candidate("cait_xxs24, patches of 8", _options("cait_xxs24", patch_size=8, depth=12, scale_init=0.1)),
)
SMALL_ON_GPU = (
    Candidate("smlpnet_t, half the width", _options("smlpnet_t", **{**fit_to_32_pixels("smlpnet_t"), "dim": 48})),
    Candidate("resmlp_s12", _options("resmlp_s12", **fit_to_32_pixels("resmlp_s12"))),
    Candidate(
        "patchconvnet_s20",
        _options("patchconvnet_s20", **fit_to_32_pixels("patchconvnet_s20"), depth=12, scale_init=0.1),
    ),
)
LARGE_ON_CPU = (
    Candidate("96 px, weak augmentation", {"model.image_size": 96, **WEAK}),
    Candidate("wide, weak augmentation", _network("smlpnet_t", {"dim": 48, "depths": (1, 2, 4, 1)})),
)
SMALL_SMLPNET = {"dim": 32, "depths": (1, 2, 2), "patch_size": 2, "global_stages": (1, 2, 3)}
SMALL_ON_CPU = (Candidate("narrow smlpnet_t, weak augmentation", _network("smlpnet_t", SMALL_SMLPNET)),)
