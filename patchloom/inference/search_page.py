"""The contact sheet of a search: each query beside the files that are like it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from patchloom.report.page import data_uri, write_page
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.inputs import thumbnail_of
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import path_within

if TYPE_CHECKING:
    from patchloom.inference.index import Index
    from patchloom.inference.search import SearchHit, SearchResult  # which shows its findings by this module

QUERIES = 200  # shown at most
THUMBNAIL = 150  # pixels on the page; twice as many for fine screens


def write_search_page(path: Path, index: "Index", found: "Sequence[SearchResult]") -> None:
    """Write the page; where both labels are known, a frame shows whether they are the same."""
    shown = [one for one in found if not one.error]
    notes = [one.error for one in found if one.error]
    if len(shown) > QUERIES:
        notes.append(f"the first {QUERIES} of {len(shown):,} queries are shown")
    if note := note_on_images(shown):
        notes.append(note)
    facts = [
        ("files in the index", f"{len(index):,}"),
        ("model", Path(index.about.model).name),
        ("search", "exact" if index.about.exact else "by faiss, approximate"),
    ]
    if counted := count_right(shown):
        facts.append(("nearest file has the query's label", f"{counted[0]:,} of {counted[1]:,}"))
    write_page(
        path,
        "search.html.j2",
        title=f"Found in {index.folder.name}",
        facts=facts,
        notes=notes,
        framed=counted is not None,
        queries=[result_card(one) for one in shown[:QUERIES]],
    )


def count_right(found: "Sequence[SearchResult]") -> tuple[int, int] | None:
    """Queries whose nearest other file has their label, and queries where both are known; None without any."""
    first = [one.right(hit) for one in found if (hit := next((hit for hit in one.hits if not hit.itself), None))]
    known = [right for right in first if right is not None]
    return (sum(known), len(known)) if known else None


def note_on_images(found: "Sequence[SearchResult]") -> str:
    """Say which hits are not shown as pictures and how to show them; '' where all may be."""
    hidden = sorted({hit.path for one in found for hit in one.hits if path_within(hit.path, one.images) is None})
    if not hidden:
        return ""
    return (
        f"{len(hidden):,} {'images are' if len(hidden) > 1 else 'image is'} not shown, such as {short(hidden[0])}: an "
        "index can name any file. Add --images FOLDER for each folder whose images may be shown, in Python "
        "open_index(…, images=[FOLDER])."
    )


def short(path: str) -> str:
    """The path for a reader: from here on where it lies below, else whole."""
    here = os.path.join(os.getcwd(), "")
    return printable(path.removeprefix(here))


def result_card(one: "SearchResult") -> dict[str, Any]:
    """For a page or a notebook: the query, where it is a file, and its hits with their pictures."""
    hits = [_hit(one, hit) for hit in one.hits]
    picture = _thumbnail(one.query) if one.query else None
    condition = one.condition.in_words() if one.condition else ""
    return {"name": short(one.query), "label": one.label, "picture": picture, "hits": hits, "condition": condition}


def _hit(one: "SearchResult", hit: "SearchHit") -> dict[str, Any]:
    name = printable(os.path.basename(hit.path))
    return hit._asdict() | {
        "path": printable(hit.path),
        "name": name,
        "right": one.right(hit),
        "picture": _thumbnail(hit.path, one.images),
    }


def _thumbnail(path: str, roots: Sequence[str] | None = None) -> str:
    """The picture as a JPEG inside an address; grey where the file has gone since or is outside the roots."""
    try:
        picture = thumbnail_of(path, 2 * THUMBNAIL, roots)
    except DataError:
        picture = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "grey")
    return data_uri(picture, "JPEG", quality=80)
