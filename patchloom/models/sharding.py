"""Weights that are split over ranks."""

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Nobody has one who has not imported that module, which takes more than a second."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
