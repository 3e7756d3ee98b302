"""torch's optimizers without the decorators that keep torch.compile out of them.

Each decorated method imports torch's compiler at its first call, only to disable it there: 2.0 s of CPU time at the
start of every run (measured with torch 2.13), against 2 ms without. Runs compile their network but never an update. The
computation is torch's own.
"""

import inspect
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer


def _bare(method: Any) -> Any:
    return inspect.unwrap(method)  # a method without decorators is returned as it is


class Eager(Optimizer):
    """Base class for optimizers that are never compiled."""

    add_param_group = _bare(Optimizer.add_param_group)
    zero_grad = _bare(Optimizer.zero_grad)
    state_dict = _bare(Optimizer.state_dict)
    load_state_dict = _bare(Optimizer.load_state_dict)


class AdamW(Eager, optim.AdamW):
    """`torch.optim.AdamW`, undecorated."""

    step = torch.no_grad()(_bare(optim.AdamW.step))


class Adam(Eager, optim.Adam):
    """`torch.optim.Adam`, undecorated."""

    step = torch.no_grad()(_bare(optim.Adam.step))


class SGD(Eager, optim.SGD):
    """`torch.optim.SGD`, undecorated."""

    step = torch.no_grad()(_bare(optim.SGD.step))


class Adagrad(Eager, optim.Adagrad):
    """`torch.optim.Adagrad`, undecorated."""

    step = torch.no_grad()(_bare(optim.Adagrad.step))
