"""The verb of a served translator, of a run or an artifact. An artifact is served without torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any


def verb_functions(model: Any) -> dict[str, Callable[..., list[dict[str, Any]]]]:
    """Return the verb of a model: translate."""
    return {"translate": partial(_translate, model)}


def _translate(model: Any, lines: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "translations": [{"text": one.text, "score": one.score} for one in translations],
            "untrained": any(one.untrained for one in translations),
        }
        for translations in model.translate(lines, n_best=options["n_best"], beams=options["beams"])
    ]
