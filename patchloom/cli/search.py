"""`patchloom search INDEX QUERY…`: the files of a collection that are most similar to an image."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import Device, IndexRun, Json
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.inference.search import SearchResult


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    index: Annotated[str, Argument("Index folder made by `patchloom index`.")]
    queries: Annotated[list[str], Argument("Image files or folders.")]
    top: Annotated[int, Option("Files per query.")] = 10
    skip_self: Annotated[bool, Option("Leave out the query's own file.")] = False
    level: Annotated[str | None, Option("Level of the labels, fine for the finest. Default: the index's.")] = None
    label: Annotated[list[str] | None, Option("Search only files with this label, at --level. Repeatable.")] = None
    folder: Annotated[list[str] | None, Option("Search only files in this folder. Repeatable.")] = None
    condition: Annotated[
        str | None,
        Option(
            "Rank files of the query's class at this level first: the predicted class, or LEVEL=CLASS.",
            metavar="LEVEL",
        ),
    ] = None
    neighbors: Annotated[int | None, Option("Files that vote on the class of --condition. Default: 20.", minimum=1)] = (
        None
    )
    page: Annotated[str | None, Option("HTML page with the images found.")] = None
    images: Annotated[list[str] | None, Option("Folders whose images the results may show. Repeatable.")] = None
    model: IndexRun = None
    device: Device = "auto"
    exact: Annotated[bool, Option("Compare with all files, also in an index for approximate search.")] = False
    recall: Annotated[
        int, Option("Measure the recall of an approximate search with this number of the queries.", minimum=0)
    ] = 0
    as_json: Json = False


def search(options: SearchOptions) -> None:
    """Find the files most similar to an image. Unreadable queries are reported, and the others searched.

    patchloom search photos.index new.jpg --page similar.html --images photos/
    """
    from patchloom.cli.output import JsonList, print_result
    from patchloom.inference.index import open_index
    from patchloom.inference.search import count_right, method_in_words, note_on_images, write_search_page
    from patchloom_runtime.errors import DataError

    index = open_index(options.index, model=options.model, device=options.device, images=options.images or ())
    results = index.search(
        options.queries,
        top=options.top,
        skip_self=options.skip_self,
        exact=options.exact,
        recall=options.recall,
        level=options.level,
        label=options.label,
        folder=options.folder,
        condition=options.condition,
        neighbors=options.neighbors,
    )
    faults = [result.error for result in results if result.error]
    if len(faults) == len(results):
        others = f" (and {len(faults) - 1} others cannot be read)" if len(faults) > 1 else ""
        raise DataError(faults[0] + others)
    if options.page:
        write_search_page(Path(options.page), index, results)
        if note := note_on_images(results):
            print(f"note: {note}")
    if options.as_json:
        json_list = JsonList()
        for result in results:
            json_list.add(_as_json(result))
        json_list.close()
    else:
        _print(results)
        if len(results) > 1 and (counted := count_right(results)):
            print_result(f"nearest file has the query's label: {counted[0]:,} of {counted[1]:,}")
        is_filtered = bool(options.label or options.folder)
        method = method_in_words(index, results)
        if options.exact or options.condition or is_filtered:
            method = "exact"
        searched = f"{index.searched:,} of {len(index):,}" if is_filtered else f"{len(index):,}"
        print_result(f"{searched} files searched, {method}" + (f"; {options.page}" if options.page else ""))
    if faults:
        raise typer.Exit(3)


def _as_json(result: "SearchResult") -> dict[str, Any]:
    return {
        "query": result.query,
        "label": result.label,
        "level": result.level,
        "condition": asdict(result.condition) if result.condition else None,
        "recall": result.recall,
        "hits": [hit._asdict() | {"right": result.right(hit)} for hit in result.hits],
        "error": result.error or None,
    }


def _print(results: "list[SearchResult]") -> None:
    """Print a table per query. Paths come last and are never cut, so that they can be copied."""
    from patchloom.cli.output import print_result
    from patchloom.inference.search import short
    from patchloom_runtime.printable import printable

    marks = {True: "right", False: "wrong", None: ""}
    for result in results:
        if result.error:
            print_result(f"unreadable: {printable(result.error)}\n")
            continue
        print_result(short(result.query) + (f" ({printable(result.label)})" if result.label else ""))
        if result.condition:
            print_result(f"      ranked by cosine + log-odds of {printable(result.condition.in_words())}")
        width = max(len(printable(hit.label)) for hit in result.hits) if result.hits else 0
        for place, hit in enumerate(result.hits, start=1):
            mark = "itself" if hit.itself else marks[result.right(hit)]
            ranked = "" if hit.conditioned is None else f"{hit.conditioned:8.4f}  "
            scores = f"{place:>4}  {ranked}{hit.score:7.4f}"
            print_result(f"{scores}  {printable(hit.label):<{width}}  {mark:<6}  {short(hit.path)}")
        print_result("")
