"""What the files of an index say of a picture that is like them (thesis 2.3.2, 2.3.3).

The k nearest files with a label vote for its class with weights exp(cos/σ) (equation 2.6), at any level of the labels.
Nothing is trained for it, so the classes may be new. A search that is conditioned on a coarse class ranks a file of
class y by cos + log(p/(1 − p)), p the votes for y (equation 2.5), or 1 for the class that a user gives.

Letters: Q pictures, k neighbours, N files, K classes, C channels.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.labels.taxonomy import FINEST, level_named
from patchloom.evaluation.exact_search import Subset, conditioned_nearest, exact_nearest, faiss_nearest
from patchloom.evaluation.retrieval import log_odds, vote_weights
from patchloom.inference.embedding import embed_batches
from patchloom.inference.index_files import IndexMetadata, IndexRow, StoredVectors, read_about
from patchloom.runs.weights import weights_digest
from patchloom_runtime.errors import CheckpointError, DataError, UsageError, at_least, nearest
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier

NEIGHBORS = 20  # as `evaluate --knn`; the thesis chooses among 10 … 30


class NeighborFile(NamedTuple):
    """A file of the index and its cosine."""

    score: float
    file: IndexRow


@dataclass(frozen=True)
class NeighborVote:
    """What the neighbours of one picture say."""

    level: str  # by name; FINEST for the labels themselves
    answers: list[tuple[str, float]]  # class, share of the weights; likeliest first
    reason: str


@dataclass(frozen=True)
class SearchCondition:
    """The coarse class that a search was conditioned on."""

    level: str
    answers: list[tuple[str, float]]  # class, probability; likeliest first
    reason: str  # whose word it is

    def in_words(self) -> str:
        """The classes with their shares, and where they come from."""
        shares = "  ".join(f"{name} {share:.1%}" for name, share in self.answers[:3])
        return f"{self.level}: {shares}  ({self.reason})"


class IndexNeighbors:
    """The files of an index that have a label, at one of its levels."""

    def __init__(self, stored: StoredVectors, level: str | None = None, neighbours: int | None = None) -> None:
        self.about, self._stored = stored.about, stored
        at_least("neighbours", NEIGHBORS if neighbours is None else neighbours, 1)
        self._k = neighbours or NEIGHBORS
        if not self.about.labels:
            raise UsageError(
                f"{stored.folder} has no labels to name classes by. Add labelled images, in class folders or with "
                f"--labels FILE: patchloom index RUN IMAGES --out {stored.folder}"
            )
        self.level = self.about.level if level is None else level_named(level, self.about.levels)
        self.names = tuple(self.about.labels_at(self.level))

    def name(self, queries: Tensor, paths: Sequence[str]) -> list[NeighborVote]:
        """Unit vectors (Q, C) → the classes of their neighbours; a file that is in the index has no vote on itself."""
        return [self._vote(near) for near in self._near(queries, paths)]

    def _vote(self, near: list[NeighborFile]) -> NeighborVote:
        if not near:
            raise DataError(f"{self._stored.folder}: no labelled file is left to compare the picture with")
        shares: dict[str, float] = {}
        votes: dict[str, int] = {}
        weights = vote_weights(torch.tensor([score for score, _ in near])).tolist()
        for weight, (_, file) in zip(weights, near, strict=True):
            label = self.about.at(file.label, self.level)
            shares[label], votes[label] = shares.get(label, 0.0) + weight, votes.get(label, 0) + 1
        answers = sorted(shares.items(), key=lambda one: (-one[1], one[0]))
        score, file = near[0]
        reason = (
            f"{votes[answers[0][0]]} of the {len(near)} nearest; "
            f"the nearest is {printable(os.path.basename(file.path))} at {score:.4f}"
        )
        return NeighborVote(self.level or FINEST, answers, reason)

    def _near(self, queries: Tensor, paths: Sequence[str]) -> Iterator[list[NeighborFile]]:
        """The k nearest labelled files of each query, its own left out."""
        all_labeled = sum(self.about.labels.values()) == len(self.about)
        wanted = self._k + 1
        if all_labeled and not self.about.exact:
            scores, positions = faiss_nearest(self._stored.faiss_file(), self._stored, queries, wanted)
        else:
            labeled = Subset(self._stored, None if all_labeled else self._labeled())
            scores, positions = exact_nearest(labeled, queries, wanted)
            positions = labeled.of_all(positions)
        files = iter(self._stored.files(positions[positions >= 0]))
        for path, row, places in zip(paths, scores.tolist(), positions.tolist(), strict=True):
            near = [NeighborFile(score, next(files)) for score, place in zip(row, places, strict=True) if place >= 0]
            yield [one for one in near if one.file.path != path][: self._k]

    def _labeled(self) -> Tensor:
        labels = self._stored.labels()
        return torch.tensor([place for place, label in enumerate(labels) if label])

    def conditions(self, queries: Tensor, paths: Sequence[str], given: str = "") -> list[SearchCondition]:
        """What each query is conditioned on: the class that is given, or those its neighbours vote for."""
        level = self.level or FINEST
        if not given:
            votes = self.name(queries, paths)
            return [SearchCondition(level, vote.answers, f"predicted by {vote.reason}") for vote in votes]
        if given not in self.names:
            raise UsageError(
                f"no class {given!r} at level {level} of {self._stored.folder}{nearest(given, self.names)}"
            )
        return [SearchCondition(level, [(given, 1.0)], "as given")] * len(queries)

    def search(self, queries: Tensor, conditions: Sequence[SearchCondition], k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of equation 2.5, cosines and positions (Q, k); of a file without a label nothing is known: p = 1/2."""
        number = {name: place for place, name in enumerate(self.names)}
        posterior = torch.zeros(len(queries), len(self.names), dtype=torch.float64)
        for row, condition in enumerate(conditions):
            for name, share in condition.answers:
                if name in number:  # of an index that somebody made by hand a label may not be counted
                    posterior[row, number[name]] = share
        added = F.pad(log_odds(posterior), (0, 1))  # the last column is of those without a label
        labels = (self.about.at(label, self.level) for label in self._stored.labels())
        classes = torch.tensor([number.get(label, len(self.names)) for label in labels])
        return conditioned_nearest(self._stored, queries, classes, added, k)


