"""The verb of a served segmenter, of a run or an artifact. An artifact is served without torch."""

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from patchloom.report.pictures.overlays import class_shares, index_image
from patchloom.tasks.endpoints import (
    INTEGER,
    SHARE,
    TEXT,
    Endpoint,
    OutputTensor,
    Serving,
    VerbFunction,
    list_schema,
    object_schema,
)


class SegmenterServing(Serving):
    """The classes of pixels."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "segment": Endpoint(
            summary="The class of every pixel",
            result=object_schema(
                height=INTEGER,
                width=INTEGER,
                classes=list_schema(object_schema(number=INTEGER, label=TEXT, share=SHARE)),
                mask={"type": "string", "contentEncoding": "base64", "description": "A PNG of class indices."},
            ),
            tensors={"mask": OutputTensor("BYTES", lambda result: result["mask"], is_list=False)},
        )
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        return {"segment": partial(_segment, model)}


def _segment(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
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
