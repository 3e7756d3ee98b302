"""The verbs of a served regression model, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.classification.serving import ClassifierServing, embed_images
from patchloom.tasks.endpoints import (
    NUMBER,
    TEXT,
    Endpoint,
    OutputTensor,
    Serving,
    VerbFunction,
    list_schema,
    object_schema,
)


class RegressorServing(Serving):
    """The numbers of images, and their vectors."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "regress": Endpoint(
            summary="Numbers of images",
            result=object_schema(numbers=list_schema(object_schema(name=TEXT, number=NUMBER))),
            tensors={
                "name": OutputTensor("BYTES", lambda result: [each["name"] for each in result["numbers"]]),
                "number": OutputTensor("FP32", lambda result: [each["number"] for each in result["numbers"]]),
            },
        ),
        "embed": ClassifierServing.endpoints["embed"],
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        return {"regress": partial(predict_numbers, model), "embed": partial(embed_images, model)}


def predict_numbers(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers that a model predicts for each image."""
    return [
        {"numbers": [{"name": name, "number": number} for name, number in numbers]}
        for numbers in model.predict(list(images))
    ]
