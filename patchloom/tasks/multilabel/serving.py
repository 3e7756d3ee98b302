"""The verbs of a served multi-label model, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.classification.serving import ClassifierServing, embed_images, predict_images
from patchloom.tasks.endpoints import MOST_RESULTS, Endpoint, EndpointOption, Serving, VerbFunction


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
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        return {"predict": partial(predict_images, model), "embed": partial(embed_images, model)}
