"""All pictures a network can have, in one call: those of its family, and none it has not.

What a picture shows is in its caption; docs/pictures.md lists them with the figures of the papers they follow.
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
from patchloom.report.pictures.embeddings import LEAST, embedding_chart, pca_energy_chart, tsne
from patchloom.report.pictures.filters import filter_picture, has_filters
from patchloom.report.pictures.interactions import (
    has_patch_matrices,
    has_row_matrices,
    has_token_units,
    interaction_picture,
    row_column_picture,
    sparsity_chart,
    token_unit_picture,
)
from patchloom.report.pictures.look import NetworkInputs, head_sheet, look_sheet, looks, names_of, show
from patchloom.runs.config import Preprocessing
from patchloom_runtime.errors import PatchloomError, UsageError

SHOWN = 4  # images with maps of their own
PLACED = 500  # images looked at in all: 300 MB at 224 pixels, a few seconds of t-SNE


class PictureNote(Markup):
    """Why a picture could not be drawn, in its place."""


class Picture(NamedTuple):
    """A picture or chart (SVG) with what it shows, or a `Note`."""

    title: str
    image: Image.Image | Markup
    caption: str


@dataclass(frozen=True, eq=False)
class PictureSubject:
    """What pictures are drawn of."""

    network: Network
    class_names: Sequence[str]
    shown: NetworkInputs | None  # None: weights alone
    few: NetworkInputs | None  # some of them, which have maps of their own
    labels: Sequence[int] | None
    truths: Sequence[str] = ()  # true classes of the few, where they are known

    @property
    def seen(self) -> NetworkInputs:
        """The images, where there are some."""
        assert self.shown is not None
        return self.shown

    @property
    def mapped(self) -> NetworkInputs:
        """The images with maps of their own."""
        assert self.few is not None
        return self.few


class PictureKind(NamedTuple):
    """One entry of the table below."""

    title: str
    fits: Callable[[PictureSubject], bool]
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
    """Every picture the network's family has; without images those of its weights alone.

    Four images, of different classes where there are `labels`, get maps of their own. All of them, up to 500, are
    placed by t-SNE, colored by `labels` where they are given and by the network's answers otherwise. A picture that
    cannot be drawn is a note in its place.
    """
    if not isinstance(network, Network):
        raise UsageError(f"pictures are of a network of patchloom, given {type(network).__name__}")
    if labels is not None and len(labels) != len(images or ()):
        raise UsageError(f"{len(labels)} labels were given for {len(images or ())} images; give one each, or none")
    shown = show(network, preprocessing, images[:PLACED]) if images else None
    known = None if labels is None else list(labels)[:PLACED]
    mapped = [] if shown is None else _of_different_classes(known or range(len(shown.seen)), SHOWN)
    few = None if shown is None else shown.at(mapped)
    names = names_of(network, class_names)
    named = known is not None and min(known, default=-1) >= 0 and max(known) < len(names)
    truths = [names[known[place]] for place in mapped] if known is not None and named else []
    subject = PictureSubject(network, names, shown, few, known, truths)
    return [_drawn(kind, subject) for kind in KINDS if kind.fits(subject)]


def _of_different_classes(labels: Sequence[int], count: int) -> list[int]:
    """Places of up to `count` images, of classes from all over the list; of one class only where there are too few."""
    first = {label: place for place, label in reversed(list(enumerate(labels)))}
    places = sorted(first.values())
    chosen = [places[i * len(places) // count] for i in range(count)] if len(places) > count else places
    return [*chosen, *(place for place in range(len(labels)) if place not in first.values())][:count]


def _drawn(kind: PictureKind, subject: PictureSubject) -> Picture:
    try:
        caption = kind.caption if isinstance(kind.caption, str) else kind.caption(subject)
        return Picture(kind.title, kind.draw(subject), caption)
    except PatchloomError as error:
        return Picture(kind.title, PictureNote('<p class="note">{}</p>').format(error), "It could not be drawn.")


def _cosine_chart(subject: PictureSubject) -> Markup:
    cosines = token_cosines(subject.mapped.network, subject.mapped.images).tolist()
    return line_chart([Series("cosine", list(enumerate(cosines)))], x_label="after block; 0: as learned")


def _placed(subject: PictureSubject) -> Markup:
    given = subject.seen.probabilities.argmax(axis=1).tolist() if subject.labels is None else subject.labels
    return embedding_chart(tsne(subject.seen.vectors), given, subject.class_names)


def _energy(subject: PictureSubject) -> Markup:
    return pca_energy_chart({subject.network.config.name or type(subject.network).__name__: subject.seen.vectors})


def _has_maps(subject: PictureSubject) -> bool:
    network = subject.network
    attends = network.attends_in_every_block or network.has_class_attention
    return subject.few is not None and (attends or has_evidence(network) or has_share(network))


def _caption_of_maps(subject: PictureSubject) -> str:
    network = subject.network
    parts = (
        ["Above each image: its true class, if known, and the classes predicted with over 10 %."]
        if network.config.num_classes
        else []
    )
    if network.attends_in_every_block or network.has_class_attention:
        parts.append("Yellow is what is read most, blue least, each map from its least to its largest (mean of heads).")
    if network.attends_in_every_block:
        parts.append("Rollout follows attention through all layers, half of each being its residual connection.")
    if has_evidence(network):
        parts.append("Patches are averaged: red ones speak for the class, blue ones against it.")
    if has_share(network):
        parts.append("Yellow patches give most to the average that is the picture's vector, blue ones least.")
    return " ".join(parts)


def _is_distilled(subject: PictureSubject) -> bool:
    return subject.few is not None and subject.network.has_distillation_token


def _can_be_placed(subject: PictureSubject) -> bool:
    return subject.shown is not None and len(subject.seen.seen) >= LEAST and len(subject.class_names) > 0


KINDS = (
    PictureKind(
        "Where it looks",
        _has_maps,
        lambda subject: look_sheet(looks(subject.mapped, subject.class_names, truths=subject.truths)),
        _caption_of_maps,
    ),
    PictureKind(
        "Attention by head",
        lambda subject: subject.few is not None and subject.network.has_class_attention,
        lambda subject: head_sheet(subject.mapped),
        "How much the class token takes from each patch: a row per layer, a column per head, each map from 0 (dark) to "
        "its largest weight.",
    ),
    PictureKind(
        "Patch interactions",
        lambda subject: has_patch_matrices(subject.network),
        lambda subject: interaction_picture(subject.network),
        "Rows of each layer's matrix across patches, one small image for each of the central 6×6 patches, placed as "
        "they lie: red takes, blue takes away. Shifted copies of one pattern are a convolution.",
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
        "Input weights of hidden units over the patches, first layers; each unit beside the one closest to its "
        "inverse, smooth ones first.",
    ),
    PictureKind(
        "Rows and columns",
        lambda subject: has_row_matrices(subject.network),
        lambda subject: row_column_picture(subject.network),
        "The matrices that mix the places of a row and of a column, a block each: row i is what place i takes from "
        "the others, so a diagonal keeps, and stripes beside it are a convolution.",
    ),
    PictureKind(
        "Filters of the first layer",
        lambda subject: has_filters(subject.network),
        lambda subject: filter_picture(subject.network),
        "Weights over the pixels of a patch as colours, grey for zero; the strongest filters, smooth ones first, each "
        "on its own scale.",
    ),
    PictureKind(
        "Residual branches",
        lambda subject: subject.few is not None and has_branches(subject.network),
        lambda subject: branch_norm_chart(subject.mapped.network, subject.mapped.images),
        "Norm of what a branch adds over the norm of what it is added to, in percent, by layer.",
    ),
    PictureKind(
        "Class and distillation token",
        _is_distilled,
        _cosine_chart,
        "Cosine of the two tokens, as learned and after each block.",
    ),
    PictureKind(
        "Energy of principal components",
        _can_be_placed,
        _energy,
        "Share of the embeddings' variance in the first components, in percent; a lower curve is a richer space.",
    ),
    PictureKind(
        "Embeddings",
        _can_be_placed,
        _placed,
        lambda subject: (
            f"t-SNE of the vectors that are classified, coloured by {'class' if subject.labels else 'the answer'}. "
            "Axes, and distances between groups, mean nothing."
        ),
    ),
)
