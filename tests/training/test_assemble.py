"""Which networks run as CUDA graphs, and which are compiled block by block."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchloom.training.assemble import is_captured


@pytest.mark.parametrize(
    ("device", "world", "model", "checkpointing", "method", "compiled", "expected"),
    [
        ("cuda", 1, None, False, "forward", False, True),
        ("cuda", 1, None, False, "maps", False, True),
        ("cpu", 1, None, False, "forward", False, False),
        ("cuda", 2, None, False, "forward", False, False),
        ("cuda", 1, None, False, "", False, False),
        ("cuda", 1, None, True, "forward", False, False),
        ("cuda", 1, None, True, "forward", True, True),
        ("cuda", 1, "module:mine", False, "forward", False, False),
        ("cuda", 1, "module:mine", False, "forward", True, True),
    ],
)
def test_what_is_captured(device, world, model, checkpointing, method, compiled, expected) -> None:
    run: Any = SimpleNamespace(
        processes=SimpleNamespace(device=torch.device(device), world=world), compiled=compiled, accumulate=2
    )
    plan: Any = SimpleNamespace(
        settings=SimpleNamespace(model=model),
        recipe=SimpleNamespace(model=SimpleNamespace(gradient_checkpointing=checkpointing)),
        task=SimpleNamespace(training=SimpleNamespace(captured_method=method)),
    )
    assert is_captured(plan, run) is expected
