"""The verbs of a served multi-label model, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.classification.serving import ClassifierServing, embed_images, predict_images
from patchloom.tasks.endpoints import MOST_RESULTS, Endpoint, EndpointOption, Serving, VerbFunction
from patchloom_runtime.artifacts.artifact import Artifact


class MultilabelServing(Serving):
    """The labels that apply to images, and their vectors."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "predict": Endpoint(
            summary="All labels that apply to images",
            options=(EndpointOption("top", int, MOST_RESULTS, "Largest number of labels.", 1, MOST_RESULTS),),
            result=ClassifierServing.endpoints["predict"].result,
            tensors=ClassifierServing.endpoints["predict"].tensors,
        ),
        "embed": ClassifierServing.endpoints["embed"],
        "explain": replace(
            ClassifierServing.endpoints["explain"],
            summary="The evidence for a label at each place of images",
            options=(
                EndpointOption("label", str, None, "The label (default: the best that applies).", most=1_000),
                EndpointOption("top", int, MOST_RESULTS, "Largest number of labels in the result.", 1, MOST_RESULTS),
            ),
        ),
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        functions: dict[str, VerbFunction] = {
            "predict": partial(predict_images, model),
            "embed": partial(embed_images, model),
        }
        if isinstance(model, Artifact):
            return functions
        from patchloom.tasks.classification.explain import explain_labels, map_kind  # loads torch

        return functions | ({"explain": partial(explain_labels, model)} if map_kind(model.model) else {})
