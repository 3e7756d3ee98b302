"""The verbs of a served classifier, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from patchloom_runtime.artifacts.artifact import Artifact


def verb_functions(model: Any) -> dict[str, Callable[..., list[dict[str, Any]]]]:
    """Return the verbs of a model: predict, embed and explain, as far as it supports them."""
    if isinstance(model, Artifact):
        verbs = {"logits": ("predict", _predict), "embedding": ("embed", _embed)}
        return {verb: partial(run, model) for output, (verb, run) in verbs.items() if output in model.about.outputs}
    from patchloom.tasks.classification.explain import class_names, explain, map_kind  # loads torch

    functions: dict[str, Callable[..., list[dict[str, Any]]]] = {}
    if class_names(model) is not None:
        functions["predict"] = partial(_predict, model)
    functions["embed"] = partial(_embed, model)
    if map_kind(model.model):
        functions["explain"] = partial(explain, model)
    return functions


def _predict(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    predictions = model.predict(list(images), top=options["top"])
    return [
        {"answers": [{"label": label, "probability": probability} for label, probability in classes]}
        for classes in predictions
    ]


def _embed(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"vector": vector.tolist()} for vector in model.embed(list(images))]
