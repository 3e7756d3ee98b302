"""torch's optimisers without what keeps a compiler out of them: runs compile their network and never an update.

At its first call each of the wrapped methods imports torch's compiler, only to tell it to stay away: more than two
seconds of processor time at the start of every run. What the methods compute is torch's own.
"""

import inspect
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer


def _bare(method: Any) -> Any:
    """The method as it was written; where another version of torch wraps nothing, as it is."""
    return inspect.unwrap(method)


class Eager(Optimizer):
    """An optimiser whose methods are called and never compiled."""

    add_param_group = _bare(Optimizer.add_param_group)
    zero_grad = _bare(Optimizer.zero_grad)
    state_dict = _bare(Optimizer.state_dict)
    load_state_dict = _bare(Optimizer.load_state_dict)


class AdamW(Eager, optim.AdamW):
    """torch's."""

    step = torch.no_grad()(_bare(optim.AdamW.step))


class Adam(Eager, optim.Adam):
    """torch's."""

    step = torch.no_grad()(_bare(optim.Adam.step))


class SGD(Eager, optim.SGD):
    """torch's."""

    step = torch.no_grad()(_bare(optim.SGD.step))


class Adagrad(Eager, optim.Adagrad):
    """torch's."""

    step = torch.no_grad()(_bare(optim.Adagrad.step))
