"""Grafit: fine-grained embeddings from coarse labels, and the methods it is compared with (thesis chapter 2).

An embedding is g(x) = P(f(x)) with a trunk f and a projector P. The kNN loss pulls an image towards the remembered
images of its label, the instance loss pulls the views of one image together: loss = kNN + λ·instance (equation 2.4; λ
from table 2.11). With λ = 0 it is SNCA. Paper and code: the thesis does not give the initial memory, its scale and the
decay of the target, which are taken from SNCA's and BYOL's code, nor the projector's sizes, which follow from the
parameter counts of table 2.7.

Letters: B images, T views of each, N training images, C channels of the trunk, D of an embedding.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.batches.views import ViewBatch
from patchloom.data.images.image_batch import normalize
from patchloom.layers.projector import Projector
from patchloom.models.network import Network
from patchloom.models.sharding import follow_
from patchloom.objectives.classification import at_least_float32, cross_entropy
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes import methods
from patchloom.recipes.parts import GrafitPart
from patchloom_runtime.errors import DataError, UsageError

# Charts of a report: title → curve → metric name.
CHARTS = {"Terms of the loss": {"labels": "label_loss", "instances": "instance_loss"}}


TEMPERATURE, TARGET_DECAY, MARGIN = GrafitPart.temperature, GrafitPart.target_decay, GrafitPart.margin

Gather = Callable[[Tensor], Tensor]  # (n, …) of this process → the rows of all, by rank, equal on every process


@dataclass(frozen=True)
class Losses:
    """The losses that are summed, and the projector between trunk and embedding."""

    labels: Literal["knn", "cross_entropy", "none"]
    instance: Literal["cosine", "triplet", "none"]
    projector: Literal["fc", "mlp", "none"]

    def drop_instances(self) -> "Losses":
        """Return the losses for λ = 0, without a projector that only the instance loss would train."""
        return replace(self, instance="none", projector=self.projector if self.labels == "knn" else "none")


# Rows of tables 2.1, 2.4 and 2.7. ClusterFit+ is classification with the labels of `objectives.clusters`.
METHODS = {name: Losses(**row.options) for name, row in methods.METHODS.items() if row.objective == __name__}


# Losses ---------------------------------------------------------------------------------------------------------------


def knn_loss(
    embeddings: Tensor, index: Tensor, memory: Tensor, labels: Tensor, temperature: float = TEMPERATURE
) -> Tensor:
    """Return −log Σ_{j: y_j = y_i, j ≠ i} p_ij with p_ij ∝ exp(cos/σ) over j ≠ i (equations 2.2, 2.3), mean over B.

    Takes embeddings (B, D) of the images at `index`, and unit vectors `memory` (N, D) and labels (N,) of all images. An
    image that is alone in its class has no neighbor to choose and adds 0, as in SNCA's code.
    """
    unit = F.normalize(at_least_float32(embeddings), dim=1)
    # In place and scaled before the product: with 1.3 M images every copy of (B, N) takes gigabytes.
    logits = ((unit / temperature) @ memory.to(unit.dtype).T).scatter_(1, index[:, None], -torch.inf)
    right = labels[index, None] == labels
    right |= right.sum(dim=1, keepdim=True) == 1
    return (logits.logsumexp(dim=1) - logits.masked_fill(~right, -torch.inf).logsumexp(dim=1)).mean()


def instance_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return −cos(prediction of view i, target of view j), mean over ordered pairs i ≠ j and B; (T, B, D) each."""
    views, images, _ = predictions.shape
    online = F.normalize(at_least_float32(predictions), dim=2)
    target = F.normalize(at_least_float32(targets), dim=2)
    cosines = torch.einsum("ibd,jbd->ij", online, target)
    return -(cosines.sum() - cosines.trace()) / (views * (views - 1) * images)


def triplet_loss(vectors: Tensor, identity: Tensor, margin: float = MARGIN) -> Tensor:
    """Return max(0, margin + ‖a − p‖² − ‖a − n‖²) of unit vectors; p has the identity of the anchor a, n another.

    Takes vectors (M, D) and identities (M,), for instances the image's index (thesis 2.2). The thesis does not say
    which triplets are used: here p is the furthest and n the nearest of the batch. Mean over the anchors that have
    both.
    """
    unit = F.normalize(at_least_float32(vectors), dim=1)
    cosines = unit @ unit.T
    same = identity[:, None] == identity
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    furthest = cosines.masked_fill(~same | itself, torch.inf).amin(dim=1)
    nearest = cosines.masked_fill(same, -torch.inf).amax(dim=1)
    counted = furthest.isfinite() & nearest.isfinite()
    # ‖a − b‖² = 2 − 2·cos
    losses = torch.where(counted, F.relu(margin + 2 * (nearest - furthest)), 0.0)
    return losses.sum() / counted.sum().clamp(min=1)


# Parts ----------------------------------------------------------------------------------------------------------------


