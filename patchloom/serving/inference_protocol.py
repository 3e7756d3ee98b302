"""The Open Inference Protocol (v2) over HTTP, for the clients of KServe and Triton.

Each verb of the model is a protocol model: the first has the server's model name, the others are `NAME-VERB`.

- Images are the input `image`: BYTES of shape [N], each an image file (in base64 in JSON), or UINT8 of shape
  [N, H, W, 3], pixels.
- Lines are the input `text`: BYTES of shape [N].
- Tensors may follow the JSON as raw bytes (Triton's binary tensor data extension).
"""

import json
import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from patchloom import __version__
from patchloom.serving.exchange import AsciiJSONResponse
from patchloom.serving.limits import INPUTS
from patchloom.serving.requests import (
    JSON,
    checked_options,
    decode_text,
    encode_line,
    from_base64,
    invalid,
    parse_object,
)
from patchloom.tasks.endpoints import IMAGES, Endpoint

EXTENSION = "binary_tensor_data"
_RAW = ("application/octet-stream",)
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class InferenceRequest:
    """A parsed request."""

    endpoint: Endpoint
    inputs: list[bytes]
    options: dict[str, Any]
    outputs: dict[str, bool]  # name → whether to send it as raw bytes after the JSON
    id: str = ""


def models(name: str, verbs: Iterable[str]) -> dict[str, str]:
    """Return protocol model name → verb."""
    return {name if number == 0 else f"{name}-{verb}": verb for number, verb in enumerate(verbs)}


def server() -> dict[str, Any]:
    """Return the metadata of the server."""
    return {"name": "patchloom", "version": __version__, "extensions": [EXTENSION]}


def model(name: str, endpoint: Endpoint) -> dict[str, Any]:
    """Return the metadata of a protocol model."""
    outputs = [
        {"name": output, "datatype": tensor.datatype, "shape": [-1, -1] if tensor.is_list else [-1]}
        for output, tensor in endpoint.tensors.items()
    ]
    inputs = [{"name": input_name(endpoint), "datatype": "BYTES", "shape": [-1]}]
    return {"name": name, "versions": [], "platform": "patchloom", "inputs": inputs, "outputs": outputs}


def input_name(endpoint: Endpoint) -> str:
    """Return the name of the input tensor."""
    return "image" if endpoint.takes == IMAGES else "text"


def read(endpoint: Endpoint, media_type: str, body: bytes, header_length: str) -> InferenceRequest:
    """Parse a request; `header_length` is the value of Inference-Header-Content-Length."""
    if media_type not in (JSON, "") and not (header_length and media_type in _RAW):  # Triton's client sends no type
        expected = "expected application/json, or application/octet-stream with Inference-Header-Content-Length"
        reason = f"the content type {media_type or 'unknown'} is not supported; {expected}"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
    head, rest = body, b""
    if header_length:
        if not (header_length.isascii() and header_length.isdecimal()) or int(header_length) > len(body):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "Inference-Header-Content-Length is not the length of the JSON")
        head, rest = body[: int(header_length)], body[int(header_length) :]
    fields = parse_object(head)
    tensors = fields.get("inputs")
    if not isinstance(tensors, list) or len(tensors) != 1 or not isinstance(tensors[0], dict):
        raise invalid(f"'inputs' is not a list of one tensor, {input_name(endpoint)!r}")
    options = dict(_parameters(fields))
    raw = bool(options.pop("binary_data_output", False))
    identity = fields.get("id", "")
    if not isinstance(identity, str) or not identity.isascii() or len(identity) > 200:
        raise invalid("'id' is not an ASCII string of at most 200 characters")
    inputs = _read_tensor(endpoint, tensors[0], rest)
    if not 1 <= len(inputs) <= INPUTS:
        raise invalid(f"the request has {len(inputs)} inputs, expected 1 to {INPUTS}")
    outputs = _requested_outputs(endpoint, fields, raw)
    return InferenceRequest(endpoint, inputs, checked_options(endpoint.options, options), outputs, identity)


def response(name: str, request: InferenceRequest, results: Sequence[Any]) -> Response:
    """Return the requested tensors."""
    tensors, parts = [], []
    for output, as_bytes in request.outputs.items():
        kind, value_of, is_list = request.endpoint.tensors[output]
        values = [value_of(result) for result in results]
        flat = [each for value in values for each in value] if is_list else values
        tensor: dict[str, Any] = {"name": output, "datatype": kind}
        tensor["shape"] = [len(values), len(values[0])] if is_list else [len(values)]
        if as_bytes:
            parts.append(_pack(kind, flat))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = flat
        tensors.append(tensor)
    fields = {"model_name": name, **({"id": request.id} if request.id else {}), "outputs": tensors}
    if not parts:
        return AsciiJSONResponse(fields)
    head = json.dumps(fields).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Response(b"".join([head, *parts]), headers=headers, media_type="application/octet-stream")


