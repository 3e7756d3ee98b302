"""Third-party weights and class names, with one-line errors for what can be wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchloom.models.pretrained.weights_file import read_weights_file
from patchloom_runtime.errors import CheckpointError, ResourceError

CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # of training checkpoints, as in timm


def read_weights(path: str) -> dict[str, Any]:
    """Read tensors by name from a .safetensors or .pth file; from a training checkpoint, its averaged weights."""
    from timm.models import clean_state_dict

    content = dict(read_weights_file(Path(path)))
    within = next((key for key in CONTAINERS if content.get(key) is not None), None)
    try:
        return clean_state_dict(content[within] if within else content)
    except Exception as error:  # a container that is not a dict
        raise CheckpointError(f"The weights in {path} cannot be read: {_in_one_line(error)}") from error


def imagenet_classes(count: int) -> list[str] | None:
    """Return the WordNet ids of a published network's outputs, inferred from their number by timm, or None."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return ImageNetInfo(subset).label_names() if subset else None


@contextmanager
def misfits(name: str, path: str) -> Iterator[None]:
    """Convert errors from loading the weights of `path` into network `name`."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"The weights in {path} are not those of {name}: {_in_one_line(error)}") from error


@contextmanager
def downloading(spec: str) -> Iterator[None]:
    """Convert errors from downloading weights with a third-party library."""
    try:
        yield
    except Exception as error:  # every library involved raises its own types
        raise ResourceError(
            f"The weights of {spec} cannot be downloaded: {_in_one_line(error)}. "
            f"Download them elsewhere and use {spec}@PATH"
        ) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