class EmbeddingMemory(nn.Module):
    """One unit vector per training image: m ← normalize(½m + ½g) after the update whose batch contained the image.

    Starts uniform in ±1/√(D/3) as in SNCA, normalized because equation 2.2 uses cosines. Every process applies the
    updates of all processes in the same order, so their memories stay equal bit for bit.
    """

    slots: Tensor  # (N, D) float32

    def __init__(self, images: int, dim: int, *, seed: int = 0, gather: Gather | None = None) -> None:
        super().__init__()
        bound = 1 / math.sqrt(dim / 3)
        start = torch.empty(images, dim).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("slots", F.normalize(start))
        self._gather = gather
        self._noted: list[tuple[Tensor, Tensor]] = []

    def note(self, index: Tensor, embeddings: Tensor) -> None:
        """Store embeddings (B, D) of the images at `index` for the next `update`; call once per micro-batch."""
        self._noted.append((index, F.normalize(embeddings.detach().float(), dim=1)))

    def forget(self) -> None:
        self._noted.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Apply what was noted. If an image was noted twice, the first counts, so that the order does not matter."""
        index, embeddings = (torch.cat(column) for column in zip(*self._noted, strict=True))
        self.forget()
        if self._gather:
            index, embeddings = self._gather(index), self._gather(embeddings)
        first = (index[:, None] == index).int().argmax(dim=1)
        self.slots[index] = F.normalize((self.slots[index] + embeddings[first]) / 2, dim=1)


class TargetNetwork(nn.Module):
    """Slow copy of network and projector: ξ ← τξ + (1 − τ)θ. It keeps its own batch statistics, as in BYOL."""

    def __init__(self, trunk: Network, projector: nn.Module) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(trunk).requires_grad_(False)
        self.projector = copy.deepcopy(projector).requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images to (B, D)."""
        headless = self.trunk.config.num_classes == 0
        vectors = self.trunk(images) if headless else self.trunk.vectors(self.trunk.features(images))
        return self.projector(self.trunk.projector(vectors))

    @torch.no_grad()
    def follow(self, trunk: nn.Module, projector: nn.Module, decay: float) -> None:
        """Move the weights towards the trained ones by a factor of 1 − `decay`."""
        follow_([self], [trunk, projector], 1 - decay)


def target_decay(step: int, total_steps: int, start: float = TARGET_DECAY) -> float:
    """Return τ = 1 − (1 − start)·(cos(πk/K) + 1)/2, which rises from `start` to 1 (BYOL)."""
    return 1 - (1 - start) * (math.cos(math.pi * step / total_steps) + 1) / 2


# The objective --------------------------------------------------------------------------------------------------------


