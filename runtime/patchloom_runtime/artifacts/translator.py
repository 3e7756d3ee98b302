"""Translations from an artefact: an encoder, a step of the decoder, and the search for words in numpy.

    model   source (B, S) → keys and values (L, B, H, S, d), as the layers of the decoder look at the sentences
    step    the last words (B, K), their position, what the positions before have left (M, L, B, K, C'), keys, values
            and what of them is no padding → logits (B, K, V), and what this position leaves (L, B, K, C')

The search is that of `models/beam_search.py`, line for line. Letters: B sentences, K beams, L layers, M positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.line_translator import MAX_LENGTH_A, MAX_LENGTH_B, LineTranslator
from patchloom_runtime.artifacts.metadata import STEP, VOCABULARY, read_whole
from patchloom_runtime.engines.formats import MODEL, Graph
from patchloom_runtime.errors import NumericalError, UsageError, at_least
from patchloom_runtime.printable import printable
from patchloom_runtime.text.hypothesis import Hypothesis
from patchloom_runtime.text.special_tokens import BOS, EOS, PAD
from patchloom_runtime.text.vocabulary import Vocabulary

FEWEST = 2  # positions that a step is given: some runtimes know no list of none or one
MOST_PENALTY = 10  # scores of long sentences would be no numbers


class ArtifactTranslator(Artifact, LineTranslator):
    """An exported translation model."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        told = self.about.translation
        assert told is not None
        self.source, self.target, self.longest = told.source, told.target, told.longest
        self.most_tokens, self.beams, self.length_penalty = told.max_length, told.beams, told.length_penalty
        self.vocabulary = Vocabulary.from_bytes(read_whole(self.folder / VOCABULARY))

    def __repr__(self) -> str:
        told = f"{self.about.network}, {self.about.to} {self.about.precision}, {self.source} → {self.target}"
        return f"{type(self).__name__}({printable(str(self.folder))}: {told})"

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        assert self.about.translation is not None
        kept = self.about.translation.kept
        return BeamSearch(self._graphs, self.most_tokens, kept, beams, penalty).of_pieces(pieces, n_best)


