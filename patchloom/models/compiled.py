"""Compile deep networks block by block: blocks of the same shape share the compiled code.

torch.compile unrolls a whole network, which takes more than two minutes for 60 blocks. Compiling by block loses only
the fusion across blocks, a few percent of a step (benchmarks/LOG.md).
"""

from typing import Any

import torch
from torch import Tensor, nn

from patchloom.models.network import Network

SHAPES = 64  # combinations of size, mode and batch for which a block may be compiled


class NetworkWrapper(nn.Module):
    """Base of modules that call a network in another way and have its attributes.

    The network is the attribute `_orig_mod`, as in modules that torch.compile returns.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._orig_mod = network

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


class CompiledByBlock(NetworkWrapper):
    """A network whose blocks are compiled. The network itself is not changed."""

    def __init__(self, network: Network, **options: Any) -> None:
        super().__init__(network)
        # Imported here, because these take seconds.
        from torch._dynamo import config
        from torch._functorch import config as joint_graphs
        from torch._inductor import config as generated

        self._joint_graphs, self._generated = joint_graphs, generated
        config.recompile_limit = max(SHAPES, config.recompile_limit)
        self._calls = [
            (block, torch.compile(block._call_impl, dynamic=False, **options)) for block in network.repeated_blocks()
        ]

    def forward(self, images: Tensor, **options: Any) -> Any:
        for block, call in self._calls:
            block._compiled_call_impl = call  # Module.compile would set it permanently
        try:
            with (
                self._joint_graphs.patch(activation_memory_budget=self._orig_mod.kept_for_backward),
                # Maps (B, H, W, C) already have the layout for convolutions. On a GPU the compiler would treat their
                # rows as channels, and save transposed copies for the backward pass.
                self._generated.patch(layout_optimization=not images.is_cuda),
            ):
                return self._orig_mod(images, **options)
        finally:
            for block, _ in self._calls:
                block._compiled_call_impl = None
