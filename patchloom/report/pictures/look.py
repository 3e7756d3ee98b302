"""What a network makes of single pictures: what it sees, what it answers, where it looks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images.image_batch import normalize
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
from patchloom.report.pictures.overlays import SIDE, attention_overlay, attention_tile, evidence_overlay
from patchloom.report.pictures.sheets import GAP, PAGE, SheetCell, SheetRow, displayed, grid_sheet, numbers, sheet
from patchloom.runs.config import Preprocessing
from patchloom_runtime.errors import UsageError, at_least, with_near_options
from patchloom_runtime.images.evaluation_transform import test_transform
from patchloom_runtime.images.inputs import ImagesLike, iterate_images

LIKELY = 0.1  # classes above it are named on a sheet (thesis, figure 3.10)
CLASSES_SHOWN = 3  # with a map of their own (thesis, figure 5.6)
HEAD_SIDE, SMALL_HEAD_SIDE = 96, 64  # pixels of one head's map, in few rows and in many
FEW_ROWS = 12
CARD_SIDE = 224  # pixels of a picture on a page or in a notebook
LOOKS_SHOWN = 20  # in a notebook, which keeps their pictures
NAMES_WIDE = 110  # pixels left for the names of layers


@dataclass(frozen=True, eq=False)
class NetworkInputs:
    """Pictures as a network is shown them, and its answers."""

    network: Network  # at the size of the images
    seen: list[Image.Image]  # resized and cropped
    images: Tensor  # (N, channels, H, W) normalised
    probabilities: np.ndarray  # (N, classes); no columns where the network has no classifier
    vectors: Tensor  # (N, C), what each is classified by, float32 on the CPU

    def at(self, places: Sequence[int]) -> "NetworkInputs":
        """Some of them."""
        chosen = list(places)
        seen = [self.seen[place] for place in chosen]
        return NetworkInputs(self.network, seen, self.images[chosen], self.probabilities[chosen], self.vectors[chosen])


@dataclass(frozen=True, eq=False)
class ImageLook:
    """What a network made of one picture."""

    seen: Image.Image  # as the network sees it: resized and cropped
    answers: list[tuple[str, float]]  # class, probability; likeliest first
    maps: list[SheetCell]  # where it looked, laid over the picture; what each is stands under it
    truth: str = ""  # its true class, where it is known

    @property
    def right(self) -> bool | None:
        """Whether the likeliest class is the true one; None where either is not known."""
        return self.answers[0][0] == self.truth if self.answers and self.truth else None

    def in_words(self) -> str:
        """The three likeliest classes."""
        return "  ".join(f"{label} {share:.1%}" for label, share in self.answers[:3])

    def line(self) -> SheetRow:
        """For a sheet: the picture and its maps under its true class and the predicted classes above 10 %."""
        likely = [summary_text(name, share) for name, share in self.answers if share > LIKELY]
        title = ", ".join(likely or [summary_text(*one) for one in self.answers[:1]])
        if self.truth:
            title = f"true: {self.truth}" + (f"   predicted: {title}" if title else "")
        return SheetRow(title, [SheetCell(displayed(self.seen, SIDE), "as the network sees it"), *self.maps])

    def card(self, name: str = "", detail: str = "") -> dict[str, Any]:
        """For a page or a notebook: pictures as addresses, answers as bars."""
        rows = [(label, 100 * share, f"{100 * share:.1f} %") for label, share in self.answers]
        return {
            "name": name,
            "detail": detail,
            "truth": self.truth,
            "right": self.right,
            "seen": data_uri(displayed(self.seen, CARD_SIDE)),
            "answers": bars(rows) if rows else None,
            "maps": [(data_uri(cell.image), cell.caption) for cell in self.maps],
        }

    def __repr__(self) -> str:
        maps = ", ".join(cell.caption for cell in self.maps)
        return f"Look({likeliest(self.answers) or 'no classes'}{f'; maps: {maps}' if maps else ''})"

    def _repr_html_(self) -> str:
        return html_card(likeliest(self.answers, 1) or "What the network saw", looks=[self.card()])


class ImageLooks(list[ImageLook]):
    """What a network made of several pictures."""

    def _repr_html_(self) -> str:
        notes = [f"and {len(self) - LOOKS_SHOWN} more"] if len(self) > LOOKS_SHOWN else []
        cards = [one.card() for one in self[:LOOKS_SHOWN]]
        return html_card(f"{len(self)} picture{'s' * (len(self) != 1)}", looks=cards, notes=notes)


@with_near_options
def look(
    network: Network,
    preprocessing: Preprocessing | None,
    images: ImagesLike,
    class_names: Sequence[str] = (),
    *,
    top: int = 5,
    truths: Sequence[str] = (),
) -> ImageLooks:
    """One `Look` per picture, for one picture too; without preprocessing they are fitted to the network's own size.

    `images` are what `Classifier.predict` takes; `Classifier.look` knows the rest by itself. `top` classes are named;
    `truths` are the true classes of the pictures, where they are known.
    """
    return looks(show(network, preprocessing, images), class_names, top=top, truths=truths)


def look_sheet(looked: Sequence[ImageLook]) -> Image.Image:
    """The pictures below one another, each with its maps."""
    return sheet([one.line() for one in looked])


@torch.no_grad()
def show(network: Network, preprocessing: Preprocessing | None, images: ImagesLike) -> NetworkInputs:
    """Fit the pictures to the network, and the network to their size; classify them."""
    if preprocessing is None:
        preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, crop_ratio=1.0)
    network = network.for_images_of(preprocessing.image_size)
    shape, ratio = preprocessing.image_size, preprocessing.crop_ratio
    transform = test_transform(shape, ratio, preprocessing.interpolation, preprocessing.resize)
    cropped = [transform(one.read()) for one in iterate_images(images)]
    if not cropped:
        raise UsageError("there is no picture to look at; give at least one")
    pixels = np.stack(cropped)  # (N, H, W, 3)
    batch = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), preprocessing.mean, preprocessing.std)
    batch = batch.to(next(network.parameters()))
    answers, vectors = [], []
    with in_eval_mode(network):
        for part in batch.split(32):
            features = network.features(part)
            answers.append(network.head(features))
            vectors.append(network.vectors(features).float().cpu())
    logits = torch.cat(answers)
    known = network.config.num_classes
    shares = numbers(logits.float().softmax(dim=-1), "the probabilities") if known else np.zeros((len(pixels), 0))
    return NetworkInputs(network, [Image.fromarray(picture) for picture in pixels], batch, shares, torch.cat(vectors))


def looks(
    shown: NetworkInputs, class_names: Sequence[str] = (), *, top: int = 5, truths: Sequence[str] = ()
) -> ImageLooks:
    """What the network made of the pictures it was shown; `truths` are their true classes, '' where one is unknown."""
    at_least("top", top, 1)
    names = names_of(shown.network, class_names)
    made = ImageLooks()
    rows = zip(shown.seen, shown.probabilities, _maps(shown, names), truths or [""] * len(shown.seen), strict=True)
    for seen, shares, maps, truth in rows:
        likeliest = np.argsort(-shares, kind="stable")[:top]
        made.append(ImageLook(seen, [(names[i], float(shares[i])) for i in likeliest], maps, truth))
    return made


def head_sheet(shown: NetworkInputs, *, pictures: int | None = None) -> Image.Image:
    """Class attention of each picture: a row per layer, a column per head (thesis, figure 3.9).

    `pictures` are the first ones; None shows as many as make a sheet that fits a screen. Each map has its own scale.
    """
    first = class_attention(shown.network, shown.images[:1])
    count = pictures or max(1, min(len(shown.seen), FEW_ROWS // len(first)))
    layers = class_attention(shown.network, shown.images[:count])
    heads = max(layer.weights.shape[1] for layer in layers)
    room = (PAGE - NAMES_WIDE) // (heads + 1) - GAP
    side = min(HEAD_SIDE if len(layers) * count <= FEW_ROWS else SMALL_HEAD_SIDE, room)
    rows: list[tuple[str, list[Image.Image | None]]] = []
    for i in range(count):
        token = int(shown.probabilities[i].argmax()) if shown.network.has_token_per_class else 0
        for number, layer in enumerate(layers):
            maps = [attention_tile(numbers(head[token]), side) for head in layer.weights[i]]
            rows.append((layer.layer, [displayed(shown.seen[i], side) if number == 0 else None, *maps]))
    return grid_sheet(["", *(f"head {head}" for head in range(1, heads + 1))], rows)


def summary_text(name: str, share: float) -> str:
    """A class with its probability; the colon, since names may be numbers."""
    return f"{name}: {100 * share:.0f} %"


def names_of(network: Network, class_names: Sequence[str]) -> Sequence[str]:
    """The names given, or numbers where there are none."""
    classes = network.config.num_classes
    if class_names and classes and len(class_names) != classes:
        raise UsageError(f"{len(class_names)} class names were given for a network of {classes} classes")
    return class_names or [f"class {number}" for number in range(classes)]


def _maps(shown: NetworkInputs, names: Sequence[str]) -> list[list[SheetCell]]:
    """The maps the family has, for each picture."""
    network = shown.network
    maps: list[list[SheetCell]] = [[] for _ in shown.seen]
    if network.attends_in_every_block:
        rolled = attention_rollout(network, shown.images)
        for token, name in zip(range(rolled.shape[1]), ("rollout", "rollout, distillation token"), strict=False):
            _add_attention(maps, shown, rolled[:, token], name)
    if network.has_class_attention:
        _add_class_attention(maps, shown, names)
    if has_evidence(network):
        evidence = numbers(class_evidence(network, shown.images), "the logits")
        for cells, picture, logits, shares in zip(maps, shown.seen, evidence, shown.probabilities, strict=True):
            # A logit means something beside the other classes' alone.
            against_others = logits - logits.mean(axis=0)
            for i in np.argsort(-shares, kind="stable")[:CLASSES_SHOWN]:
                cells.append(
                    SheetCell(evidence_overlay(picture, against_others[i]), f"for {summary_text(names[i], shares[i])}")
                )
    if has_share(network):
        _add_attention(maps, shown, vector_share(network, shown.images), "what its vector is made of")
    return maps


def _add_class_attention(maps: list[list[SheetCell]], shown: NetworkInputs, names: Sequence[str]) -> None:
    """A CaiT's class layers, a ViT's last layer, a PatchConvNet's pooling: mean of heads, or a map a likely class."""
    layers = class_attention(shown.network, shown.images)
    for layer in layers[-1:] if shown.network.attends_in_every_block else layers:
        weights = layer.weights.mean(dim=1)  # (B, T, h, w)
        if not shown.network.has_token_per_class:
            _add_attention(maps, shown, weights[:, 0], layer.layer)
            continue
        for cells, picture, tokens, shares in zip(maps, shown.seen, weights, shown.probabilities, strict=True):
            for i in np.argsort(-shares, kind="stable")[:CLASSES_SHOWN]:
                cells.append(
                    SheetCell(attention_overlay(picture, numbers(tokens[i])), summary_text(names[i], shares[i]))
                )


def _add_attention(maps: list[list[SheetCell]], shown: NetworkInputs, attention: Tensor, name: str) -> None:
    for cells, picture, weights in zip(maps, shown.seen, attention, strict=True):
        cells.append(SheetCell(attention_overlay(picture, numbers(weights, "the attention")), name))
