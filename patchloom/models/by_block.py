"""A deep network compiled block by block: blocks of one shape share what was compiled for the first of them.

Compiled as a whole, a network of 60 blocks is 60 blocks to the compiler, and takes two minutes and more. What is lost
is what it would have joined across two blocks, some hundredths of a step (benchmarks/LOG.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.models.network import Network
from patchloom.models.wrapped import Wrapped

SHAPES = 64  # sizes, modes and batches for which blocks of one class may be compiled


class CompiledByBlock(Wrapped):
    """Calls the network with its blocks compiled; the network itself stays as it is."""

    def __init__(self, network: Network, **options: Any) -> None:
        super().__init__(network)
        # Seconds, which a run that compiles nothing is spared.
        from torch._dynamo import config
        from torch._functorch import config as joint_graphs

        self._joint_graphs = joint_graphs
        config.recompile_limit = max(SHAPES, config.recompile_limit)
        self._calls = [(block, _compiled(block, **options)) for block in network.repeated_blocks()]

    def forward(self, images: Tensor, **options: Any) -> Any:
        """As the network's."""
        for block, call in self._calls:
            block._compiled_call_impl = call  # what Module.compile sets for good
        try:
            with self._joint_graphs.patch(activation_memory_budget=self._orig_mod.kept_for_backward):
                return self._orig_mod(images, **options)
        finally:
            for block, _ in self._calls:
                block._compiled_call_impl = None


def _compiled(block: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """The block's call; compiled, it is given maps (B, H, W, C) as (B, C, H, W), which are the same numbers in memory.

    Before a convolution torch's compiler takes the second dimension for channels, and would keep maps for the backward
    pass as copies in which the rows come last.
    """

    def on_images(images: Tensor) -> Tensor:
        out: Tensor = block._call_impl(images.permute(0, 2, 3, 1))
        return out.permute(0, 3, 1, 2)

    of_tokens = torch.compile(block._call_impl, dynamic=False, **options)
    of_images = torch.compile(on_images, dynamic=False, **options)

    def call(x: Tensor, *others: Tensor) -> Tensor:
        if x.ndim == 4:
            out: Tensor = of_images(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            return out
        found: Tensor = of_tokens(x, *others)
        return found

    return call
