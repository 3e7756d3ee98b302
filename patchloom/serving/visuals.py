"""Answers that a person looks at: the map of what spoke for a class, and small pictures of an index's files.

This runs where the model is, but for `small_pictures`, which the process of `thumbnails.py` runs.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from patchloom_runtime.errors import PatchloomError, UsageError, nearest
from patchloom_runtime.images.inputs import thumbnail_of

LOSSLESS = 64  # pixels of a side up to which a picture is sent as it is: every pixel of it is seen
QUALITY = 85


def explained(model: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Likeliest classes of pictures, and what speaks for one of them where."""
    import torch

    from patchloom.report.pictures.explanations import class_map, map_kind, strengths
    from patchloom.report.pictures.look import network_inputs
    from patchloom.report.pictures.sheets import numbers

    label, names = options["label"], _names(model)
    if label is not None and label not in names:
        raise UsageError(
            f"there is no class {label!r}.{nearest(label, names)}" if names else "the model names no classes"
        )
    inputs = network_inputs(model.model, model.preprocessing, list(pictures))
    order = (-inputs.probabilities).argsort(axis=1, kind="stable") if names else None
    likeliest = torch.zeros(len(pictures), dtype=torch.int64) if order is None else torch.from_numpy(order[:, 0].copy())
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
            "seen": in_base64(seen),
        }
        for row, seen in enumerate(inputs.input_images)
    ]


def _names(model: Any) -> list[str]:
    """Of its classes; none where it has no classifier for them."""
    try:
        model.check_decides()
    except UsageError:
        return []
    return list(model.labels)


def in_base64(picture: Image.Image) -> str:
    """A PNG of a small picture, a JPEG of others."""
    file = io.BytesIO()
    if max(picture.size) <= LOSSLESS:
        picture.save(file, "PNG")
    else:
        picture.save(file, "JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()


def thumbnails_of(roots: Sequence[str], lines: Sequence[str], options: Mapping[str, Any]) -> list[str | None]:
    """Return a thumbnail per path, which is JSON in its line; None if it is outside the roots or has no picture."""
    return [_thumbnail(json.loads(line), options["side"], roots) for line in lines]


def _thumbnail(path: str, side: int, roots: Sequence[str]) -> str | None:
    try:
        return in_base64(thumbnail_of(path, side, roots))
    except PatchloomError:
        return None


def search_answer(index: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nearest files of an index; with voters, what class they vote for and at which level each file matches it."""
    from patchloom.data.labels.taxonomy import FINEST, level_named
    from patchloom.inference.neighbors import vote_shares

    about, voters = index.about, options["neighbours"]
    level = about.level if options["level"] is None else level_named(options["level"], about.levels)
    told = []
    # Of the labels themselves, which say those of every level.
    for one in index.search(list(pictures), top=max(options["top"], voters), level=FINEST):
        voting = [hit for hit in one.hits[:voters] if hit.label]
        shares = vote_shares([hit.score for hit in voting], [hit.label for hit in voting])
        best = next(iter(shares), "")
        hits = [
            {
                "path": hit.path,
                "score": hit.score,
                "label": about.at(hit.label, level),
                "match": _match(about, hit.label, best),
                "thumbnail": None,  # the process of `thumbnails.py` makes it
            }
            for hit in one.hits[: options["top"]]
        ]
        answers: dict[str, float] = {}
        for label, share in shares.items():
            name = about.at(label, level)
            answers[name] = answers.get(name, 0.0) + share
        ordered = sorted(answers.items(), key=lambda each: (-each[1], each[0]))
        votes = [{"label": name, "probability": min(1.0, share)} for name, share in ordered]
        told.append({"hits": hits, "level": level or FINEST, "answers": votes})
    return told


def levels_of(about: Any) -> list[str]:
    """The levels of an index's labels, the finest first."""
    from patchloom.data.labels.taxonomy import FINEST

    if not about.labels:
        return []
    above = sorted(about.levels, key=lambda level: -len(about.labels_at(level)))
    return [FINEST, *(level for level in above if level != FINEST)]


def _match(about: Any, label: str, best: str) -> str | None:
    """The finest level at which two labels are of one class; None where there is none."""
    if not label or not best:
        return None
    levels = levels_of(about)
    return next((level for level in levels if _at(about, label, level) == _at(about, best, level)), None)


def _at(about: Any, label: str, level: str) -> str:
    found: str = about.at(label, level if level in about.levels else "")
    return found
