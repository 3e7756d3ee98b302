"""`patchloom search INDEX QUERY…`: the files of a collection that are like a picture."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from patchloom.inference.search import SearchResult


def search(
    index: Annotated[str, typer.Argument(help="Folder that `patchloom index` made.")],
    queries: Annotated[list[str], typer.Argument(help="Image files or folders.")],
    top: Annotated[int, typer.Option(help="Files per query.")] = 10,
    skip_self: Annotated[bool, typer.Option("--skip-self", help="Leave out the query's own file.")] = False,
    level: Annotated[
        str | None, typer.Option(help="Level of the labels shown, fine for the finest; the index's own by default.")
    ] = None,
    condition: Annotated[
        str | None,
        typer.Option(
            help="Rank files of the query's class at this LEVEL first: as predicted, or as given, LEVEL=CLASS."
        ),
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=1, help="Files that vote for the class of --condition; by default 20.")
    ] = None,
    page: Annotated[str | None, typer.Option(help="Write a contact sheet here (HTML).")] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(help="Folder whose images the page may show; may be given several times."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the index's run lies now, if it was moved.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="Compare with all files where faiss would search.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: a list with one object per query.")] = False,
) -> None:
    """Find the files most like a picture; a query that cannot be read is named, and the others are searched."""
    from pathlib import Path

    from patchloom.cli.output import JsonList, print_result
    from patchloom.inference.index import open_index
    from patchloom.inference.search import count_right, note_on_images, write_search_page
    from patchloom_runtime.errors import DataError

    opened = open_index(index, model=model, device=device, images=images or ())
    found = opened.search(
        queries,
        top=top,
        skip_self=skip_self,
        exact=exact,
        level=level,
        condition=condition,
        neighbours=neighbours,
    )
    faults = [one.error for one in found if one.error]
    if len(faults) == len(found):
        others = f" (and {len(faults) - 1} others cannot be read)" if len(faults) > 1 else ""
        raise DataError(faults[0] + others)
    if page:
        write_search_page(Path(page), opened, found)
        if note := note_on_images(found):
            print(f"note: {note}")
    if as_json:
        listed = JsonList()
        for one in found:
            listed.add(_for_machines(one))
        listed.close()
    else:
        _print_found(found)
        if len(found) > 1 and (counted := count_right(found)):
            print_result(f"nearest file has the query's label: {counted[0]:,} of {counted[1]:,}")
        how = "exact" if exact or condition or opened.about.exact else "by faiss, approximate"
        print_result(f"{len(opened):,} files searched, {how}" + (f"; {page}" if page else ""))
    if faults:
        raise typer.Exit(3)


def _for_machines(one: "SearchResult") -> dict[str, Any]:
    hits = [hit._asdict() | {"right": one.right(hit)} for hit in one.hits]
    condition = asdict(one.condition) if one.condition else None
    told = {"query": one.query, "label": one.label, "level": one.level, "condition": condition}
    return told | {"hits": hits, "error": one.error or None}


def _print_found(found: "list[SearchResult]") -> None:
    """A table per query. Paths come last and are never cut, so that they can be copied."""
    from patchloom.cli.output import print_result
    from patchloom.inference.search import short
    from patchloom_runtime.printable import printable

    marks = {True: "right", False: "wrong", None: ""}
    for one in found:
        if one.error:
            print_result(f"unreadable: {printable(one.error)}\n")
            continue
        print_result(short(one.query) + (f" ({printable(one.label)})" if one.label else ""))
        if one.condition:
            print_result(f"      ranked by cosine + log-odds of {printable(one.condition.in_words())}")
        width = max(len(printable(hit.label)) for hit in one.hits) if one.hits else 0
        for place, hit in enumerate(one.hits, start=1):
            mark = "itself" if hit.itself else marks[one.right(hit)]
            ranked = "" if hit.conditioned is None else f"{hit.conditioned:8.4f}  "
            scores = f"{place:>4}  {ranked}{hit.score:7.4f}"
            print_result(f"{scores}  {printable(hit.label):<{width}}  {mark:<6}  {short(hit.path)}")
        print_result("")
