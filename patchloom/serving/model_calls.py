"""What a loaded model can be asked, and its answers as JSON has them. This runs where the model is.

A row of `_ASKED` says what a kind of model does: verb → a function of pictures (or lines) and options that gives one
value per picture, in order.
"""

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from patchloom.serving.endpoints import IMAGES, THUMBNAILS, VERBS
from patchloom.serving.visuals import explained, levels_of, search_answer, thumbnails_of
from patchloom_runtime.artifacts.artifact import Artifact, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.inputs import read_image_within

Answer: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[dict[str, Any]]]


def load_served(source: str, *, device: str = "auto", model: str | None = None, threads: int | None = None) -> Any:
    """The model of a run or artefact, or an index, of which `model` says where its run lies now.

    Torch reads its number of threads from the environment; the graph of an artefact is told `threads`.
    """
    if is_artifact(source) and model is None and device in ("auto", "cpu"):
        return load_artifact(source, threads=threads)
    from patchloom.inference.index_files import FILE as INDEX_FILE

    if os.path.isfile(os.path.join(source, INDEX_FILE)):
        from patchloom.inference.index import open_index

        return open_index(source, model=model, device=device)
    if model is not None:
        raise UsageError(f"--model says where the run of an index lies; {source} is none")
    from patchloom.tasks.load import load

    return load(source, device=device)


def call_model(model: Any) -> dict[str, Answer]:
    """The verbs that it answers."""
    kind = type(model).__name__
    if kind not in _ASKED:
        raise UsageError(f"{kind} has nothing that can be served; give a run, an artefact or an index")
    return _ASKED[kind](model)


def make_thumbnails(roots: Sequence[str]) -> dict[str, Any]:
    """What the process that makes thumbnails answers."""
    return {THUMBNAILS: partial(thumbnails_of, roots)}


def described(model: Any) -> dict[str, Any]:
    """What clients are told of it."""
    judge = getattr(model, "classifier", model)
    network = getattr(judge, "model", None) or getattr(judge, "network", None)
    name = getattr(getattr(network, "config", None), "name", "") or getattr(judge, "about", None)
    folder, is_index = getattr(judge, "folder", None), hasattr(model, "search") and hasattr(model, "about")
    return {
        "network": name if isinstance(name, str) else str(getattr(name, "network", "")),
        "labels": list(getattr(judge, "labels", ())),
        "languages": [model.source, model.target] if hasattr(model, "translate") else [],
        "files": len(model) if is_index else None,
        "levels": levels_of(model.about) if is_index else [],
        "level": model.about.level or next(iter(levels_of(model.about)), "") if is_index else "",
        "is_artifact": isinstance(model, Artifact),
        "folder": None if folder is None else str(folder),  # for this machine alone
    }


def read_inputs(verb: str, parts: Sequence[bytes], pixels: int) -> list[Any]:
    """Pictures, or lines of text, of one request."""
    if verb == THUMBNAILS or VERBS[verb].takes != IMAGES:
        return [part.decode() for part in parts]
    names = ["the image"] if len(parts) == 1 else [f"image {number}" for number in range(len(parts))]
    return [read_image_within(part, name, pixels) for part, name in zip(parts, names, strict=True)]


def _predict(model: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = model.predict(list(pictures), top=options["top"])
    return [{"answers": [{"label": name, "probability": share} for name, share in one]} for one in found]


def _embed(model: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    del options
    return [{"vector": vector.tolist()} for vector in model.embed(list(pictures))]


def _segment(model: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    from patchloom.report.pictures.overlays import class_shares, index_image

    del options
    found = []
    for numbers in model.predict(list(pictures)):
        mask = io.BytesIO()
        index_image(numbers, len(model.labels)).save(mask, "PNG")
        found.append(
            {
                "height": numbers.shape[0],
                "width": numbers.shape[1],
                "classes": [
                    {"number": number, "label": model.labels[number], "share": share}
                    for number, share in class_shares(numbers)
                ],
                "mask": base64.b64encode(mask.getvalue()).decode(),
            }
        )
    return found


def _detect(model: Any, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    told = []
    for picture, objects in zip(pictures, model.predict(list(pictures), min_score=options["min_score"]), strict=True):
        size = (picture.height, picture.width)
        told.append(
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
    return told


def _translate(model: Any, lines: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = model.translate(lines, n_best=options["n_best"], beams=options["beams"])
    return [
        {
            "translations": [{"text": one.text, "score": one.score} for one in of_line],
            "untrained": any(one.untrained for one in of_line),
        }
        for of_line in found
    ]


def _of_classifier(model: Any) -> dict[str, Answer]:
    embeds: dict[str, Answer] = {"embed": partial(_embed, model)}
    try:
        model.check_decides()
    except UsageError:
        return embeds | _explains(model)
    return {"predict": partial(_predict, model), **embeds, **_explains(model)}


def _explains(model: Any) -> dict[str, Answer]:
    from patchloom.report.pictures.explanations import map_kind

    return {"explain": partial(explained, model)} if map_kind(model.model) else {}


def _of_artifact(model: Any) -> dict[str, Answer]:
    known = {"logits": ("predict", _predict), "embedding": ("embed", _embed)}
    return {known[name][0]: partial(known[name][1], model) for name in known if name in model.about.outputs}


def _of_index(index: Any) -> dict[str, Answer]:
    return {"search": partial(search_answer, index), **_of_classifier(index.classifier)}


_ASKED: dict[str, Callable[[Any], dict[str, Answer]]] = {
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
