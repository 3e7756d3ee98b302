"""Agreement between classifiers and between the two tokens of a distilled network (thesis 3.3, table 3.4)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.evaluation.classification import in_eval_mode
from patchloom.models.network import Network
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, eq=False)
class DisagreementTable:
    """Table 3.4: the share of images, 0…1, on which two classifiers disagree."""

    names: tuple[str, ...]
    shares: np.ndarray  # (classifiers, classifiers) float64, symmetric, 0 on the diagonal

    def between(self, a: str, b: str) -> float:
        """Return the share of images on which `a` and `b` disagree."""
        return float(self.shares[self.names.index(a), self.names.index(b)])


def disagreement(decisions: Mapping[str, Sequence[int] | np.ndarray | Tensor]) -> DisagreementTable:
    """Compare classifiers by the class that each predicts per image, all in the same order.

    The labels can be added as one more "classifier", named groundtruth as in the thesis.
    """
    rows = [np.asarray(classes) for classes in decisions.values()]
    counts = {name: len(row) for name, row in zip(decisions, rows, strict=True)}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        sizes = ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"
        raise UsageError(f"Classifiers must be compared on the same images, got predictions for {sizes}.")
    shares = [[np.mean(a != b) for b in rows] for a in rows]
    return DisagreementTable(tuple(decisions), np.array(shares))


@torch.no_grad()
def head_decisions(model: Network, batches: Iterable[ImageBatch]) -> dict[str, Tensor]:
    """Return the classes (N,) predicted by each head of a distilled network and by both, as rows of table 3.4.

    They cover the images of `evaluate`'s report in its order: labeled, once each, by index.
    """
    device = next(model.parameters()).device
    chosen: dict[str, list[Tensor]] = {"class": [], "distillation": [], "class+distillation": []}
    places: list[Tensor] = []
    with in_eval_mode(model):
        for batch in batches:
            images = normalize(batch.images.to(device, non_blocking=True), model.pixel_mean, model.pixel_std)
            features = model.features(images)
            places.append(torch.where(batch.labels < 0, -1, batch.index))
            for rows, logits in zip(chosen.values(), (*model.both_heads(features), model.head(features)), strict=True):
                rows.append(logits.argmax(dim=1))
    index, first = np.unique(torch.cat(places).cpu().numpy(), return_index=True)
    return {name: torch.cat(rows).cpu()[first[index >= 0]] for name, rows in chosen.items()}


@torch.no_grad()
def token_cosines(model: Network, images: Tensor) -> Tensor:
    """Return the cosine between class and distillation token, initially and after each block: (1 + depth,).

    `images` (B, 3, H, W) are normalized; each cosine is a mean over them.
    """
    if not model.has_distillation_token:
        raise UsageError(f"{model.config.name} has no distillation token; create it with distilled=True")
    distilled: Any = model
    with in_eval_mode(model):
        return torch.stack([_cosine(tokens) for tokens in distilled.class_token_path(images)])


def _cosine(tokens: Tensor) -> Tensor:  # (B, T, C), class and distillation token first
    return F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float(), dim=-1).mean()
