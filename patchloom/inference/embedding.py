"""Pictures of any origin → what a trained model compares them by; light, since a server begins with it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.embeddings import Embeddings, embed
from patchloom.models.network import Network
from patchloom_runtime.errors import UsageError, at_least

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier


def check_view_settings(size: int | None, crop_ratio: float | None, batch: int) -> None:
    """One clear line for pixels, a crop or a batch that no picture can be shown with."""
    if size is not None:
        at_least("size", size, 1)
    at_least("batch", batch, 1)
    if crop_ratio is not None and not 0 < crop_ratio <= 1:
        raise UsageError(f"crop_ratio is {crop_ratio}, expected a share above 0 and up to 1")


def embed_batches(
    classifier: "Classifier",
    batches: Iterable[ImageBatch],
    *,
    model: Network | None = None,
    logits: bool = False,
    projected: bool = True,
) -> Embeddings:
    """What a trained model's images are compared by, in levels, indexes and searches alike.

    `model` is the classifier's own at another image size. A linear classifier is better off with what the projector,
    where there is one, was given: without `projected`.
    """
    own = classifier.preprocessing
    found = embed(model or classifier.model, batches, pixel_mean=own.mean, pixel_std=own.std, logits=logits)
    return found.projected(classifier.model) if projected else found
