"""Embeddings: one vector per image, the pooled features of any network, for neighbors, probes and search.

Letters: B images of a batch, N of the dataset, C channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.evaluation.classification import in_eval_mode
from patchloom.models.network import Network
from patchloom_runtime.errors import DataError

ROWS_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings of a dataset, in its order."""

    vectors: Tensor  # (N, C) float32
    labels: Tensor  # (N,) int64; negative for unlabeled images
    index: Tensor  # (N,) int64, increasing, in the dataset
    logits: Tensor | None = None  # (N, K) of the network's own classes, if requested

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Embeddings({len(self):,} images, {self.vectors.shape[1]} numbers each, {self.vectors.device})"

    def rows(self, chosen: Tensor | np.ndarray) -> "Embeddings":
        """Return the embeddings at the positions `chosen`."""
        at = torch.as_tensor(chosen, device=self.index.device)
        logits = None if self.logits is None else self.logits[at]
        return Embeddings(self.vectors[at], self.labels[at], self.index[at], logits)

    @torch.no_grad()
    def projected(self, network: Network) -> "Embeddings":
        """Return the output of the network's projector, which search uses; unchanged without a projector."""
        if network.config.projector == "none":
            return self
        with in_eval_mode(network):
            device = next(network.parameters()).device
            parts = [network.projector(part.to(device)).float() for part in self.vectors.split(ROWS_AT_ONCE)]
        return replace(self, vectors=torch.cat(parts).to(self.vectors.device))

    def labeled(self, what: str) -> "Embeddings":
        """Return the labeled embeddings. Raise DataError naming `what` if there are none."""
        positions = torch.nonzero(self.labels >= 0)[:, 0]
        if not len(positions):
            raise DataError(f"None of the {len(self)} images of {what} has a label, which a probe needs.")
        return self if len(positions) == len(self) else self.rows(positions)


@torch.no_grad()
def embed(
    model: Network,
    batches: Iterable[ImageBatch],
    *,
    pixel_mean: tuple[float, ...] | None = None,
    pixel_std: tuple[float, ...] | None = None,
    logits: bool = False,
) -> Embeddings:
    """Return the inputs of the network's classifier, on its device; each image once, even if it is repeated.

    From an Apple GPU they come to the CPU, since what is computed from them needs float64.

    Pixels are normalized as in the network's training by default. `logits` also returns the classifier's output. The
    host waits for the device once, at the end.
    """
    device = next(model.parameters()).device
    mean, std = pixel_mean or model.pixel_mean, pixel_std or model.pixel_std
    parts: list[tuple[Tensor, ...]] = []
    with in_eval_mode(model):
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            features = model.features(normalize(batch.images, mean, std))
            outputs = (model.head(features).float(),) if logits else ()
            parts.append((model.vectors(features).float(), batch.labels, batch.index, *outputs))
    if not parts:
        raise DataError("There are no images to embed: the dataset or its split is empty.")
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    embeddings = Embeddings(*(column.cpu() if device.type == "mps" else column for column in columns))
    _, first = np.unique(embeddings.index.cpu().numpy(), return_index=True)
    return embeddings.rows(first)
