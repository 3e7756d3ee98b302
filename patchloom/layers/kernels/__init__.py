"""Triton kernels that fuse what PyTorch does in several passes over memory.

A layer calls a kernel if `usable(x)`, and otherwise PyTorch operations, which are the reference on every device. Every
kernel here was measured to be faster (benchmarks/LOG.md). Without a GPU, tests run them in Triton's interpreter.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

SWITCH = "PATCHLOOM_KERNELS"  # environment variable; 0 disables the kernels
HALF_TYPES = (torch.bfloat16, torch.float16)
ALIGNED = 8  # 16-bit numbers in 16 bytes
ENABLED = os.environ.get(SWITCH, "1") != "0" and find_spec("triton") is not None

P = ParamSpec("P")
R = TypeVar("R")


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function an operator `patchloom::<its name>`, which torch.compile takes as it is. It changes no input.

    The same as `torch.library.custom_op`, which imports the compiler when an operator is first called: 4 of the 20
    seconds of a short run (benchmarks/LOG.md).
    """
    name = f"patchloom::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", function)
    overload: Callable[P, R] = getattr(torch.ops.patchloom, function.__name__).default
    return overload


def usable(x: Tensor) -> bool:
    """Return whether kernels apply to x: a 16-bit tensor on a GPU."""
    return ENABLED and x.is_cuda and x.dtype in HALF_TYPES


def usable_without_gradients(x: Tensor, *weights: Tensor | None) -> bool:
    """Return whether an inference kernel applies: no gradients, and weights of the same type as x."""
    return not torch.is_grad_enabled() and usable(x) and all(each is None or each.dtype == x.dtype for each in weights)


def usable_uncompiled(x: Tensor, *weights: Tensor | None) -> bool:
    """Return whether an inference kernel applies and nothing is being compiled: torch.compile fuses these itself."""
    return usable_without_gradients(x, *weights) and not torch.compiler.is_compiling()


def aligned(x: Tensor, *dims: int) -> Tensor:
    """Pad x with zeros along `dims` (negative) to multiples of 16 bytes.

    Unaligned matrix products, as of 196 positions, take twice as long (benchmarks/LOG.md).
    """
    padding = [0] * (2 * x.ndim)
    for dim in dims:
        padding[-2 * dim - 1] = -x.shape[dim] % ALIGNED
    return nn.functional.pad(x, padding) if any(padding) else x


def cores(device: torch.device) -> int:
    """Return the number of multiprocessors. The interpreter gets 2, so that a program has several steps."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
