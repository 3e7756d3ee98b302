"""How sure a share is that was counted on so many images."""

import math
from statistics import NormalDist

LEVEL = 0.95


def wilson(right: int, images: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's interval of a share, in percent: what accuracies are likely where `right` of `images` were.

    It stays within 0…100 and keeps its level near the ends, where the usual ± is wrong: 20 of 20 is 84…100.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = right / images, z * z / images
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)
