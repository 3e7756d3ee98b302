"""XML from strangers: a document type is refused in any encoding, and damage is one error."""

import pytest

from patchloom_runtime.untrusted_xml import parse_xml
from tests.data.facts import facts

ENTITIES = '<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>'


def test_plain_xml_is_parsed() -> None:
    assert parse_xml(b"<box><name>cat</name></box>").findtext("name") == "cat"


@pytest.mark.parametrize(
    "data", [ENTITIES.encode(), b"\xef\xbb\xbf" + ENTITIES.encode(), ENTITIES.encode("utf-16"), b"<!DOCTYPE x><x/>"]
)
def test_a_document_type_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=facts("document type")):
        parse_xml(data)


@pytest.mark.parametrize("encoding", ["futf-8", "utf-7", "idna", "hex", "undefined"])
def test_an_encoding_that_cannot_be_read_is_refused(encoding: str) -> None:
    with pytest.raises(ValueError, match=r"encod|codec"):
        parse_xml(f'<?xml version="1.0" encoding="{encoding}"?><x/>'.encode())


@pytest.mark.parametrize("data", [b"", b"\0", b"<x>", b"<x>&a;</x>"])
def test_damaged_xml_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_xml(data)
