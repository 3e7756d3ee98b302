"""The verbs of a served classifier, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.endpoints import (
    CLASSES,
    IMAGE_FILE,
    MOST_RESULTS,
    NUMBER,
    TEXT,
    Endpoint,
    EndpointOption,
    OutputTensor,
    Serving,
    VerbFunction,
    list_schema,
    object_schema,
)
from patchloom_runtime.artifacts.artifact import Artifact

ABSTAINED = {"type": "string", "description": "Why the model does not answer; empty if it does."}


class ClassifierServing(Serving):
    """Classes, vectors and evidence of images, as far as a model supports them."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "predict": Endpoint(
            summary="The most likely classes of images",
            options=(EndpointOption("top", int, 3, "Number of classes.", 1, MOST_RESULTS),),
            result=object_schema(answers=CLASSES, abstained=ABSTAINED),
            tensors={
                "label": OutputTensor("BYTES", lambda result: [each["label"] for each in result["answers"]]),
                "probability": OutputTensor("FP32", lambda result: [each["probability"] for each in result["answers"]]),
                "abstained": OutputTensor("BYTES", lambda result: result["abstained"], is_list=False),
            },
        ),
        "embed": Endpoint(
            summary="Embedding vectors of images",
            result=object_schema(vector=list_schema(NUMBER)),
            tensors={"vector": OutputTensor("FP32", lambda result: result["vector"])},
        ),
        "explain": Endpoint(
            summary="The evidence for a class at each place of images",
            options=(
                EndpointOption("label", str, None, "The class (default: the most likely one).", most=1_000),
                EndpointOption("top", int, 3, "Number of classes in the result.", 1, MOST_RESULTS),
            ),
            result=object_schema(
                answers=CLASSES,
                abstained=ABSTAINED,
                label=TEXT,
                kind={"enum": ["evidence", "contribution", "attention", "share"]},
                map={
                    "description": "Rows of the image as the network sees it; values from -1 or 0 to 1.",
                    **list_schema(list_schema({"type": "number", "minimum": -1, "maximum": 1})),
                },
                seen={"type": "string", **IMAGE_FILE},
            ),
            tensors={
                "label": OutputTensor("BYTES", lambda result: [result["label"]]),
                "map": OutputTensor("FP32", lambda result: [value for row in result["map"] for value in row]),
            },
            warmed=False,
        ),
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        if isinstance(model, Artifact):
            verbs = {"logits": ("predict", predict_images), "embedding": ("embed", embed_images)}
            return {verb: partial(run, model) for output, (verb, run) in verbs.items() if output in model.about.outputs}
        from patchloom.tasks.classification.explain import class_names, explain, map_kind  # loads torch

        functions: dict[str, VerbFunction] = {}
        if class_names(model) is not None:
            functions["predict"] = partial(predict_images, model)
        functions["embed"] = partial(embed_images, model)
        if map_kind(model.model):
            functions["explain"] = partial(explain, model)
        return functions


def predict_images(model: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the labels and scores that a model predicts for each image."""
    predictions = model.predict(list(images), top=options["top"])
    return [
        {
            "answers": [{"label": label, "probability": probability} for label, probability in classes],
            "abstained": classes.abstained,
        }
        for classes in predictions
    ]


def embed_images(model: Any, images: Sequence[Any], _options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the vector of each image."""
    return [{"vector": vector.tolist()} for vector in model.embed(list(images))]
