"""Load a served model, and run its verbs on images or lines. This code runs in a model process.

The row of a task (`tasks.table`) names its `Serving`, which has the verbs of a model. An index adds the verb `search`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from PIL import Image

from patchloom.serving.endpoints import THUMBNAILS, endpoints_of
from patchloom.tasks.endpoints import IMAGES, LINES, VerbFunction
from patchloom.tasks.table import task_named, task_of_run
from patchloom.tasks.task import Task
from patchloom_runtime.artifacts.artifact import Artifact, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import PatchloomError, UsageError
from patchloom_runtime.images.inputs import thumbnail_of


class ServedVerb(NamedTuple):
    """The function of a verb and the kind of its inputs."""

    run: VerbFunction
    takes: str = IMAGES


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
            raise UsageError(f"{source} is an artifact, which runs on the CPU; drop --device {device}")
        artifact = load_artifact(source, threads=threads)
        return ServedModel(task_named(artifact.about.task), artifact)
    from patchloom.inference.index import is_index, open_index  # loads torch, which artifacts do not need

    if is_index(source):
        index = open_index(source, model=model, device=device)
        return ServedModel(task_named("classification"), index.classifier, index)
    if model is not None:
        raise UsageError(f"--model is the run folder of an index, but {source} is not an index")
    from patchloom.runs.locate import run_folder

    folder = run_folder(source)
    task = task_of_run(folder)
    return ServedModel(task, task.model.load(folder, device=device))


def served_verbs(served: ServedModel) -> dict[str, ServedVerb]:
    """Return the verbs of a model."""
    if served.task.serving is None:
        raise UsageError(f"models of the task {served.task.name} cannot be served")
    functions = dict(served.task.serving.functions(served.model))
    if served.index is not None:
        from patchloom.serving.index_search import search  # loads torch, which artifacts do not need

        functions = {"search": partial(search, served.index), **functions}
    endpoints = endpoints_of(served.task.name, functions)
    return {verb: ServedVerb(run, endpoints[verb].takes) for verb, run in functions.items()}


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
        "task": served.task.name,
        "network": name if isinstance(name, str) else str(getattr(name, "network", "")),
        "labels": list(getattr(model, "labels", ())),
        "several": hasattr(model, "thresholds"),  # whether any number of labels applies to an image
        "languages": [model.source, model.target] if hasattr(model, "translate") else [],
        **facts,
        "is_artifact": isinstance(model, Artifact),
        "folder": None if folder is None else str(folder),  # not sent to clients
    }


def warm_up(task: Task, verbs: Mapping[str, ServedVerb]) -> None:
    """Run each verb once on a gray image or a word: libraries choose kernels and allocate memory then."""
    for verb, endpoint in endpoints_of(task.name, verbs).items():
        if endpoint.warmed:
            example = Image.new("RGB", (64, 64), (128, 128, 128)) if endpoint.takes == IMAGES else "a"
            verbs[verb].run([example], {option.name: option.default for option in endpoint.options})


def thumbnail_verbs(roots: Sequence[str]) -> dict[str, ServedVerb]:
    """Return the verb of the thumbnail process, which reads files in `roots` only."""
    from patchloom.report.page import image_base64  # loads jinja2, which models do not need

    def thumbnail(path: str, side: int) -> str | None:
        try:
            return image_base64(thumbnail_of(path, side, roots))
        except PatchloomError:  # outside of `roots`, or not a readable image
            return None

    def thumbnails(lines: Sequence[str], options: Mapping[str, Any]) -> list[str | None]:
        return [thumbnail(json.loads(line), options["side"]) for line in lines]

    return {THUMBNAILS: ServedVerb(thumbnails, LINES)}
