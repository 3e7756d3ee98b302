"""Classification by the nearest files of an index (thesis 2.3.2, 2.3.3).

The k nearest labeled files vote for the class of an image with weights exp(cos/σ) (equation 2.6), at any level of the
labels. No training is needed, so the classes may be new. A search conditioned on a coarse class ranks a file of class y
by cos + log(p/(1 − p)) (equation 2.5), where p is the share of the votes for y, or 1 for a class that the user names.

Letters: Q queries, k neighbors, N files, K classes, C channels.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.labels.taxonomy import FINEST, level_named
from patchloom.evaluation.exact_search import Subset, conditioned_nearest, exact_nearest
from patchloom.evaluation.retrieval import log_odds, vote_weights
from patchloom.inference.embedding import embed_batches
from patchloom.inference.index_files import IndexMetadata, StoredVectors, read_about
from patchloom.inference.index_rows import IndexRow
from patchloom.runs.weights import weights_digest
from patchloom_runtime.errors import CheckpointError, DataError, UsageError, at_least, nearest
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier, NamedPixels

NEIGHBORS = 20  # default, as in `probe --knn`; the thesis chooses among 10 … 30


class NeighborFile(NamedTuple):
    """A file of the index and its cosine similarity."""

    score: float
    file: IndexRow


@dataclass(frozen=True)
class NeighborVote:
    """The classes that the neighbors of one image vote for."""

    level: str  # FINEST for the labels themselves
    answers: list[tuple[str, float]]  # (class, share of the votes), most likely first
    reason: str


@dataclass(frozen=True)
class SearchCondition:
    """The coarse classes that a search is conditioned on."""

    level: str
    answers: list[tuple[str, float]]  # (class, probability), most likely first
    reason: str  # where the classes come from

    def in_words(self) -> str:
        """Return the three most likely classes with their probabilities and the reason."""
        scores = "  ".join(f"{name} {score:.1%}" for name, score in self.answers[:3])
        return f"{self.level}: {scores}  ({self.reason})"


def vote_shares(scores: Sequence[float], labels: Sequence[str]) -> dict[str, float]:
    """Return label → share of the votes of neighbors with these cosines (equation 2.6), largest first, then by name."""
    shares: dict[str, float] = {}
    for label, weight in zip(labels, vote_weights(torch.tensor(scores)).tolist(), strict=True):
        shares[label] = shares.get(label, 0.0) + weight
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


class IndexNeighbors:
    """The labeled files of an index, which vote at one level of their labels."""

    def __init__(self, stored: StoredVectors, level: str | None = None, neighbors: int | None = None) -> None:
        self.about, self._stored = stored.about, stored
        self._k = NEIGHBORS if neighbors is None else neighbors
        at_least("neighbors", self._k, 1)
        if not self.about.labels:
            raise UsageError(
                f"{stored.folder} has no labels to predict. Add labeled images, in class folders or with --labels "
                f"FILE: patchloom index RUN IMAGES --out {stored.folder}"
            )
        self.level = self.about.level if level is None else level_named(level, self.about.levels)
        self.names = tuple(self.about.labels_at(self.level))

    def vote(self, queries: Tensor, paths: Sequence[str]) -> list[NeighborVote]:
        """Return the vote for each query, unit vectors (Q, C); a query's own file in the index does not vote."""
        return [self._vote(near) for near in self._nearest(queries, paths)]

    def _vote(self, near: list[NeighborFile]) -> NeighborVote:
        if not near:
            raise DataError(f"{self._stored.folder}: no labeled file is left to compare the image with")
        labels = [self.about.at(file.label, self.level) for _, file in near]
        answers = list(vote_shares([score for score, _ in near], labels).items())
        score, file = near[0]
        reason = (
            f"{labels.count(answers[0][0])} of the {len(near)} nearest; "
            f"the nearest is {printable(os.path.basename(file.path))} at {score:.4f}"
        )
        return NeighborVote(self.level or FINEST, answers, reason)

    def _nearest(self, queries: Tensor, paths: Sequence[str]) -> Iterator[list[NeighborFile]]:
        """Yield the k nearest labeled files of each query, except its own file."""
        all_labeled = sum(self.about.labels.values()) == len(self.about)
        count = self._k + 1  # one of them may be the query's own file
        if all_labeled and not self.about.exact:
            scores, positions, _ = self._stored.nearest(queries, count)
        else:
            labeled = Subset(self._stored, None if all_labeled else self._labeled_positions())
            scores, positions = exact_nearest(labeled, queries, count)
            positions = labeled.of_all(positions)
        files = iter(self._stored.files(positions[positions >= 0]))
        for path, row, places in zip(paths, scores.tolist(), positions.tolist(), strict=True):
            near = [NeighborFile(score, next(files)) for score, place in zip(row, places, strict=True) if place >= 0]
            yield [neighbor for neighbor in near if neighbor.file.path != path][: self._k]

    def _labeled_positions(self) -> Tensor:
        return torch.tensor([position for position, label in enumerate(self._stored.labels()) if label])

    def conditions(self, queries: Tensor, paths: Sequence[str], class_name: str = "") -> list[SearchCondition]:
        """Return the condition of each query: the class that the user names, or the classes its neighbors vote for."""
        level = self.level or FINEST
        if not class_name:
            votes = self.vote(queries, paths)
            return [SearchCondition(level, vote.answers, f"predicted by {vote.reason}") for vote in votes]
        if class_name not in self.names:
            raise UsageError(
                f"no class {class_name!r} at level {level} of {self._stored.folder}{nearest(class_name, self.names)}"
            )
        return [SearchCondition(level, [(class_name, 1.0)], "as requested")] * len(queries)

    def search(
        self, queries: Tensor, conditions: Sequence[SearchCondition], k: int, among: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores of equation 2.5, cosines and positions, each (Q, k); p is 1/2 for a file without a label.

        `among` are the positions of the files to compare with; None means all.
        """
        number = {name: place for place, name in enumerate(self.names)}
        posterior = torch.zeros(len(queries), len(self.names), dtype=torch.float64)
        for row, condition in enumerate(conditions):
            for name, share in condition.answers:
                if name in number:  # index.json of a hand-made index may not count every label
                    posterior[row, number[name]] = share
        added = F.pad(log_odds(posterior), (0, 1))  # the last column is for files without a label
        labels = (self.about.at(label, self.level) for label in self._stored.labels())
        classes = torch.tensor([number.get(label, len(self.names)) for label in labels])
        subset = Subset(self._stored, among)
        if among is not None:
            classes = classes[among]
        scores, cosines, positions = conditioned_nearest(subset, queries, classes, added, k)
        return scores, cosines, subset.of_all(positions)


class NeighborClassifier:
    """A classifier that predicts the labels of an index: its model embeds images, and their neighbors vote."""

    def __init__(self, classifier: "Classifier", index: Any, level: str | None, neighbors: int | None) -> None:
        folder = Path(os.fspath(getattr(index, "folder", index)))
        about = read_about(folder)
        check_model(about, classifier, folder, str(classifier.folder or classifier.model.config.name))
        self._classifier, self._projected = classifier, not about.trunk
        self._voters = IndexNeighbors(StoredVectors(folder, about), level, neighbors)

    def __call__(self, batch: "NamedPixels") -> list[NeighborVote | str]:
        """Return the vote for each image, or an error if its vector is not finite."""
        if not batch:
            return []
        images = ImageBatch.of_pixels([pixels for _, pixels in batch])
        vectors = embed_batches(self._classifier, [images], projected=self._projected).vectors.cpu()
        finite = vectors.isfinite().all(dim=1)
        paths = [os.path.abspath(name) for (name, _), good in zip(batch, finite.tolist(), strict=True) if good]
        votes = iter(self._voters.vote(F.normalize(vectors[finite]), paths) if paths else [])
        return [next(votes) if good else "the model's vector of it is not finite" for good in finite.tolist()]


def check_model(about: IndexMetadata, classifier: "Classifier", folder: Path, source: str) -> None:
    """Raise CheckpointError if vectors of this model cannot be compared with those of the index."""
    own = index_preprocessing(classifier)
    for name, value in about.preprocessing.items():
        if own.get(name) != value:
            raise CheckpointError(
                f"{folder} was made with {name} {value}, but {source} has {own.get(name)}. "
                f"Use the model of the index ({about.model}), or build another index."
            )
    model = classifier.model
    weights = {name: value for name, value in model.state_dict().items() if not (about.trunk and _is_projector(name))}
    if about.weights_sha256 == weights_digest(weights):
        return
    if not about.trunk and model.config.projector == "none" and about.dimension != model.feature_dim:
        raise CheckpointError(
            f"{folder} has projected vectors of {about.dimension} numbers, and {source} was loaded without its "
            "projector. Load it without trunk, or build another index with --trunk."
        )
    raise CheckpointError(
        f"{folder} was made with other weights than those of {source}. "
        f"Use the model of the index ({about.model}) as it was, or build another index."
    )


def _is_projector(name: str) -> bool:
    return name.startswith("projector.")


def index_preprocessing(classifier: "Classifier") -> dict[str, Any]:
    """Return the preprocessing as it is written to `index.json`."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(classifier.preprocessing)))
    return values
