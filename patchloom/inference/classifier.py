"""`Classifier`: a trained network with its class names and preprocessing."""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.datasets import ClassTable, ImageSet
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.data.images.video import frames_or_error
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.disk import atomic_write, make_folder
from patchloom.inference.evaluation_methods import EvaluationMethods, EvaluationSettings, check_view_settings
from patchloom.machine import resolve_device
from patchloom.models.network import Network
from patchloom.options import renamed
from patchloom.runs.calibration import RunCalibration, read_calibration, write_calibration
from patchloom.runs.checksums import write_checked
from patchloom.runs.config import OTHER_NAMES, RunFiles, is_run, write_run_files
from patchloom.runs.weights import load_network, save_weights
from patchloom_runtime.calibration import NONE_OF_THESE, ClassScores
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

# Modules that `predict` does not need are imported where they are used: predicting loads few modules.
if TYPE_CHECKING:
    from patchloom.data.sources.specs import Data, PythonObjects
    from patchloom.evaluation.embeddings import Embeddings
    from patchloom.inference.index import Index
    from patchloom.report.pictures.look import ImageLook, ImageLooks

    IndexLike: TypeAlias = str | os.PathLike[str] | Index

PREDICT_BATCH = 32  # images
NamedPixels: TypeAlias = Sequence[tuple[str, np.ndarray]]  # (name, pixels) of each image of a batch
# A path, a file or an array may hold one image or many, so the result is a single value or a list.
OneOrMany: TypeAlias = str | os.PathLike[str] | IO[bytes] | np.ndarray | Tensor
T = TypeVar("T")


class PredictKeywords(TypedDict, total=False):
    """Options of `Classifier.predict`, for its overloads."""

    top: int
    index: "IndexLike | None"
    level: str | None
    neighbors: int | None
    tta: bool


class EmbedOptions(TypedDict, total=False):
    """Options of `Classifier.embed`, for its overloads."""

    size: int | None
    crop_ratio: float | None
    batch: int


@dataclass(frozen=True)
class Prediction:
    """The predicted classes of one image file, or the error that prevented a prediction."""

    path: str
    answers: list[tuple[str, float]]  # (class name, probability), most likely first
    error: str | None = None
    level: str = ""  # label level of the classes, if an index predicted them
    reason: str = ""  # why the first class is the most likely one, if an index predicted it
    abstained: str = ""  # why the model does not answer; empty if it does

    def in_words(self) -> str:
        """Return the classes with their probabilities or why there is no answer; for an index, level and votes."""
        if self.abstained:
            return f"{NONE_OF_THESE}: {self.abstained}"
        scores = "  ".join(f"{name} {score:.1%}" for name, score in self.answers)
        return f"{scores}  ({self.level}: {self.reason})" if self.reason else scores

    def __repr__(self) -> str:
        from patchloom.report.notebook import likeliest

        return f"Prediction({printable(self.path)}: {printable(self.error) if self.error else likeliest(self.answers)})"


