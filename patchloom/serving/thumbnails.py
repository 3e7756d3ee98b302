"""Thumbnails of search results, made in a process of their own, so that the model never waits for them.

A client sends a size, never a path: only files that the index itself returned are read, and only from folders named by
whoever started the server.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from patchloom.serving.admission import Admission, ModelRequest
from patchloom.serving.endpoints import THUMBNAILS
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses, Say
from patchloom.serving.requests import invalid
from patchloom_runtime.errors import UsageError

NO_IMAGES = "note: images of the index are not shown: it can name any file. Add --images FOLDER for each folder to show"
PIXELS = 4 << 20  # all thumbnails of one response: 16 of 512 pixels per side
LEAST_SIDE = 128  # a smaller thumbnail counts as this size, since its file is decoded all the same; so 256 are the most
_PART = 8  # files per request to the process, so that other requests come in between
_QUEUE = 2 * PIXELS // LEAST_SIDE**2  # files that may wait: those of two of the largest responses


class ThumbnailProcess(ModelProcesses):
    """The process that makes thumbnails, with a queue of its own."""

    def __init__(self, roots: Sequence[str], limits: Limits, *, say: Say = print) -> None:
        own = Limits(queue=_QUEUE, deadline_seconds=limits.deadline_seconds, pixels=limits.pixels)
        super().__init__("", Admission(own), threads=1, say=say)
        self._settings["roots"] = list(roots)


def image_roots(source: str, images: Sequence[str]) -> list[str]:
    """Return the real paths of folders whose images an index may show; raise UsageError if one is not a folder."""
    if images and not os.path.isfile(os.path.join(source, "index.json")):
        raise UsageError(f"--images names folders with the images of an index, but {source} is not an index")
    for folder in images:
        if not os.path.isdir(folder):
            raise UsageError(f"--images is {folder}, which is not a folder; pass a folder with images of the index")
    return [os.path.realpath(folder) for folder in images]


def check_thumbnails(inputs: int, options: Mapping[str, Any]) -> None:
    """Refuse a search whose thumbnails have more than PIXELS pixels together."""
    side = options.get("thumbnails", 0)
    pixels = inputs * options.get("top", 0) * max(side, LEAST_SIDE) ** 2
    if side and pixels > PIXELS:
        raise invalid(
            f"{inputs} inputs × top {options['top']} × thumbnails of {side} × {side} are {pixels:,} pixels, expected "
            f"at most {PIXELS:,} (a side below {LEAST_SIDE} counts as {LEAST_SIDE}); request fewer or smaller ones"
        )


async def add_thumbnails(results: bytes, side: int, process: ModelProcesses, began: float) -> bytes:
    """Return the results of a search, in JSON, with thumbnails; the deadline counts from `began`."""
    searches = json.loads(results)
    paths = list(dict.fromkeys(hit["path"] for search in searches for hit in search["hits"]))
    parts = [paths[start : start + _PART] for start in range(0, len(paths), _PART)]
    # In JSON, since a path may have bytes that are not text.
    requests = [
        ModelRequest(THUMBNAILS, {"side": side}, [json.dumps(path).encode() for path in part]) for part in parts
    ]
    deadline = process.admission.limits.deadline_seconds
    try:
        async with asyncio.timeout(began + deadline - time.monotonic()):
            responses = await asyncio.gather(*(process.admission.run(request) for request in requests))
    except TimeoutError:
        reason = f"the thumbnails were not ready within {deadline:g} s"
        raise HTTPException(HTTPStatus.GATEWAY_TIMEOUT, reason) from None
    thumbnails = dict(zip(paths, (each for response in responses for each in json.loads(response)), strict=True))
    for search in searches:
        for hit in search["hits"]:
            hit["thumbnail"] = thumbnails[hit["path"]]
    return json.dumps(searches).encode()