def _parameters(value: Mapping[str, Any]) -> dict[str, Any]:
    parameters = value.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid("'parameters' is not an object")
    return parameters


def _read_tensor(endpoint: Endpoint, tensor: Mapping[str, Any], rest: bytes) -> list[bytes]:
    """Return the image files or lines of a tensor; `rest` are the bytes after the JSON."""
    name, images = input_name(endpoint), endpoint.takes == IMAGES
    if tensor.get("name") != name:
        raise invalid(f"there is no input {str(tensor.get('name'))[:40]!r}, expected {name!r}")
    shape = tensor.get("shape")
    sizes = [size for size in shape if type(size) is int and 0 < size < 1 << 32] if isinstance(shape, list) else []
    if not sizes or sizes != shape or len(sizes) > 4:
        raise invalid("'shape' is not a list of up to four positive integers")
    size = _parameters(tensor).get("binary_data_size")
    if size is not None and (type(size) is not int or size != len(rest)):
        raise invalid(f"'binary_data_size' is {str(size)[:40]}, but {len(rest)} bytes follow the JSON")
    datatype, data = tensor.get("datatype"), rest if size is not None else tensor.get("data")
    if datatype == "UINT8" and images:
        return _image_files(sizes, data)
    if datatype != "BYTES":
        raise invalid(f"{name!r} has the type {str(datatype)[:20]!r}, expected BYTES{' or UINT8' if images else ''}")
    if isinstance(data, bytes):
        elements = _split_elements(data)
    elif isinstance(data, list) and all(isinstance(each, str) for each in _flatten(data)):
        read_one = from_base64 if images else encode_line
        elements = [read_one(each, f"{name} {number}") for number, each in enumerate(_flatten(data))]
    else:
        raise invalid("'data' is not a list of strings")
    if len(elements) != math.prod(sizes):
        raise invalid(f"the tensor has {len(elements)} elements, but the shape {sizes}")
    if images:
        return elements
    return [encode_line(decode_text(each), f"{name} {number}") for number, each in enumerate(elements)]


def _image_files(shape: Sequence[int], data: Any) -> list[bytes]:
    """Return pixels as uncompressed image files (PPM), so that one reader checks all images."""
    if len(shape) not in (3, 4) or shape[-1] != 3:
        raise invalid(f"the UINT8 tensor has the shape {list(shape)}, expected [N, H, W, 3]")
    if not isinstance(data, bytes):
        values = _flatten(data) if isinstance(data, list) else []
        if not values or not all(type(value) is int and 0 <= value <= 255 for value in values):
            raise invalid("'data' is not a list of integers from 0 to 255")
        data = bytes(values)
    height, width = shape[-3], shape[-2]
    each = height * width * 3
    if len(data) != math.prod(shape):
        raise invalid(f"the tensor has {len(data)} values, but the shape {list(shape)}")
    head = f"P6 {width} {height} 255\n".encode()
    return [head + data[start : start + each] for start in range(0, len(data), each)]


def _flatten(values: Any) -> list[Any]:
    """Return the elements of nested lists, row by row."""
    elements: list[Any] = []
    for value in values:
        if isinstance(value, list):
            elements += _flatten(value)
        else:
            elements.append(value)
    return elements


def _split_elements(data: bytes) -> list[bytes]:
    """Split BYTES elements, each after four bytes with its length."""
    elements, at = [], 0
    while at < len(data):
        if at + _SIZE.size > len(data):
            raise invalid("the BYTES tensor is truncated")
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            raise invalid("the BYTES tensor is truncated")
        elements.append(data[at : at + size])
        at += size
    return elements


def _requested_outputs(endpoint: Endpoint, fields: Mapping[str, Any], raw: bool) -> dict[str, bool]:
    """Return output name → whether to send it as raw bytes."""
    tensors, known = fields.get("outputs"), endpoint.tensors
    if tensors is None or tensors == []:
        return dict.fromkeys(known, raw)
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise invalid("'outputs' is not a list of objects")
    outputs = {}
    for tensor in tensors:
        if tensor.get("name") not in list(known):
            raise invalid(f"there is no output {str(tensor.get('name'))[:40]!r}, expected {', '.join(known)}")
        outputs[tensor["name"]] = bool(_parameters(tensor).get("binary_data", raw))
    return outputs


def _pack(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "FP32":
        return array("f", values).tobytes()
    texts = [str(value).encode() for value in values]
    return b"".join(_SIZE.pack(len(text)) + text for text in texts)