class Classifier(EvaluationMethods):
    """A network in eval mode with its class names and preprocessing."""

    def __init__(
        self,
        model: Network,
        files: RunFiles,
        folder: Path | None = None,
        calibration: RunCalibration | None = None,
    ) -> None:
        self.model = model
        self.calibration = calibration or RunCalibration()
        self.folder = folder  # run folder; None for a model without one
        self.labels = files.labels
        self.level = files.level  # taxonomy level of the classes it was trained on
        self.preprocessing = files.preprocessing
        self._files = files
        self._transform = self.transform()

    @property
    def name(self) -> str:
        """Name of the network, as in recipes and `--model`."""
        return self._files.model

    @property
    def table(self) -> ClassTable:
        """Class table that datasets are matched with: names and, for published networks, WordNet ids and synonyms."""
        return self._files.table

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.model.parameters()).device

    def __repr__(self) -> str:
        from patchloom.report.notebook import first_names

        classes = f"{len(self.labels)} classes: {first_names(self.labels, 3)}" if self.labels else "no classes"
        height, width = self.preprocessing.image_size
        return f"Classifier({self.name}, {height}×{width} pixels, {self.device}, {classes})"

    def _repr_html_(self) -> str:
        from patchloom.report.notebook import first_names, html_card

        own = self.preprocessing
        height, width = own.image_size
        facts = [
            ("classes", f"{len(self.labels):,}"),
            ("images", f"{height}×{width} pixels, crop ratio {own.crop_ratio:g}, {own.interpolation}"),
            ("parameters", f"{sum(value.numel() for value in self.model.parameters()):,}"),
            ("device", str(self.device)),
        ]
        return html_card(self.name, facts=facts, notes=[first_names(self.labels, 20)] if self.labels else [])

    def reading_of(self, data: str, reading: Reading = AS_IT_IS) -> Reading:
        """Return `reading`, completed with the reading options of the training if the model was trained on `data`."""
        from patchloom.runs.run_metadata import recorded_reading

        return reading.filled_from(recorded_reading(self.folder, data)) if self.folder else reading

    def check_decides(self) -> None:
        """Raise UsageError if the network has no classifier for named classes, as after DINO."""
        if not self._files.decides:
            raise UsageError(
                f"{self.name} was trained without a classifier and cannot name classes by itself. Measure its features "
                "with --knn or --linear, predict with the labels of an index (`patchloom index RUN IMAGES --out "
                "INDEX`, then `patchloom predict RUN IMAGES --index INDEX`), or train a classifier with "
                "`patchloom train DATA --init RUN`."
            )

    def transform(self, size: int | None = None, crop_ratio: float | None = None) -> EvaluationTransform:
        """Return the transform from an RGB image of any size to the network's input pixels.

        `size` and `crop_ratio` default to those of the model.
        """
        own = self.preprocessing
        return test_transform(size or own.image_size, crop_ratio or own.crop_ratio, own.interpolation, own.resize)

    def preprocess(self, image: ImageLike) -> Tensor:
        """Return one image as a tensor (3, H, W): resized, cropped and normalized as in training."""
        batch = ImageBatch.of_pixels([self._transform(read_image(image))])
        return normalize(batch.images, self.preprocessing.mean, self.preprocessing.std)[0]

    @overload
    def predict(self, images: Image.Image | bytes, **options: Unpack[PredictKeywords]) -> ClassScores: ...

    @overload
    def predict(self, images: OneOrMany, **options: Unpack[PredictKeywords]) -> Any: ...

    @overload
    def predict(
        self, images: ImageSet | Iterable[ImageLike], **options: Unpack[PredictKeywords]
    ) -> list[ClassScores]: ...

    @renamed(neighbours="neighbors")
    @with_near_options
    def predict(
        self,
        images: ImagesLike,
        *,
        top: int = 3,
        index: "IndexLike | None" = None,
        level: str | None = None,
        neighbors: int | None = None,
        tta: bool = False,
    ) -> ClassScores | list[ClassScores]:
        """Return the `top` most likely classes with their probabilities: one list for one image, else one per image.

        A list has an attribute `abstained`: the reason why the model does not answer (`patchloom.calibrate`), or "".

        An image is a path, bytes, an open file, a PIL image, a numpy array (H, W[, channels]) or a torch tensor
        ([channels,] H, W). Several images are a folder, a batch, an `ImageSet` or any iterable, which is read lazily
        (see docs/python.md). An unreadable image raises a DataError that names it; `predict_files` continues instead.

        With an `index` of this model (a folder or an open index), the classes are voted for by the `neighbors` (20)
        nearest files, at a `level` of their labels (default: the index's). This works without a classifier and for
        classes that were not in the training data (thesis, equation 2.6).

        With `tta` (test-time augmentation), probabilities are the mean over the image and its mirror image. No promise
        was tested with it, so only negatives are abstained from.
        """
        at_least("top", top, 1)
        scores = self.predict_with(images, self._batch_predictor(top, index, level, neighbors, tta))
        return scores[0] if is_single_image(images) else scores

    def predict_with(
        self, images: ImagesLike, predict_batch: Callable[[NamedPixels], list[Prediction]]
    ) -> list[ClassScores]:
        """Return what a function of batches predicts for each image, as `predict` reads and preprocesses them."""
        pixels = ((image.name, self._transform(image.read())) for image in iterate_images(images))
        predictions = [prediction for batch in in_batches(pixels) for prediction in predict_batch(batch)]
        for prediction in predictions:
            if prediction.error:
                raise DataError(f"{printable(prediction.path)}: {prediction.error}")
        scores = []
        for prediction in predictions:
            scores.append(ClassScores(prediction.answers))
            scores[-1].abstained = prediction.abstained
        return scores

    @renamed(neighbours="neighbors")
    def predict_files(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        top: int = 3,
        every: int | None = None,
        index: "IndexLike | None" = None,
        level: str | None = None,
        neighbors: int | None = None,
        tta: bool = False,
    ) -> Iterator[Prediction]:
        """Yield one prediction per file, in order; folders are searched, and an unreadable file has an `error`.

        Videos, animations and multi-page files have one prediction per `every`-th frame (see `data.images.video`).
        The other options are those of `predict`.
        """
        at_least("top", top, 1)
        return self.predict_files_with(paths, every, self._batch_predictor(top, index, level, neighbors, tta))

    def predict_files_with(
        self,
        paths: Iterable[str | os.PathLike[str]],
        every: int | None,
        predict_batch: Callable[[NamedPixels], list[Prediction]],
    ) -> Iterator[Prediction]:
        """Yield what a function of batches predicts for each file, as `predict_files` reads and preprocesses them."""
        frames = (frame for path in list_image_files(paths) for frame in frames_or_error(path, every))
        inputs = ((name, frame if isinstance(frame, str) else self._transform(frame)) for name, frame in frames)
        for batch in in_batches(inputs):
            readable = [(name, pixels) for name, pixels in batch if not isinstance(pixels, str)]
            predictions = iter(predict_batch(readable))
            for name, pixels in batch:
                yield Prediction(name, [], pixels) if isinstance(pixels, str) else next(predictions)

    def _batch_predictor(
        self, top: int, index: "IndexLike | None", level: str | None, neighbors: int | None, tta: bool
    ) -> Callable[[NamedPixels], list[Prediction]]:
        """Return the function that predicts a batch: with the classifier, or with the files of an index."""
        if index is None:
            if level is not None or neighbors is not None:
                option = "level" if level is not None else "neighbors"
                raise UsageError(f"{option} is an option of an index; pass the index too (--index INDEX)")
            self.check_decides()
            return lambda batch: self._predict_batch(batch, top, tta)
        if tta:
            raise UsageError("tta is for predictions of the classifier; drop it, or the index")
        from patchloom.inference.neighbors import NeighborClassifier

        by_neighbors = NeighborClassifier(self, index, level, neighbors)

        def predict_batch(batch: NamedPixels) -> list[Prediction]:
            names, votes = [name for name, _ in batch], by_neighbors(batch)
            return [
                Prediction(name, [], vote)
                if isinstance(vote, str)
                else Prediction(name, vote.answers[:top], level=vote.level, reason=vote.reason)
                for name, vote in zip(names, votes, strict=True)
            ]

        return predict_batch

    @torch.inference_mode()
    def _predict_batch(self, batch: NamedPixels, top: int, tta: bool) -> list[Prediction]:
        if not batch:
            return []
        images = ImageBatch.of_pixels([pixels for _, pixels in batch]).images.to(self.device)
        logits, distances = self.classify(normalize(images, self.preprocessing.mean, self.preprocessing.std), tta=tta)
        rules = self.calibration.rules
        # Sorted by logits, since dividing by the temperature may make two of them equal.
        numbers = logits.topk(min(top, len(self.labels))).indices
        scores = (logits / rules.temperature).softmax(dim=-1).gather(1, numbers)
        if tta:
            rules = replace(rules, promise=None)
        predictions = []
        for row, ((name, _), shares) in enumerate(zip(batch, scores.tolist(), strict=True)):
            if not math.isfinite(shares[0]):
                raise not_finite(printable(name))
            answers = list(zip([self.labels[number] for number in numbers[row].tolist()], shares, strict=True))
            distance = None if distances is None else float(distances[row])
            predictions.append(Prediction(name, answers, abstained=rules.reason(answers[0], distance)))
        return predictions

    def classify(
        self, images: Tensor, *, model: Network | None = None, tta: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits (B, K) of normalized images and, if a rule needs them, distances (B,) from training images.

        `model` is the classifier's network at another image size. With `tta`, the logits are those of the mean
        probabilities of the images and their mirror images, and there are no distances.
        """
        network = model or self.model
        if tta:
            temperature = self.calibration.rules.temperature
            shares = [(network(view).float() / temperature).softmax(dim=1) for view in (images, images.flip(3))]
            mean = (shares[0] + shares[1]) / 2
            return temperature * mean.clamp_min(torch.finfo(mean.dtype).tiny).log(), None
        if self.calibration.features is None:
            return network(images), None
        features = network.features(images)
        return network.head(features), self.distances(network.projector(network.vectors(features)))

    def distances(self, vectors: Tensor) -> Tensor | None:
        """Return the distances (B,) of embeddings (B, C) from the training images, or None without a distance rule."""
        rule, stored = self.calibration.rules.distance, self.calibration.features
        if rule is None or stored is None:
            return None
        distances = rule.distances(stored, vectors.detach().float().cpu().numpy())
        return torch.from_numpy(distances).to(vectors.device)

    @overload
    def look(self, images: Image.Image | bytes, *, top: int = 5) -> "ImageLook": ...

    @overload
    def look(self, images: OneOrMany, *, top: int = 5) -> Any: ...

    @overload
    def look(self, images: ImageSet | Iterable[ImageLike], *, top: int = 5) -> "ImageLooks": ...

    @overload
    def look(self, images: "PythonObjects", *, top: int = 5) -> Any: ...

    @with_near_options
    def look(self, images: "ImagesLike | Data", *, top: int = 5) -> "ImageLook | ImageLooks":
        """Return the network's input, prediction and attention maps: one `ImageLook` for one image, else a list.

        `images` are those of `predict`, or a Dataset, a table or a list of (image, target), whose targets are the true
        classes. A notebook displays the image, the most likely classes and the maps.
        """
        from patchloom.data.sources.python_objects import labeled_images
        from patchloom.report.pictures.look import look

        names = self.labels if self._files.decides else ()
        own, truths = labeled_images(images)
        looks = look(self.model, self.preprocessing, own, names, top=top, truths=truths, calibration=self.calibration)
        return looks[0] if is_single_image(own) else looks

    @overload
    def embed(self, images: ImageSet, *, workers: int = 0, **options: Unpack[EmbedOptions]) -> "Embeddings": ...

    @overload
    def embed(self, images: ImageLike | Iterable[ImageLike], **options: Unpack[EmbedOptions]) -> Tensor: ...

    @with_near_options
    def embed(
        self,
        images: ImagesLike,
        *,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
        workers: int = 0,
    ) -> "Embeddings | Tensor":
        """Return the vectors that images are compared by.

        For images as in `predict`: a float32 tensor on the CPU, (C,) for one image and (N, C) for several. For an
        `ImageSet`, such as `open_data(…).val`: `Embeddings` with the vectors and labels of the readable images, in the
        order of the set; `workers` processes read them.
        """
        options = locals()
        from patchloom.inference.embedding import embed_batches

        if isinstance(images, ImageSet):
            from patchloom.inference.evaluations import embed_on

            return embed_on(self, images, EvaluationSettings.of(options))
        check_view_settings(size, crop_ratio, batch)
        if workers:
            raise UsageError("workers is an option for an ImageSet (patchloom.open_data) only; drop it")
        transform = self.transform(size, crop_ratio)
        pixels = (transform(image.read()) for image in iterate_images(images))
        batches = (ImageBatch.of_pixels(some, i * batch) for i, some in enumerate(in_batches(pixels, batch)))
        model = self.model if size is None else self.model.for_images_of(size)
        vectors = embed_batches(self, batches, model=model).vectors.cpu()
        return vectors[0] if is_single_image(images) else vectors

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights, labels, preprocessing and a model card into a folder that `load` and the hub can read."""
        target = Path(folder)
        make_folder(target)
        write_run_files(
            target, self.model, self.preprocessing, self._files.recipe, self.labels, self.level, task=self._files.task
        )
        if (names := self._files.other_names) is not None:
            write_checked(target, {OTHER_NAMES: names})
        save_weights(target, dict(self.model.state_dict()), {})
        if self.calibration.images:
            write_calibration(target, self.calibration)
        atomic_write(target / "README.md", model_card(self).encode())

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, device: str = "auto") -> "Classifier":
        """Load a model that `save_pretrained` or `push_to_hub` wrote; the same as `patchloom.load`."""
        return load(source, device=device)

    def push_to_hub(self, repository: str, *, private: bool = False) -> str:
        """Upload the model to the Hugging Face hub and return its address."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repository, folder_path=folder))


@with_near_options
def load(source: str | os.PathLike[str], *, device: str = "auto", trunk: bool = False) -> Classifier:
    """Load a classifier from a run folder, published weights ('resmlp_s12:in1k') or the hub ('hub:user/name').

    With `trunk`, a projector is dropped, and images are compared by its input vectors.
    """
    if is_run(source):
        folder = Path(source)
    else:
        from patchloom.runs.locate import run_folder  # not needed for a local run folder

        folder = run_folder(source)
    network, files = load_network(folder)
    if trunk:
        network.drop_projector()
    calibration = read_calibration(folder)
    network = network.for_images_of(files.preprocessing.image_size).to(resolve_device(device))
    return Classifier(network, files, folder, calibration)


def drop_projector(classifier: Classifier, source: str) -> None:
    """Compare images by the vectors before the projector. Raises UsageError if the model has none."""
    if classifier.model.config.projector == "none":
        raise UsageError(f"{source} has no projector: its vectors are the trunk's already; leave --trunk out")
    classifier.model.drop_projector()


def model_card(classifier: Classifier) -> str:
    """Return the model card for the Hugging Face hub, in Markdown."""
    from patchloom.runs.model_card import card

    files, recipe = classifier._files, classifier._files.recipe
    origin = f"Trained with the recipe `{recipe.name}` ({recipe.source})" if recipe else "Training recipe unknown"
    network = classifier.model.config.name
    return card(network, classifier.preprocessing, classifier.labels, decides=files.decides, origin=origin)


def in_batches(items: Iterable[T], count: int = PREDICT_BATCH) -> Iterator[list[T]]:
    """Yield lists of up to `count` items, reading no further ahead."""
    waiting = iter(items)
    while batch := list(islice(waiting, count)):
        yield batch
