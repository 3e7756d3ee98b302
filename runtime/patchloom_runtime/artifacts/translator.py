"""Translation with an artifact: an encoder, a decoder step, and beam search in numpy.

    model   source (B, S) → keys and values (L, B, H, S, d) for the cross-attention of the decoder layers
    step    the last words (B, K), their position, the state of the earlier positions (M, L, B, K, C'), keys, values and
            the mask of padding → logits (B, K, V), and the state of this position (L, B, K, C')

The search is the one of `patchloom/models/beam_search.py`. Letters: B sentences, K beams, L layers, M positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.metadata import read_whole
from patchloom_runtime.engines.engine import MODEL, Graph
from patchloom_runtime.errors import NumericalError, UsageError, at_least
from patchloom_runtime.printable import printable
from patchloom_runtime.text.line_translator import MAX_LENGTH_A, MAX_LENGTH_B, Hypothesis, LineTranslator
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD, Vocabulary

STEP, VOCABULARY = "step", "vocabulary.model"  # part and file
MOST_COUNT = 1 << 20
MIN_POSITIONS = 2  # passed to a step: some engines accept no axis of length 0 or 1
MOST_PENALTY = 10  # beyond it the scores of long sentences overflow


@dataclass(frozen=True)
class TranslationSettings:
    """Languages, limits and search settings of a translator."""

    source: str  # language
    target: str
    longest: int  # subwords of the longest source sentence in training
    max_length: int  # positions of the network
    kept: int  # numbers that a decoder layer stores per position
    beams: int  # default
    length_penalty: float


class ArtifactTranslator(Artifact, LineTranslator):
    """An exported translation model."""

    required_parts: ClassVar[tuple[str, ...]] = (MODEL, STEP)
    required_files: ClassVar[tuple[str, ...]] = (VOCABULARY,)
    takes_images = False
    settings_shape: ClassVar[Mapping[str, Any]] = {
        "translation": {
            "source": str,
            "target": str,
            "longest": int,
            "max_length": int,
            "kept": int,
            "beams": int,
            "length_penalty": float,
        }
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings: TranslationSettings = self.about.settings
        self.source, self.target, self.longest = settings.source, settings.target, settings.longest
        self.most_tokens, self.beams = settings.max_length, settings.beams
        self.length_penalty, self._state_size = settings.length_penalty, settings.kept
        self.vocabulary = Vocabulary.from_bytes(read_whole(self.folder / VOCABULARY))

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> TranslationSettings:
        fields = {name: values["translation"][name] for name in TranslationSettings.__dataclass_fields__}
        settings = TranslationSettings(**fields)
        counts = (settings.longest, settings.max_length, settings.kept, settings.beams)
        if not all(0 < count <= MOST_COUNT for count in counts):
            raise ValueError(
                f"longest, max_length, kept and beams of the translation are {counts}; "
                f"expected 1 to {MOST_COUNT:,} each"
            )
        return settings

    def __repr__(self) -> str:
        summary = f"{self.about.network}, {self.about.to} {self.about.precision}, {self.source} → {self.target}"
        return f"{type(self).__name__}({printable(str(self.folder))}: {summary})"

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        return BeamSearch(self._graphs, self.most_tokens, self._state_size, beams, penalty).of_pieces(pieces, n_best)


@dataclass(frozen=True)
class BeamSearch:
    """Beam search over the graphs of a translator. It stops when no better translation is possible."""

    graphs: Mapping[str, Graph]
    max_length: int
    state_size: int  # numbers that a decoder layer stores per position
    beams: int
    penalty: float

    def of_pieces(self, pieces: Sequence[list[int]], n_best: int) -> list[list[Hypothesis]]:
        """Return the `n_best` translations of each sentence, best first."""
        width = max(map(len, pieces)) + 1
        source = np.array([[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in pieces], np.int64)
        at_least("beams", self.beams, 1)
        if not 1 <= n_best <= self.beams:
            raise UsageError(f"n_best is {n_best}, expected 1 to the number of beams ({self.beams})")
        if not abs(self.penalty) <= MOST_PENALTY:
            raise UsageError(f"length_penalty is {self.penalty}, expected at most {MOST_PENALTY}")
        finished = self._search(source, n_best)
        if not all(finished):
            raise NumericalError("the graph returns no finite probabilities: the artifact or its run is broken")
        return [sorted(each, key=lambda hypothesis: -hypothesis.score)[:n_best] for each in finished]

    def _search(self, source: np.ndarray, wanted: int) -> list[list[Hypothesis]]:
        finished: list[list[Hypothesis]] = [[] for _ in source]
        lengths = (source != PAD).sum(1).tolist()
        limits = [max(0, min(int(MAX_LENGTH_A * n + MAX_LENGTH_B), self.max_length - 1)) for n in lengths]
        state = _DecoderState(self.graphs, source, self.beams, self.state_size)
        alive = list(range(len(finished)))  # the sentence of each row
        tokens = np.full((len(alive), self.beams, max(limits) + 1), PAD, np.int64)
        tokens[..., 0] = BOS
        scores = np.full((len(alive), self.beams), -np.inf, np.float32)  # sums of log-probabilities
        scores[:, 0] = 0.0  # the beams of a sentence are equal at first: continue only one
        for position in range(max(limits) + 1):
            forced = [row for row, sentence in enumerate(alive) if limits[sentence] <= position]
            likely = _log_probabilities(state.step(tokens[..., position], position), forced)
            totals, origins, words = _candidates(likely, scores, self.beams)  # (B, 2K)
            ended = ((words == EOS) & np.isfinite(totals))[:, : self.beams]
            for row, candidate in np.argwhere(ended).tolist():
                text = tokens[row, origins[row, candidate], 1 : position + 1].tolist()
                total = float(totals[row, candidate])
                score = total / (position + 1) ** self.penalty
                finished[alive[row]].append(Hypothesis(tuple(text), score, total))
            first = np.argsort(words == EOS, axis=1, kind="stable")[:, : self.beams]  # the likeliest unfinished ones
            scores, parents, words = (np.take_along_axis(each, first, 1) for each in (totals, origins, words))
            bounds = (
                scores[:, 0] / (position + 2) ** self.penalty
            ).tolist()  # scores if they ended at the next position
            stay = [
                row
                for row, sentence in enumerate(alive)
                if limits[sentence] > position
                and (len(finished[sentence]) < self.beams or bounds[row] > _nth_best(finished[sentence], wanted))
            ]
            if not stay:
                break
            scores, parents, words = scores[stay], parents[stay], words[stay]
            alive = [alive[row] for row in stay]
            state.reorder(np.array(stay)[:, None], parents)
            tokens = tokens[np.array(stay)[:, None], parents]
            tokens[..., position + 1] = words
        return finished


class _DecoderState:
    """Encoded sentences and the states of earlier positions, one row per beam."""

    def __init__(self, graphs: Mapping[str, Graph], source: np.ndarray, beams: int, state_size: int) -> None:
        encoded = graphs[MODEL](source)
        self._step, self._keys, self._values = graphs[STEP], encoded["keys"], encoded["values"]
        self._is_word = source != PAD
        layers, sentences = self._keys.shape[:2]
        # Positions are the first axis, so that the filled ones are contiguous in memory.
        self._past = np.zeros((MIN_POSITIONS, layers, sentences, beams, state_size), np.float32)

    def step(self, words: np.ndarray, position: int) -> np.ndarray:
        """Return the logits (B, K, V) of the next words, from the words (B, K) at a position."""
        at, past = np.array([position], np.int64), self._past[: max(MIN_POSITIONS, position)]
        result = self._step(np.ascontiguousarray(words), at, past, self._keys, self._values, self._is_word)
        if position == len(self._past):
            self._past = np.concatenate([self._past, np.zeros_like(self._past)])
        self._past[position] = result["state"]
        return result["logits"]

    def reorder(self, sentences: np.ndarray, parents: np.ndarray) -> None:
        """Replace beam i of each sentence by beam parents[i], and drop sentences that are not listed."""
        if self._past.shape[3] > 1 or len(sentences) < self._keys.shape[1]:
            self._past = self._past[:, :, sentences, parents]
        if len(sentences) < self._keys.shape[1]:
            stay = sentences[:, 0]
            self._keys, self._values, self._is_word = self._keys[:, stay], self._values[:, stay], self._is_word[stay]


def _nth_best(hypotheses: list[Hypothesis], n: int) -> float:
    return sorted((hypothesis.score for hypothesis in hypotheses), reverse=True)[n - 1]


def _log_probabilities(logits: np.ndarray, forced: list[int]) -> np.ndarray:
    """Return (B, K, V): −∞ for PAD and BOS, and for all but EOS in the rows in `forced`."""
    result = logits - logits.max(-1, keepdims=True)
    result -= np.log(np.exp(result).sum(-1, keepdims=True))
    result[..., PAD] = result[..., BOS] = -np.inf
    if forced:
        end = result[forced, :, EOS]
        result[forced] = -np.inf
        result[forced, :, EOS] = end
    return result


def _candidates(likely: np.ndarray, scores: np.ndarray, beams: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probability, beam and word, (B, 2K) each, of the 2·K likeliest continuations, best first."""
    count = min(2 * beams, likely.shape[-1])
    best, words = _largest(likely, count)  # (B, K, count)
    totals, indices = _largest((best + scores[..., None]).reshape(len(likely), -1), min(2 * beams, count * beams))
    return totals, indices // count, np.take_along_axis(words.reshape(len(likely), -1), indices, 1)


def _largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest values along the last axis, largest first, and their indices."""
    indices = np.argpartition(-values, count - 1, axis=-1)[..., :count]
    largest = np.take_along_axis(values, indices, -1)
    order = np.argsort(-largest, axis=-1, kind="stable")
    return np.take_along_axis(largest, order, -1), np.take_along_axis(indices, order, -1)
