"""Embedding with a trained model: batches, images in memory, and image files.

Files are read in worker processes; a file that cannot be read is reported, and the others continue.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchloom.data.batches.loader import WORKER_TIMEOUT_S
from patchloom.data.batches.workers import Workers, keep_working, no_core_warning, watched, workers_started
from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.images.image_store import ImageStore
from patchloom.evaluation.embeddings import Embeddings, embed
from patchloom.models.network import Network
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.images.inputs import ImageLike, read_image
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier


class EmbeddedFiles(NamedTuple):
    """The vectors of a batch of image files, and the files that could not be embedded."""

    paths: list[str]
    vectors: Tensor  # (len(paths), C) float32 unit vectors on the CPU
    unreadable: dict[str, str]  # path → error


def embed_batches(
    classifier: "Classifier",
    batches: Iterable[ImageBatch],
    *,
    model: Network | None = None,
    logits: bool = False,
    projected: bool = True,
) -> Embeddings:
    """Return the vectors that evaluations at levels, indexes and searches compare images by.

    `model` is the classifier's network at another image size. Without `projected`, the vectors are the input of the
    projector, if the network has one: a linear probe works better on them.
    """
    own = classifier.preprocessing
    embeddings = embed(model or classifier.model, batches, pixel_mean=own.mean, pixel_std=own.std, logits=logits)
    return embeddings.projected(classifier.model) if projected else embeddings


def embed_images(classifier: "Classifier", images: Sequence[ImageLike]) -> Tensor:
    """Return the unit vectors of images: (N, C) float32 on the CPU."""
    return F.normalize(classifier.embed(images))


def embed_files(
    classifier: "Classifier",
    paths: Sequence[str],
    *,
    batch: int = 64,
    workers: int = 0,
    in_memory: Mapping[str, tuple[ImageStore, int]] | None = None,
) -> Iterator[EmbeddedFiles]:
    """Yield the vectors of the files in order, `batch` files at a time; `workers` processes read them.

    `in_memory` are images that are not files, by the name that stands for their path.
    """
    start = 0
    for pixels in _read_batches(_FileDataset(paths, classifier.transform(), in_memory or {}), batch, workers):
        files = list(zip(paths[start : start + len(pixels)], pixels, strict=True))
        start += len(pixels)
        readable = {path: value for path, value in files if not isinstance(value, str)}
        unreadable = {path: value for path, value in files if isinstance(value, str)}
        vectors = torch.empty(0, 0)
        if readable:
            images = ImageBatch.of_pixels(list(readable.values()))
            vectors = F.normalize(embed_batches(classifier, [images]).vectors).cpu()
        # A vector that is not finite is close to nothing, and would hide other files from a search.
        finite = vectors.isfinite().all(dim=1)
        for path, is_finite in zip(readable, finite.tolist(), strict=True):
            if not is_finite:
                unreadable[path] = f"{printable(path)}: the model's vector of it is not finite"
        yield EmbeddedFiles([path for path in readable if path not in unreadable], vectors[finite], unreadable)


class _FileDataset(Dataset):
    """Image files as network inputs, (H, W, 3) uint8, or the error of a file that cannot be read."""

    def __init__(
        self, paths: Sequence[str], transform: EvaluationTransform, in_memory: Mapping[str, tuple[ImageStore, int]]
    ) -> None:
        self._paths, self._transform, self._in_memory = paths, transform, in_memory

    def __len__(self) -> int:
        return len(self._paths)

    def __getitems__(self, numbers: Sequence[int]) -> list[np.ndarray | str]:
        """Read a batch: images in buckets all at once."""
        rows: dict[int, tuple[ImageStore, list[int]]] = {}
        for number in numbers:
            if (place := self._in_memory.get(self._paths[number])) is not None:
                rows.setdefault(id(place[0]), (place[0], []))[1].append(place[1])
        for images, wanted in rows.values():
            images.prefetch(wanted)
        return [self[number] for number in numbers]

    def __getitem__(self, number: int) -> np.ndarray | str:
        path = self._paths[number]
        try:
            if path in self._in_memory:
                images, row = self._in_memory[path]
                return self._transform(images.read(row))
            return self._transform(read_image(path))
        except DataError as error:
            return str(error)


def _read_batches(files: _FileDataset, batch: int, workers: int) -> Iterator[list[np.ndarray | str]]:
    with no_core_warning():
        pool: DataLoader[Any] = DataLoader(
            files,
            batch_size=batch,
            collate_fn=list,
            num_workers=workers,
            worker_init_fn=_start_worker,
            timeout=WORKER_TIMEOUT_S if workers else 0,
        )
        with workers_started():
            batches = watched(iter(pool))
    try:
        yield from batches
    except RuntimeError as error:
        if not str(error).startswith("DataLoader "):
            raise
        reason = Workers(batches).what_happened(WORKER_TIMEOUT_S)
        Workers(batches).kill()
        raise ResourceError(reason) from error
    finally:
        Workers(batches).end()


def _start_worker(worker: int) -> None:  # noqa: ARG001
    keep_working()
