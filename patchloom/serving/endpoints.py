"""The endpoints of a served model: those of its task, and `search` if it is an index."""

from collections.abc import Iterable

from patchloom.tasks.endpoints import (
    CLASSES,
    IMAGE_FILE,
    MOST_RESULTS,
    NUMBER,
    TEXT,
    Endpoint,
    EndpointOption,
    OutputTensor,
    list_schema,
    object_schema,
)
from patchloom.tasks.table import task_named

THUMBNAILS = "thumbnails"  # verb of the thumbnail process, not open to clients
SEARCH = Endpoint(
    summary="The files of the index that are most similar to images",
    options=(
        EndpointOption("top", int, 10, "Number of files.", 1, MOST_RESULTS),
        EndpointOption("level", str, None, "Level of the labels (default: the index's).", most=200),
        EndpointOption("neighbours", int, 0, "Number of nearest files that vote for a class.", 0, MOST_RESULTS),
        EndpointOption("thumbnails", int, 0, "Pixels per side of thumbnails of the files; 0 sends none.", 0, 512),
    ),
    result=object_schema(
        hits=list_schema(
            object_schema(
                path=TEXT,
                score=NUMBER,
                label=TEXT,
                match={
                    "type": ["string", "null"],
                    "description": "The finest level at which the file has the class of the vote.",
                },
                thumbnail={"type": ["string", "null"], **IMAGE_FILE},
            )
        ),
        level=TEXT,
        answers=CLASSES,
    ),
    tensors={
        "path": OutputTensor("BYTES", lambda result: [each["path"] for each in result["hits"]]),
        "score": OutputTensor("FP32", lambda result: [each["score"] for each in result["hits"]]),
        "label": OutputTensor("BYTES", lambda result: [each["label"] for each in result["hits"]]),
    },
)


def endpoints_of(task: str, verbs: Iterable[str]) -> dict[str, Endpoint]:
    """Return the endpoints of a model with these verbs."""
    serving = task_named(task).serving
    known = {"search": SEARCH, **(serving.endpoints if serving else {})}
    return {verb: known[verb] for verb in verbs}
