"""Duplicates: equal images by a digest of their pixels, near-duplicates by a 64-bit difference hash (dHash).

A bit of the hash is set where a 9×8 gray thumbnail brightens to the right. Two images are near-duplicates if at most
`MAX_BITS` bits of their hashes differ and their color thumbnails differ by at most `MAX_LEVELS` on average. That finds
images that were saved again, scaled or slightly retouched, but not cropped or rotated ones. Flat images have no such
pattern and are compared by digest alone.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np
from PIL import Image

COLUMNS, ROWS = 9, 8
DIGEST_BYTES, THUMBNAIL_BYTES = 16, ROWS * COLUMNS * 3
MAX_BITS = 3  # of 64
MAX_LEVELS = 4.0  # of 255, mean over the thumbnail
FLAT_LEVELS = 16  # brightest minus darkest pixel of the gray thumbnail
_PARTS = 6  # of a hash; bits are assigned in turn, so that each part samples the whole image
_BITS = [np.uint64(sum(1 << bit for bit in range(part, 64, _PARTS))) for part in range(_PARTS)]
CHOICES = tuple(combinations(range(_PARTS), _PARTS - MAX_BITS))  # of half of the parts
COMPARED = 128  # hashes compared with each hash, among those that agree with it in half of the parts
_BLOCK = 1 << 11  # pairs of thumbnails compared at a time


def digest(content: Image.Image | bytes) -> bytes:
    """Return a digest of the pixels of an image, or of the bytes of a file, which takes a tenth of the time."""
    if isinstance(content, Image.Image):
        content = f"{content.width}×{content.height}".encode() + content.tobytes()
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]


def thumbnail(image: Image.Image) -> bytes:
    """Return an (8, 9, 3) uint8 thumbnail. Bilinear, since boxes of whole pixels shift when an image is scaled."""
    return image.resize((COLUMNS, ROWS), Image.Resampling.BILINEAR, reducing_gap=4.0).tobytes()


def equal_groups(digests: Sequence[bytes]) -> list[list[int]]:
    """Return groups of two or more positions that share a digest, ordered by their first position."""
    groups: dict[bytes, list[int]] = {}
    for position, value in enumerate(digests):
        groups.setdefault(value, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def similar_pairs(thumbnails: Sequence[bytes]) -> np.ndarray:
    """Return (pairs, 2) positions of near-duplicates, each pair once, the smaller position first."""
    colors = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(-1, THUMBNAIL_BYTES)
    textured, hashes = textured_hashes(colors)
    order = np.argsort(levels_of(colors[textured]), kind="stable")
    pairs = np.sort(textured[order][near_pairs(hashes[order])], axis=1)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[similar_colors(colors, pairs)]


def textured_hashes(colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of (N, 216) uint8 thumbnails that are not flat, and their uint64 hashes."""
    gray = colors.reshape(-1, ROWS, COLUMNS, 3).mean(axis=3)
    textured = np.flatnonzero(np.ptp(gray, axis=(1, 2)) >= FLAT_LEVELS)
    return textured, hashes_of(gray[textured])


