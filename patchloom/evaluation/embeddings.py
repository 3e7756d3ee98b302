"""One vector an image: the pooled features of any network, for neighbours, probes and search.

Letters: B images of a batch, N of the set, C channels.
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
    """A set as a network sees it, in the order of the set."""

    vectors: Tensor  # (N, C) float32
    labels: Tensor  # (N,) int64; negative where an image has none
    index: Tensor  # (N,) int64, places in the set, rising
    logits: Tensor | None = None  # (N, K) of the network's own classes, where they were asked for

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Embeddings({len(self):,} images, {self.vectors.shape[1]} numbers each, {self.vectors.device})"

    def rows(self, chosen: Tensor | np.ndarray) -> "Embeddings":
        """Those at the positions `chosen`."""
        at = torch.as_tensor(chosen, device=self.index.device)
        logits = None if self.logits is None else self.logits[at]
        return Embeddings(self.vectors[at], self.labels[at], self.index[at], logits)

    @torch.no_grad()
    def projected(self, network: Network) -> "Embeddings":
        """What the network's projector makes of them, which it is searched by; the same without a projector."""
        if network.config.projector == "none":
            return self
        with in_eval_mode(network):
            parts = [network.projector(part).float() for part in self.vectors.split(ROWS_AT_ONCE)]
        return replace(self, vectors=torch.cat(parts))

    def labeled(self, what: str) -> "Embeddings":
        """Those with a label; a DataError that names `what` where there is none."""
        found = torch.nonzero(self.labels >= 0)[:, 0]
        if not len(found):
            raise DataError(f"None of the {len(self)} images of {what} has a label, which a probe needs.")
        return self if len(found) == len(self) else self.rows(found)


@torch.no_grad()
def embed(
    model: Network,
    batches: Iterable[ImageBatch],
    *,
    pixel_mean: tuple[float, ...] | None = None,
    pixel_std: tuple[float, ...] | None = None,
    logits: bool = False,
) -> Embeddings:
    """The vectors that go into the network's classifier, on its device; each image once, however often it comes.

    Pixels are normalised as the network was trained where nothing else is said. `logits` asks for those of its
    classifier too. The device is waited for once, at the end.
    """
    device = next(model.parameters()).device
    mean, std = pixel_mean or model.pixel_mean, pixel_std or model.pixel_std
    parts: list[tuple[Tensor, ...]] = []
    with in_eval_mode(model):
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            features = model.features(normalize(batch.images, mean, std))
            decided = (model.head(features).float(),) if logits else ()
            parts.append((model.vectors(features).float(), batch.labels, batch.index, *decided))
    if not parts:
        raise DataError("There is no image to embed: the set or its split is empty.")
    found = Embeddings(*(torch.cat(column) for column in zip(*parts, strict=True)))
    _, first = np.unique(found.index.cpu().numpy(), return_index=True)
    return found.rows(first)
