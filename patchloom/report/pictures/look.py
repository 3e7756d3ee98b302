"""`look`: the input, prediction and attention maps of a network for single images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images.image_batch import normalize
from patchloom.data.sources.python_objects import labeled_images
from patchloom.data.sources.specs import Data
from patchloom.evaluation.classification import in_eval_mode
from patchloom.models.network import Network
from patchloom.report.charts import bars
from patchloom.report.notebook import html_card, likeliest
from patchloom.report.page import data_uri
from patchloom.report.pictures.attention import (
    attention_rollout,
    class_attention,
    class_evidence,
    has_evidence,
    has_share,
    vector_share,
)
from patchloom.report.pictures.explanations import relative
from patchloom.report.pictures.overlays import SIDE, attention_overlay, attention_tile, evidence_overlay
from patchloom.report.pictures.sheets import GAP, PAGE, SheetCell, SheetRow, displayed, grid_sheet, numbers, sheet
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.config import Preprocessing
from patchloom_runtime.calibration import NONE_OF_THESE
from patchloom_runtime.errors import UsageError, at_least, with_near_options
from patchloom_runtime.images.evaluation_transform import test_transform
from patchloom_runtime.images.inputs import ImagesLike, iterate_images

LIKELY = 0.1  # classes above this probability are named on a sheet (thesis, figure 3.10)
MAPPED_CLASSES = 3  # classes with a map of their own (thesis, figure 5.6)
HEAD_SIDE, SMALL_HEAD_SIDE = 96, 64  # pixels of one head's map, in few rows and in many
FEW_ROWS = 12
CARD_SIDE = 224  # pixels of an image on a page or in a notebook
MAX_LOOKS = 20  # in a notebook, which stores their images
LAYER_NAMES_WIDTH = 110  # pixels


def class_text(name: str, share: float) -> str:
    """Return a class with its probability; the colon separates names that are numbers."""
    return f"{name}: {100 * share:.0f} %"


@dataclass(frozen=True, eq=False)
class NetworkInputs:
    """Images as a network sees them, and its outputs."""

    network: Network  # at the size of the images
    input_images: list[Image.Image]  # resized and cropped
    images: Tensor  # (N, channels, H, W), normalized
    probabilities: np.ndarray  # (N, classes), or scores of labels, or numbers; no columns without a classifier
    vectors: Tensor  # (N, C), the input of the classifier, float32 on the CPU
    calibration: RunCalibration  # of the probabilities, with the rules by which the model abstains
    neutral: Tensor | None = None  # (K,), see `explanations`: for labels and numbers, which do not compete
    caption: Callable[[str, float], str] = class_text  # of the map of a class, with its value
    ranked: bool = True  # whether the classes with maps are those with the largest values; otherwise the first ones

    def at(self, places: Sequence[int]) -> "NetworkInputs":
        """Return some of the images."""
        chosen = list(places)
        crops = [self.input_images[place] for place in chosen]
        return replace(
            self,
            input_images=crops,
            images=self.images[chosen],
            probabilities=self.probabilities[chosen],
            vectors=self.vectors[chosen],
        )

    def mapped(self, values: np.ndarray) -> list[int]:
        """Return the classes with a map of their own, given the values (K,) of one image."""
        order = np.argsort(-values, kind="stable") if self.ranked else np.arange(len(values))
        return [int(number) for number in order[:MAPPED_CLASSES]]

    @torch.no_grad()
    def abstained(self, names: Sequence[str]) -> list[str]:
        """Return why the model does not answer each image, '' for those it answers."""
        rules, stored = self.calibration.rules, self.calibration.features
        if not rules.abstains or not len(names):
            return [""] * len(self.input_images)
        best = self.probabilities.argmax(axis=1)
        distances: Sequence[float | None] = [None] * len(best)
        if rules.distance and stored is not None:
            vectors = self.network.projector(self.vectors.to(self.images.device)).float().cpu().numpy()
            distances = rules.distance.distances(stored, vectors).tolist()
        scores = [
            (names[number], float(shares[number])) for number, shares in zip(best, self.probabilities, strict=True)
        ]
        return [rules.reason(score, distance) for score, distance in zip(scores, distances, strict=True)]


@dataclass(frozen=True, eq=False)
class ImageLook:
    """The input, prediction and maps of a network for one image."""

    input_image: Image.Image  # as the network sees it: resized and cropped
    answers: list[tuple[str, float]]  # (class, probability), most likely first
    maps: list[SheetCell]  # attention and evidence over the image, each with a caption
    truth: str = ""  # true class, if known
    abstained: str = ""  # why the model does not answer; empty if it does
    truth_name: ClassVar[str] = "true class"

    @property
    def seen(self) -> Image.Image:
        """The input image, under the name of earlier versions."""
        return self.input_image

    @property
    def right(self) -> bool | None:
        """Whether the most likely class is the true one; None if either is unknown, or the model abstains."""
        known = self.answers and self.truth and not self.abstained
        return self.answers[0][0] == self.truth if known else None

    def in_words(self) -> str:
        """Return the three most likely classes, or why there is no answer."""
        if self.abstained:
            return f"{NONE_OF_THESE}: {self.abstained}"
        return "  ".join(f"{label} {share:.1%}" for label, share in self.answers[:3])

    def sheet_row(self) -> SheetRow:
        """Return a row for a sheet: image and maps under the true class and the classes predicted with over 10 %."""
        likely = [class_text(name, share) for name, share in self.answers if share > LIKELY]
        title = ", ".join(likely or [class_text(*answer) for answer in self.answers[:1]])
        if self.truth:
            title = f"true: {self.truth}" + (f"   predicted: {title}" if title else "")
        return SheetRow(title, [SheetCell(displayed(self.input_image, SIDE), "as the network sees it"), *self.maps])

    def card(self, name: str = "", detail: str = "") -> dict[str, Any]:
        """Return the values of a page's or notebook's template: images as data URIs, predictions as bars."""
        rows = [(label, 100 * share, f"{100 * share:.1f} %") for label, share in self.answers]
        return {
            "name": name,
            "detail": detail,
            "truth": self.truth,
            "truth_name": self.truth_name,
            "right": self.right,
            "abstained": self.abstained,
            "seen": data_uri(displayed(self.input_image, CARD_SIDE)),
            "answers": bars(rows) if rows else None,
            "maps": [(data_uri(cell.image), cell.caption) for cell in self.maps],
        }

    def __repr__(self) -> str:
        maps = ", ".join(cell.caption for cell in self.maps)
        return f"ImageLook({likeliest(self.answers) or 'no classes'}{f'; maps: {maps}' if maps else ''})"

    def _repr_html_(self) -> str:
        return html_card(likeliest(self.answers, 1) or "Network input", looks=[self.card()])


class ImageLooks(list[ImageLook]):
    """A list of `ImageLook` with a display in notebooks."""

    def _repr_html_(self) -> str:
        notes = [f"and {len(self) - MAX_LOOKS} more"] if len(self) > MAX_LOOKS else []
        cards = [look.card() for look in self[:MAX_LOOKS]]
        return html_card(f"{len(self)} image{'s' * (len(self) != 1)}", looks=cards, notes=notes)


@with_near_options
def look(
    network: Network,
    preprocessing: Preprocessing | None,
    images: ImagesLike | Data,
    class_names: Sequence[str] = (),
    *,
    top: int = 5,
    truths: Sequence[str] = (),
    calibration: RunCalibration | None = None,
) -> ImageLooks:
    """Return one `ImageLook` per image; without preprocessing, images are resized to the network's size.

    `images` are those of `Classifier.predict`, or data with targets, as for `train`: a Dataset, (images, targets), a
    table, a list of (image, target). `Classifier.look` supplies the other arguments. `top` classes are named; `truths`
    are the true classes of the images (default: those of the data); `calibration` is that of the run.
    """
    if not isinstance(network, Network):
        raise UsageError(f"look takes a network, got {network!r}; for a run: patchloom.load(run).look(images)")
    own, labels = labeled_images(images)
    truths = truths or labels
    return looks(network_inputs(network, preprocessing, own, calibration), class_names, top=top, truths=truths)


def look_sheet(all_looks: Sequence[ImageLook]) -> Image.Image:
    """Draw the images below each other, each with its maps."""
    return sheet([one.sheet_row() for one in all_looks])


@torch.no_grad()
def network_inputs(
    network: Network,
    preprocessing: Preprocessing | None,
    images: ImagesLike,
    calibration: RunCalibration | None = None,
) -> NetworkInputs:
    """Preprocess images for a network, adapt the network to their size, and classify them."""
    calibration = calibration or RunCalibration()
    if preprocessing is None:
        preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, crop_ratio=1.0)
    network = network.for_images_of(preprocessing.image_size)
    shape, ratio = preprocessing.image_size, preprocessing.crop_ratio
    transform = test_transform(shape, ratio, preprocessing.interpolation, preprocessing.resize)
    crops = [transform(image.read()) for image in iterate_images(images)]
    if not crops:
        raise UsageError("there is no image to look at; pass at least one")
    pixels = np.stack(crops)  # (N, H, W, 3)
    batch = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), preprocessing.mean, preprocessing.std)
    batch = batch.to(next(network.parameters()))
    logits, vectors = [], []
    with in_eval_mode(network):
        for part in batch.split(32):
            features = network.features(part)
            logits.append(network.head(features))
            vectors.append(network.vectors(features).float().cpu())
    probabilities = np.zeros((len(pixels), 0))
    if network.config.num_classes:
        scaled = torch.cat(logits).float() / calibration.rules.temperature
        probabilities = numbers(scaled.softmax(dim=-1), "the probabilities")
    crops_seen = [Image.fromarray(crop) for crop in pixels]
    return NetworkInputs(network, crops_seen, batch, probabilities, torch.cat(vectors), calibration)


def looks(
    inputs: NetworkInputs, class_names: Sequence[str] = (), *, top: int = 5, truths: Sequence[str] = ()
) -> ImageLooks:
    """Return one `ImageLook` per image; `truths` are their true classes, '' if unknown."""
    at_least("top", top, 1)
    names = names_of(inputs.network, class_names)
    result = ImageLooks()
    known = truths or [""] * len(inputs.input_images)
    reasons = inputs.abstained(names)
    rows = zip(inputs.input_images, inputs.probabilities, _maps(inputs, names), known, reasons, strict=True)
    for image, shares, maps, truth, reason in rows:
        order = np.argsort(-shares, kind="stable")[:top]
        result.append(ImageLook(image, [(names[i], float(shares[i])) for i in order], maps, truth, reason))
    return result


def head_sheet(inputs: NetworkInputs, *, count: int | None = None) -> Image.Image:
    """Draw the class attention of each image: one row per layer, one column per head (thesis, figure 3.9).

    The first `count` images are drawn; None draws as many as fit on a screen. Each map has its own scale.
    """
    first = class_attention(inputs.network, inputs.images[:1])
    count = count or max(1, min(len(inputs.input_images), FEW_ROWS // len(first)))
    layers = class_attention(inputs.network, inputs.images[:count])
    heads = max(layer.weights.shape[1] for layer in layers)
    room = (PAGE - LAYER_NAMES_WIDTH) // (heads + 1) - GAP
    side = min(HEAD_SIDE if len(layers) * count <= FEW_ROWS else SMALL_HEAD_SIDE, room)
    rows: list[tuple[str, list[Image.Image | None]]] = []
    for i in range(count):
        token = int(inputs.probabilities[i].argmax()) if inputs.network.has_token_per_class else 0
        for number, layer in enumerate(layers):
            maps = [attention_tile(numbers(head[token]), side) for head in layer.weights[i]]
            rows.append((layer.layer, [displayed(inputs.input_images[i], side) if number == 0 else None, *maps]))
    return grid_sheet(["", *(f"head {head}" for head in range(1, heads + 1))], rows)


def names_of(network: Network, class_names: Sequence[str]) -> Sequence[str]:
    """Return the class names, or numbered names if there are none."""
    classes = network.config.num_classes
    if class_names and classes and len(class_names) != classes:
        raise UsageError(f"there are {len(class_names)} class names for a network of {classes} classes")
    return class_names or [f"class {number}" for number in range(classes)]


def _maps(inputs: NetworkInputs, names: Sequence[str]) -> list[list[SheetCell]]:
    """Return the maps of each image that the network's family has."""
    network = inputs.network
    maps: list[list[SheetCell]] = [[] for _ in inputs.input_images]
    if network.attends_in_every_block:
        rolled = attention_rollout(network, inputs.images)
        for token, name in zip(range(rolled.shape[1]), ("rollout", "rollout, distillation token"), strict=False):
            _add_attention(maps, inputs, rolled[:, token], name)
    if network.has_class_attention:
        _add_class_attention(maps, inputs, names)
    if has_evidence(network):
        evidence = numbers(relative(class_evidence(network, inputs.images), inputs.neutral), "the logits")
        for cells, image, logits, values in zip(maps, inputs.input_images, evidence, inputs.probabilities, strict=True):
            for i in inputs.mapped(values):
                caption = f"for {inputs.caption(names[i], values[i])}"
                cells.append(SheetCell(evidence_overlay(image, logits[i]), caption))
    if has_share(network):
        _add_attention(maps, inputs, vector_share(network, inputs.images), "contribution to the vector")
    return maps


def _add_class_attention(maps: list[list[SheetCell]], inputs: NetworkInputs, names: Sequence[str]) -> None:
    """Add the class layers of a CaiT, the last layer of a ViT, or the pooling of a PatchConvNet.

    Maps are the mean over heads, or one map per likely class if each class has its own token.
    """
    layers = class_attention(inputs.network, inputs.images)
    for layer in layers[-1:] if inputs.network.attends_in_every_block else layers:
        weights = layer.weights.mean(dim=1)  # (B, T, h, w)
        if not inputs.network.has_token_per_class:
            _add_attention(maps, inputs, weights[:, 0], layer.layer)
            continue
        for cells, image, tokens, values in zip(maps, inputs.input_images, weights, inputs.probabilities, strict=True):
            for i in inputs.mapped(values):
                caption = inputs.caption(names[i], values[i])
                cells.append(SheetCell(attention_overlay(image, numbers(tokens[i])), caption))


def _add_attention(maps: list[list[SheetCell]], inputs: NetworkInputs, attention: Tensor, name: str) -> None:
    for cells, image, weights in zip(maps, inputs.input_images, attention, strict=True):
        cells.append(SheetCell(attention_overlay(image, numbers(weights, "the attention")), name))