def similar_colors(colors: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return whether the thumbnails of each pair of positions differ by at most MAX_LEVELS on average."""
    apart = [
        np.abs(colors[block[:, 0]].astype(np.int16) - colors[block[:, 1]]).mean(axis=1)
        for block in np.split(pairs, range(_BLOCK, len(pairs), _BLOCK))
    ]
    return np.concatenate(apart) <= MAX_LEVELS


def levels_of(colors: np.ndarray) -> np.ndarray:
    """Return the mean colors of the upper and the lower half of (N, 216) thumbnails, as (N,) uint64.

    Sorting by them sorts by brightness, which is in the highest two bytes.
    """
    levels = np.zeros((len(colors), 8), np.uint8)
    levels[:, 6:] = (256 * colors.mean(axis=1)).astype("<u2")[:, None].view(np.uint8)
    levels[:, :6] = colors.reshape(-1, 2, ROWS // 2 * COLUMNS, 3).mean(axis=2).reshape(-1, 6)
    return levels.view(np.uint64)[:, 0]


def may_be_similar(levels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return False for pairs that `similar_colors` refuses for certain: for 98 of 100 photos with near hashes."""
    one, other = (each.copy().view(np.uint8).reshape(-1, 8)[:, :6].astype(np.int16) for each in (levels, others))
    return np.abs(one - other).mean(axis=1) <= MAX_LEVELS + 1  # a mean is rounded down by less than one


def hashes_of(gray: np.ndarray) -> np.ndarray:
    """Return the (N,) uint64 hashes of (N, 8, 9) gray thumbnails."""
    brighter = (gray[:, :, 1:] > gray[:, :, :-1]).reshape(-1, 64)
    return np.packbits(brighter, axis=1).view(np.uint64)[:, 0]


def near_pairs(hashes: np.ndarray) -> np.ndarray:
    """Return (pairs, 2) positions of (N,) uint64 hashes that differ in at most MAX_BITS bits.

    So few bits change at most half of the parts of a hash. For each choice of that many parts, hashes that agree in
    them are compared. If very many agree (frames of a static camera), each is compared with the next COMPARED only, so
    `similar_pairs` passes the hashes in the order of brightness.
    """
    pairs = [np.zeros(0, np.int64)]
    for choice in CHOICES:
        for one, other in near_in_runs(hashes, choice):
            pairs.append(one * len(hashes) + other)
    return np.stack(np.divmod(np.sort(np.concatenate(pairs)), max(len(hashes), 1)), axis=1)


def keys_of(hashes: np.ndarray, choice: tuple[int, ...]) -> np.ndarray:
    """Return the bits of the chosen parts of hashes."""
    return hashes & np.bitwise_or.reduce([_BITS[part] for part in choice])


def near_in_runs(hashes: np.ndarray, choice: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the positions of near pairs among hashes that agree in the chosen parts.

    Several choices have a pair that agrees in more parts; only the first of them yields it.
    """
    for one, other in _pairs_of_runs(hashes, keys_of(hashes, choice)):
        changed = hashes[one] ^ hashes[other]
        earlier = [changed & _BITS[part] != 0 for part in range(choice[-1]) if part not in choice]
        first = np.logical_and.reduce(earlier) if earlier else slice(None)
        yield one[first], other[first]


def _pairs_of_runs(hashes: np.ndarray, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield near pairs among hashes of equal keys, by their distance in sorted order."""
    order = np.argsort(keys, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(keys[order])) + 1, len(keys))
    counts = np.diff(ends, prepend=0)
    agreeing = np.repeat(counts, counts)
    for apart in range(1, COMPARED + 1):
        if apart.bit_count() == 1:  # drop runs that have become too short, not at every step
            order, agreeing = order[agreeing > apart], agreeing[agreeing > apart]
            ordered, sorted_keys = hashes[order], keys[order]
        if not len(order):
            return
        near = np.bitwise_count(ordered[apart:] ^ ordered[:-apart]) <= MAX_BITS
        first = np.flatnonzero(near & (sorted_keys[apart:] == sorted_keys[:-apart]))
        yield order[first], order[first + apart]


def linked(count: int, pairs: np.ndarray) -> list[list[int]]:
    """Return groups of positions that pairs connect, directly or through others."""
    groups: dict[int, list[int]] = {}
    for position, root in enumerate(roots_of(count, [pairs]).tolist()):
        groups.setdefault(root, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def roots_of(count: int, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Return for each position the smallest one that the pairs in these blocks connect it with, or itself."""
    roots = np.arange(count)
    parent = roots.data  # several times as fast as the array, item by item

    def root(position: int) -> int:
        while parent[position] != position:
            parent[position] = position = parent[parent[position]]
        return position

    for block in blocks:
        for first, second in block.tolist():
            low, high = sorted((root(first), root(second)))
            parent[high] = low
    for position in range(count):
        parent[position] = root(position)
    return roots
