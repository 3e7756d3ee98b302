"""A model process: reads batches and writes results until the front process closes the connection.

    python -m patchloom.serving.model_process SETTINGS [DESCRIPTOR]

`processes.py` starts it, with the descriptor of its socket; on Windows the socket comes through standard input. Images
are decoded here too, so that a bad image affects its own request only. Signals to the process group are left to the
front process: this process ends with it. With `roots` in its settings it holds no model and makes thumbnails of the
files in these folders.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from patchloom.machine import STOP_SIGNALS
from patchloom.plugins import load_plugin
from patchloom.serving.messages import HEARTBEAT_SECONDS, Connection
from patchloom.tasks.endpoints import IMAGES
from patchloom_runtime.errors import PatchloomError, ResourceError, first_line, is_device_failure, is_out_of_memory
from patchloom_runtime.images.inputs import read_image_within

if TYPE_CHECKING:
    from patchloom.serving.served_model import ServedVerb

OK, UNPROCESSABLE, FAILED, SHORT_OF_MEMORY = 200, 422, 500, 503
DEVICE_FAILED = 6  # exit code


class BatchRequest(NamedTuple):
    """One decoded request of a batch."""

    number: int  # within the batch
    verb: str
    options: str  # in JSON, to group equal ones
    inputs: list[Any]


def main(connected: socket.socket, settings: Mapping[str, Any]) -> None:
    """Load the model, send its description, then process batches."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # prints of libraries are not results of the command
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `pixels` is the limit
    connection = Connection(connected)
    try:
        verbs, about = _load(settings)
    except PatchloomError as error:
        connection.write({"error": str(error), "kind": type(error).__name__})
        return
    except RuntimeError as error:
        if not is_out_of_memory(error) and not is_device_failure(error):
            raise
        connection.write({"error": f"the device cannot hold the model: {first_line(error)}", "kind": "ResourceError"})
        return
    connection.write(about)
    threading.Thread(target=_beat, args=(connection,), daemon=True).start()
    while (message := connection.read()) is not None:
        began = time.perf_counter()
        statuses, bodies = run_batch(verbs, *message, pixels=settings["pixels"])
        connection.write({"statuses": statuses, "seconds": time.perf_counter() - began}, bodies)


def _beat(connection: Connection) -> None:
    """Send heartbeats, also during a long batch; a stopped process sends none."""
    with suppress(OSError):  # the other side has gone
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            connection.write({})


def _load(settings: Mapping[str, Any]) -> "tuple[dict[str, ServedVerb], dict[str, Any]]":
    """Return the verbs, each run once, and the description of the model for clients."""
    # Imported here, so that errors of importing a model's packages are reported like those of loading it.
    from patchloom.serving.served_model import describe, load_served, served_verbs, thumbnail_verbs, warm_up

    if "roots" in settings:
        return thumbnail_verbs(settings["roots"]), {}
    for file in settings.get("plugins", ()):  # of the command that started this process
        load_plugin(file)
    model = load_served(settings["source"], **{name: settings[name] for name in ("device", "model", "threads")})
    verbs = served_verbs(model)
    warm_up(model.task, verbs)
    return verbs, {**describe(model), "verbs": list(verbs), "pid": os.getpid()}


def run_batch(
    verbs: "Mapping[str, ServedVerb]", header: Mapping[str, Any], parts: Sequence[bytes], *, pixels: int
) -> tuple[list[int], list[bytes]]:
    """Return status and body per request of a batch; requests with equal verb and options run together."""
    results: dict[int, tuple[int, bytes]] = {}
    groups: dict[tuple[str, str], list[BatchRequest]] = {}
    rest = iter(parts)
    for index, fields in enumerate(header["requests"]):
        own = [next(rest) for _ in range(fields["inputs"])]
        verb, options = fields["verb"], json.dumps(fields["options"])
        try:
            request = BatchRequest(index, verb, options, _read_inputs(verbs[verb].takes, own, pixels))
            groups.setdefault((verb, options), []).append(request)
        except Exception as error:
            results[index] = _error_result(error)
    for group in groups.values():
        results |= _run_group(verbs, group)
    ordered = [results[index] for index in range(len(header["requests"]))]
    return [status for status, _ in ordered], [body for _, body in ordered]


def _read_inputs(takes: str, parts: Sequence[bytes], pixels: int) -> list[Any]:
    """Decode the images or lines of one request."""
    if takes != IMAGES:
        return [part.decode() for part in parts]
    names = ["the image"] if len(parts) == 1 else [f"image {number}" for number in range(len(parts))]
    return [read_image_within(part, name, pixels) for part, name in zip(parts, names, strict=True)]


def _run_group(verbs: "Mapping[str, ServedVerb]", group: Sequence[BatchRequest]) -> dict[int, tuple[int, bytes]]:
    try:
        inputs = [one for request in group for one in request.inputs]
        rest = iter(verbs[group[0].verb].run(inputs, json.loads(group[0].options)))
        # NaN is not JSON: it raises ValueError.
        return {
            request.number: (OK, json.dumps([next(rest) for _ in request.inputs], allow_nan=False).encode())
            for request in group
        }
    except Exception as error:
        _end_with_device(error)
        if len(group) == 1:
            return {group[0].number: _error_result(error)}
    # One request is at fault, or they need too much memory together: run each alone, outside of `except`, since the
    # error holds memory.
    return {index: result for request in group for index, result in _run_group(verbs, [request]).items()}


def _end_with_device(error: Exception) -> None:
    """Exit if the device failed: a new process may be able to use it, and gets the batch."""
    if is_device_failure(error):
        print(f"the device failed: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(DEVICE_FAILED)  # a normal exit may wait for the device


def _error_result(error: Exception) -> tuple[int, bytes]:
    if isinstance(error, ResourceError | MemoryError) or is_out_of_memory(error):
        return SHORT_OF_MEMORY, b"there is not enough memory for this request now"
    if isinstance(error, PatchloomError):
        return UNPROCESSABLE, str(error).encode()
    if isinstance(error, ValueError) and "JSON compliant" in str(error):
        return UNPROCESSABLE, b"the model's result is not finite"
    traceback.print_exception(error)  # for the server's log; clients learn nothing about the code
    return FAILED, b"the model failed; see the server's log"


if __name__ == "__main__":
    if sys.platform == "win32":
        own = socket.fromshare(sys.stdin.buffer.read())
    else:
        own = socket.socket(fileno=int(sys.argv[2]))
    main(own, json.loads(sys.argv[1]))
