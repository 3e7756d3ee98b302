"""A trained model as it is used: with its labels and its preprocessing."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.datasets import ClassTable, ImageSet, Progress
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.disk import atomic_write, make_folder
from patchloom.models.network import Network
from patchloom.runs.checksums import write_checked
from patchloom.runs.config import OTHER_NAMES, RunFiles, is_run, write_run_files
from patchloom.runs.weights import load_network, save_weights
from patchloom_runtime.errors import DataError, UsageError, at_least, not_finite, with_near_options
from patchloom_runtime.images.evaluation_transform import EvaluationTransform, test_transform
from patchloom_runtime.images.inputs import (
    ImageLike,
    ImagesLike,
    is_single_image,
    iterate_images,
    list_image_files,
    read_image,
)
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.evaluation.embeddings import Embeddings
    from patchloom.inference.evaluations import Evaluation, Probes, SweepPoint
    from patchloom.inference.index import Index
    from patchloom.report.pictures.look import ImageLook, ImageLooks

    IndexGiven: TypeAlias = str | os.PathLike[str] | Index

PREDICTED_AT_ONCE = 32
Answers: TypeAlias = list[tuple[str, float]]  # class name, probability; likeliest first
T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """What the classifier says of one file."""

    path: str
    answers: Answers
    error: str | None = None
    level: str = ""  # of the classes, where neighbours name them
    reason: str = ""  # why the first is the likeliest, where neighbours say so

    def in_words(self) -> str:
        """The classes with their shares; of neighbours, their level and who voted."""
        shares = "  ".join(f"{name} {share:.1%}" for name, share in self.answers)
        return f"{shares}  ({self.level}: {self.reason})" if self.reason else shares

    def __repr__(self) -> str:
        from patchloom.report.notebook import likeliest

        return f"Answer({printable(self.path)}: {printable(self.error) if self.error else likeliest(self.answers)})"


class Classifier:
    """A network in eval mode, the names of its classes, and the way pictures are shown to it."""

    def __init__(self, model: Network, files: RunFiles, folder: Path | None = None) -> None:
        self.model = model
        self.folder = folder  # of its run, which remembers its data
        self.labels = files.labels
        self.level = files.level  # of the taxonomy it was trained with
        self.preprocessing = files.preprocessing
        self._files = files
        self._transform = self.transform()

    @property
    def name(self) -> str:
        """Its network as recipes and --model call it."""
        return self._files.model

    @property
    def table(self) -> ClassTable:
        """Its classes, as data are matched with them: by name, of published networks by WordNet id and synonym too."""
        return self._files.table

    def __repr__(self) -> str:
        from patchloom.report.notebook import first_names

        classes = f"{len(self.labels)} classes: {first_names(self.labels, 3)}" if self.labels else "no classes"
        height, width = self.preprocessing.image_size
        return f"Classifier({self.name}, {height}×{width} pixels, {self.device}, {classes})"

    def _repr_html_(self) -> str:
        from patchloom.report.notebook import first_names, piece

        shown = self.preprocessing
        height, width = shown.image_size
        facts = [
            ("classes", f"{len(self.labels):,}"),
            ("pictures", f"{height}×{width} pixels, crop ratio {shown.crop_ratio:g}, {shown.interpolation}"),
            ("parameters", f"{sum(value.numel() for value in self.model.parameters()):,}"),
            ("device", str(self.device)),
        ]
        return piece(self.name, facts=facts, notes=[first_names(self.labels, 20)] if self.labels else [])

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    def reading_of(self, data: str, given: Reading = AS_IT_IS) -> Reading:
        """How `data` are read: as is `given`, and for the rest as in training, where the model was trained on them."""
        from patchloom.runs.run_metadata import recorded_reading

        return given.filled_from(recorded_reading(self.folder, data)) if self.folder else given

    def check_decides(self) -> None:
        """A UsageError where the network has features but no classifier for named classes, as one trained by DINO."""
        if not self._files.decides:
            raise UsageError(
                f"{self.name} was trained without a classifier and cannot name classes by itself. Measure "
                "its features with --knn or --linear, let the files of an index name classes (`patchloom index RUN "
                "IMAGES --out INDEX`, then `patchloom predict RUN IMAGES --index INDEX`), or train a classifier with "
                "`patchloom train DATA --init RUN`."
            )

    def transform(self, size: int | None = None, crop_ratio: float | None = None) -> EvaluationTransform:
        """RGB picture of any size → the pixels the network is shown, at its own size and crop or at another."""
        own = self.preprocessing
        return test_transform(size or own.image_size, crop_ratio or own.crop_ratio, own.interpolation, own.resize)

    def preprocess(self, picture: ImageLike) -> Tensor:
        """One picture → (3, H, W), resized, cropped and normalised as in training."""
        batch = ImageBatch.of_pixels([self._transform(read_image(picture))])
        return normalize(batch.images, self.preprocessing.mean, self.preprocessing.std)[0]

    @overload
    def predict(
        self,
        pictures: Image.Image | bytes,
        *,
        top: int = 3,
        index: "IndexGiven | None" = None,
        level: str | None = None,
        neighbours: int | None = None,
    ) -> Answers: ...

    @overload
    def predict(
        self,
        pictures: str | os.PathLike[str] | IO[bytes] | np.ndarray | Tensor,
        *,
        top: int = 3,
        index: "IndexGiven | None" = None,
        level: str | None = None,
        neighbours: int | None = None,
    ) -> Any: ...

    @overload
    def predict(
        self,
        pictures: ImageSet | Iterable[ImageLike],
        *,
        top: int = 3,
        index: "IndexGiven | None" = None,
        level: str | None = None,
        neighbours: int | None = None,
    ) -> list[Answers]: ...

    @with_near_options
    def predict(
        self,
        pictures: ImagesLike,
        *,
        top: int = 3,
        index: "IndexGiven | None" = None,
        level: str | None = None,
        neighbours: int | None = None,
    ) -> Answers | list[Answers]:
        """The `top` likeliest classes, by name, with their probabilities: of one picture, or a list for many.

        A picture is a path, bytes, an open file, a PIL image, a numpy array (H, W[, channels]) or a torch tensor
        ([channels,] H, W); many are a folder, a batch, an `ImageSet`, or any iterable, which is read as it goes. One
        rule holds for all (docs/python.md). What cannot be read is a DataError that names it; `predict_files` goes on.

        With an `index` of this model, its folder or open, the classes are those of the `neighbours` nearest files
        (20) at a `level` of their labels, or at the index's own: also for a model without a classifier, and of classes
        it was never trained on (thesis, equation 2.6).
        """
        at_least("top", top, 1)
        decide = self._decider(top, index, level, neighbours)
        one = is_single_image(pictures)
        read = ((each.name, self._transform(each.read())) for each in iterate_images(pictures))
        found = [answer for batch in in_batches(read) for answer in decide(batch)]
        for answer in found:
            if answer.error:
                raise DataError(f"{printable(answer.path)}: {answer.error}")
        return found[0].answers if one else [answer.answers for answer in found]

    def predict_files(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        top: int = 3,
        every: int | None = None,
        index: "IndexGiven | None" = None,
        level: str | None = None,
        neighbours: int | None = None,
    ) -> Iterator[Prediction]:
        """One answer per file, in order; folders are searched; a file that cannot be read is an answer with `error`.

        Videos, animations and files of several pages have an answer for every `every`-th frame (see `pictures.video`).
        The other options are those of `predict`.
        """
        at_least("top", top, 1)
        decide = self._decider(top, index, level, neighbours)
        from patchloom.data.images.video import frames_or_error

        frames = (frame for path in list_image_files(paths) for frame in frames_or_error(path, every))
        read = ((name, one if isinstance(one, str) else self._transform(one)) for name, one in frames)
        for batch in in_batches(read):
            found = iter(decide([(name, pixels) for name, pixels in batch if not isinstance(pixels, str)]))
            for name, pixels in batch:
                yield Prediction(name, [], pixels) if isinstance(pixels, str) else next(found)

    def _decider(
        self, top: int, index: "IndexGiven | None", level: str | None, neighbours: int | None
    ) -> Callable[[Sequence[tuple[str, np.ndarray]]], list[Prediction]]:
        """Names and pixels of pictures → answers, by the classifier or by the neighbours in an index."""
        if index is None:
            if level is not None or neighbours is not None:
                unread = "level" if level is not None else "neighbours"
                raise UsageError(f"{unread} is about the labels of an index; give one with index (--index INDEX)")
            self.check_decides()

            def by_classifier(batch: Sequence[tuple[str, np.ndarray]]) -> list[Prediction]:
                decided = self._decide([pixels for _, pixels in batch], top)
                for (name, _), answers in zip(batch, decided, strict=True):
                    if not math.isfinite(answers[0][1]):
                        raise not_finite(printable(name))
                return [Prediction(name, answers) for (name, _), answers in zip(batch, decided, strict=True)]

            return by_classifier
        from patchloom.inference.neighbors import NeighborClassifier

        vote = NeighborClassifier(self, index, level, neighbours)

        def by_neighbours(batch: Sequence[tuple[str, np.ndarray]]) -> list[Prediction]:
            names = [name for name, _ in batch]
            votes = zip(names, vote([pixels for _, pixels in batch], names), strict=True)
            return [
                Prediction(name, [], one)
                if isinstance(one, str)
                else Prediction(name, one.answers[:top], level=one.level, reason=one.reason)
                for name, one in votes
            ]

        return by_neighbours

    @torch.inference_mode()
    def _decide(self, pixels: Sequence[np.ndarray], top: int) -> list[Answers]:
        if not pixels:
            return []
        images = ImageBatch.of_pixels(pixels).images.to(self.device)
        logits = self.model(normalize(images, self.preprocessing.mean, self.preprocessing.std))
        found = logits.softmax(dim=-1).topk(min(top, len(self.labels)))
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [[(self.labels[i], share) for i, share in zip(*row, strict=True)] for row in rows]

    @overload
    def look(self, pictures: Image.Image | bytes, *, top: int = 5) -> "ImageLook": ...

    @overload
    def look(self, pictures: str | os.PathLike[str] | IO[bytes] | np.ndarray | Tensor, *, top: int = 5) -> Any: ...

    @overload
    def look(self, pictures: ImageSet | Iterable[ImageLike], *, top: int = 5) -> "ImageLooks": ...

    @with_near_options
    def look(self, pictures: ImagesLike, *, top: int = 5) -> "ImageLook | ImageLooks":
        """What the network saw, answered and looked at: of one picture, or a list for many, as `predict` takes them.

        In a notebook it is shown as picture, likeliest classes and maps.
        """
        from patchloom.report.pictures.look import look

        found = look(self.model, self.preprocessing, pictures, self.labels if self._files.decides else (), top=top)
        return found[0] if is_single_image(pictures) else found

    @with_near_options
    def evaluate(
        self,
        data: str,
        *,
        split: str | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        real: str | None = None,
        v2: bool = False,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
        progress: Progress | None = None,
    ) -> "Evaluation":
        """Numbers on any data with the model's classes, matched by name.

        split       train, val, test or all; by default val, or what the run held out, or else all
        size        in pixels, where not the model's own
        crop_ratio  share of the short side that is kept, where not the model's own
        real        path of ImageNet-ReaL's labels
        v2          folder names are class numbers, as in ImageNet-V2
        batch       pictures at once
        workers     processes that read pictures
        strict      classes that the model does not know are an error instead of a note
        reading     how the data are read (`patchloom.Reading`: labels file, taxonomy …), where not as in training
        level       of the labels compared with, where not that of the model's classes
        progress    called with the pictures done and their number
        """
        given = locals()
        from patchloom.inference.evaluations import EvaluationSettings, evaluate_on

        settings = EvaluationSettings.of(given)
        self.check_decides()
        return evaluate_on(self, settings.open(data, self), settings)

    @with_near_options
    def probe(
        self,
        data: str,
        *,
        knn: Sequence[int] = (),
        linear: bool = False,
        linear_sgd: int | None = None,
        few_shot: int | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
    ) -> "Probes":
        """What the features tell of any data, of any classes.

        The probes learn from the train split and are judged on val; the model's own head is not used. The options that
        are not explained here are those of `evaluate`.

        knn         numbers of neighbours that vote, such as (10, 20)
        linear      a linear probe
        linear_sgd  epochs of DINO's linear evaluation: SGD on augmented pictures
        few_shot    a probe of this many pictures per class
        """
        given = locals()
        from patchloom.inference.evaluations import EvaluationSettings, probe_on

        shown = EvaluationSettings.of(given)
        return probe_on(self, data, shown, neighbours=knn, linear=linear, linear_sgd=linear_sgd, few_shot=few_shot)

    @with_near_options
    def sweep(
        self,
        data: str,
        over: Literal["crop", "size"],
        values: Sequence[float] | None = None,
        *,
        split: str | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        real: str | None = None,
        v2: bool = False,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
        progress: Progress | None = None,
    ) -> "list[SweepPoint]":
        """The numbers at several crop ratios or image sizes; the usual ones where no values are given.

        The options are those of `evaluate`.
        """
        given = locals()
        from patchloom.inference.evaluations import EvaluationSettings, sweep_on

        return sweep_on(self, data, EvaluationSettings.of(given), over=over, values=values)

    @overload
    def embed(
        self,
        pictures: ImageSet,
        *,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
        workers: int = 0,
    ) -> "Embeddings": ...

    @overload
    def embed(
        self,
        pictures: ImageLike | Iterable[ImageLike],
        *,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
    ) -> Tensor: ...

    @with_near_options
    def embed(
        self,
        pictures: ImagesLike,
        *,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
        workers: int = 0,
    ) -> "Embeddings | Tensor":
        """What images are compared by: one vector per picture.

        Of pictures as `predict` takes them a float32 tensor on the CPU, (C,) for one and (N, C) for many. Of an
        `ImageSet`, such as `open_data(…).val`, `Embeddings`: vectors and labels in the order of the set, without those
        that cannot be read; `workers` processes read them.
        """
        given = locals()
        if isinstance(pictures, ImageSet):
            from patchloom.inference.evaluations import EvaluationSettings, embed_on  # which one picture does not need

            return embed_on(self, pictures, EvaluationSettings.of(given))
        from patchloom.inference.embedding import check_view_settings, embed_batches

        check_view_settings(size, crop_ratio, batch)
        if workers:
            raise UsageError("workers read the pictures of an ImageSet alone (patchloom.open_data); leave them out")
        transform, one = self.transform(size, crop_ratio), is_single_image(pictures)
        pixels = (transform(each.read()) for each in iterate_images(pictures))
        batches = (ImageBatch.of_pixels(some, i * batch) for i, some in enumerate(in_batches(pixels, batch)))
        model = self.model if size is None else self.model.for_images_of(size)
        vectors = embed_batches(self, batches, model=model).vectors.cpu()
        return vectors[0] if one else vectors

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, labels, preprocessing and a model card: the hub's form, and a folder `load` reads."""
        target = Path(folder)
        make_folder(target)
        write_run_files(
            target, self.model, self.preprocessing, self._files.recipe, self.labels, self.level, task=self._files.task
        )
        if (names := self._files.other_names) is not None:
            write_checked(target, {OTHER_NAMES: names})
        save_weights(target, dict(self.model.state_dict()), {})
        atomic_write(target / "README.md", model_card(self).encode())

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, device: str = "auto") -> "Classifier":
        """What `save_pretrained` or `push_to_hub` left, under the hub's name for it; the same as `patchloom.load`."""
        return load(source, device=device)

    def push_to_hub(self, repository: str, *, private: bool = False) -> str:
        """Upload the model to the Hugging Face hub; returns its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repository, folder_path=folder))


@with_near_options
def load(source: str | os.PathLike[str], *, device: str = "auto", trunk: bool = False) -> Classifier:
    """The classifier of a run folder, of published weights ('resmlp_s12:in1k'), or of the hub ('hub:user/name').

    `trunk` leaves a projector out, so that images are compared by the vectors it was given.
    """
    if is_run(source):
        folder = Path(source)
    else:
        from patchloom.runs.locate import run_folder  # which folders here do without

        folder = run_folder(source)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network, files = load_network(folder)
    if trunk:
        network.drop_projector()
    return Classifier(network.for_images_of(files.preprocessing.image_size).to(device), files, folder)


def model_card(classifier: Classifier) -> str:
    """What a stranger needs to know of the model, in the hub's form."""
    from patchloom.runs.model_card import card  # which answering does without

    files, recipe = classifier._files, classifier._files.recipe
    origin = f"Trained with the recipe `{recipe.name}` ({recipe.source})" if recipe else "Training recipe unknown"
    network = classifier.model.config.name
    return card(network, classifier.preprocessing, classifier.labels, decides=files.decides, origin=origin)


def in_batches(items: Iterable[T], count: int = PREDICTED_AT_ONCE) -> Iterator[list[T]]:
    """`count` at a time; no more than those are held."""
    waiting = iter(items)
    while some := list(islice(waiting, count)):
        yield some
