"""Read HTTP requests to a verb: their inputs and options, or the reason for a refusal.

A body is an image file (`image/…` or `application/octet-stream`), text with one input per line (`text/plain`), or JSON
with `images` in base64 or `lines`. Options are in the query or in the JSON.
"""

import binascii
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException

from patchloom.serving.limits import INPUTS, LINE_CHARACTERS
from patchloom.tasks.endpoints import IMAGES, Endpoint, EndpointOption
from patchloom_runtime.errors import nearest
from patchloom_runtime.untrusted import parse_json

JSON = "application/json"
_RAW = ("", "application/octet-stream", "application/x-www-form-urlencoded")  # the last is curl's --data-binary
_QUERY_FIELDS = 50


def content_type(headers: Mapping[str, str]) -> str:
    """Return the media type of a body without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def inputs_and_options(
    endpoint: Endpoint, media_type: str, query: bytes, body: bytes
) -> tuple[list[bytes], dict[str, Any]]:
    """Return the images or lines of a request, and every option of the verb."""
    options: dict[str, Any] = _query_options(endpoint, query)
    if media_type == JSON:
        fields = parse_object(body)
        if endpoint.takes not in fields:
            raise invalid(f"the JSON has no field {endpoint.takes!r}; {_expected(endpoint)}")
        options |= {name: value for name, value in fields.items() if name != endpoint.takes}
        inputs = _read_inputs(endpoint, fields[endpoint.takes])
    elif endpoint.takes == IMAGES and (media_type in _RAW or media_type.startswith("image/")):
        inputs = [body]
    elif endpoint.takes != IMAGES and media_type == "text/plain":
        inputs = _read_inputs(endpoint, decode_text(body).removesuffix("\n").split("\n"))
    else:
        reason = f"the content type {media_type or 'unknown'} is not supported; {_expected(endpoint)}"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
    return inputs, checked_options(endpoint.options, options)


def _expected(endpoint: Endpoint) -> str:
    if endpoint.takes == IMAGES:
        return 'send an image file (Content-Type image/…), or application/json: {"images": [base64, …]}'
    return 'send text/plain with one input per line, or application/json: {"lines": [text, …]}'


def invalid(reason: str) -> HTTPException:
    """Return the refusal of a well-formed request with unusable content."""
    return HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, reason)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = parse_json(body, len(body), parse_constant=_refuse_constant)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the JSON is a {type(value).__name__}, expected an object")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _read_inputs(endpoint: Endpoint, values: Any) -> list[bytes]:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise invalid(f"{endpoint.takes!r} is not a list of strings; {_expected(endpoint)}")
    if len(values) > INPUTS:
        raise invalid(f"the request has {len(values)} {endpoint.takes}, the limit is {INPUTS}")
    return [
        from_base64(value, f"image {number}") if endpoint.takes == IMAGES else encode_line(value, f"line {number}")
        for number, value in enumerate(values)
    ]


def from_base64(text: str, name: str) -> bytes:
    """Decode base64; `name` is what messages call it."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise invalid(f"{name} is not base64: {error}") from None


def encode_line(text: str, name: str) -> bytes:
    """Return a line to translate in UTF-8."""
    if len(text) > LINE_CHARACTERS:
        raise invalid(f"{name} has {len(text):,} characters, the limit is {LINE_CHARACTERS:,}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{name} has a lone surrogate, which is not a character") from None


def decode_text(body: bytes) -> str:
    """Decode UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise invalid("the text is not UTF-8") from None


def checked_options(known: Sequence[EndpointOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option, with its default if it was not sent."""
    names = [option.name for option in known]
    for name in values:
        if name not in names:
            raise invalid(f"unknown option {name!r}.{nearest(name, names) or f' Known: {names}'}")
    return {option.name: _checked(option, values.get(option.name)) for option in known}


def _checked(option: EndpointOption, value: Any) -> Any:
    if value is None:
        return option.default
    if option.kind is str:
        if not isinstance(value, str) or len(value) > option.most:
            raise invalid(f"{option.name} is not a string of at most {int(option.most)} characters")
        return value
    whole = option.kind is int
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if whole and isinstance(value, float) and value.is_integer():  # an integer by JSON Schema
        number, value = True, int(value)
    if not number or not option.least <= value <= option.most:
        kind = "an integer" if whole else "a number"
        raise invalid(f"{option.name} is {str(value)[:40]!r}, expected {kind} from {option.least:g} to {option.most:g}")
    return value


def _query_options(endpoint: Endpoint, query: bytes) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_QUERY_FIELDS)
    except ValueError:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the query cannot be parsed") from None
    kinds = {option.name: option.kind for option in endpoint.options}
    options: dict[str, Any] = {}
    for name, text in pairs:
        if name in options:
            raise invalid(f"the query has {name!r} twice")
        options[name] = _number(text, kinds[name]) if kinds.get(name) in (int, float) else text
    return options


def _number(text: str, kind: Any) -> Any:
    """Return a number, or the text itself if it is none; `checked_options` refuses that."""
    if not text.isascii() or "_" in text or len(text) > 30 or text != text.strip():
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def check_encoding(header: str) -> None:
    """Refuse compressed bodies: their size is unknown until they are read."""
    if header.strip().lower() not in ("", "identity"):
        reason = "Content-Encoding is not supported; send the body uncompressed"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
