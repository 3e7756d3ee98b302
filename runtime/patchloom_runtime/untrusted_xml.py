"""XML from files that may be damaged or come from strangers; importing the parser takes some milliseconds."""

from typing import NoReturn
from xml.etree import ElementTree


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML without a document type, which may declare entities. Raises ValueError with a one-line message."""
    try:
        return ElementTree.fromstring(data, ElementTree.XMLParser(target=_NoDocumentType()))
    except (ElementTree.ParseError, LookupError) as error:  # LookupError: an unknown encoding
        raise ValueError(str(error)) from error


class _NoDocumentType(ElementTree.TreeBuilder):
    def doctype(self, *_: str) -> NoReturn:
        raise ValueError("it declares a document type or entities, which it does not need")
