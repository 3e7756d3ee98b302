"""The verb of a served segmenter, of a run or an artifact. An artifact is served without torch."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from patchloom.report.pictures.overlays import class_shares, index_image


def verb_functions(model: Any) -> dict[str, Callable[..., list[dict[str, Any]]]]:
    """Return the verb of a model: segment."""
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
