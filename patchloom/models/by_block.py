"""A deep network compiled block by block: blocks of one shape share what was compiled for the first of them.

Compiled as a whole, a network of 60 blocks is 60 blocks to the compiler, and takes two minutes and more. What is lost
is what it would have joined across two blocks, some hundredths of a step (benchmarks/LOG.md).
"""

from typing import Any

import torch
from torch import Tensor

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
        from torch._inductor import config as generated

        self._joint_graphs, self._generated = joint_graphs, generated
        config.recompile_limit = max(SHAPES, config.recompile_limit)
        self._calls = [
            (block, torch.compile(block._call_impl, dynamic=False, **options)) for block in network.repeated_blocks()
        ]

    def forward(self, images: Tensor, **options: Any) -> Any:
        """As the network's."""
        for block, call in self._calls:
            block._compiled_call_impl = call  # what Module.compile sets for good
        try:
            with (
                self._joint_graphs.patch(activation_memory_budget=self._orig_mod.kept_for_backward),
                # Maps (B, H, W, C) are laid out for convolutions already. For a GPU the compiler would take their rows
                # for channels, and keep transposed copies for the backward pass.
                self._generated.patch(layout_optimization=not images.is_cuda),
            ):
                return self._orig_mod(images, **options)
        finally:
            for block, _ in self._calls:
                block._compiled_call_impl = None
