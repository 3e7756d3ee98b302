"""Feature distillation: a network learns the features of any other network from images without labels.

Letters: B images, N positions, C channels of the student, D of the teacher, λ weight of the positions.
    loss = (1 − λ)·mean (P s − n(t))² + λ·mean (Q s_i − n(t_i))²
s and t are the pooled features, s_i and t_i those at position i. n standardizes the D channels of one vector (a
LayerNorm without weights), so that all teachers have one scale and no image depends on the others of its batch. P and Q
are linear layers that are not part of the trained network. The finer of the two grids is averaged to the coarser.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.augmentation.mixing import draw_blend
from patchloom.data.batches.sampler import step_seed
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.models.dense.pyramid import as_map
from patchloom.models.network import Network
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.objectives.teacher import Teacher
from patchloom.recipes.schema import Recipe
from patchloom_runtime.errors import UsageError

# Charts of a report: title → curve → metric name.
CHARTS = {"Terms of the loss": {"pooled": "pooled_loss", "positions": "position_loss"}}


class Features(NamedTuple):
    """The features of a batch of images."""

    pooled: Tensor  # (B, C)
    positions: Tensor | None  # (B, C, H, W); None for a network that only has pooled features


class FeatureExtractor(nn.Module):
    """A network that returns its pooled features and the map that they are pooled from."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Features:
        """Map images (B, 3, H, W) to features."""
        return features_of(self.network, images)


def features_of(network: Network, images: Tensor) -> Features:
    """Return the features of images (B, 3, H, W), in one pass."""
    features = network.features(images)
    levels = list(network.taps().values())
    has_map = features.ndim == 4 or (levels and features.shape[1] > 1)
    positions = as_map(features, levels[-1].stride, images) if has_map else None
    return Features(network.vectors(features), positions)


@torch.no_grad()
def check_positions(network: Network) -> None:
    """Raise UsageError if a network has no features per position."""
    mode, weight = network.training, next(network.parameters())
    shape = (1, network.config.channels, *network.config.image_size)
    positions = features_of(network.eval(), torch.zeros(shape, device=weight.device)).positions
    network.train(mode)
    if positions is None:
        raise UsageError(
            f"{network.config.name} has no features per position; learn the pooled ones alone: "
            "--set objective.position_weight=0"
        )


def regression_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared difference between predicted (…, D) and standardized target (…, D) vectors."""
    target = at_least_float32(target)
    return F.mse_loss(at_least_float32(predicted), F.layer_norm(target, target.shape[-1:]))


class FeatureDistillation(nn.Module, Objective):
    """Learns the pooled features of a teacher and those per position. The module holds P and Q of the equation."""

    def __init__(self, recipe: Recipe, network: Network, teacher: Teacher) -> None:
        super().__init__()
        self.augment, self.seed = recipe.augment, recipe.seed
        self.weight = recipe.objective.position_weight
        self.pixel_mean, self.pixel_std = network.pixel_mean, network.pixel_std
        # A list, so that the frozen teacher is not part of checkpoints.
        self._teachers = [teacher.for_images_of(self.pixel_mean, self.pixel_std)]
        extractor = teacher.module
        assert isinstance(extractor, FeatureExtractor)
        if self.weight:
            for each in (network, extractor.network):
                check_positions(each)
        channels = extractor.network.feature_dim
        self.pooled_layer = nn.Linear(network.feature_dim, channels)
        self.position_layer = nn.Linear(network.feature_dim, channels) if self.weight else None

    @property
    def followers(self) -> list[nn.Module]:
        return list(self._teachers)

    def forward(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized, and its two terms."""
        images = normalize(batch.images, self.pixel_mean, self.pixel_std)
        blend = draw_blend(
            *images.shape[2:],
            mixup=self.augment.mixup,
            cutmix=self.augment.cutmix,
            probability=self.augment.mix_probability,
            switch=self.augment.mix_switch,
            seed=step_seed(self.seed, epoch, step),
        )
        images = blend.images(images)
        target: Features = self._teachers[0](images)
        # Wrappers of a network return its logits alone, so its features are computed without them.
        network: Any = getattr(model, "_orig_mod", model)
        own = features_of(network, images)
        pooled_loss = regression_loss(self.pooled_layer(own.pooled), target.pooled)
        if self.position_layer is None or own.positions is None or target.positions is None:
            return {"loss": pooled_loss, "pooled_loss": pooled_loss.detach()}
        maps = own.positions, target.positions
        grid = min(each.shape[2] for each in maps), min(each.shape[3] for each in maps)
        student, teacher = (F.adaptive_avg_pool2d(each, grid).permute(0, 2, 3, 1) for each in maps)  # (B, H, W, C or D)
        position_loss = regression_loss(self.position_layer(student), teacher)
        return {
            "loss": (1 - self.weight) * pooled_loss + self.weight * position_loss,
            "pooled_loss": pooled_loss.detach(),
            "position_loss": position_loss.detach(),
        }


def make_objective(ingredients: Ingredients) -> FeatureDistillation:
    """Build the recipe's objective."""
    return FeatureDistillation(ingredients.recipe, ingredients.network, ingredients.teacher)