class Grafit(nn.Module, Objective):
    """The objective of every method in `METHODS`: `loss` and its terms `label_loss` and `instance_loss`.

    `labels` (N,) belong to all training images, at the level that is trained on. They are the only labels it reads, so
    a level, or ClusterFit's clusters, are chosen here and nowhere else. Labels and memory use the first view.
    """

    labels: Tensor

    def __init__(
        self,
        method: Losses,
        trunk: Network,
        labels: Tensor,
        *,
        total_steps: int,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        instance_weight: float = 1.0,
        temperature: float = TEMPERATURE,
        decay: float = TARGET_DECAY,
        margin: float = MARGIN,
        seed: int = 0,
        gather: Gather | None = None,
    ) -> None:
        super().__init__()
        self.method = method if instance_weight else method.drop_instances()
        _check(self.method, trunk, labels)
        self.instance_weight, self.temperature, self.margin = instance_weight, temperature, margin
        self.decay, self.total_steps = decay, total_steps
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        # Known from the data, so not part of a checkpoint.
        self.register_buffer("labels", labels.clone(), persistent=False)
        # A projector that the kNN loss trains belongs to the network (search uses it); one for instances only is held
        # here.
        self.projector: nn.Module = nn.Identity()
        if self.method.projector != "none" and self.method.labels != "knn":
            self.projector = Projector(self.method.projector, trunk.feature_dim)
        if self.method.labels == "knn":
            self.memory = EmbeddingMemory(len(labels), self._dim(trunk), seed=seed, gather=gather)
        if self.method.instance == "cosine":
            self.predictor = Projector("mlp", self._dim(trunk), self._dim(trunk))
            self.target = TargetNetwork(trunk, self.projector)

    @property
    def equal_on_all_ranks(self) -> list[str]:
        """Return the buffers that come from the data or are gathered from all ranks."""
        return ["labels", *(["memory.slots"] if self.method.labels == "knn" else [])]

    @property
    def followers(self) -> list[Network]:
        """Return the networks that follow the model."""
        return [self.target.trunk] if self.method.instance == "cosine" else []

    def _dim(self, trunk: Network) -> int:
        dims = [p.dim for p in (self.projector, trunk.projector) if isinstance(p, Projector)]
        return dims[0] if dims else trunk.feature_dim

    def forward(self, model: nn.Module, batch: ViewBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the scalars of one batch: `loss` to be minimized, and its terms."""
        views = self._used(batch.views)
        # All views in one pass, view by view: small images are bound by kernel launches. Batch statistics are then
        # those of all views together, where BYOL's code uses each view's own; the thesis does not say.
        images = normalize(torch.cat(views), self.pixel_mean, self.pixel_std)  # (T·B, 3, H, W)
        terms: dict[str, Tensor] = {}
        if self.method.labels == "cross_entropy":
            features = model.features(images)  # type: ignore[operator]
            first = features[: len(batch.index)]
            terms["label_loss"] = cross_entropy(model.head(first), self.labels[batch.index])  # type: ignore[operator]
            vectors = model.vectors(features)  # type: ignore[operator]
        else:
            vectors = model(images)  # pooled features: there is no classifier
        if self.method.labels == "knn" or self.method.instance != "none":
            embeddings = self.projector(model.projector(vectors))  # type: ignore[operator]
            terms |= self._embedding_losses(images, embeddings, batch.index)
        weights = {"label_loss": 1.0, "instance_loss": self.instance_weight}
        loss = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
        return {"loss": loss, **{name: term.detach() for name, term in terms.items()}}

    def _used(self, views: list[Tensor]) -> list[Tensor]:
        if self.method.instance == "none":
            return views[:1]
        if len(views) < 2:
            raise UsageError(f"The instance loss compares views of an image, got {len(views)}. Use 2 or more.")
        return views

    def _embedding_losses(self, images: Tensor, embeddings: Tensor, index: Tensor) -> dict[str, Tensor]:
        """Return the terms of embeddings (T·B, D) in full precision: exp(cos/σ) of 3 digits is off by tenths."""
        terms: dict[str, Tensor] = {}
        views = len(embeddings) // len(index)
        if self.method.instance == "cosine":
            predictions, targets = self.predictor(embeddings), self.target(images)
        with torch.autocast(index.device.type, enabled=False):
            if self.method.labels == "knn":
                first = embeddings[: len(index)]
                self.memory.note(index, first)
                terms["label_loss"] = knn_loss(first, index, self.memory.slots, self.labels, self.temperature)
            if self.method.instance == "cosine":
                by_view = (views, len(index), -1)
                terms["instance_loss"] = instance_loss(predictions.view(by_view), targets.view(by_view))
            elif self.method.instance == "triplet":
                terms["instance_loss"] = triplet_loss(embeddings, index.repeat(views), self.margin)
        return terms

    def after_update(self, model: nn.Module, step: int) -> None:
        """Update the memory with the batch and the target with the weights; `step` counts updates before this one."""
        if self.method.labels == "knn":
            self.memory.update()
        if self.method.instance == "cosine":
            decay = target_decay(min(step, self.total_steps), self.total_steps, self.decay)
            self.target.follow(model, self.projector, decay)

    def forget(self) -> None:
        """Discard what was noted for the next update."""
        if self.method.labels == "knn":
            self.memory.forget()

    def micro_batch_note(self, images: int) -> str:
        """Say that triplets are formed within a micro-batch."""
        return f"triplets are then formed from {images} images" if self.method.instance == "triplet" else ""


def make_objective(ingredients: Ingredients) -> Grafit:
    """Build the recipe's objective, any of `METHODS`."""
    recipe, part = ingredients.recipe, ingredients.recipe.grafit
    assert ingredients.labels is not None
    return Grafit(
        METHODS[recipe.objective.method],
        ingredients.network,
        ingredients.labels,
        total_steps=ingredients.steps_per_epoch * recipe.schedule.epochs,
        instance_weight=part.instance_weight,
        temperature=part.temperature,
        decay=part.target_decay,
        margin=part.margin,
        seed=recipe.seed,
        gather=ingredients.gather,
        **ingredients.pixels,
    )


def _check(method: Losses, trunk: Network, labels: Tensor) -> None:
    if method.labels == method.instance == "none":
        raise UsageError("Neither labels nor instances are learned. Set instance_weight above 0.")
    if method.labels != "none" and (len(labels) < 2 or bool((labels < 0).any())):
        unlabeled = int((labels < 0).sum())
        raise DataError(
            f"{unlabeled} of {len(labels)} training images have no label; at least 2, all labeled, are needed."
        )
    classes, wanted = trunk.config.num_classes, method.projector if method.labels == "knn" else "none"
    if trunk.config.projector != wanted:
        raise UsageError(
            f"The network has the projector {trunk.config.projector}, the method needs {wanted}. Create it with "
            f"projector={wanted!r}."
        )
    if method.labels != "cross_entropy" and classes:
        # Several processes would wait for gradients that never arrive.
        raise UsageError(
            f"The network has a classifier of {classes} classes, which the method does not train. Call reset_head(0)."
        )
    if method.labels == "cross_entropy" and classes <= int(labels.max()):
        count = int(labels.max()) + 1
        raise UsageError(f"The network has {classes} classes, the labels {count}. Call reset_head({count}).")
