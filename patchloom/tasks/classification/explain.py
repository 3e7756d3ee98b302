"""The verb `explain` of a served classifier or multi-label model: a map of the evidence for a class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from patchloom.report.page import image_base64
from patchloom.report.pictures.explanations import class_map, map_kind, strengths
from patchloom.report.pictures.look import NetworkInputs, network_inputs
from patchloom.report.pictures.sheets import numbers
from patchloom_runtime.errors import UsageError, nearest

__all__ = ["class_names", "explain", "explain_labels", "map_kind"]


def class_names(model: Any) -> list[str] | None:
    """Return the class names of a model, or None if it has no classifier."""
    try:
        model.check_decides()
    except UsageError:
        return None
    return list(model.labels)


def explain(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the most likely classes of images, and a map of the evidence for one class each."""
    names = class_names(model) or []
    _check_label(options["label"], names)
    inputs = network_inputs(model.model, model.preprocessing, list(images), model.calibration)
    order = (-inputs.probabilities).argsort(axis=1, kind="stable")[:, : options["top"]]
    answers = [
        [(names[at], float(shares[at])) for at in best]
        for best, shares in zip(order.tolist(), inputs.probabilities, strict=True)
    ]
    return _explained(inputs, names, inputs.probabilities, answers, inputs.abstained(names), options["label"])


def explain_labels(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the labels that apply to images, and a map of the evidence for one label each.

    Without a label in the options, it is the one with the highest score of those that apply, or of all if none does.
    """
    _check_label(options["label"], model.labels)
    inputs = network_inputs(model.model, model.preprocessing, list(images), model.classifier.calibration)
    inputs = replace(inputs, neutral=model.neutral)
    scores = model.scores_of(inputs.images)
    answers = [model.answers(row, options["top"]) for row in scores]
    order = scores + (scores >= model.thresholds)
    return _explained(inputs, model.labels, order, answers, [each.abstained for each in answers], options["label"])


def _check_label(label: str | None, names: list[str] | tuple[str, ...]) -> None:
    if label is not None and label not in names:
        raise UsageError(
            f"there is no class {label!r}.{nearest(label, names)}" if names else "the model has no classes"
        )


def _explained(
    inputs: NetworkInputs,
    names: Sequence[str],
    scores: np.ndarray,
    answers: Sequence[Sequence[tuple[str, float]]],
    abstained: Sequence[str],
    label: str | None,
) -> list[dict[str, Any]]:
    """Return the results of the verb; scores (N, K) decide which class is explained if `label` is None."""
    count = len(inputs.input_images)
    likeliest = torch.from_numpy(scores.argmax(axis=1)) if names else torch.zeros(count, dtype=torch.int64)
    chosen = likeliest if label is None else torch.full_like(likeliest, list(names).index(label))
    kind = map_kind(inputs.network)
    of_classes = partial(class_map, inputs.network, inputs.images, neutral=inputs.neutral)
    best = of_classes(likeliest)
    maps = best if torch.equal(chosen, likeliest) else of_classes(chosen)
    scaled = numbers(strengths(maps, kind, best), "the map").round(3)
    return [
        {
            "answers": [{"label": name, "probability": probability} for name, probability in answers[row]],
            "abstained": abstained[row],
            "label": names[int(chosen[row])] if names else "",
            "kind": kind,
            "map": scaled[row].tolist(),
            "seen": image_base64(image),
        }
        for row, image in enumerate(inputs.input_images)
    ]
