"""The OpenAPI 3.1 schema of the routes, to generate clients and to check requests."""

from collections.abc import Mapping
from typing import Any

from patchloom import __version__
from patchloom.serving.inference_protocol import input_name, models
from patchloom.serving.limits import INPUTS, LINE_CHARACTERS
from patchloom.tasks.endpoints import IMAGES, Endpoint

_ERROR = {"$ref": "#/components/schemas/Error"}
_OBJECT = {"type": "object"}
# Status → meaning, for routes that run the model.
_REFUSALS = {
    "400": "The body cannot be parsed, or the request does not name exactly one host",
    "403": "The request comes from a page of another origin",
    "408": "The body arrived too slowly",
    "413": "The body is too large",
    "415": "The content type is not supported",
    "422": "The content cannot be processed, such as a damaged image",
    "503": "The queue is full or the model is not ready; see Retry-After",
    "504": "The deadline passed without a result",
}


def openapi(name: str, endpoints: Mapping[str, Endpoint], *, keyed: bool) -> dict[str, Any]:
    """Return the schema of a model with these endpoints by verb; `keyed` if the server has an API key."""
    paths = {f"/{verb}": {"post": _operation(verb, endpoint, keyed)} for verb, endpoint in endpoints.items()}
    paths |= {
        "/": _get("The served model", _OBJECT, keyed),
        "/health": _get("Whether the server is running", _OBJECT, False),
        "/ready": _get("Whether the model is ready", _OBJECT, False, {"503": "The model is not ready"}),
        "/openapi.json": _get("This schema", _OBJECT, keyed),
        "/v2": _get("Server metadata of the Open Inference Protocol", _OBJECT, keyed),
        "/v2/health/live": _get("Whether the server is running", _OBJECT, False),
        "/v2/health/ready": _get("Whether the model is ready", _OBJECT, False, {"503": "The model is not ready"}),
    }
    paths["/metrics"] = _get("Metrics for Prometheus", {"type": "string"}, keyed, kind="text/plain")
    for model, verb in models(name, endpoints).items():
        paths[f"/v2/models/{model}"] = _get("Model metadata of the Open Inference Protocol", _OBJECT, keyed)
        paths[f"/v2/models/{model}/ready"] = _get(
            "Whether the model is ready", _OBJECT, False, {"503": "The model is not ready"}
        )
        paths[f"/v2/models/{model}/infer"] = {"post": _infer(endpoints[verb], keyed)}
    schemas = {"Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}}
    key = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"patchloom: {name}", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, **key},
    }


def page_paths(*, has_report: bool, keyed: bool) -> dict[str, Any]:
    """Return the paths that `patchloom app` adds or replaces."""
    summaries = {"/": "The page"} | ({"/report": "The report of the run"} if has_report else {})
    return {path: _get(summary, {"type": "string"}, keyed, kind="text/html") for path, summary in summaries.items()}


def _content(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _refusals(meanings: dict[str, str], keyed: bool) -> dict[str, Any]:
    common = {"400": "The request does not name exactly one host", "421": "The server does not serve this host"}
    key = {"401": "The API key is missing or wrong"} if keyed else {}
    return {
        status: {"description": meaning, "content": _content(_ERROR)}
        for status, meaning in (common | meanings | key).items()
    }


def _secured(keyed: bool) -> dict[str, Any]:
    return {"security": [{"key": []}]} if keyed else {}


def _get(
    summary: str,
    schema: dict[str, Any],
    keyed: bool,
    more: dict[str, str] | None = None,
    kind: str = "application/json",
) -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": _content(schema, kind)}}
    responses |= {
        status: {"description": meaning, "content": _content(_OBJECT)} for status, meaning in (more or {}).items()
    }
    return {"get": {"summary": summary, "responses": responses | _refusals({}, keyed), **_secured(keyed)}}


def _operation(name: str, endpoint: Endpoint, keyed: bool) -> dict[str, Any]:
    options = {option.name: option.schema for option in endpoint.options}
    results = {
        "type": "object",
        "properties": {"results": {"type": "array", "items": endpoint.result}},
        "required": ["results"],
    }
    return {
        "operationId": name,
        "summary": endpoint.summary,
        "parameters": [{"name": each, "in": "query", "schema": schema} for each, schema in options.items()],
        "requestBody": {"required": True, "content": _bodies(endpoint, options)},
        "responses": {
            "200": {"description": "One result per input, in order", "content": _content(results)},
            **_refusals(_REFUSALS, keyed),
        },
        **_secured(keyed),
    }


def _bodies(endpoint: Endpoint, options: dict[str, Any]) -> dict[str, Any]:
    if endpoint.takes == IMAGES:
        item: dict[str, Any] = {"type": "string", "contentEncoding": "base64", "description": "An image file."}
        raw = _content({"type": "string", "format": "binary"}, "image/*")
        raw |= _content({"type": "string", "format": "binary"}, "application/octet-stream")
    else:
        item = {"type": "string", "maxLength": LINE_CHARACTERS}
        raw = _content({"type": "string"}, "text/plain")
    inputs = {"type": "array", "items": item, "minItems": 1, "maxItems": INPUTS}
    body = {
        "type": "object",
        "properties": {endpoint.takes: inputs, **options},
        "required": [endpoint.takes],
        "additionalProperties": False,
    }
    return {**_content(body), **raw}


def _infer(endpoint: Endpoint, keyed: bool) -> dict[str, Any]:
    name = input_name(endpoint)
    kinds = ["BYTES", "UINT8"] if name == "image" else ["BYTES"]
    size = {"type": "integer", "minimum": 1}
    tensor = {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "shape": {"type": "array", "items": size, "minItems": 1, "maxItems": 4},
            "datatype": {"enum": kinds},
            "data": {"type": "array"},
        },
        "required": ["name", "shape", "datatype"],
    }
    body = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "maxLength": 200},
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            "parameters": {
                "type": "object",
                "properties": {option.name: option.schema for option in endpoint.options},
                "additionalProperties": False,
            },
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"enum": list(endpoint.tensors)}},
                    "required": ["name"],
                },
            },
        },
        "required": ["inputs"],
    }
    return {
        "summary": f"{endpoint.summary}, by the Open Inference Protocol",
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {"200": {"description": "Tensors", "content": _content(_OBJECT)}, **_refusals(_REFUSALS, keyed)},
        **_secured(keyed),
    }
