"""Load a served model, and run its verbs on images or lines. This code runs in a model process.

A row of `_VERB_FUNCTIONS` lists the verbs of a kind of model: verb → function of inputs and options that returns one
JSON value per input, in order.
"""

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from PIL import Image

from patchloom.serving.endpoints import IMAGES, THUMBNAILS, VERBS
from patchloom.serving.visuals import class_names, explain, levels_of, search, thumbnails_of
from patchloom_runtime.artifacts.artifact import Artifact, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.inputs import read_image_within

VerbFunction: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[dict[str, Any]]]


def load_served(source: str, *, device: str = "auto", model: str | None = None, threads: int | None = None) -> Any:
    """Load a run, an artifact or an index; `model` is the run folder of an index, if it was moved.

    `threads` applies to artifacts; torch reads its number of threads from the environment.
    """
    if is_artifact(source) and model is None and device in ("auto", "cpu"):
        return load_artifact(source, threads=threads)
    from patchloom.inference.index_files import FILE as INDEX_FILE

    if os.path.isfile(os.path.join(source, INDEX_FILE)):
        from patchloom.inference.index import open_index

        return open_index(source, model=model, device=device)
    if model is not None:
        raise UsageError(f"--model is the run folder of an index, but {source} is not an index")
    from patchloom.tasks.load import load

    return load(source, device=device)


def verb_functions(model: Any) -> dict[str, VerbFunction]:
    """Return verb → function for a loaded model."""
    kind = type(model).__name__
    if kind not in _VERB_FUNCTIONS:
        raise UsageError(f"cannot serve a {kind}; pass a run, an artifact or an index")
    return _VERB_FUNCTIONS[kind](model)


def thumbnail_functions(roots: Sequence[str]) -> dict[str, Any]:
    """Return verb → function for the thumbnail process."""
    return {THUMBNAILS: partial(thumbnails_of, roots)}


def warm_up(functions: Mapping[str, Any]) -> None:
    """Run each verb once on a gray image or a word: libraries choose kernels and allocate memory then."""
    for verb, function in functions.items():
        endpoint = VERBS[verb]
        if not endpoint.warmed:
            continue
        example = Image.new("RGB", (64, 64), (128, 128, 128)) if endpoint.takes == IMAGES else "a"
        function([example], {option.name: option.default for option in endpoint.options})


def describe(model: Any) -> dict[str, Any]:
    """Return the description of a model for clients and the page."""
    classifier = getattr(model, "classifier", model)
    network = getattr(classifier, "model", None) or getattr(classifier, "network", None)
    name = getattr(getattr(network, "config", None), "name", "") or getattr(classifier, "about", None)
    folder, is_index = getattr(classifier, "folder", None), hasattr(model, "search") and hasattr(model, "about")
    return {
        "network": name if isinstance(name, str) else str(getattr(name, "network", "")),
        "labels": list(getattr(classifier, "labels", ())),
        "languages": [model.source, model.target] if hasattr(model, "translate") else [],
        "files": len(model) if is_index else None,
        "levels": levels_of(model.about) if is_index else [],
        "level": model.about.level or next(iter(levels_of(model.about)), "") if is_index else "",
        "is_artifact": isinstance(model, Artifact),
        "folder": None if folder is None else str(folder),  # not sent to clients
    }


def read_inputs(verb: str, parts: Sequence[bytes], pixels: int) -> list[Any]:
    """Decode the images or lines of one request."""
    if verb == THUMBNAILS or VERBS[verb].takes != IMAGES:
        return [part.decode() for part in parts]
    names = ["the image"] if len(parts) == 1 else [f"image {number}" for number in range(len(parts))]
    return [read_image_within(part, name, pixels) for part, name in zip(parts, names, strict=True)]


def _predict(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    predictions = model.predict(list(images), top=options["top"])
    return [
        {"answers": [{"label": label, "probability": probability} for label, probability in classes]}
        for classes in predictions
    ]


def _embed(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"vector": vector.tolist()} for vector in model.embed(list(images))]


def _segment(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
    from patchloom.report.pictures.overlays import class_shares, index_image

    results = []
    for class_map in model.predict(list(images)):
        mask = io.BytesIO()
        index_image(class_map, len(model.labels)).save(mask, "PNG")
        results.append(
            {
                "height": class_map.shape[0],
                "width": class_map.shape[1],
                "classes": [
                    {"number": number, "label": model.labels[number], "share": share}
                    for number, share in class_shares(class_map)
                ],
                "mask": base64.b64encode(mask.getvalue()).decode(),
            }
        )
    return results


def _detect(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    results = []
    for image, objects in zip(images, model.predict(list(images), min_score=options["min_score"]), strict=True):
        size = (image.height, image.width)
        results.append(
            {
                "height": size[0],
                "width": size[1],
                "objects": [
                    {
                        "label": one.name,
                        "score": one.score,
                        "box": list(one.box),
                        "mask": None if one.outline is None else one.outline.to_coco(size),
                    }
                    for one in objects
                ],
            }
        )
    return results


def _translate(model: Any, lines: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "translations": [{"text": one.text, "score": one.score} for one in translations],
            "untrained": any(one.untrained for one in translations),
        }
        for translations in model.translate(lines, n_best=options["n_best"], beams=options["beams"])
    ]


def _of_classifier(model: Any) -> dict[str, VerbFunction]:
    from patchloom.report.pictures.explanations import map_kind

    functions: dict[str, VerbFunction] = {}
    if class_names(model) is not None:
        functions["predict"] = partial(_predict, model)
    functions["embed"] = partial(_embed, model)
    if map_kind(model.model):
        functions["explain"] = partial(explain, model)
    return functions


def _of_artifact(model: Any) -> dict[str, VerbFunction]:
    verbs = {"logits": ("predict", _predict), "embedding": ("embed", _embed)}
    return {verb: partial(run, model) for output, (verb, run) in verbs.items() if output in model.about.outputs}


def _of_index(index: Any) -> dict[str, VerbFunction]:
    return {"search": partial(search, index), **_of_classifier(index.classifier)}


_VERB_FUNCTIONS: dict[str, Callable[[Any], dict[str, VerbFunction]]] = {
    "Classifier": _of_classifier,
    "ArtifactClassifier": _of_artifact,
    "ArtifactSegmenter": lambda model: {"segment": partial(_segment, model)},
    "ArtifactTranslator": lambda model: {"translate": partial(_translate, model)},
    "ArtifactDetector": lambda model: {"detect": partial(_detect, model)},
    "Index": _of_index,
    "Segmenter": lambda model: {"segment": partial(_segment, model)},
    "ObjectDetector": lambda model: {"detect": partial(_detect, model)},
    "Translator": lambda model: {"translate": partial(_translate, model)},
}
