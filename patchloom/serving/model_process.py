"""A process that holds the model: batches in, answers out, until the other side closes.

    python -m patchloom.serving.model_process DESCRIPTOR SETTINGS

It is started by `processes.py`. Pictures are decoded here too, so that a bad one costs clients nothing but its own
request. Signals that a whole group is told are left to the process that talks to clients: this one ends with it. With
`roots` in its settings it holds no model and makes thumbnails of the files in these folders.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from patchloom.serving.messages import HEARTBEAT_SECONDS, Connection
from patchloom_runtime.errors import PatchloomError, ResourceError, first_line, is_device_failure, is_out_of_memory

OK, UNPROCESSABLE, FAILED, SHORT_OF_MEMORY = 200, 422, 500, 503
DEVICE_FAILED = 6  # exit code


class BatchRequest(NamedTuple):
    """One request of a batch, its pictures read."""

    place: int
    verb: str
    options: str  # JSON, so that equal ones are found
    inputs: list[Any]


def main(descriptor: int, settings: Mapping[str, Any]) -> None:
    """Load the model, say so, and answer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # whatever is printed is no result
    connection = Connection(descriptor)
    try:
        answers, about = _loaded(settings)
    except PatchloomError as error:
        connection.write({"error": str(error), "kind": type(error).__name__})
        return
    except RuntimeError as error:
        if not is_out_of_memory(error) and not is_device_failure(error):
            raise
        connection.write({"error": f"the device refused the model: {first_line(error)}", "kind": "ResourceError"})
        return
    connection.write(about)
    threading.Thread(target=_beat, args=(connection,), daemon=True).start()
    while (message := connection.read()) is not None:
        began = time.perf_counter()
        statuses, bodies = _answered(answers, *message, pixels=settings["pixels"])
        connection.write({"statuses": statuses, "seconds": time.perf_counter() - began}, bodies)


def _beat(connection: Connection) -> None:
    """Say that the process runs, also during a long batch: a stopped one has no thread that could."""
    with suppress(OSError):  # the other side has gone
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            connection.write({})


def _loaded(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What answers each verb, warm, and what clients are told of it."""
    from patchloom.serving.model_calls import call_model, described, load_served, make_thumbnails
    from patchloom.serving.warmup import warm

    if "roots" in settings:
        return make_thumbnails(settings["roots"]), {}

    given = {name: settings[name] for name in ("device", "model", "threads")}
    model = load_served(settings["source"], **given)
    answers = call_model(model)
    warm(answers)
    return answers, {**described(model), "verbs": list(answers), "pid": os.getpid()}


def _answered(
    answers: Mapping[str, Any], header: Mapping[str, Any], parts: Sequence[bytes], *, pixels: int
) -> tuple[list[int], list[bytes]]:
    """Status and body of each request of a batch; those of the same verb and options are answered together."""
    from patchloom.serving.model_calls import read_inputs

    found: dict[int, tuple[int, bytes]] = {}
    groups: dict[tuple[str, str], list[BatchRequest]] = {}
    rest = iter(parts)
    for place, one in enumerate(header["requests"]):
        own = [next(rest) for _ in range(one["inputs"])]
        try:
            asked = BatchRequest(place, one["verb"], json.dumps(one["options"]), read_inputs(one["verb"], own, pixels))
            groups.setdefault((asked.verb, asked.options), []).append(asked)
        except Exception as error:
            found[place] = _fault(error)
    for group in groups.values():
        found |= _of_group(answers, group)
    ordered = [found[place] for place in range(len(header["requests"]))]
    return [status for status, _ in ordered], [body for _, body in ordered]


def _of_group(answers: Mapping[str, Any], group: Sequence[BatchRequest]) -> dict[int, tuple[int, bytes]]:
    try:
        inputs = [one for asked in group for one in asked.inputs]
        rest = iter(answers[group[0].verb](inputs, json.loads(group[0].options)))
        # Not finite is no JSON: a ValueError.
        return {
            asked.place: (OK, json.dumps([next(rest) for _ in asked.inputs], allow_nan=False).encode())
            for asked in group
        }
    except Exception as error:
        _end_with_device(error)
        if len(group) == 1:
            return {group[0].place: _fault(error)}
    # The fault is of one of them, or they are too many: each alone, without what the error holds of the memory.
    return {place: told for asked in group for place, told in _of_group(answers, [asked]).items()}


def _end_with_device(error: Exception) -> None:
    """End this process where its device failed: another one may be able to use it, and tries the batch again."""
    if is_device_failure(error):
        print(f"the device failed: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(DEVICE_FAILED)  # whatever else ends a process may wait for the device


def _fault(error: Exception) -> tuple[int, bytes]:
    if isinstance(error, ResourceError | MemoryError) or is_out_of_memory(error):
        return SHORT_OF_MEMORY, b"there is not enough memory for this request now"
    if isinstance(error, PatchloomError):
        return UNPROCESSABLE, str(error).encode()
    if isinstance(error, ValueError) and "JSON compliant" in str(error):
        return UNPROCESSABLE, b"the model's answer is not finite"
    traceback.print_exception(error)  # for whoever runs the server; the client is told nothing of the inside
    return FAILED, b"the model failed; the server's log says why"


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
