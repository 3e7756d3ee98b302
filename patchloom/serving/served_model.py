"""Load a served model, and run its verbs on images or lines. This code runs in a model process.

The row of a task (`tasks.table`) names a function that returns the verbs of a model: verb → function of inputs and
options that returns one JSON value per input, in order. An index adds the verb `search`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from PIL import Image

from patchloom.serving.endpoints import IMAGES, THUMBNAILS, VERBS
from patchloom.tasks.table import task_named, task_of_run
from patchloom.tasks.task import Task
from patchloom_runtime.artifacts.artifact import Artifact, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import PatchloomError, UsageError
from patchloom_runtime.images.inputs import read_image_within, thumbnail_of

VerbFunction: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with its task, and the index that it searches, if any."""

    task: Task
    model: Any
    index: Any = None


def load_served(
    source: str, *, device: str = "auto", model: str | None = None, threads: int | None = None
) -> ServedModel:
    """Load a run, an artifact or an index; `model` is the run folder of an index, if it was moved.

    `threads` applies to artifacts; torch reads its number of threads from the environment.
    """
    if is_artifact(source) and model is None:
        if device not in ("auto", "cpu"):
            raise UsageError(f"{source} is an artifact, which runs on the CPU; leave out --device {device}")
        artifact = load_artifact(source, threads=threads)
        return ServedModel(task_named(artifact.about.task), artifact)
    from patchloom.inference.index_files import FILE as INDEX_FILE  # loads torch, which artifacts do not need

    if os.path.isfile(os.path.join(source, INDEX_FILE)):
        from patchloom.inference.index import open_index

        index = open_index(source, model=model, device=device)
        return ServedModel(task_named("classification"), index.classifier, index)
    if model is not None:
        raise UsageError(f"--model is the run folder of an index, but {source} is not an index")
    from patchloom.runs.locate import run_folder

    folder = run_folder(source)
    task = task_of_run(folder)
    return ServedModel(task, task.model.load(folder, device=device))


def verb_functions(served: ServedModel) -> dict[str, VerbFunction]:
    """Return verb → function."""
    if served.task.serving is None:
        raise UsageError(f"models of the task {served.task.name} cannot be served")
    functions = dict(served.task.serving(served.model))
    if served.index is None:
        return functions
    from patchloom.serving.index_search import search  # loads torch, which artifacts do not need

    return {"search": partial(search, served.index), **functions}


def describe(served: ServedModel) -> dict[str, Any]:
    """Return the description of a model for clients and the page."""
    model = served.model
    network = getattr(model, "model", None) or getattr(model, "network", None)
    name = getattr(getattr(network, "config", None), "name", "") or getattr(model, "about", None)
    folder = getattr(model, "folder", None)
    facts: dict[str, Any] = {"files": None, "levels": [], "level": ""}
    if served.index is not None:
        from patchloom.serving.index_search import index_facts

        facts = index_facts(served.index)
    return {
        "network": name if isinstance(name, str) else str(getattr(name, "network", "")),
        "labels": list(getattr(model, "labels", ())),
        "languages": [model.source, model.target] if hasattr(model, "translate") else [],
        **facts,
        "is_artifact": isinstance(model, Artifact),
        "folder": None if folder is None else str(folder),  # not sent to clients
    }


def warm_up(functions: Mapping[str, Any]) -> None:
    """Run each verb once on a gray image or a word: libraries choose kernels and allocate memory then."""
    for verb, function in functions.items():
        endpoint = VERBS[verb]
        if not endpoint.warmed:
            continue
        example = Image.new("RGB", (64, 64), (128, 128, 128)) if endpoint.takes == IMAGES else "a"
        function([example], {option.name: option.default for option in endpoint.options})


def read_inputs(verb: str, parts: Sequence[bytes], pixels: int) -> list[Any]:
    """Decode the images or lines of one request."""
    if verb == THUMBNAILS or VERBS[verb].takes != IMAGES:
        return [part.decode() for part in parts]
    names = ["the image"] if len(parts) == 1 else [f"image {number}" for number in range(len(parts))]
    return [read_image_within(part, name, pixels) for part, name in zip(parts, names, strict=True)]


def thumbnail_functions(roots: Sequence[str]) -> dict[str, VerbFunction]:
    """Return verb → function of the thumbnail process, which reads files in `roots` only."""
    from patchloom.report.page import image_base64  # loads jinja2, which models do not need

    def thumbnail(path: str, side: int) -> str | None:
        try:
            return image_base64(thumbnail_of(path, side, roots))
        except PatchloomError:  # outside of `roots`, or not a readable image
            return None

    return {THUMBNAILS: lambda lines, options: [thumbnail(json.loads(line), options["side"]) for line in lines]}
