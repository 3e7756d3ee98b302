"""What stands for a network and calls it in another way."""

from typing import Any

from torch import nn


class Wrapped(nn.Module):
    """Has the network's attributes beside its own; the network is found where torch.compile keeps it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._orig_mod = network

    def __getattr__(self, name: str) -> Any:
        """The network's, where it is no own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)
