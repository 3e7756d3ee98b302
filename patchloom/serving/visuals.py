"""Results for people to look at: maps of the evidence for a class, search results with thumbnails.

This code runs in a model process, `thumbnails_of` in the thumbnail process.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from patchloom_runtime.errors import PatchloomError, UsageError, nearest
from patchloom_runtime.images.inputs import thumbnail_of

LOSSLESS = 64  # pixels per side up to which an image is sent as PNG, since people can tell single pixels
QUALITY = 85


def explain(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the most likely classes of images, and a map of the evidence for one class each."""
    import torch

    from patchloom.report.pictures.explanations import class_map, map_kind, strengths
    from patchloom.report.pictures.look import network_inputs
    from patchloom.report.pictures.sheets import numbers

    label, names = options["label"], class_names(model) or []
    if label is not None and label not in names:
        raise UsageError(
            f"there is no class {label!r}.{nearest(label, names)}" if names else "the model has no classes"
        )
    inputs = network_inputs(model.model, model.preprocessing, list(images))
    order = (-inputs.probabilities).argsort(axis=1, kind="stable") if names else None
    likeliest = torch.zeros(len(images), dtype=torch.int64) if order is None else torch.from_numpy(order[:, 0].copy())
    chosen = likeliest if label is None else torch.full_like(likeliest, names.index(label))
    kind = map_kind(inputs.network)
    best = class_map(inputs.network, inputs.images, likeliest)
    maps = best if torch.equal(chosen, likeliest) else class_map(inputs.network, inputs.images, chosen)
    scaled = numbers(strengths(maps, kind, best), "the map").round(3)
    return [
        {
            "answers": [
                {"label": names[at], "probability": float(inputs.probabilities[row, at])}
                for at in (() if order is None else order[row, : options["top"]])
            ],
            "label": names[chosen[row]] if names else "",
            "kind": kind,
            "map": scaled[row].tolist(),
            "seen": in_base64(image),
        }
        for row, image in enumerate(inputs.input_images)
    ]


def class_names(model: Any) -> list[str] | None:
    """Return the class names of a classifier, or None if it has no classifier head."""
    try:
        model.check_decides()
    except UsageError:
        return None
    return list(model.labels)


def in_base64(image: Image.Image) -> str:
    """Encode a small image as PNG, others as JPEG."""
    file = io.BytesIO()
    if max(image.size) <= LOSSLESS:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()


def thumbnails_of(roots: Sequence[str], lines: Sequence[str], options: Mapping[str, Any]) -> list[str | None]:
    """Return a thumbnail per path, each path in JSON; None for a path outside the roots or an unreadable image."""
    return [_thumbnail(json.loads(line), options["side"], roots) for line in lines]


def _thumbnail(path: str, side: int, roots: Sequence[str]) -> str | None:
    try:
        return in_base64(thumbnail_of(path, side, roots))
    except PatchloomError:
        return None


def search(index: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nearest files of an index, the vote of the first `neighbours`, and where each file matches it."""
    from patchloom.data.labels.taxonomy import FINEST, level_named
    from patchloom.inference.neighbors import vote_shares

    about, voters = index.about, options["neighbours"]
    level = about.level if options["level"] is None else level_named(options["level"], about.levels)
    results = []
    # At the finest level, whose labels determine those of every other level.
    for neighbors in index.search(list(images), top=max(options["top"], voters), level=FINEST):
        voting = [hit for hit in neighbors.hits[:voters] if hit.label]
        shares = vote_shares([hit.score for hit in voting], [hit.label for hit in voting])
        best = next(iter(shares), "")
        hits = [
            {
                "path": hit.path,
                "score": hit.score,
                "label": about.at(hit.label, level),
                "match": _match(about, hit.label, best),
                "thumbnail": None,  # filled in by the front process, see `thumbnails.py`
            }
            for hit in neighbors.hits[: options["top"]]
        ]
        votes: dict[str, float] = {}
        for label, share in shares.items():
            name = about.at(label, level)
            votes[name] = votes.get(name, 0.0) + share
        ordered = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
        answers = [{"label": name, "probability": min(1.0, share)} for name, share in ordered]
        results.append({"hits": hits, "level": level or FINEST, "answers": answers})
    return results


def levels_of(about: Any) -> list[str]:
    """Return the levels of an index's labels, finest first."""
    from patchloom.data.labels.taxonomy import FINEST

    if not about.labels:
        return []
    above = sorted(about.levels, key=lambda level: -len(about.labels_at(level)))
    return [FINEST, *(level for level in above if level != FINEST)]


def _match(about: Any, label: str, best: str) -> str | None:
    """Return the finest level at which two labels have the same class, or None."""
    if not label or not best:
        return None
    levels = levels_of(about)
    return next((level for level in levels if _at(about, label, level) == _at(about, best, level)), None)


def _at(about: Any, label: str, level: str) -> str:
    name: str = about.at(label, level if level in about.levels else "")
    return name
