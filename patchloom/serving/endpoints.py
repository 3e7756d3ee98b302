"""What can be asked of a served model: the verbs, their options, and the form of their answers.

One table for both sides: requests are read and the schema is written by it where clients are talked to, and
`answers.py` has a function per verb where the model is.
"""

from dataclasses import dataclass
from typing import Any

IMAGES, LINES = "images", "lines"
THUMBNAILS = "thumbnails"  # what the process of `thumbnails.py` is asked, and no client
TOP = 1_000


@dataclass(frozen=True)
class EndpointOption:
    """Something that can be said beside the pictures or lines; whole numbers and numbers have bounds."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: int | float | str | None
    help: str
    least: float = 0
    most: float = 0

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON Schema has it."""
        kind = {int: "integer", float: "number", str: "string"}[self.kind]
        bounds = {"maxLength": int(self.most)} if self.kind is str else {"minimum": self.least, "maximum": self.most}
        given = {} if self.default is None else {"default": self.default}
        return {"type": kind, "description": self.help, **bounds, **given}


@dataclass(frozen=True)
class Endpoint:
    """One route."""

    summary: str
    takes: str  # IMAGES or LINES
    options: tuple[EndpointOption, ...]
    result: dict[str, Any]  # JSON Schema of what is said of one picture or line
    warmed: bool = True  # asked once before clients ask


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


_TEXT, _NUMBER, _WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_PICTURE = {"contentEncoding": "base64", "description": "A PNG or JPEG."}

VERBS = {
    "predict": Endpoint(
        "The likeliest classes of pictures",
        IMAGES,
        (EndpointOption("top", int, 3, "How many classes.", 1, TOP),),
        _object(answers=_list(_object(label=_TEXT, probability=_SHARE))),
    ),
    "embed": Endpoint("The vectors that pictures are compared by", IMAGES, (), _object(vector=_list(_NUMBER))),
    "search": Endpoint(
        "The files of the index that are most like pictures",
        IMAGES,
        (
            EndpointOption("top", int, 10, "How many files.", 1, TOP),
            EndpointOption("level", str, None, "Of the labels, where not the index's own.", most=200),
            EndpointOption("neighbours", int, 0, "How many of the nearest files vote for a class.", 0, TOP),
            EndpointOption(
                "thumbnails", int, 0, "Pixels per side of small pictures of the files; 0 sends none.", 0, 512
            ),
        ),
        _object(
            hits=_list(
                _object(
                    path=_TEXT,
                    score=_NUMBER,
                    label=_TEXT,
                    match={
                        "type": ["string", "null"],
                        "description": "The finest level at which it is of the class that was voted for.",
                    },
                    thumbnail={"type": ["string", "null"], **_PICTURE},
                )
            ),
            level=_TEXT,
            answers=_list(_object(label=_TEXT, probability=_SHARE)),
        ),
    ),
    "explain": Endpoint(
        "What speaks for a class of pictures, and where",
        IMAGES,
        (
            EndpointOption("label", str, None, "The class, where not the likeliest.", most=1_000),
            EndpointOption("top", int, 3, "How many classes are named.", 1, TOP),
        ),
        _object(
            answers=_list(_object(label=_TEXT, probability=_SHARE)),
            label=_TEXT,
            kind={"enum": ["evidence", "contribution", "attention", "share"]},
            map={
                "description": "Rows of the picture as the network sees it, from -1 or 0 to 1.",
                **_list(_list({"type": "number", "minimum": -1, "maximum": 1})),
            },
            seen={"type": "string", **_PICTURE},
        ),
        warmed=False,
    ),
    "segment": Endpoint(
        "The class of every pixel",
        IMAGES,
        (),
        _object(
            height=_WHOLE,
            width=_WHOLE,
            classes=_list(_object(number=_WHOLE, label=_TEXT, share=_SHARE)),
            mask={"type": "string", "contentEncoding": "base64", "description": "A PNG of the classes' numbers."},
        ),
    ),
    "detect": Endpoint(
        "Objects with their boxes, and masks where those were learned",
        IMAGES,
        (EndpointOption("min_score", float, 0.5, "Objects with less are left out.", 0, 1),),
        _object(
            height=_WHOLE,
            width=_WHOLE,
            objects=_list(
                _object(
                    label=_TEXT,
                    score=_SHARE,
                    box={"type": "array", "items": _NUMBER, "description": "x0, y0, x1, y1 in pixels"},
                    mask={"type": ["object", "null"], "description": "Run lengths as COCO has them: size, counts."},
                )
            ),
        ),
    ),
    "translate": Endpoint(
        "Lines of text in the other language",
        LINES,
        (
            EndpointOption("n_best", int, 1, "Translations per line.", 1, 16),
            EndpointOption("beams", int, None, "Hypotheses searched, where not the recipe's.", 1, 16),
        ),
        _object(translations=_list(_object(text=_TEXT, score=_NUMBER)), untrained={"type": "boolean"}),
    ),
}
