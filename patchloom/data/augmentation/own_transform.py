"""A user's transforms of one image or of a batch.

They draw from the global generators of Python, numpy and torch, as torchvision's and most others do. These are seeded
from (seed, epoch, step, position) for each call and restored after it, so that a run resumes exactly.
"""

import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.plugins import name_of
from patchloom_runtime.errors import PatchloomError, UsageError, first_line
from patchloom_runtime.images.evaluation_transform import test_transform
from patchloom_runtime.images.geometry import Size
from patchloom_runtime.images.inputs import read_image
from patchloom_runtime.images.samples import Sample


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators in this context, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if device is not None and device.type == "cuda":
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass(frozen=True)
class OwnTransform:
    """A user's transform of one image in the place of a recipe's crop, flip and colors.

    It takes an RGB image of PIL, or `image=` an array as albumentations does, and returns an image, an array or a
    tensor. A result of another size than the network's is resized and cropped at the center.
    """

    function: Callable[..., Any]
    image_size: Size

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shape of the image. Raise UsageError if there are masks or boxes, which cannot follow."""
        if parts:
            raise UsageError(f"transform changes images alone, which {' and '.join(parts)} cannot follow")
        return {"image": (*self.image_size, 3)}

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the transformed image, (H, W, 3) uint8."""
        name, seed = f"transform {name_of(self.function)}", rng.getrandbits(63)
        try:
            with seeded(seed):
                result = self._call(sample.image, seed)
        except PatchloomError:
            raise
        except Exception as error:  # code of the user
            raise UsageError(f"{name} failed on an image: {type(error).__name__}: {first_line(error)}") from error
        image = read_image(result, f"the result of {name}")
        if (image.height, image.width) != self.image_size:
            return {"image": test_transform(self.image_size)(image)}
        return {"image": np.asarray(image)}

    def _call(self, image: Any, seed: int) -> Any:
        if hasattr(self.function, "set_random_state"):  # albumentations has its own generators
            self.function.set_random_state(np.random.default_rng(seed), random.Random(seed))
        elif hasattr(self.function, "set_random_seed"):  # in workers, its later versions change a seed
            self.function.set_random_seed(seed)
        if "force_apply" in _parameters(self.function):  # the protocol of albumentations
            result = self.function(image=np.asarray(image))
            return result["image"] if isinstance(result, Mapping) else result
        return self.function(image)


def transform_batch(function: Callable[..., Any], images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Apply a user's transform to images (B, 3, H, W) of 0…255; it sees floats of 0…1 and, if it takes them, targets.

    Returns images of 0…255 and targets: class numbers (B,), or shares of the classes (B, K) as of MixUp.
    """
    name = f"batch_transform {name_of(function)}"
    pixels = images.float() / 255
    with seeded(seed, images.device):
        try:
            result = function(pixels, labels) if _takes_targets(function) else function(pixels)
        except Exception as error:  # code of the user
            raise UsageError(f"{name} failed on a batch: {type(error).__name__}: {first_line(error)}") from error
    pair = isinstance(result, tuple | list) and len(result) == 2
    pixels, labels = result if pair else (result, labels)
    if not isinstance(pixels, Tensor) or pixels.shape != images.shape:
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise UsageError(f"{name} returned {shape}; expected a tensor of the shape of its input, {tuple(images.shape)}")
    return pixels * 255, labels


def _takes_targets(function: Any) -> bool:
    call = function.forward if isinstance(function, torch.nn.Module) else function
    kinds = [each.kind for each in _parameters(call).values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) > 1


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}
