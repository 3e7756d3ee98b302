"""The verbs of served models: their inputs, options and results.

One table for both kinds of processes. The front process parses requests and writes the OpenAPI schema by it; the model
process has a function per verb.
"""

from dataclasses import dataclass
from typing import Any

IMAGES, LINES = "images", "lines"
THUMBNAILS = "thumbnails"  # verb of the thumbnail process, not open to clients
TOP = 1_000


@dataclass(frozen=True)
class EndpointOption:
    """An option of a verb; numbers have bounds, and `most` is the maximum length of a string."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: int | float | str | None
    help: str
    least: float = 0
    most: float = 0

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the option."""
        kind = {int: "integer", float: "number", str: "string"}[self.kind]
        bounds = {"maxLength": int(self.most)} if self.kind is str else {"minimum": self.least, "maximum": self.most}
        default = {} if self.default is None else {"default": self.default}
        return {"type": kind, "description": self.help, **bounds, **default}


@dataclass(frozen=True)
class Endpoint:
    """Inputs, options and results of one verb."""

    summary: str
    takes: str  # IMAGES or LINES
    options: tuple[EndpointOption, ...]
    result: dict[str, Any]  # JSON Schema of the result for one input
    warmed: bool = True  # whether to run it once before the first request


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


_TEXT, _NUMBER, _INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_IMAGE = {"contentEncoding": "base64", "description": "A PNG or JPEG."}

VERBS = {
    "predict": Endpoint(
        "The most likely classes of images",
        IMAGES,
        (EndpointOption("top", int, 3, "Number of classes.", 1, TOP),),
        _object(answers=_list(_object(label=_TEXT, probability=_SHARE))),
    ),
    "embed": Endpoint("Embedding vectors of images", IMAGES, (), _object(vector=_list(_NUMBER))),
    "search": Endpoint(
        "The files of the index that are most similar to images",
        IMAGES,
        (
            EndpointOption("top", int, 10, "Number of files.", 1, TOP),
            EndpointOption("level", str, None, "Level of the labels (default: the index's).", most=200),
            EndpointOption("neighbours", int, 0, "Number of nearest files that vote for a class.", 0, TOP),
            EndpointOption("thumbnails", int, 0, "Pixels per side of thumbnails of the files; 0 sends none.", 0, 512),
        ),
        _object(
            hits=_list(
                _object(
                    path=_TEXT,
                    score=_NUMBER,
                    label=_TEXT,
                    match={
                        "type": ["string", "null"],
                        "description": "The finest level at which the file has the class of the vote.",
                    },
                    thumbnail={"type": ["string", "null"], **_IMAGE},
                )
            ),
            level=_TEXT,
            answers=_list(_object(label=_TEXT, probability=_SHARE)),
        ),
    ),
    "explain": Endpoint(
        "The evidence for a class at each place of images",
        IMAGES,
        (
            EndpointOption("label", str, None, "The class (default: the most likely one).", most=1_000),
            EndpointOption("top", int, 3, "Number of classes in the result.", 1, TOP),
        ),
        _object(
            answers=_list(_object(label=_TEXT, probability=_SHARE)),
            label=_TEXT,
            kind={"enum": ["evidence", "contribution", "attention", "share"]},
            map={
                "description": "Rows of the image as the network sees it; values from -1 or 0 to 1.",
                **_list(_list({"type": "number", "minimum": -1, "maximum": 1})),
            },
            seen={"type": "string", **_IMAGE},
        ),
        warmed=False,
    ),
    "segment": Endpoint(
        "The class of every pixel",
        IMAGES,
        (),
        _object(
            height=_INTEGER,
            width=_INTEGER,
            classes=_list(_object(number=_INTEGER, label=_TEXT, share=_SHARE)),
            mask={"type": "string", "contentEncoding": "base64", "description": "A PNG of class indices."},
        ),
    ),
    "detect": Endpoint(
        "Objects with their boxes, and their masks if the model predicts masks",
        IMAGES,
        (EndpointOption("min_score", float, 0.5, "Minimum score of an object.", 0, 1),),
        _object(
            height=_INTEGER,
            width=_INTEGER,
            objects=_list(
                _object(
                    label=_TEXT,
                    score=_SHARE,
                    box={"type": "array", "items": _NUMBER, "description": "x0, y0, x1, y1 in pixels"},
                    mask={"type": ["object", "null"], "description": "COCO run-length encoding: size, counts."},
                )
            ),
        ),
    ),
    "translate": Endpoint(
        "Translations of lines of text",
        LINES,
        (
            EndpointOption("n_best", int, 1, "Translations per line.", 1, 16),
            EndpointOption("beams", int, None, "Beam size (default: the recipe's).", 1, 16),
        ),
        _object(translations=_list(_object(text=_TEXT, score=_NUMBER)), untrained={"type": "boolean"}),
    ),
}
