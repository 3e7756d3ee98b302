"""The Open Inference Protocol (v2) over HTTP, as KServe's and Triton's clients speak it.

A verb of the model is a model there: the first is called as the server's model is, another `NAME-VERB`. Pictures are
`image`: BYTES of shape [N], each a file (in JSON in base64), or UINT8 of shape [N, H, W, 3], pixels. Lines are `text`:
BYTES of shape [N]. Tensors may follow the JSON as they are (Triton's binary tensor data extension).
"""

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from patchloom import __version__
from patchloom.serving.endpoints import IMAGES, VERBS
from patchloom.serving.exchange import JSON, Response, json_response
from patchloom.serving.limits import INPUTS
from patchloom.serving.refusals import Refused
from patchloom.serving.requests import checked_options, from_base64, invalid, line, parsed

EXTENSION = "binary_tensor_data"
_RAW = ("application/octet-stream",)
_SIZE = struct.Struct("<I")

# Verb → name of an output → its type, and what it is of one result: a value, or a list of values.
OUTPUTS: dict[str, dict[str, tuple[str, Any]]] = {
    "predict": {
        "label": ("BYTES", lambda one: [each["label"] for each in one["answers"]]),
        "probability": ("FP32", lambda one: [each["probability"] for each in one["answers"]]),
    },
    "embed": {"vector": ("FP32", lambda one: one["vector"])},
    "search": {
        "path": ("BYTES", lambda one: [each["path"] for each in one["hits"]]),
        "score": ("FP32", lambda one: [each["score"] for each in one["hits"]]),
        "label": ("BYTES", lambda one: [each["label"] for each in one["hits"]]),
    },
    "explain": {
        "label": ("BYTES", lambda one: [one["label"]]),
        "map": ("FP32", lambda one: [value for row in one["map"] for value in row]),
    },
    "segment": {"mask": ("BYTES", lambda one: one["mask"])},
    "detect": {"objects": ("BYTES", lambda one: json.dumps(one["objects"]))},
    "translate": {
        "text": ("BYTES", lambda one: [each["text"] for each in one["translations"]]),
        "score": ("FP32", lambda one: [each["score"] for each in one["translations"]]),
    },
}


@dataclass(frozen=True)
class InferenceRequest:
    """A request that was read."""

    verb: str
    inputs: list[bytes]
    options: dict[str, Any]
    outputs: dict[str, bool]  # name → whether it is to follow the JSON as bytes
    id: str = ""


def models(name: str, verbs: Sequence[str]) -> dict[str, str]:
    """Name of a model → its verb."""
    return {name if number == 0 else f"{name}-{verb}": verb for number, verb in enumerate(verbs)}


def server() -> dict[str, Any]:
    """What the server says of itself."""
    return {"name": "patchloom", "version": __version__, "extensions": [EXTENSION]}


def model(name: str, verb: str) -> dict[str, Any]:
    """What it says of a model."""
    is_value = {"mask", "objects"}
    outputs = [
        {"name": output, "datatype": kind, "shape": [-1] if output in is_value else [-1, -1]}
        for output, (kind, _) in OUTPUTS[verb].items()
    ]
    inputs = [{"name": _input_name(verb), "datatype": "BYTES", "shape": [-1]}]
    return {"name": name, "versions": [], "platform": "patchloom", "inputs": inputs, "outputs": outputs}


def read(verb: str, kind: str, body: bytes, header_length: str) -> InferenceRequest:
    """What a client asks."""
    if kind not in (JSON, "") and not (header_length and kind in _RAW):  # Triton's client names no type at all
        ways = "expected application/json, or application/octet-stream with Inference-Header-Content-Length"
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a body of type {kind or 'unknown'} is not read: {ways}")
    head, rest = body, b""
    if header_length:
        if not (header_length.isascii() and header_length.isdecimal()) or int(header_length) > len(body):
            raise Refused(HTTPStatus.BAD_REQUEST, "Inference-Header-Content-Length is not the length of the JSON")
        head, rest = body[: int(header_length)], body[int(header_length) :]
    told = parsed(head)
    given = told.get("inputs")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], dict):
        raise invalid(f"'inputs' is not a list of one tensor, {_input_name(verb)!r}")
    options = dict(_parameters(told))
    raw = bool(options.pop("binary_data_output", False))
    identity = told.get("id", "")
    if not isinstance(identity, str) or not identity.isascii() or len(identity) > 200:
        raise invalid("'id' is not a short text of ASCII letters")
    inputs = _inputs(verb, given[0], rest)
    if not 1 <= len(inputs) <= INPUTS:
        raise invalid(f"{len(inputs)} inputs, expected 1 to {INPUTS}")
    return InferenceRequest(
        verb, inputs, checked_options(VERBS[verb].options, options), _outputs(verb, told, raw), identity
    )


