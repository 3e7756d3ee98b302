"""A set as it is judged: in its order, every picture once."""

from typing import Any

import torch

from patchloom.data.batches.decoded_dataset import DeviceLoader, decode_all, fits_in_memory
from patchloom.data.batches.loader import WORKER_TIMEOUT_S, Loader
from patchloom.data.datasets import ImageSet
from patchloom_runtime.images.evaluation_transform import test_transform
from patchloom_runtime.images.samples import UNLABELED


def make_evaluation_loader(
    dataset: ImageSet,
    image_size: int | tuple[int, int],
    crop_ratio: float,
    interpolation: str = "bicubic",
    resize: str = "short_side",
    *,
    batch_size: int,
    device: torch.device,
    workers: int,
    rank: int = 0,
    world: int = 1,
    skip_broken: bool = True,
    timeout_s: float = WORKER_TIMEOUT_S,
) -> Loader | DeviceLoader:
    """A set in its order, every picture once; kept decoded on the device where it fits."""
    transform = test_transform(image_size, crop_ratio, interpolation, resize)
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": False,
        "drop_last": False,
        "rank": rank,
        "world": world,
    }
    if fits_in_memory(len(dataset), transform.image_size):
        store = decode_all(dataset, transform, device, workers=workers, skip_broken=skip_broken, timeout_s=timeout_s)
        if store.broken:  # no picture counts in place of another
            store.labels[torch.tensor(list(store.broken))] = UNLABELED
        return DeviceLoader(store, None, transform.image_size, **shared)
    shared |= {"workers": workers, "skip_broken": skip_broken, "timeout_s": timeout_s}
    return Loader(dataset, transform, pin=device.type == "cuda", **shared)
