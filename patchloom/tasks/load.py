"""`patchloom.load`: the trained model of a run of any task, or of an artifact."""

import os
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, overload

from torch import nn

from patchloom.inference.classifier import Classifier
from patchloom.inference.classifier import load as load_classifier
from patchloom.plugins import MODULE, register_module
from patchloom.runs.config import read_config
from patchloom.runs.locate import local_copy, run_folder
from patchloom.tasks.table import task_of_run
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import UsageError, with_near_options

Model: TypeAlias = nn.Module | Callable[..., nn.Module]
T = TypeVar("T")


@overload
def load(
    source: str | os.PathLike[str], *, device: str = "auto", trunk: Literal[True], model: Model | None = None
) -> Classifier: ...


@overload
def load(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    trunk: bool = False,
    model: Model | None = None,
    kind: type[T],
) -> T: ...


@overload
def load(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    trunk: bool = False,
    model: Model | None = None,
    kind: None = None,
) -> Any: ...


@with_near_options
def load(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    trunk: bool = False,
    model: Model | None = None,
    kind: type[Any] | None = None,
) -> Any:
    """Load the model of a run folder, an artifact, published weights ('resmlp_s12:in1k') or the hub ('hub:user/name').

    `trunk` drops a projector, so that images are compared by the vectors before it. A run of the user's own module
    needs `model`, the module or the function that makes it, unless this process trained the run; its weights are those
    of the run. `kind`, such as `patchloom.Classifier`, is the type of the result for a type checker; a model of another
    kind raises UsageError.
    """
    loaded = _load(source, device=device, trunk=trunk, model=model)
    if kind is not None and not isinstance(loaded, kind):
        raise UsageError(f"{os.fspath(source)} is a {type(loaded).__name__}; expected a {kind.__name__}")
    return loaded


def _load(source: str | os.PathLike[str], *, device: str, trunk: bool, model: Model | None) -> Any:
    source = local_copy(os.fspath(source))
    if is_artifact(source):
        if trunk or model is not None or device not in ("auto", "cpu"):
            raise UsageError(
                f"{os.fspath(source)} is an artifact: it runs on the CPU only and does not support trunk=True or model="
            )
        return load_artifact(source)
    if model is not None:
        name = str(read_config(run_folder(source))["network"])
        if not name.startswith(MODULE):
            raise UsageError(f"{os.fspath(source)} is a run of {name}, a network of patchloom; drop model=")
        register_module(model, name)
    if trunk:
        return load_classifier(source, device=device, trunk=True)
    folder = run_folder(source)
    return task_of_run(folder).model.load(folder, device=device)
