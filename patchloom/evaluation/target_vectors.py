"""Outputs and targets of networks that predict K values per image, such as labels or numbers."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.evaluation.classification import in_eval_mode
from patchloom_runtime.errors import DataError, UsageError


def predict_vectors(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    count: int,
    what: str,
    *,
    pixel_mean: tuple[float, ...],
    pixel_std: tuple[float, ...],
    gather: Callable[[Tensor], Tensor] | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions (N,), targets (N, K) and outputs (N, K) of all images, with K = `count`.

    Runs in eval mode and under the caller's autocast. Each image counts once, and images without a known target do not
    count. `gather` concatenates the rows of all processes; rows of −1 that pad them to equal length are ignored.
    `what` names a value in messages, as in "label".
    """
    device = next(model.parameters()).device
    index: list[Tensor] = []
    rows: list[Tensor] = []
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            outputs = model(normalize(batch.images, pixel_mean, pixel_std)).float()
            if batch.targets is None or outputs.shape[1] != count:
                raise UsageError(
                    f"The network predicts {outputs.shape[1]} {what}s, expected {count}. "
                    f"Evaluate it on the {what}s it was trained on."
                )
            index.append(batch.index)
            rows.append(torch.stack([batch.targets.float(), outputs], dim=2))
    if not index:
        raise DataError("There are no images to evaluate: the dataset or its split is empty.")
    join = gather or (lambda rows: rows)
    positions, values = (join(torch.cat(each)).cpu().numpy() for each in (index, rows))
    counted = (positions >= 0) & ~np.isnan(values[:, :, 0]).all(axis=1)
    places, first = np.unique(positions[counted], return_index=True)
    if not len(places):
        raise DataError(f"None of the images has a known {what}, so nothing can be evaluated.")
    targets, outputs = np.ascontiguousarray(values[counted][first].transpose(2, 0, 1))
    return places, targets, outputs
