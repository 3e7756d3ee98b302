"""Which boxes of a detector count: the rules of torchvision's Faster R-CNN in numpy, between the graphs of an artefact.

    maps → proposals: the likeliest boxes of every map, without those that overlap a likelier one of the same map
    regions → objects: boxes with their classes, without those that overlap a likelier one of the same class

How many there are depends on what is found, so these steps are in no graph. Letters: A anchors, R regions, K classes
and the background, n objects. Boxes are x0, y0, x1, y1 in pixels of the canvas, float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Sizes = np.ndarray  # (B, 2): height and width of the pictures on their canvases
LEVELS = 4  # maps that regions are read from
MOST_SCALED = math.log(1000 / 16)  # of the logarithm that a side of an anchor is scaled by
AT_ONCE = 128  # boxes that are compared with all others together
LEAST_PROPOSAL, LEAST_OBJECT = 1e-3, 1e-2  # pixels of a side
USUAL_SIDE, USUAL_LEVEL, FIRST_LEVEL = 224, 4, 2  # a region of 224² is read from the map of stride 2⁴


@dataclass(frozen=True)
class BoxLimits:
    """How many boxes go on, and which; numbers of the run's detector."""

    anchors: tuple[tuple[tuple[float, ...], ...], ...]  # of each map, around (0, 0)
    before: int  # proposals of a map, before overlaps are left out
    proposals: int  # of a picture
    proposal_overlap: float  # IoU from which of two proposals the likelier stays
    min_score: float
    overlap: float
    most: int  # objects of a picture
    cut: bool  # whether the canvas is cut to what its pictures fill
    short: int = 0  # pixels that the sides of a picture are limited to; 0: by the canvas alone
    long: int = 0


@dataclass(frozen=True)
class RegionBoxes:
    """What was found on one canvas."""

    boxes: np.ndarray  # (n, 4)
    labels: np.ndarray  # (n,) from 1
    scores: np.ndarray  # (n,)
    shares: np.ndarray | None = None  # (n, 28, 28) of masks


def proposals_of(
    objectness: np.ndarray, offsets: np.ndarray, grids: Sequence[tuple[int, int]], canvas: Sequence[int],
    size: np.ndarray, choice: BoxLimits,
) -> np.ndarray:  # fmt: skip
    """Objectness (A,) and offsets (A, 4) of all maps, one after the other → boxes (R, 4), likeliest first."""
    boxes, scores, maps, start = [], [], [], 0
    for number, (grid, around) in enumerate(zip(grids, choice.anchors, strict=True)):
        count = grid[0] * grid[1] * len(around)
        own = objectness[start : start + count]
        best = np.argsort(-own, kind="stable")[: choice.before]
        boxes.append(moved(anchors_at(best, grid, canvas, np.array(around, np.float32)), offsets[start + best]))
        scores.append(1 / (1 + np.exp(-own[best])))
        maps.append(np.full(len(best), number))
        start += count
    found, likely, map_of = inside(np.concatenate(boxes), size), np.concatenate(scores), np.concatenate(maps)
    large = ((found[:, 2:] - found[:, :2]) >= LEAST_PROPOSAL).all(1)
    found, likely, map_of = found[large], likely[large], map_of[large]
    return found[apart(found, likely, map_of, choice.proposal_overlap, choice.proposals)]


def objects_of(scores: np.ndarray, boxes: np.ndarray, size: np.ndarray, choice: BoxLimits) -> RegionBoxes:
    """Scores (R, K) and boxes (R, K, 4) of a picture's regions → its objects, likeliest first."""
    region, label = np.nonzero(scores[:, 1:] > choice.min_score)
    label += 1  # the background is none
    found, likely = inside(boxes[region, label], size), scores[region, label]
    large = ((found[:, 2:] - found[:, :2]) >= LEAST_OBJECT).all(1)
    found, likely, label = found[large], likely[large], label[large]
    kept = apart(found, likely, label, choice.overlap, choice.most)
    return RegionBoxes(found[kept], label[kept], likely[kept])


def anchors_at(places: np.ndarray, grid: tuple[int, int], canvas: Sequence[int], around: np.ndarray) -> np.ndarray:
    """The anchors of these places, which count the anchors around each point of a grid, row by row: (n, 4)."""
    point, which = np.divmod(places, len(around))
    y, x = np.divmod(point, grid[1])
    steps = canvas[0] // grid[0], canvas[1] // grid[1]
    return np.stack([x * steps[1], y * steps[0]] * 2, 1).astype(np.float32) + around[which]


def moved(anchors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Anchors (n, 4) moved by shares of their sides, and scaled."""
    sides = anchors[:, 2:] - anchors[:, :2]
    centres = anchors[:, :2] + np.float32(0.5) * sides + offsets[:, :2] * sides
    half = np.float32(0.5) * np.exp(np.minimum(offsets[:, 2:], np.float32(MOST_SCALED))) * sides
    return np.concatenate([centres - half, centres + half], 1)


def inside(boxes: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Boxes cut to a picture of `size` (height, width)."""
    height, width = size.tolist()
    return np.clip(boxes, 0, np.array([width, height] * 2, np.float32))


def apart(boxes: np.ndarray, scores: np.ndarray, groups: np.ndarray, overlap: float, most: int) -> np.ndarray:
    """Places of the `most` likeliest boxes that overlap no likelier one of their group by more than that IoU."""
    own = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    kept = [places[_apart(boxes[places], scores[places], overlap, most)] for places in own]
    found = np.concatenate(kept) if kept else np.empty(0, np.int64)
    return found[np.argsort(-scores[found], kind="stable")][:most]


def _apart(boxes: np.ndarray, scores: np.ndarray, overlap: float, most: int) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")
    boxes = boxes[order]
    sides = boxes[:, 2:] - boxes[:, :2]
    areas, left = sides[:, 0] * sides[:, 1], np.ones(len(order), bool)
    kept: list[int] = []
    for start in range(0, len(order), AT_ONCE):
        if len(kept) >= most:
            break
        rows = np.arange(start, min(start + AT_ONCE, len(order)))
        rows = rows[left[rows]]
        low, high = (np.ascontiguousarray(each.T) for each in (boxes[:, :2], boxes[:, 2:]))
        width, height = (
            np.minimum(high[axis, rows, None], high[axis, None, start:])
            - np.maximum(low[axis, rows, None], low[axis, None, start:])
            for axis in (0, 1)
        )
        both = np.maximum(width, 0) * np.maximum(height, 0)  # (rows, boxes from `start` on)
        over = both > np.float32(overlap) * (areas[rows, None] + areas[None, start:] - both)
        for row, hides in zip(rows.tolist(), over, strict=True):
            if left[row]:
                kept.append(row)
                left[start:] &= ~hides
    return order[kept[:most]]


def levels_of(boxes: np.ndarray) -> np.ndarray:
    """The map that each region is read from: larger ones from coarser maps."""
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    with np.errstate(divide="ignore"):
        level = np.floor(USUAL_LEVEL + np.log2(sides / np.float32(USUAL_SIDE)) + np.float32(1e-6))
    return (np.clip(level, FIRST_LEVEL, FIRST_LEVEL + LEVELS - 1) - FIRST_LEVEL).astype(np.int64)
