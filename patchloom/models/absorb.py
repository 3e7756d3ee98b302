"""Inference without what training needed: everything affine folded into the linear layer beside it (RM-5)."""

import copy

from patchloom.models.network import Network
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom_runtime.errors import UsageError


def absorb(model: Network) -> Network:
    """An eval-only copy with the same features and outputs and fewer operations.

    Aff, LayerScale, BatchNorm and LayerNorm's weight and bias are folded away wherever a linear layer or a convolution
    stands next to them. The network given is not changed.
    """
    if not isinstance(model, Network):
        raise UsageError(f"absorb takes a network of patchloom, given {type(model).__name__}")
    lean = copy.deepcopy(model).eval().requires_grad_(False)
    for module in reversed(list(lean.modules())):  # the parts of a module before it
        fold = getattr(module, "absorb_", None)
        if fold is not None:
            fold()
    if isinstance(lean, PooledConvNet):
        lean.absorb_trunk_()
    lean.requires_grad_(False)
    lean.absorbed = True
    return lean
