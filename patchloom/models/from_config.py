"""Networks that a stranger's config tells of: built only where the weights beside it have their names and shapes.

A config of a few hundred bytes can ask for terabytes. So its whole numbers are compared with the weights first, then
the network is built without memory, and only one whose tensors are those of the file is built with it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from patchloom.models.sharding import is_sharded
from patchloom_runtime.errors import CheckpointError, PatchloomError

# Beyond it a whole number among the options must be a dimension of some weight, or less than their number.
ANY_OPTION = 4096
# Where the weights are lost: more than networks have.
MOST_OPTION, MOST_PARAMETERS = 1 << 20, 100_000
# Parameters made for each weight of the file: timm's networks are tried in several ways before they are made.
_TRIES = 16
_SHOWN = 5

M = TypeVar("M", bound=nn.Module)


def make_for(weights: Mapping[str, Tensor], make: Callable[[], M], options: Mapping[str, Any], *, config: str) -> M:
    """`make()`, which builds a network with `options`, where that can be the network of these weights.

    Where its tensors are all among the weights it holds those themselves: drawing others first would take longer than
    reading the file. `config` is the file that the options are from, for the CheckpointError where it cannot.
    """
    most = max([ANY_OPTION, len(weights), *(side for tensor in weights.values() for side in tensor.shape)])
    frame = make_frame(make, options, config=config, most=most, parameters=_TRIES * len(weights) + 1024)
    if differ := differences(frame.state_dict(), weights):
        raise CheckpointError(f"{config} is of another network or number of classes than its weights: {differ}.")
    if _is_filled_by(frame, weights):
        frame.load_state_dict(dict(weights), assign=True)
        return frame
    with _named(config):
        return make()


def _is_filled_by(network: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether all its tensors are among the weights, once: no buffers that are not saved, no plain attributes."""
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    shared = len({id(tensor) for _, tensor in named}) < len(named)  # which would be two tensors afterwards
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
    """`make()` on the meta device, which takes no memory; a CheckpointError where it would take for ever, or fails."""
    for name, value in options.items():
        if any(abs(number) > most for number in _whole_numbers(value)):
            shown = f"{value!r}"
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise CheckpointError(f"{config}: {name} is {shown}, expected at most {most:,}: no weight has so many.")
    with _named(config), torch.device("meta"), _no_more_parameters_than(parameters):
        return make()


@contextmanager
def _named(config: str) -> Iterator[None]:
    """What keeps a network from being built is said of the file that tells of it."""
    try:
        yield
    except PatchloomError as error:
        raise CheckpointError(f"{config} is of no network that can be built: {error}") from error
    except Exception as error:  # options that nobody foresaw, which torch refuses in words of its own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{config} is of no network that can be built: {reason}") from error


def differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Names, shapes and kinds of number in which weights differ from a network's own; '' where they fit."""
    differ = [f"{name} is missing" for name in own if name not in given]
    differ += [f"{name} is unknown" for name in given if name not in own]
    both = [(name, own[name], given[name]) for name in own if name in given]
    differ += [
        f"{name} is {tuple(found.shape)}, expected {tuple(expected.shape)}"
        for name, expected, found in both
        if found.shape != expected.shape
    ]
    differ += [
        f"{name} is {found.dtype}, expected {expected.dtype}"
        for name, expected, found in both
        if found.is_floating_point() != expected.is_floating_point()
    ]
    return "; ".join(differ[:_SHOWN]) + (f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else "")


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _whole_numbers(inner)


@contextmanager
def _no_more_parameters_than(most: int) -> Iterator[None]:
    """End the building of a network that has many times the parameters there are weights for."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise CheckpointError(f"it has more than {most:,} parameters, which its weights do not")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load exactly these weights, or a CheckpointError that lists the names and shapes that differ."""
    own = module.state_dict()
    if differ := differences(own, weights):
        raise CheckpointError(f"{source} is of another network or number of classes: {differ}.")
    module.load_state_dict({name: like(own[name], value) for name, value in weights.items()})


def like(own: Tensor, value: Tensor) -> Tensor:
    """The value split over ranks as `own` is, or in its memory order, as an optimiser itself would make it."""
    if is_sharded(own):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(own, DTensor)
        # Every rank has read the whole value: no rank needs to send it.
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return torch.empty_like(own, dtype=value.dtype, requires_grad=False).copy_(value)
