"""The verbs of a task's served models: inputs, options and results of each, and the functions that run them.

Both kinds of server processes read them: the front process parses requests and writes the OpenAPI schema, the model
process runs the functions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from patchloom.tasks.task import TaskPart

IMAGES, LINES = "images", "lines"
MOST_RESULTS = 1_000
VerbFunction: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]  # inputs, options → results


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


class OutputTensor(NamedTuple):
    """One output of a verb in the Open Inference Protocol."""

    datatype: str  # BYTES or FP32
    values: Callable[[Mapping[str, Any]], Any]  # the tensor's value, or list of values, in one result
    is_list: bool = True


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Inputs, options and results of one verb."""

    summary: str
    takes: str = IMAGES  # or LINES
    options: tuple[EndpointOption, ...] = ()
    result: dict[str, Any]  # JSON Schema of the result for one input
    tensors: Mapping[str, OutputTensor]  # by name
    warmed: bool = True  # whether to run it once before the first request


class Serving(TaskPart, ABC):
    """How the models of a task are served. Importing it must not load torch, which artifacts do not need."""

    endpoints: ClassVar[Mapping[str, Endpoint]]  # by verb

    @abstractmethod
    def functions(self, model: Any) -> Mapping[str, VerbFunction]:
        """Return the function of each verb that a model supports: one JSON value per input, in order."""


def object_schema(**fields: Any) -> dict[str, Any]:
    """Return the JSON Schema of an object that has these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def list_schema(of: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a list."""
    return {"type": "array", "items": of}


TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
IMAGE_FILE = {"contentEncoding": "base64", "description": "A PNG or JPEG."}
CLASSES = list_schema(object_schema(label=TEXT, probability=SHARE))
