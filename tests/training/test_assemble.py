from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchloom.training.assemble import runs_as_graphs


@pytest.mark.parametrize(
    ("device", "world", "accumulate", "expected"),
    [
        ("cuda", 1, 1, True),
        ("cpu", 1, 1, False),
        ("cuda", 2, 1, False),
        ("cuda", 1, 2, False),
    ],
)
def test_a_network_is_recorded_where_one_process_takes_whole_batches(device, world, accumulate, expected) -> None:
    processes = SimpleNamespace(device=torch.device(device), world=world)
    run: Any = SimpleNamespace(processes=processes, accumulate=accumulate)
    assert runs_as_graphs(run) is expected
