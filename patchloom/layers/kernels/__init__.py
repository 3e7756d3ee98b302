"""Triton kernels for what PyTorch does in several passes over memory, each beside the plain form that it equals.

A layer asks `usable(x)` and otherwise takes its plain path, which stays the reference on every device. A kernel is here
where it was measured faster (benchmarks/LOG.md). Without a GPU tests run them in Triton's interpreter.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor, nn

SWITCH = "PATCHLOOM_KERNELS"  # 0 leaves all work to PyTorch
LOW = (torch.bfloat16, torch.float16)
ALIGNED = 8  # numbers of two bytes in 16
FOUND = os.environ.get(SWITCH, "1") != "0" and find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """For tensors of two bytes per number on a GPU, for which the kernels were measured."""
    return FOUND and x.is_cuda and x.dtype in LOW


def usable_without_gradients(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether a kernel for inference takes x and the weights as they are."""
    return not torch.is_grad_enabled() and usable(x) and all(each is None or each.dtype == x.dtype for each in weights)


def usable_uncompiled(x: Tensor, *weights: Tensor | None) -> bool:
    """The same for one that a compiler would join with what stands beside it: nothing is being compiled."""
    return usable_without_gradients(x, *weights) and not torch.compiler.is_compiling()


def aligned(x: Tensor, *dims: int) -> Tensor:
    """x with zeros after it along `dims`, counted from the last, up to rows of 16 bytes.

    A product with other rows, as of 196 positions, takes twice as long (benchmarks/LOG.md).
    """
    room = [0] * (2 * x.ndim)
    for dim in dims:
        room[-2 * dim - 1] = -x.shape[dim] % ALIGNED
    return nn.functional.pad(x, room) if any(room) else x


def cores(device: torch.device) -> int:
    """Multiprocessors of a GPU; interpreted, few, so that one program has several steps."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
