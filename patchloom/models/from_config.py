"""Build networks from untrusted configs, and load weights into them.

A config of a few hundred bytes can request terabytes. So its integers are compared with the weights first, then the
network is built on the meta device, and only if its tensors match the file is memory allocated.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from patchloom_runtime.errors import CheckpointError, PatchloomError

# A larger integer among the options must be a dimension of some weight, or at most the number of weights.
ANY_OPTION = 4096
# Limits if there are no weights to compare with: more than networks have.
MOST_OPTION, MOST_PARAMETERS = 1 << 20, 100_000
# Parameters created per weight of the file: timm's networks are tried with several options before they are made.
_TRIES = 16
_MOST_LISTED = 5

M = TypeVar("M", bound=nn.Module)


def make_for(weights: Mapping[str, Tensor], make: Callable[[], M], options: Mapping[str, Any], *, config: str) -> M:
    """Return `make()`, which builds a network with `options`, after checking that it matches these weights.

    If all its tensors are among the weights, the network uses these directly: initializing others would take longer
    than reading the file. `config` is the file with the options, for messages.
    """
    most = max([ANY_OPTION, len(weights), *(side for tensor in weights.values() for side in tensor.shape)])
    frame = make_frame(make, options, config=config, most=most, parameters=_TRIES * len(weights) + 1024)
    if differ := differences(frame.state_dict(), weights):
        raise CheckpointError(
            f"{config} does not match its weights, which are of another network or number of classes: {differ}."
        )
    if _is_filled_by(frame, weights):
        frame.load_state_dict(dict(weights), assign=True)
        return frame
    with _named(config):
        return make()


def _is_filled_by(network: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Return whether all its tensors are among the weights: no unsaved buffers, shared tensors or plain attributes."""
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    shared = len({id(tensor) for _, tensor in named}) < len(named)  # loading would separate them
    loose = any(isinstance(value, Tensor) for module in network.modules() for value in vars(module).values())
    return not (shared or loose) and all(name in weights for name, _ in named)


def make_frame(
    make: Callable[[], M],
    options: Mapping[str, Any],
    *,
    config: str,
    most: int = MOST_OPTION,
    parameters: int = MOST_PARAMETERS,
) -> M:
    """Return `make()` on the meta device, which takes no memory. Raise CheckpointError if it is too large or fails."""
    for name, value in options.items():
        if any(abs(number) > most for number in _whole_numbers(value)):
            text = f"{value!r}"
            text = text if len(text) <= 60 else f"{text[:57]}..."
            raise CheckpointError(f"{config}: {name} is {text}, expected at most {most:,}: no weight is that large.")
    with _named(config), torch.device("meta"), _no_more_parameters_than(parameters):
        return make()


@contextmanager
def _named(config: str) -> Iterator[None]:
    """Raise CheckpointError naming the config file if the network cannot be built."""
    try:
        yield
    except PatchloomError as error:
        raise CheckpointError(f"{config} does not describe a network that can be built: {error}") from error
    except Exception as error:  # unforeseen options, which torch rejects
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{config} describes no network that can be built: {reason}") from error


def differences(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return the names, shapes and dtypes in which weights differ from a network's own, or ''."""
    differ = [f"{name} is missing" for name in own if name not in weights]
    differ += [f"{name} is unknown" for name in weights if name not in own]
    both = [(name, own[name], weights[name]) for name in own if name in weights]
    differ += [
        f"{name} is {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        for name, expected, actual in both
        if actual.shape != expected.shape
    ]
    differ += [
        f"{name} is {actual.dtype}, expected {expected.dtype}"
        for name, expected, actual in both
        if actual.is_floating_point() != expected.is_floating_point()
    ]
    more = len(differ) - _MOST_LISTED
    return "; ".join(differ[:_MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _whole_numbers(inner)


@contextmanager
def _no_more_parameters_than(most: int) -> Iterator[None]:
    """Raise CheckpointError while a network is built if it has many more parameters than weights."""
    count = 0

    def count_parameter(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise CheckpointError(f"it has more than {most:,} parameters, many more than its weights")

    hook = register_module_parameter_registration_hook(count_parameter)
    try:
        yield
    finally:
        hook.remove()


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load exactly these weights. Raise CheckpointError with the names and shapes that differ."""
    own = module.state_dict()
    if differ := differences(own, weights):
        raise CheckpointError(f"{source} is of another network or number of classes: {differ}.")
    module.load_state_dict({name: like(own[name], value) for name, value in weights.items()})


def like(own: Tensor, value: Tensor) -> Tensor:
    """Return the value sharded over ranks like `own`, or in its memory format, as an optimizer creates its state."""
    if is_sharded(own):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(own, DTensor)
        # Every rank has read the whole value, so none needs to send it.
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return torch.empty_like(own, dtype=value.dtype, requires_grad=False).copy_(value)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing its module, which takes more than a second."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
