from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchloom.recipes import get_recipe
from patchloom.training.assemble import runs_as_graphs


@pytest.mark.parametrize(
    ("device", "world", "accumulate", "recipe", "expected"),
    [
        ("cuda", 1, 1, "small_images", True),
        ("cpu", 1, 1, "small_images", False),
        ("cuda", 2, 1, "small_images", False),
        ("cuda", 1, 2, "small_images", False),
        ("cuda", 1, 1, "dino_small_images", False),
    ],
)
def test_a_network_is_recorded_where_a_step_passes_it_once(device, world, accumulate, recipe, expected) -> None:
    processes = SimpleNamespace(device=torch.device(device), world=world)
    run: Any = SimpleNamespace(processes=processes, accumulate=accumulate)
    assert runs_as_graphs(run, get_recipe(recipe)) is expected
