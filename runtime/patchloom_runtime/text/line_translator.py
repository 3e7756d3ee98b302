"""Translation line by line, independent of what searches for the words.

A line with more subwords than any in training is split into sentences. A sentence that does not fit the network is
split at spaces, and a word that does not fit between characters, into pieces as long as those of training. The
translations of pieces are joined by spaces, so nothing is lost. An empty line stays empty.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from patchloom_runtime.errors import at_least
from patchloom_runtime.text.vocabulary import Vocabulary, clean

WINDOW = 1024  # lines read ahead, so that those of similar length share a batch
ROWS = 64
MAX_LENGTH_A, MAX_LENGTH_B = 2.0, 50  # a translation longer than A · source length + B repeats itself

_SENTENCE_END = re.compile(r"(?<=[.!?…]) +|(?<=[。！？])")


@dataclass(frozen=True)
class Hypothesis:
    """One result of a search for translations."""

    tokens: tuple[int, ...]  # without BOS and EOS
    score: float  # log_probability / length**length_penalty, where the length counts EOS
    log_probability: float  # natural, of the tokens and EOS


@dataclass(frozen=True)
class LineTranslation:
    """One translation of a line."""

    text: str  # without line breaks
    score: float  # log-probability / tokens ** length penalty, EOS counted; 0 for an empty line
    untrained: bool = False  # the source has a sentence longer than any in training: do not trust it


class LineTranslator(ABC):
    """Base class of models that translate lines of text."""

    vocabulary: Vocabulary
    source: str  # language
    target: str
    longest: int  # subwords of the longest source sentence in training
    most_tokens: int  # positions of the network
    beams: int  # default
    length_penalty: float

    def translate(
        self,
        lines: Iterable[str],
        *,
        beams: int | None = None,
        length_penalty: float | None = None,
        batch: int = ROWS,
        n_best: int = 1,
    ) -> Iterator[list[LineTranslation]]:
        """Yield the `n_best` translations of each line, best first. Beams and penalty default to the recipe's.

        Lines are read when they are needed, at most 1,024 ahead, so `lines` may be an endless stream.
        """
        at_least("batch", batch, 1)
        beams = max(n_best, self.beams) if beams is None else beams
        penalty = self.length_penalty if length_penalty is None else length_penalty
        rest = iter(lines)
        while window := [clean(line) for line in islice(rest, WINDOW)]:
            yield from self._translated(window, beams, penalty, batch, n_best)

    def _translated(
        self, lines: Sequence[str], beams: int, penalty: float, batch: int, n_best: int
    ) -> Iterator[list[LineTranslation]]:
        pieces = [self._pieces(line) for line in lines]
        every = [ids for of_line in pieces for ids in of_line]
        results: list[list[Hypothesis]] = [[] for _ in every]
        order = sorted(range(len(every)), key=lambda row: len(every[row]))
        for start in range(0, len(order), batch):
            batch_rows = order[start : start + batch]
            hypotheses = self._search([every[row] for row in batch_rows], beams, penalty, n_best)
            for row, of_piece in zip(batch_rows, hypotheses, strict=True):
                results[row] = of_piece
        remaining = iter(results)
        for of_line in pieces:
            parts = list(islice(remaining, len(of_line)))
            untrained = any(len(ids) > self.longest for ids in of_line)
            yield self._joined(parts, penalty, untrained) if parts else [LineTranslation("", 0.0)]

    @abstractmethod
    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        """Return the `n_best` translations of each piece, best first."""

    def _joined(self, parts: Sequence[list[Hypothesis]], penalty: float, untrained: bool) -> list[LineTranslation]:
        """Join the best translations of all pieces, then the second best, and so on."""
        joined = []
        for hypotheses in zip(*parts, strict=False):
            tokens = sum(len(hypothesis.tokens) + 1 for hypothesis in hypotheses)
            score = sum(hypothesis.log_probability for hypothesis in hypotheses) / tokens**penalty
            # A network may spell a line break in bytes; `clean` replaces it by a space.
            texts = [clean(self.vocabulary.decode(hypothesis.tokens)) for hypothesis in hypotheses]
            joined.append(LineTranslation(" ".join(filter(None, texts)), score, untrained))
        return joined

    def _pieces(self, line: str) -> list[list[int]]:
        """Split a line into the pieces that are translated separately, as subwords."""
        if not line:
            return []
        ids = self.vocabulary.encode(line)
        most = self.most_tokens - 1
        usual = min(self.longest, most)
        if len(ids) <= usual:
            return [ids]
        pieces: list[list[int]] = []
        for sentence in self._packed(_SENTENCE_END.split(line), usual):
            ids = self.vocabulary.encode(sentence)
            if len(ids) <= most:
                pieces.append(ids)
                continue
            for words in self._packed(sentence.split(" "), usual):
                pieces += [self.vocabulary.encode(part) for part in self._cut(words, usual)]
        return [ids for ids in pieces if ids]

    def _packed(self, parts: Sequence[str], most: int) -> Iterator[str]:
        """Join neighboring parts to at most `most` subwords. A single part with more is returned as it is."""
        counts = [len(ids) for ids in self.vocabulary.encode_all(parts)]
        packed, total = "", 0
        for part, count in zip(parts, counts, strict=True):
            # Joined parts never have more subwords than separate ones.
            if packed and total + count > most:
                yield packed
                packed, total = "", 0
            packed = f"{packed} {part}" if packed else part
            total += count
        if packed:
            yield packed

    def _cut(self, word: str, most: int) -> list[str]:
        """Halve a word until each part fits."""
        if len(word) == 1 or len(self.vocabulary.encode(word)) <= most:
            return [word]
        middle = len(word) // 2
        return self._cut(word[:middle], most) + self._cut(word[middle:], most)
