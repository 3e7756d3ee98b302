"""Image files → one unit vector each, batch by batch; what cannot be read is named and the others go on."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchloom.data.batches.loader import WORKER_TIMEOUT_S
from patchloom.data.batches.workers import Workers, keep_working, no_word_about_cores, watched, workers_started
from patchloom.data.images.image_batch import ImageBatch
from patchloom.inference.classifier import Classifier
from patchloom.inference.embedding import embed_batches
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.images.inputs import ImageLike, read_image
from patchloom_runtime.printable import printable


class EmbeddedFiles(NamedTuple):
    """A batch: the vectors of the files that could be read."""

    paths: list[str]
    vectors: Tensor  # (len(paths), C) float32 on the CPU, of length 1
    unreadable: dict[str, str]  # path → what is wrong


def embed_files(
    classifier: Classifier, paths: Sequence[str], *, batch: int = 64, workers: int = 0
) -> Iterator[EmbeddedFiles]:
    """The files in order, `batch` at a time; `workers` processes read them."""
    start = 0
    for seen in _read(_Files(paths, classifier.transform()), batch, workers):
        given = paths[start : start + len(seen)]
        start += len(seen)
        read = {path: pixels for path, pixels in zip(given, seen, strict=True) if not isinstance(pixels, str)}
        unreadable = {path: fault for path, fault in zip(given, seen, strict=True) if isinstance(fault, str)}
        vectors = _vectors(classifier, list(read.values()))
        # One that is not finite is like nothing, and would hide others from a search.
        finite = vectors.isfinite().all(dim=1)
        for path, good in zip(read, finite.tolist(), strict=True):
            if not good:
                unreadable[path] = f"{printable(path)}: the model's vector of it is not finite"
        yield EmbeddedFiles([path for path in read if path not in unreadable], vectors[finite], unreadable)


def embed_images(classifier: Classifier, pictures: Sequence[ImageLike]) -> Tensor:
    """(N, C) float32 on the CPU, of length 1."""
    return F.normalize(classifier.embed(pictures))


def _vectors(classifier: Classifier, pixels: Sequence[np.ndarray]) -> Tensor:
    if not pixels:
        return torch.empty(0, 0)
    return F.normalize(embed_batches(classifier, [ImageBatch.of_pixels(pixels)]).vectors).cpu()


class _Files(Dataset):
    """(H, W, 3) uint8 as the network is shown a file, or what is wrong with it."""

    def __init__(self, paths: Sequence[str], transform: EvaluationTransform) -> None:
        self._paths, self._transform = paths, transform

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> np.ndarray | str:
        path = self._paths[number]
        try:
            return self._transform(read_image(path))
        except DataError as error:
            return str(error)


def _read(files: _Files, batch: int, workers: int) -> Iterator[list[np.ndarray | str]]:
    with no_word_about_cores():
        pool: DataLoader[Any] = DataLoader(
            files,
            batch_size=batch,
            collate_fn=list,
            num_workers=workers,
            worker_init_fn=_begin_work,
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


def _begin_work(worker: int) -> None:  # noqa: ARG001
    keep_working()
