"""Small pictures of the files that a search found, made in a process of their own: the model never waits for them.

A client names a number of pixels, never a file: pictures are sent of those files alone that the index itself found, and
only from folders that whoever started the server named.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from patchloom.serving.admission import Admission, Request
from patchloom.serving.endpoints import THUMBNAILS
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses, Say
from patchloom.serving.refusals import Refused
from patchloom.serving.requests import invalid

PIXELS = 4 << 20  # of all thumbnails of one answer: 16 of 512 pixels per side
LEAST_SIDE = 128  # what a smaller thumbnail counts as: its file is decoded all the same, so that 256 are the most
_PART = 8  # files of one request to the process; those of others come between
_QUEUE = 2 * PIXELS // LEAST_SIDE**2  # files that may wait: those of two of the largest answers


class ThumbnailProcess(ModelProcesses):
    """The process that makes thumbnails, with a queue of its own."""

    def __init__(self, roots: Sequence[str], limits: Limits, *, say: Say = print) -> None:
        own = Limits(queue=_QUEUE, deadline_seconds=limits.deadline_seconds, pixels=limits.pixels)
        super().__init__("", Admission(own), threads=1, say=say)
        self._settings["roots"] = list(roots)


def check_thumbnails(inputs: int, options: Mapping[str, Any]) -> None:
    """Refuse a search whose thumbnails have more pixels together than one answer holds."""
    side = options.get("thumbnails", 0)
    pixels = inputs * options.get("top", 0) * max(side, LEAST_SIDE) ** 2
    if side and pixels > PIXELS:
        raise invalid(
            f"{inputs} inputs × top {options['top']} × thumbnails of {side} × {side} are {pixels:,} pixels, expected "
            f"at most {PIXELS:,} (a side below {LEAST_SIDE} counts as {LEAST_SIDE}); ask for fewer or smaller ones"
        )


async def add_thumbnails(results: bytes, side: int, process: ModelProcesses, began: float) -> bytes:
    """Fill in the thumbnails of a search's results; `began` is when the request came, for its deadline."""
    found = json.loads(results)
    paths = list(dict.fromkeys(hit["path"] for one in found for hit in one["hits"]))
    parts = [paths[start : start + _PART] for start in range(0, len(paths), _PART)]
    # As JSON, since a path may hold what is no text.
    requests = [Request(THUMBNAILS, {"side": side}, [json.dumps(path).encode() for path in part]) for part in parts]
    deadline = process.admission.limits.deadline_seconds
    try:
        async with asyncio.timeout(began + deadline - time.monotonic()):
            answers = await asyncio.gather(*(process.admission.answered(request) for request in requests))
    except TimeoutError:
        raise Refused(HTTPStatus.GATEWAY_TIMEOUT, f"there were no thumbnails within {deadline:g} s") from None
    made = dict(zip(paths, (each for answer in answers for each in json.loads(answer)), strict=True))
    for one in found:
        for hit in one["hits"]:
            hit["thumbnail"] = made[hit["path"]]
    return json.dumps(found).encode()
