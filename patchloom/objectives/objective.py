"""What a method minimises, as the loop sees it; and what a method is made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe


class Objective:
    """A method. One that is an nn.Module too has its state saved, and is moved to the device with the model."""

    @property
    def averaged(self) -> nn.Module | None:
        """A network that follows the model: evaluated, and kept where it is better, as an average."""
        return None

    @property
    def followers(self) -> Sequence[nn.Module]:
        """Networks of its own that see every batch: compiled where the model is."""
        return ()

    @property
    def equal_on_all_ranks(self) -> Sequence[str]:
        """Names of buffers that every rank keeps the same by itself."""
        return ()

    def __call__(self, model: nn.Module, batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Scalars, means over the batch, with `loss`; `step` counts within the epoch."""
        raise NotImplementedError

    def before_update(self, model: nn.Module, step: int) -> None:
        """Called once the gradients are there (some are to be dropped); `step` counts updates."""

    def after_update(self, model: nn.Module, step: int) -> None:
        """Called after each update: a teacher follows its student, a memory takes in the batch."""

    def forget(self) -> None:
        """Called where no update follows: drop what was noted for the next one."""

    def collapsed(self) -> str:
        """One line on how the method failed in the epoch that ends, asked once; '' where it did not."""
        return ""

    def cut_in_words(self, images: int) -> str:
        """What micro-batches of so many images change in the result; '' where they change nothing."""
        del images
        return ""


def no_sum(tensor: Tensor) -> Tensor:
    """The sum over one process."""
    return tensor


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What an objective is made from, on the device of the network."""

    recipe: Recipe
    network: Any
    labels: Tensor | None = None  # of all training images
    ignored: int = -1  # the number in a mask that stands for 'not labelled'
    steps_per_epoch: int = 1
    teacher: Any = None
    add_up: Callable[[Tensor], Tensor] = no_sum  # sums a tensor over the processes
    gather: Callable[[Tensor], Tensor] = no_sum  # rows of this process → the rows of all

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    @property
    def pixels(self) -> dict[str, Any]:
        """How pictures are normalised for the network."""
        return {"pixel_mean": self.network.pixel_mean, "pixel_std": self.network.pixel_std}


def make_objective(ingredients: Ingredients) -> Objective:
    """What the recipe minimises: its method's module makes it."""
    module = import_module(method_of(ingredients.recipe.objective.method).objective)
    made: Objective = module.make_objective(ingredients)
    return made.to(ingredients.device) if isinstance(made, nn.Module) else made