def response(name: str, wanted: InferenceRequest, results: Sequence[Any]) -> Response:
    """The tensors."""
    tensors, parts = [], []
    for output, as_bytes in wanted.outputs.items():
        kind, of_one = OUTPUTS[wanted.verb][output]
        values = [of_one(one) for one in results]
        is_list = isinstance(values[0], list)
        flat = [each for one in values for each in one] if is_list else values
        tensor: dict[str, Any] = {"name": output, "datatype": kind}
        tensor["shape"] = [len(values), len(values[0])] if is_list else [len(values)]
        if as_bytes:
            parts.append(_packed(kind, flat))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = flat
        tensors.append(tensor)
    told = {"model_name": name, **({"id": wanted.id} if wanted.id else {}), "outputs": tensors}
    if not parts:
        return json_response(told)
    head = json.dumps(told).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Response(body=b"".join([head, *parts]), kind="application/octet-stream", headers=headers)


def _input_name(verb: str) -> str:
    return "image" if VERBS[verb].takes == IMAGES else "text"


def _parameters(value: Mapping[str, Any]) -> dict[str, Any]:
    parameters = value.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid("'parameters' is not an object")
    return parameters


def _inputs(verb: str, tensor: Mapping[str, Any], rest: bytes) -> list[bytes]:
    """Files or lines of a tensor."""
    name, images = _input_name(verb), VERBS[verb].takes == IMAGES
    if tensor.get("name") != name:
        raise invalid(f"there is no input {str(tensor.get('name'))[:40]!r}, expected {name!r}")
    shape = tensor.get("shape")
    sizes = [size for size in shape if type(size) is int and 0 < size < 1 << 32] if isinstance(shape, list) else []
    if not sizes or sizes != shape or len(sizes) > 4:
        raise invalid("'shape' is not a list of up to four whole numbers above 0")
    size = _parameters(tensor).get("binary_data_size")
    if size is not None and (type(size) is not int or size != len(rest)):
        raise invalid(f"'binary_data_size' is {str(size)[:40]}, but {len(rest)} bytes follow the JSON")
    datatype, data = tensor.get("datatype"), rest if size is not None else tensor.get("data")
    if datatype == "UINT8" and images:
        return _pixels(sizes, data)
    if datatype != "BYTES":
        raise invalid(f"{name!r} is of type {str(datatype)[:20]!r}, expected BYTES{' or UINT8' if images else ''}")
    if isinstance(data, bytes):
        found = _elements(data)
    elif isinstance(data, list) and all(isinstance(each, str) for each in _flat(data)):
        read_one = from_base64 if images else line
        found = [read_one(each, f"{name} {number}") for number, each in enumerate(_flat(data))]
    else:
        raise invalid("'data' is not a list of text")
    if len(found) != math.prod(sizes):
        raise invalid(f"{len(found)} elements for a tensor of shape {sizes}")
    return found if images else [line(_decoded(each), f"{name} {number}") for number, each in enumerate(found)]


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise invalid("the text is not UTF-8") from None


def _pixels(shape: Sequence[int], data: Any) -> list[bytes]:
    """Pixels as files that hold them as they are (PPM), so that one reader checks them all."""
    if len(shape) not in (3, 4) or shape[-1] != 3:
        raise invalid(f"UINT8 of shape {list(shape)}, expected [N, H, W, 3]")
    if not isinstance(data, bytes):
        values = _flat(data) if isinstance(data, list) else []
        if not values or not all(type(value) is int and 0 <= value <= 255 for value in values):
            raise invalid("'data' is not a list of whole numbers from 0 to 255")
        data = bytes(values)
    height, width = shape[-3], shape[-2]
    each = height * width * 3
    if len(data) != math.prod(shape):
        raise invalid(f"{len(data)} values for a tensor of shape {list(shape)}")
    head = f"P6 {width} {height} 255\n".encode()
    return [head + data[start : start + each] for start in range(0, len(data), each)]


def _flat(values: Any) -> list[Any]:
    """The elements of nested lists, row by row."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list):
            found += _flat(value)
        else:
            found.append(value)
    return found


def _elements(data: bytes) -> list[bytes]:
    """Each after four bytes of its length."""
    found, at = [], 0
    while at < len(data):
        if at + _SIZE.size > len(data):
            raise invalid("BYTES are cut short")
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            raise invalid("BYTES are cut short")
        found.append(data[at : at + size])
        at += size
    return found


def _outputs(verb: str, told: Mapping[str, Any], raw: bool) -> dict[str, bool]:
    """The outputs that are wanted, and whether as bytes."""
    asked = told.get("outputs")
    if asked is None or asked == []:
        return dict.fromkeys(OUTPUTS[verb], raw)
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise invalid("'outputs' is not a list of objects")
    found = {}
    for one in asked:
        if one.get("name") not in list(OUTPUTS[verb]):
            raise invalid(f"there is no output {str(one.get('name'))[:40]!r}, expected {', '.join(OUTPUTS[verb])}")
        found[one["name"]] = bool(_parameters(one).get("binary_data", raw))
    return found


def _packed(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "FP32":
        return array("f", values).tobytes()
    texts = [str(value).encode() for value in values]
    return b"".join(_SIZE.pack(len(text)) + text for text in texts)
