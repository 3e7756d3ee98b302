"""The routes as OpenAPI 3.1 has them, so that clients can be generated and requests checked."""

from collections.abc import Sequence
from typing import Any

from patchloom import __version__
from patchloom.serving.endpoints import IMAGES, VERBS, Endpoint
from patchloom.serving.inference_protocol import OUTPUTS, models
from patchloom.serving.limits import INPUTS, LINE_CHARACTERS

_ERROR = {"$ref": "#/components/schemas/Error"}
# Status → when.
_ASKED = {
    "400": "The body cannot be read, or not one host is named",
    "403": "A page of another origin asks",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "A body of this type is not read",
    "422": "What the body holds cannot be answered, such as a damaged image",
    "503": "Too many wait already, or the model is not ready; Retry-After says when to come again",
    "504": "There was no answer before the deadline",
}


def openapi(name: str, verbs: Sequence[str], *, keyed: bool) -> dict[str, Any]:
    """The whole document."""
    paths = {f"/{verb}": {"post": _operation(verb, VERBS[verb], keyed)} for verb in verbs}
    paths |= {
        "/": _get("What is served", _OBJECT, keyed),
        "/health": _get("Whether the server lives", _OBJECT, False),
        "/ready": _get("Whether it answers", _OBJECT, False, {"503": "It does not"}),
        "/openapi.json": _get("This document", _OBJECT, keyed),
        "/v2": _get("The server, by the Open Inference Protocol", _OBJECT, keyed),
        "/v2/health/live": _get("Whether the server lives", _OBJECT, False),
        "/v2/health/ready": _get("Whether it answers", _OBJECT, False, {"503": "It does not"}),
    }
    paths["/metrics"] = _get("Metrics for Prometheus", {"type": "string"}, keyed, kind="text/plain")
    for model, verb in models(name, verbs).items():
        paths[f"/v2/models/{model}"] = _get("Inputs and outputs", _OBJECT, keyed)
        paths[f"/v2/models/{model}/ready"] = _get("Whether it answers", _OBJECT, False, {"503": "It does not"})
        paths[f"/v2/models/{model}/infer"] = {"post": _infer(verb, keyed)}
    schemas = {"Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}}
    key = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"patchloom: {name}", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, **key},
    }


def page_paths(*, has_report: bool, keyed: bool) -> dict[str, Any]:
    """What an application with a page has beside, or in place of, those of every one."""
    shown = {"/": "The page"} | ({"/report": "The report of the run"} if has_report else {})
    return {path: _get(told, {"type": "string"}, keyed, kind="text/html") for path, told in shown.items()}


_OBJECT = {"type": "object"}


def _content(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _refusals(told: dict[str, str], keyed: bool) -> dict[str, Any]:
    told = {"400": "Not one host is named", "421": "The server does not answer to this host"} | told
    told = told | ({"401": "The key is missing or wrong"} if keyed else {})
    return {status: {"description": when, "content": _content(_ERROR)} for status, when in told.items()}


def _secured(keyed: bool) -> dict[str, Any]:
    return {"security": [{"key": []}]} if keyed else {}


def _get(
    summary: str,
    schema: dict[str, Any],
    keyed: bool,
    more: dict[str, str] | None = None,
    kind: str = "application/json",
) -> dict[str, Any]:
    answers = {"200": {"description": summary, "content": _content(schema, kind)}}
    others = {status: {"description": when, "content": _content(_OBJECT)} for status, when in (more or {}).items()}
    return {"get": {"summary": summary, "responses": answers | others | _refusals({}, keyed), **_secured(keyed)}}


def _operation(name: str, verb: Endpoint, keyed: bool) -> dict[str, Any]:
    options = {option.name: option.schema for option in verb.options}
    answer = {
        "type": "object",
        "properties": {"results": {"type": "array", "items": verb.result}},
        "required": ["results"],
    }
    return {
        "operationId": name,
        "summary": verb.summary,
        "parameters": [{"name": each, "in": "query", "schema": schema} for each, schema in options.items()],
        "requestBody": {"required": True, "content": _bodies(verb, options)},
        "responses": {
            "200": {"description": "One result per input, in order", "content": _content(answer)},
            **_refusals(_ASKED, keyed),
        },
        **_secured(keyed),
    }


def _bodies(verb: Endpoint, options: dict[str, Any]) -> dict[str, Any]:
    if verb.takes == IMAGES:
        item: dict[str, Any] = {"type": "string", "contentEncoding": "base64", "description": "An image file."}
        raw = _content({"type": "string", "format": "binary"}, "image/*")
        raw |= _content({"type": "string", "format": "binary"}, "application/octet-stream")
    else:
        item = {"type": "string", "maxLength": LINE_CHARACTERS}
        raw = _content({"type": "string"}, "text/plain")
    inputs = {"type": "array", "items": item, "minItems": 1, "maxItems": INPUTS}
    whole = {
        "type": "object",
        "properties": {verb.takes: inputs, **options},
        "required": [verb.takes],
        "additionalProperties": False,
    }
    return {**_content(whole), **raw}


def _infer(verb: str, keyed: bool) -> dict[str, Any]:
    name = "image" if VERBS[verb].takes == IMAGES else "text"
    kinds = ["BYTES", "UINT8"] if name == "image" else ["BYTES"]
    whole = {"type": "integer", "minimum": 1}
    tensor = {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "shape": {"type": "array", "items": whole, "minItems": 1, "maxItems": 4},
            "datatype": {"enum": kinds},
            "data": {"type": "array"},
        },
        "required": ["name", "shape", "datatype"],
    }
    asked = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "maxLength": 200},
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            "parameters": {
                "type": "object",
                "properties": {option.name: option.schema for option in VERBS[verb].options},
                "additionalProperties": False,
            },
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"enum": list(OUTPUTS[verb])}},
                    "required": ["name"],
                },
            },
        },
        "required": ["inputs"],
    }
    answers = {"200": {"description": "Tensors", "content": _content(_OBJECT)}}
    return {
        "summary": f"{VERBS[verb].summary}, by the Open Inference Protocol",
        "requestBody": {"required": True, "content": _content(asked)},
        "responses": answers | _refusals(_ASKED, keyed),
        **_secured(keyed),
    }
