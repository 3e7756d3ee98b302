"""What a client sent → what is asked of the model, or the reason why not.

A body is a picture as it is (`image/…` or `application/octet-stream`), a line of text per line (`text/plain`), or JSON
with `images` in base64 or `lines`. Options stand in the query, or in the JSON.
"""

import binascii
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from patchloom.serving.endpoints import IMAGES, VERBS, Endpoint, EndpointOption
from patchloom.serving.exchange import JSON
from patchloom.serving.limits import INPUTS, LINE_CHARACTERS
from patchloom.serving.refusals import Refused
from patchloom_runtime.errors import nearest
from patchloom_runtime.untrusted import parse_json

_RAW = ("", "application/octet-stream", "application/x-www-form-urlencoded")  # the last is curl's --data-binary
_MOST_FIELDS = 50


def inputs_and_options(verb: str, kind: str, query: bytes, body: bytes) -> tuple[list[bytes], dict[str, Any]]:
    """Pictures or lines, and every option of the verb."""
    about = VERBS[verb]
    given: dict[str, Any] = _queried(about, query)
    if kind == JSON:
        told = parsed(body)
        if about.takes not in told:
            raise invalid(f"the JSON has no field {about.takes!r}: {expected(about)}")
        given |= {name: value for name, value in told.items() if name != about.takes}
        inputs = read_inputs(about, told[about.takes])
    elif about.takes == IMAGES and (kind in _RAW or kind.startswith("image/")):
        inputs = [body]
    elif about.takes != IMAGES and kind == "text/plain":
        inputs = read_inputs(about, _text(body).removesuffix("\n").split("\n"))
    else:
        raise Refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a body of type {kind or 'unknown'} is not read: {expected(about)}"
        )
    return inputs, checked_options(about.options, given)


def expected(about: Endpoint) -> str:
    """What a client may send."""
    if about.takes == IMAGES:
        return 'send an image as it is (Content-Type image/…), or application/json: {"images": [base64, …]}'
    return 'send text/plain with a line per line, or application/json: {"lines": [text, …]}'


def invalid(reason: str) -> Refused:
    """The form is right, but not what it holds."""
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, reason)


def parsed(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = parse_json(body, len(body), parse_constant=_no_number)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the JSON is a {type(value).__name__}, expected an object")
    return value


def read_inputs(about: Endpoint, values: Any) -> list[bytes]:
    """Files in base64, or lines of text."""
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise invalid(f"{about.takes!r} is not a list of text: {expected(about)}")
    if len(values) > INPUTS:
        raise invalid(f"{len(values)} {about.takes}, at most {INPUTS} are answered at once")
    return [
        from_base64(value, f"image {number}") if about.takes == IMAGES else line(value, f"line {number}")
        for number, value in enumerate(values)
    ]


def from_base64(text: str, name: str) -> bytes:
    """The bytes."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise invalid(f"{name} is not base64: {error}") from None


def line(text: str, name: str) -> bytes:
    """A line to translate, in UTF-8."""
    if len(text) > LINE_CHARACTERS:
        raise invalid(f"{name} has {len(text):,} characters, at most {LINE_CHARACTERS:,} are translated")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{name} has a half of a surrogate pair, which is no letter") from None


def checked_options(known: Sequence[EndpointOption], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option, as given or by default."""
    names = [option.name for option in known]
    for name in given:
        if name not in names:
            raise invalid(f"there is no option {name!r}.{nearest(name, names) or f' Known: {names}'}")
    return {option.name: _checked(option, given.get(option.name)) for option in known}


def _checked(option: EndpointOption, value: Any) -> Any:
    if value is None:
        return option.default
    if option.kind is str:
        if not isinstance(value, str) or len(value) > option.most:
            raise invalid(f"{option.name} is not a text of at most {int(option.most)} characters")
        return value
    whole = option.kind is int
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if whole and isinstance(value, float) and value.is_integer():  # as JSON Schema counts
        number, value = True, int(value)
    if not number or not option.least <= value <= option.most:
        kind = "a whole number" if whole else "a number"
        raise invalid(f"{option.name} is {str(value)[:40]!r}, expected {kind} from {option.least:g} to {option.most:g}")
    return value


def _queried(about: Endpoint, query: bytes) -> dict[str, Any]:
    """Options of the query, as numbers where they are."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise Refused(HTTPStatus.BAD_REQUEST, "the query cannot be read") from None
    kinds = {option.name: option.kind for option in about.options}
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name in found:
            raise invalid(f"{name!r} is given twice")
        found[name] = _number(text, kinds[name]) if kinds.get(name) in (int, float) else text
    return found


def _number(text: str, kind: Any) -> Any:
    """A number where it is one, else the text, which is then refused."""
    if not text.isascii() or "_" in text or len(text) > 30 or text != text.strip():
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise invalid("the text is not UTF-8") from None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def check_encoding(header: str) -> None:
    """Refuse bodies that are packed: nobody knows how large they become."""
    if header.strip().lower() not in ("", "identity"):
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a body with Content-Encoding is not read; send it as it is")
