"""Every candidate of a race is a recipe whose network can be built, for each kind of data and machine."""

from typing import Any

import pytest
import torch

from patchloom.recipes.candidates import classification_candidates, segmentation_candidates
from patchloom.recipes.choices import resolve_recipe
from patchloom.recipes.fit import Facts
from patchloom.recipes.segmentation import auto_segmentation
from patchloom.tasks.images.networks import make_network
from patchloom.tasks.segmentation.training import make_segmentation


def chosen(facts: Facts, changes: Any) -> Any:
    return resolve_recipe(lambda: facts, classes=10, recipe="auto", model=None, changes=dict(changes))[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("median", [8, 32, 64, 136, 500])
@pytest.mark.parametrize("pretrained", [False, True])
def test_classification(device: Any, median: int, pretrained: bool) -> None:
    facts = Facts(2_000, median, device, pretrained)
    default = chosen(facts, {})
    rows = classification_candidates(default, facts)
    assert len({row.name for row in rows}) == len(rows)
    recipes = []
    for row in rows:
        recipe = chosen(facts, row.changes)
        assert recipe not in recipes
        recipes.append(recipe)
        with torch.device("meta"):
            assert make_network(recipe, 10).config.num_classes == 10
    assert (len(rows) > 2) == (device == "cuda" if pretrained else median > 8)


def test_remedies_race_for_uneven_classes() -> None:
    facts = Facts(2_000, 136, "cpu", imbalance=50.0)
    recipes = [chosen(facts, row.changes) for row in classification_candidates(chosen(facts, {}), facts)]
    remedies = [(recipe.balance.sampling, recipe.balance.logit_adjustment) for recipe in recipes]
    assert set(remedies) == {("sqrt", 0.0), ("none", 1.0), ("balanced", 0.0)}
    assert remedies[0] == ("sqrt", 0.0)
    fixed = {"balance.class_weights": "inverse"}
    others = [chosen(facts, fixed | row.changes) for row in classification_candidates(chosen(facts, fixed), facts)]
    assert {recipe.balance for recipe in others} == {others[0].balance}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("median", "pretrained"), [(64, False), (180, False), (500, False), (180, True)])
def test_segmentation(device: Any, median: int, pretrained: bool) -> None:
    facts = Facts(300, median, device, pretrained)
    rows = segmentation_candidates(auto_segmentation(facts, None, {})[0], facts)
    assert rows[0].changes == {}
    for row in rows:
        recipe, _ = auto_segmentation(facts, row.changes.get("model.name"), dict(row.changes))
        with torch.device("meta"):
            make_segmentation(recipe, 5)
