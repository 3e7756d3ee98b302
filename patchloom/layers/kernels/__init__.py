"""Triton kernels for what PyTorch does in several passes over memory, each beside the plain form that it equals.

A layer asks `usable(x)` and otherwise takes its plain path, which stays the reference on every device. A kernel is here
where it was measured faster (benchmarks/LOG.md). Without a GPU tests run them in Triton's interpreter.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

SWITCH = "PATCHLOOM_KERNELS"  # 0 leaves all work to PyTorch
LOW = (torch.bfloat16, torch.float16)


@cache
def _found() -> bool:
    return os.environ.get(SWITCH, "1") != "0" and find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """For tensors of two bytes per number on a GPU, for which the kernels were measured."""
    return x.is_cuda and x.dtype in LOW and _found()
