"""The verb of a served detector, of a run or an artifact. An artifact is served without torch."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.endpoints import (
    INTEGER,
    NUMBER,
    SHARE,
    TEXT,
    Endpoint,
    EndpointOption,
    OutputTensor,
    Serving,
    VerbFunction,
    list_schema,
    object_schema,
)


class DetectorServing(Serving):
    """Objects in images."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "detect": Endpoint(
            summary="Objects with their boxes, and their masks if the model predicts masks",
            options=(EndpointOption("min_score", float, 0.5, "Minimum score of an object.", 0, 1),),
            result=object_schema(
                height=INTEGER,
                width=INTEGER,
                objects=list_schema(
                    object_schema(
                        label=TEXT,
                        score=SHARE,
                        box={"type": "array", "items": NUMBER, "description": "x0, y0, x1, y1 in pixels"},
                        mask={"type": ["object", "null"], "description": "COCO run-length encoding: size, counts."},
                    )
                ),
            ),
            tensors={"objects": OutputTensor("BYTES", lambda result: json.dumps(result["objects"]), is_list=False)},
        )
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
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