class NeighborClassifier:
    """Answers of a model whose classes are those of an index: pictures → votes."""

    def __init__(self, classifier: "Classifier", index: Any, level: str | None, neighbours: int | None) -> None:
        folder = Path(os.fspath(getattr(index, "folder", index)))
        about = read_about(folder)
        check_model(about, classifier, folder, str(classifier.folder or classifier.model.config.name))
        self._classifier, self._projected = classifier, not about.trunk
        self._voters = IndexNeighbors(StoredVectors(folder, about), level, neighbours)

    def __call__(self, pixels: Sequence[np.ndarray], names: Sequence[str]) -> list[NeighborVote | str]:
        """Of pictures as the network is shown them, and their paths; what is wrong where one has no vector."""
        if not pixels:
            return []
        batch = [ImageBatch.of_pixels(pixels)]
        vectors = embed_batches(self._classifier, batch, projected=self._projected).vectors.cpu()
        finite = vectors.isfinite().all(dim=1)
        paths = [os.path.abspath(name) for name, good in zip(names, finite.tolist(), strict=True) if good]
        votes = iter(self._voters.name(F.normalize(vectors[finite]), paths) if paths else [])
        return [next(votes) if good else "the model's vector of it is not finite" for good in finite.tolist()]


def check_model(about: IndexMetadata, classifier: "Classifier", folder: Path, source: str) -> None:
    """A CheckpointError where vectors of this model cannot be compared with those of the index."""
    shown = neighbors_of_view(classifier)
    for name, value in about.preprocessing.items():
        if shown.get(name) != value:
            raise CheckpointError(
                f"{folder} was made with {name} {value}, but {source} has {shown.get(name)}. "
                f"Use its own model ({about.model}), or build another index."
            )
    model = classifier.model
    weights = {name: value for name, value in model.state_dict().items() if not (about.trunk and _projects(name))}
    if about.weights_sha256 == weights_digest(weights):
        return
    if not about.trunk and model.config.projector == "none" and about.dimension != model.feature_dim:
        raise CheckpointError(
            f"{folder} has vectors of {about.dimension} numbers, which a projector made, and {source} was loaded "
            "without one. Load it without trunk, or build another index with --trunk."
        )
    raise CheckpointError(
        f"{folder} was made with other weights than those of {source}. "
        f"Use its own model ({about.model}) as it was, or build another index."
    )


def _projects(name: str) -> bool:
    return name.startswith("projector.")


def neighbors_of_view(classifier: "Classifier") -> dict[str, Any]:
    """The preprocessing as it stands in `index.json`."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(classifier.preprocessing)))
    return values
