"""The verb of a served translator, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from patchloom.tasks.endpoints import (
    LINES,
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


class TranslatorServing(Serving):
    """Translations of lines."""

    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "translate": Endpoint(
            summary="Translations of lines of text",
            takes=LINES,
            options=(
                EndpointOption("n_best", int, 1, "Translations per line.", 1, 16),
                EndpointOption("beams", int, None, "Beam size (default: the recipe's).", 1, 16),
            ),
            result=object_schema(
                translations=list_schema(object_schema(text=TEXT, score=NUMBER)), untrained={"type": "boolean"}
            ),
            tensors={
                "text": OutputTensor("BYTES", lambda result: [each["text"] for each in result["translations"]]),
                "score": OutputTensor("FP32", lambda result: [each["score"] for each in result["translations"]]),
            },
        )
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        return {"translate": partial(_translate, model)}


def _translate(model: Any, lines: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "translations": [{"text": one.text, "score": one.score} for one in translations],
            "untrained": any(one.untrained for one in translations),
        }
        for translations in model.translate(lines, n_best=options["n_best"], beams=options["beams"])
    ]
