"""Lines translated, in their order, whatever searches for the words. Without torch: it is part of the runtime.

Of a line with more subwords than any of training, each sentence is translated by itself. A sentence that does not fit
the network is cut at spaces, and a word that does not fit between characters, into pieces as long as training knew.
Translations of pieces are joined by spaces, so nothing is left out. An empty line stays empty.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from patchloom_runtime.errors import at_least
from patchloom_runtime.text.cleaning import clean
from patchloom_runtime.text.hypothesis import Hypothesis
from patchloom_runtime.text.vocabulary import Vocabulary

# Lines that are looked at together, so that those of equal length can be translated together.
WINDOW = 1024
ROWS = 64
# A translation longer than that goes in circles.
MAX_LENGTH_A, MAX_LENGTH_B = 2.0, 50

_SENTENCE_END = re.compile(r"(?<=[.!?…]) +|(?<=[。！？])")


@dataclass(frozen=True)
class LineTranslation:
    """One translation of a line."""

    text: str  # without line breaks
    score: float  # log-probability / tokens ** length penalty, EOS counted; 0 of an empty line
    untrained: bool = False  # the source has a sentence longer than any of training: do not trust it


class LineTranslator(ABC):
    """Lines in, lines out."""

    vocabulary: Vocabulary
    source: str  # languages
    target: str
    longest: int  # subwords of the longest source that was trained on
    most_tokens: int  # positions of the network
    beams: int  # where nothing else is asked for
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
        """The `n_best` translations of each line, best first; beams and penalty are the recipe's if not given.

        Lines are taken as they are needed, up to 1,024 ahead; of an endless stream, no more is kept.
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
        found: list[list[Hypothesis]] = [[] for _ in every]
        order = sorted(range(len(every)), key=lambda place: len(every[place]))
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            hypotheses = self._search([every[place] for place in places], beams, penalty, n_best)
            for place, of_piece in zip(places, hypotheses, strict=True):
                found[place] = of_piece
        done = iter(found)
        for of_line in pieces:
            parts = list(islice(done, len(of_line)))
            untrained = any(len(ids) > self.longest for ids in of_line)
            yield self._joined(parts, penalty, untrained) if parts else [LineTranslation("", 0.0)]

    @abstractmethod
    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        """The `n_best` translations of each piece, best first."""

    def _joined(self, parts: Sequence[list[Hypothesis]], penalty: float, untrained: bool) -> list[LineTranslation]:
        """The best of all pieces together, the second best together …"""
        out = []
        for hypotheses in zip(*parts, strict=False):
            tokens = sum(len(hypothesis.tokens) + 1 for hypothesis in hypotheses)
            score = sum(hypothesis.log_probability for hypothesis in hypotheses) / tokens**penalty
            # A network may spell a line break in bytes; `clean` makes it a space, so that lines stay lines.
            texts = [clean(self.vocabulary.decode(hypothesis.tokens)) for hypothesis in hypotheses]
            out.append(LineTranslation(" ".join(filter(None, texts)), score, untrained))
        return out

    def _pieces(self, line: str) -> list[list[int]]:
        """What is translated by itself, as subwords; the whole line where it is not too long."""
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
        """Neighbours together as long as they have at most so many subwords; one that alone has more is left so."""
        counts = [len(ids) for ids in self.vocabulary.encode_all(parts)]
        packed, total = "", 0
        for part, count in zip(parts, counts, strict=True):
            # Parts have at most as many subwords together as apart.
            if packed and total + count > most:
                yield packed
                packed, total = "", 0
            packed = f"{packed} {part}" if packed else part
            total += count
        if packed:
            yield packed

    def _cut(self, word: str, most: int) -> list[str]:
        """Halves, quarters … of a word until each fits."""
        if len(word) == 1 or len(self.vocabulary.encode(word)) <= most:
            return [word]
        middle = len(word) // 2
        return self._cut(word[:middle], most) + self._cut(word[middle:], most)