@dataclass(frozen=True)
class BeamSearch:
    """Beam search that goes on until nothing better can come."""

    graphs: Mapping[str, Graph]
    max_length: int
    kept: int  # numbers that a layer keeps of a position
    beams: int
    penalty: float

    def of_pieces(self, pieces: Sequence[list[int]], n_best: int) -> list[list[Hypothesis]]:
        """The `n_best` translations of each sentence, best first."""
        width = max(map(len, pieces)) + 1
        source = np.array([[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in pieces], np.int64)
        at_least("beams", self.beams, 1)
        if not 1 <= n_best <= self.beams:
            raise UsageError(f"n_best is 1 to the number of beams ({self.beams}), given {n_best}")
        if not abs(self.penalty) <= MOST_PENALTY:
            raise UsageError(f"length_penalty is {self.penalty}, expected at most {MOST_PENALTY}")
        finished = self._search(source, n_best)
        if not all(finished):
            raise NumericalError("the graph gives no finite probabilities: the artefact or its run is broken")
        return [sorted(found, key=lambda hypothesis: -hypothesis.score)[:n_best] for found in finished]

    def _search(self, source: np.ndarray, wanted: int) -> list[list[Hypothesis]]:
        finished: list[list[Hypothesis]] = [[] for _ in source]
        lengths = (source != PAD).sum(1).tolist()
        limits = [max(0, min(int(MAX_LENGTH_A * n + MAX_LENGTH_B), self.max_length - 1)) for n in lengths]
        state = _State(self.graphs, source, self.beams, self.kept)
        alive = list(range(len(finished)))  # the sentence at each of the places
        tokens = np.full((len(alive), self.beams, max(limits) + 1), PAD, np.int64)
        tokens[..., 0] = BOS
        scores = np.full((len(alive), self.beams), -np.inf, np.float32)  # sums of log-probabilities
        scores[:, 0] = 0.0  # all rows of a sentence are the same: one is continued
        for position in range(max(limits) + 1):
            forced = [place for place, sentence in enumerate(alive) if limits[sentence] <= position]
            likely = _log_probabilities(state.step(tokens[..., position], position), forced)
            totals, origins, words = _candidates(likely, scores, self.beams)  # (B, 2K)
            ended = ((words == EOS) & np.isfinite(totals))[:, : self.beams]
            for place, candidate in np.argwhere(ended).tolist():
                text = tokens[place, origins[place, candidate], 1 : position + 1].tolist()
                total = float(totals[place, candidate])
                score = total / (position + 1) ** self.penalty
                finished[alive[place]].append(Hypothesis(tuple(text), score, total))
            first = np.argsort(words == EOS, axis=1, kind="stable")[:, : self.beams]  # the likeliest that go on
            scores, rows, words = (np.take_along_axis(each, first, 1) for each in (totals, origins, words))
            hopes = (scores[:, 0] / (position + 2) ** self.penalty).tolist()  # if they ended next
            stay = [
                place
                for place, s in enumerate(alive)
                if limits[s] > position
                and (len(finished[s]) < self.beams or hopes[place] > _nth_best(finished[s], wanted))
            ]
            if not stay:
                break
            scores, rows, words = scores[stay], rows[stay], words[stay]
            alive = [alive[place] for place in stay]
            state.reorder(np.array(stay)[:, None], rows)
            tokens = tokens[np.array(stay)[:, None], rows]
            tokens[..., position + 1] = words
        return finished


class _State:
    """What the sentences and the words so far have left, one row per beam."""

    def __init__(self, graphs: Mapping[str, Graph], source: np.ndarray, beams: int, kept: int) -> None:
        said = graphs[MODEL](source)
        self._step, self._keys, self._values, self._seen = graphs[STEP], said["keys"], said["values"], source != PAD
        layers, sentences = self._keys.shape[:2]
        # Positions there is room for come first, so that those that are filled are one piece of memory.
        self._past = np.zeros((FEWEST, layers, sentences, beams, kept), np.float32)

    def step(self, words: np.ndarray, position: int) -> np.ndarray:
        """The words (B, K) at a position → logits (B, K, V) of the next."""
        at, past = np.array([position], np.int64), self._past[: max(FEWEST, position)]
        said = self._step(np.ascontiguousarray(words), at, past, self._keys, self._values, self._seen)
        if position == len(self._past):
            self._past = np.concatenate([self._past, np.zeros_like(self._past)])
        self._past[position] = said["state"]
        return said["logits"]

    def reorder(self, sentences: np.ndarray, rows: np.ndarray) -> None:
        """Row i of a sentence becomes what row rows[i] was; sentences that are not named are left out."""
        if self._past.shape[3] > 1 or len(sentences) < self._keys.shape[1]:
            self._past = self._past[:, :, sentences, rows]
        if len(sentences) < self._keys.shape[1]:
            stay = sentences[:, 0]
            self._keys, self._values, self._seen = self._keys[:, stay], self._values[:, stay], self._seen[stay]


def _nth_best(found: list[Hypothesis], n: int) -> float:
    return sorted((hypothesis.score for hypothesis in found), reverse=True)[n - 1]


def _log_probabilities(logits: np.ndarray, forced: list[int]) -> np.ndarray:
    """(B, K, V); −∞ for PAD and BOS, and for all but EOS at the places in `forced`."""
    found = logits - logits.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    found[..., PAD] = found[..., BOS] = -np.inf
    if forced:
        end = found[forced, :, EOS]
        found[forced] = -np.inf
        found[forced, :, EOS] = end
    return found


def _candidates(likely: np.ndarray, scores: np.ndarray, beams: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 2·K likeliest continuations of each sentence, best first, (B, 2K) each: log-probability, beam, word."""
    kept = min(2 * beams, likely.shape[-1])
    best, words = _largest(likely, kept)  # (B, K, kept)
    totals, places = _largest((best + scores[..., None]).reshape(len(likely), -1), min(2 * beams, kept * beams))
    return totals, places // kept, np.take_along_axis(words.reshape(len(likely), -1), places, 1)


def _largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest of the last side, largest first, and where they are."""
    places = np.argpartition(-values, count - 1, axis=-1)[..., :count]
    found = np.take_along_axis(values, places, -1)
    order = np.argsort(-found, axis=-1, kind="stable")
    return np.take_along_axis(found, order, -1), np.take_along_axis(places, order, -1)
