"""One object of a picture, as detectors and their artefacts tell of it. Without torch: it is part of the runtime."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from patchloom_runtime.images.object_masks import ObjectMask

SURE = 0.5  # the score from which objects are told


@dataclass(frozen=True)
class DetectedObject:
    """One object of a picture."""

    name: str
    score: float
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels
    outline: ObjectMask | None = None

    def mask(self, size: tuple[int, int]) -> np.ndarray | None:
        """(H, W) bool of a picture of `size` (height, width); None where masks were not learned."""
        return None if self.outline is None else self.outline.whole(size)


def surest_first(
    boxes: np.ndarray,
    categories: np.ndarray,
    scores: np.ndarray,
    masks: Sequence[ObjectMask] | None,
    labels: Sequence[str],
    min_score: float,
) -> list[DetectedObject]:
    """What was found in a picture with a score of at least so much: boxes (n, 4) in its pixels, numbers of `labels`."""
    return [
        DetectedObject(
            labels[categories[i]],
            float(scores[i]),
            tuple(map(float, boxes[i])),  # type: ignore[arg-type]
            None if masks is None else masks[i],
        )
        for i in np.argsort(-scores, kind="stable")
        if scores[i] >= min_score
    ]
