"""Which pictures are the same: pixel for pixel by digest, nearly by a 64-bit difference hash (dHash).

The hash says of a 9×8 grey thumbnail where it brightens to the right. Two pictures are near-duplicates when at most
`MAX_BITS` of their hashes differ and their colour thumbnails agree to `MAX_LEVELS` on average: saved again, scaled or
slightly retouched, not cropped or turned. Flat pictures have no such pattern and are compared by digest alone.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

COLUMNS, ROWS = 9, 8
MAX_BITS = 3  # of 64; one fewer than the bands, so that one band is equal in every such pair
MAX_LEVELS = 4.0  # of 255, mean over the thumbnail
FLAT_LEVELS = 16  # brightest minus darkest of the grey thumbnail
_BANDS = 4
_BLOCK = 1 << 11  # hashes, or thumbnails, compared at a time


def digest(content: Image.Image | bytes) -> bytes:
    """Equal for equal pixels, however stored; or for equal bytes of a file, which takes a tenth of the time."""
    if isinstance(content, Image.Image):
        content = f"{content.width}×{content.height}".encode() + content.tobytes()
    return hashlib.sha256(content).digest()[:16]


def thumbnail(picture: Image.Image) -> bytes:
    """(8, 9, 3) uint8. Bilinear, since boxes of whole pixels shift as a picture is scaled."""
    return picture.resize((COLUMNS, ROWS), Image.Resampling.BILINEAR, reducing_gap=4.0).tobytes()


def equal_groups(digests: Sequence[bytes]) -> list[list[int]]:
    """Positions that share a digest, two or more each, in order of the first."""
    groups: dict[bytes, list[int]] = {}
    for position, value in enumerate(digests):
        groups.setdefault(value, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def similar_pairs(thumbnails: Sequence[bytes]) -> np.ndarray:
    """(pairs, 2) positions of near-duplicates, each pair once, the smaller first."""
    colours = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(-1, ROWS * COLUMNS * 3)
    grey = colours.reshape(-1, ROWS, COLUMNS, 3).mean(axis=3)
    textured = np.flatnonzero(np.ptp(grey, axis=(1, 2)) >= FLAT_LEVELS)
    pairs = textured[near_pairs(hashes_of(grey[textured]))]
    apart = [
        np.abs(colours[block[:, 0]].astype(np.int16) - colours[block[:, 1]]).mean(axis=1)
        for block in np.split(pairs, range(_BLOCK, len(pairs), _BLOCK))
    ]
    return pairs[np.concatenate(apart) <= MAX_LEVELS]


def hashes_of(grey: np.ndarray) -> np.ndarray:
    """(N, 8, 9) thumbnails → (N,) uint64. Each 16 bits of a hash come from all over the picture."""
    brighter = (grey[:, :, 1:] > grey[:, :, :-1]).reshape(-1, 64 // _BANDS, _BANDS)
    return np.packbits(brighter.swapaxes(1, 2).reshape(-1, 64), axis=1).view(np.uint64)[:, 0]


def near_pairs(hashes: np.ndarray) -> np.ndarray:
    """(pairs, 2) positions of (N,) uint64 that differ in at most MAX_BITS, found among those with an equal band."""
    codes = [np.zeros(0, np.int64)]
    for band in range(_BANDS):
        values = (hashes >> np.uint64(16 * band)) & np.uint64(0xFFFF)
        for run in _equal_runs(values):
            for start in range(0, len(run), _BLOCK):
                rows, others = run[start : start + _BLOCK], run[start:]
                bits = np.bitwise_count(hashes[rows, None] ^ hashes[others])
                i, j = np.nonzero(np.triu(bits <= MAX_BITS, k=1))
                codes.append(rows[i] * len(hashes) + others[j])
    found = np.unique(np.concatenate(codes))
    return np.stack(np.divmod(found, max(len(hashes), 1)), axis=1)


def linked(count: int, pairs: np.ndarray) -> list[list[int]]:
    """Positions joined by pairs, directly or over others: groups of two or more, in order."""
    parent = list(range(count))

    def root(position: int) -> int:
        while parent[position] != position:
            parent[position] = position = parent[parent[position]]
        return position

    for first, second in pairs.tolist():
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    groups: dict[int, list[int]] = {}
    for position in range(count):
        groups.setdefault(root(position), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def _equal_runs(values: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of each value that occurs more than once, ascending."""
    order = np.argsort(values, kind="stable")
    _, starts, counts = np.unique(values[order], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        yield order[start : start + count]
