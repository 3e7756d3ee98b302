"""Weights and class names of networks that others published, and what goes wrong with them in one line each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchloom.models.pretrained.weights_file import check_weights_file
from patchloom_runtime.errors import CheckpointError, ResourceError


def read_weights(path: str) -> dict[str, Any]:
    """Tensors by name, out of a .safetensors file or a .pth; of a training checkpoint its averaged weights."""
    from timm.models import load_state_dict

    check_weights_file(Path(path))
    try:
        return load_state_dict(path, weights_only=True)
    except Exception as error:  # torch, pickle and safetensors raise kinds of their own
        raise CheckpointError(f"The weights in {path} cannot be read: {_in_one_line(error)}") from error


def imagenet_classes(count: int) -> list[str] | None:
    """WordNet ids of a published network's outputs, told by their number as timm does; None where it is another."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return ImageNetInfo(subset).label_names() if subset else None


@contextmanager
def misfits(name: str, path: str) -> Iterator[None]:
    """Loading the weights of `path` into the network called `name`."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"The weights in {path} are not those of {name}: {_in_one_line(error)}") from error


@contextmanager
def fetching(spec: str) -> Iterator[None]:
    """Having weights fetched by the library that published them."""
    try:
        yield
    except Exception as error:  # each library of the way to the network raises kinds of its own
        raise ResourceError(
            f"The weights of {spec} cannot be fetched: {_in_one_line(error)}. Fetch them elsewhere and give {spec}@PATH"
        ) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
