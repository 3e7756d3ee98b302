"""The verb of a served detector, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any


def verb_functions(model: Any) -> dict[str, Callable[..., list[dict[str, Any]]]]:
    """Return the verb of a model: detect."""
    return {"detect": partial(_detect, model)}


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
