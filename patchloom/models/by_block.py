"""A deep network compiled block by block: blocks of one shape share what was compiled for the first of them.

Compiled as a whole, a network of 60 blocks is 60 blocks to the compiler, and takes two minutes and more. What is lost
is what it would have joined across two blocks, some hundredths of a step (benchmarks/LOG.md).
"""

from typing import Any

import torch
from torch import Tensor, nn

from patchloom.models.network import Network

SHAPES = 64  # sizes, modes and batches for which blocks of one class may be compiled


class CompiledByBlock(nn.Module):
    """Calls the network with its blocks compiled; the network itself stays as it is, where torch.compile keeps it."""

    def __init__(self, network: Network, **options: Any) -> None:
        super().__init__()
        from torch._dynamo import config  # seconds, which a run that compiles nothing is spared

        config.recompile_limit = max(SHAPES, config.recompile_limit)
        self._orig_mod = network
        self._calls = [
            (block, torch.compile(block._call_impl, dynamic=False, **options)) for block in network.repeated_blocks()
        ]

    def forward(self, images: Tensor) -> Tensor:
        """As the network's."""
        for block, call in self._calls:
            block._compiled_call_impl = call  # what Module.compile sets for good
        try:
            out: Tensor = self._orig_mod(images)
        finally:
            for block, _ in self._calls:
                block._compiled_call_impl = None
        return out

    def __getattr__(self, name: str) -> Any:
        """The network's, where it is no own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)
