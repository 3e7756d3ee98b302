"""The verb `explain` of a served classifier: a map of the evidence for a class."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from patchloom.report.page import image_base64
from patchloom.report.pictures.explanations import class_map, map_kind, strengths
from patchloom.report.pictures.look import network_inputs
from patchloom.report.pictures.sheets import numbers
from patchloom_runtime.errors import UsageError, nearest

__all__ = ["class_names", "explain", "map_kind"]


def class_names(model: Any) -> list[str] | None:
    """Return the class names of a model, or None if it has no classifier."""
    try:
        model.check_decides()
    except UsageError:
        return None
    return list(model.labels)


def explain(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the most likely classes of images, and a map of the evidence for one class each."""
    label, names = options["label"], class_names(model) or []
    if label is not None and label not in names:
        raise UsageError(
            f"there is no class {label!r}.{nearest(label, names)}" if names else "the model has no classes"
        )
    inputs = network_inputs(model.model, model.preprocessing, list(images), model.calibration)
    reasons = inputs.abstained(names)
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
            "abstained": reasons[row],
            "label": names[chosen[row]] if names else "",
            "kind": kind,
            "map": scaled[row].tolist(),
            "seen": image_base64(image),
        }
        for row, image in enumerate(inputs.input_images)
    ]
