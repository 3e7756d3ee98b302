"""`pictures_of`: every picture that a network's family has, in one call.

Captions explain the pictures; docs/pictures.md lists them with the figures of the papers they follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.agreement import token_cosines
from patchloom.models.network import Network
from patchloom.report.charts import Series, line_chart
from patchloom.report.pictures.attention import has_evidence, has_share
from patchloom.report.pictures.branches import branch_norm_chart, has_branches
from patchloom.report.pictures.embeddings import LEAST_IMAGES, embedding_chart, pca_energy_chart, tsne
from patchloom.report.pictures.look import NetworkInputs, head_sheet, look_sheet, looks, names_of, network_inputs
from patchloom.report.pictures.weights import (
    filter_picture,
    has_filters,
    has_patch_matrices,
    has_row_matrices,
    has_token_units,
    interaction_picture,
    row_column_picture,
    sparsity_chart,
    token_unit_picture,
)
from patchloom.runs.config import Preprocessing
from patchloom_runtime.errors import PatchloomError, UsageError

MAPPED_IMAGES = 4  # images with maps of their own
MAX_IMAGES = 500  # in all: 300 MB at 224 pixels, a few seconds of t-SNE


class PictureNote(Markup):
    """The reason why a picture could not be drawn, in its place."""


class Picture(NamedTuple):
    """A picture, a chart (SVG) or a `PictureNote`, with title and caption."""

    title: str
    image: Image.Image | Markup
    caption: str


@dataclass(frozen=True, eq=False)
class PictureSubject:
    """A network and images to draw pictures of."""

    network: Network
    class_names: Sequence[str]
    inputs: NetworkInputs | None  # None: draw the weights only
    mapped_inputs: NetworkInputs | None  # some of the inputs, which get maps of their own
    labels: Sequence[int] | None
    truths: Sequence[str] = ()  # true classes of the mapped images, if known

    @property
    def every(self) -> NetworkInputs:
        """All images; only for pictures that need images."""
        assert self.inputs is not None
        return self.inputs

    @property
    def mapped(self) -> NetworkInputs:
        """The images with maps of their own; only for pictures that need images."""
        assert self.mapped_inputs is not None
        return self.mapped_inputs


class PictureKind(NamedTuple):
    """One entry of KINDS."""

    title: str
    applies: Callable[[PictureSubject], bool]
    draw: Callable[[PictureSubject], Image.Image | Markup]
    caption: str | Callable[[PictureSubject], str]


def pictures_of(
    network: Network,
    images: Sequence[Image.Image] | None = None,
    class_names: Sequence[str] = (),
    *,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[int] | None = None,
) -> list[Picture]:
    """Return every picture the network's family has; without images, those of its weights only.

    Four images, of different classes if there are `labels`, get maps of their own. Up to 500 images are placed by
    t-SNE, colored by `labels` or else by the network's predictions. A picture that cannot be drawn is replaced by a
    note.
    """
    if not isinstance(network, Network):
        raise UsageError(f"pictures_of needs a network of patchloom, got {type(network).__name__}")
    if labels is not None and len(labels) != len(images or ()):
        raise UsageError(f"there are {len(labels)} labels for {len(images or ())} images; pass one per image, or none")
    inputs = network_inputs(network, preprocessing, images[:MAX_IMAGES]) if images else None
    known = None if labels is None else list(labels)[:MAX_IMAGES]
    mapped = [] if inputs is None else _of_different_classes(known or range(len(inputs.input_images)), MAPPED_IMAGES)
    names = names_of(network, class_names)
    named = known is not None and min(known, default=-1) >= 0 and max(known) < len(names)
    truths = [names[known[place]] for place in mapped] if known is not None and named else []
    subject = PictureSubject(network, names, inputs, None if inputs is None else inputs.at(mapped), known, truths)
    return [_draw(kind, subject) for kind in KINDS if kind.applies(subject)]


def _of_different_classes(labels: Sequence[int], count: int) -> list[int]:
    """Return the places of up to `count` images, of different classes as far as there are enough."""
    first = {label: place for place, label in reversed(list(enumerate(labels)))}
    places = sorted(first.values())
    chosen = [places[i * len(places) // count] for i in range(count)] if len(places) > count else places
    return [*chosen, *(place for place in range(len(labels)) if place not in first.values())][:count]


def _draw(kind: PictureKind, subject: PictureSubject) -> Picture:
    try:
        caption = kind.caption if isinstance(kind.caption, str) else kind.caption(subject)
        return Picture(kind.title, kind.draw(subject), caption)
    except PatchloomError as error:
        return Picture(kind.title, PictureNote('<p class="note">{}</p>').format(error), "It could not be drawn.")


def _cosine_chart(subject: PictureSubject) -> Markup:
    cosines = token_cosines(subject.mapped.network, subject.mapped.images).tolist()
    return line_chart(
        [Series("cosine", list(enumerate(cosines)))], x_label="after block; 0: as learned", y_label="cosine"
    )


def _tsne_chart(subject: PictureSubject) -> Markup:
    labels = subject.labels
    if labels is None:  # a network without a classifier has no probabilities, and always gets labels
        labels = subject.every.probabilities.argmax(axis=1).tolist()
    return embedding_chart(tsne(subject.every.vectors), labels, subject.class_names)


def _energy_chart(subject: PictureSubject) -> Markup:
    return pca_energy_chart({subject.network.config.name or type(subject.network).__name__: subject.every.vectors})


def _has_maps(subject: PictureSubject) -> bool:
    network = subject.network
    attends = network.attends_in_every_block or network.has_class_attention
    return subject.mapped_inputs is not None and (attends or has_evidence(network) or has_share(network))


def _caption_of_maps(subject: PictureSubject) -> str:
    network, parts = subject.network, []
    if network.config.num_classes:
        parts.append("Above each image: its true class, if known, and the classes predicted with over 10 %.")
    if network.attends_in_every_block or network.has_class_attention:
        parts.append("Yellow patches get the most attention, blue ones the least (mean of heads, each map scaled).")
    if network.attends_in_every_block:
        parts.append("Rollout follows attention through all layers, half of each being its residual connection.")
    if has_evidence(network):
        parts.append("Patches are averaged: red ones speak for the class, blue ones against it.")
    if has_share(network):
        parts.append("Yellow patches contribute most to the average that is the image's vector, blue ones least.")
    return " ".join(parts)


def _is_distilled(subject: PictureSubject) -> bool:
    return subject.mapped_inputs is not None and subject.network.has_distillation_token


def _has_embeddings(subject: PictureSubject) -> bool:
    enough = subject.inputs is not None and len(subject.inputs.input_images) >= LEAST_IMAGES
    return enough and len(subject.class_names) > 0


KINDS = (
    PictureKind(
        "Where it looks",
        _has_maps,
        lambda subject: look_sheet(looks(subject.mapped, subject.class_names, truths=subject.truths)),
        _caption_of_maps,
    ),
    PictureKind(
        "Attention by head",
        lambda subject: subject.mapped_inputs is not None and subject.network.has_class_attention,
        lambda subject: head_sheet(subject.mapped),
        "Attention of the class token to each patch: one row per layer, one column per head, each map from 0 (dark) to "
        "its largest weight.",
    ),
    PictureKind(
        "Patch interactions",
        lambda subject: has_patch_matrices(subject.network),
        lambda subject: interaction_picture(subject.network),
        "Rows of each layer's matrix across patches, one small image for each of the central 6×6 patches, in their "
        "order: red adds, blue subtracts. Shifted copies of one pattern are a convolution.",
    ),
    PictureKind(
        "Sparsity",
        lambda subject: has_patch_matrices(subject.network),
        lambda subject: sparsity_chart(subject.network),
        "Share of weights below 5 % of the matrix's largest, in percent: A across patches, B and C of the channel MLP.",
    ),
    PictureKind(
        "Token-mixing units",
        lambda subject: has_token_units(subject.network),
        lambda subject: token_unit_picture(subject.network),
        "Input weights of hidden units over the patches, in the first layers; each unit is next to the one closest to "
        "its inverse, smooth ones first.",
    ),
    PictureKind(
        "Rows and columns",
        lambda subject: has_row_matrices(subject.network),
        lambda subject: row_column_picture(subject.network),
        "The matrices that mix the places of a row and of a column, one per block: row i has the weights of the places "
        "that place i takes from, so a diagonal keeps the place, and stripes next to it are a convolution.",
    ),
    PictureKind(
        "Filters of the first layer",
        lambda subject: has_filters(subject.network),
        lambda subject: filter_picture(subject.network),
        "Weights over the pixels of a patch as colors, gray for zero; the strongest filters, smooth ones first, each "
        "on its own scale.",
    ),
    PictureKind(
        "Residual branches",
        lambda subject: subject.mapped_inputs is not None and has_branches(subject.network),
        lambda subject: branch_norm_chart(subject.mapped.network, subject.mapped.images),
        "Norm of a branch's output relative to the norm of its input, in percent, by layer.",
    ),
    PictureKind(
        "Class and distillation token",
        _is_distilled,
        _cosine_chart,
        "Cosine of the two tokens, as learned and after each block.",
    ),
    PictureKind(
        "Energy of principal components",
        _has_embeddings,
        _energy_chart,
        "Share of the embeddings' variance in the first components, in percent; a lower curve is a richer space.",
    ),
    PictureKind(
        "Embeddings",
        _has_embeddings,
        _tsne_chart,
        lambda subject: (
            "t-SNE of the vectors that are classified, colored by "
            f"{'class' if subject.labels else 'predicted class'}. "
            "Axes, and distances between groups, mean nothing."
        ),
    ),
)
