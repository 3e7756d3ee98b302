"""The interface between an objective and the training loop, and the inputs an objective is built from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe


class Objective:
    """Base class of all objectives. If it is also an nn.Module, its state is saved and moved to the device."""

    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None  # of the user, in place of the recipe's
    batch_transform: Callable[..., Any] | None = None  # of the user

    @property
    def averaged(self) -> nn.Module | None:
        """Return a network that follows the model and is evaluated and saved like an average, or None."""
        return None

    @property
    def followers(self) -> Sequence[nn.Module]:
        """Return networks of the objective that see every batch; they are compiled if the model is."""
        return ()

    @property
    def shardable(self) -> Sequence[nn.Module]:
        """Return the modules of the objective that are sharded if the model is: its heads and followers."""
        children = self.children() if isinstance(self, nn.Module) else ()
        return [child for child in children if any(True for _ in child.parameters())]

    @property
    def equal_on_all_ranks(self) -> Sequence[str]:
        """Return the names of buffers that stay equal on all ranks without synchronization."""
        return ()

    def __call__(self, model: nn.Module, batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return scalars, means over the batch, that contain `loss`. `step` counts within the epoch."""
        raise NotImplementedError

    def before_update(self, model: nn.Module, step: int) -> None:
        """Modify the gradients before an update. `step` counts updates."""

    def after_update(self, model: nn.Module, step: int) -> None:
        """Update the objective's own state (a teacher, a memory) after an update."""

    def forget(self) -> None:
        """Discard what was noted for the next update; called if no update follows."""

    def collapsed(self) -> str:
        """Return one line on how the method failed in the past epoch, or "". Called once per epoch."""
        return ""

    def micro_batch_note(self, images: int) -> str:
        """Return how micro-batches of `images` images change the result, or "" if they do not."""
        del images
        return ""


def no_sum(tensor: Tensor) -> Tensor:
    """Return the tensor: the sum over one process."""
    return tensor


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """Everything an objective is built from, on the network's device."""

    recipe: Recipe
    network: Any
    labels: Tensor | None = None  # of all training images
    ignored: int = -1  # mask value of unlabeled pixels
    steps_per_epoch: int = 1
    teacher: Any = None
    add_up: Callable[[Tensor], Tensor] = no_sum  # sums a tensor over the processes
    gather: Callable[[Tensor], Tensor] = no_sum  # rows of this process → the rows of all

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        return next(self.network.parameters()).device

    @property
    def pixels(self) -> dict[str, Any]:
        """Return the pixel normalization of the network."""
        return {"pixel_mean": self.network.pixel_mean, "pixel_std": self.network.pixel_std}


def make_objective(ingredients: Ingredients) -> Objective:
    """Build the recipe's objective with its method's module."""
    module = import_module(method_of(ingredients.recipe.objective.method).objective)
    made: Objective = module.make_objective(ingredients)
    return made.to(ingredients.device) if isinstance(made, nn.Module) else made
