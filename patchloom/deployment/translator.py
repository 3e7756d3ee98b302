"""A trained translation network as it is used: lines in, lines out, in their order.

Of a line with more subwords than any of training, each sentence is translated by itself. A sentence that does not fit
the network is cut at spaces, and a word that does not fit between characters, into pieces as long as training knew.
Translations of pieces are joined by spaces, so nothing is left out. An empty line stays empty.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from patchloom.data.text.sentences import clean
from patchloom.data.text.special_tokens import EOS, PAD
from patchloom.data.text.vocabulary import Vocabulary
from patchloom.engine.devices import kind_of
from patchloom.errors import at_least, with_near_options
from patchloom.models.beam_search import Hypothesis, beam_search
from patchloom.models.seq2seq import Seq2Seq
from patchloom.recipes.parts import TextPart
from patchloom.runs.named import is_on_hub, run_folder
from patchloom.runs.translation import TranslationFiles, load_seq2seq

# Lines that are looked at together, so that those of equal length can be translated together.
WINDOW = 1024
ROWS = 64
# A translation longer than that goes in circles.
MAX_LENGTH_A, MAX_LENGTH_B = 2.0, 50

_SENTENCE_END = re.compile(r"(?<=[.!?…]) +|(?<=[。！？])")


@dataclass(frozen=True)
class Translated:
    """One translation of a line."""

    text: str  # without line breaks
    score: float  # log-probability / tokens ** length penalty, EOS counted; 0 of an empty line
    untrained: bool = False  # the source has a sentence longer than any of training: do not trust it


class Translator:
    """A network in eval mode, its vocabulary and its languages."""

    def __init__(
        self,
        network: Seq2Seq,
        vocabulary: Vocabulary,
        *,
        languages: tuple[str, str],
        longest: int,
        search: TextPart | None = None,
    ) -> None:
        self.network, self.vocabulary = network, vocabulary
        self.source, self.target = languages
        self.longest = longest  # subwords of the longest source that was trained on
        self.search = search or TextPart()

    @classmethod
    def of(cls, network: Seq2Seq, files: TranslationFiles) -> "Translator":
        """The translator of a run."""
        return cls(
            network,
            files.vocabulary,
            languages=(files.source, files.target),
            longest=files.longest[0],
            search=files.recipe.text if files.recipe else None,
        )

    def translate(
        self,
        lines: Iterable[str],
        *,
        beams: int | None = None,
        length_penalty: float | None = None,
        batch: int = ROWS,
        n_best: int = 1,
    ) -> Iterator[list[Translated]]:
        """The `n_best` translations of each line, best first; beams and penalty are the recipe's if not given.

        Lines are taken as they are needed, up to 1,024 ahead; of an endless stream, no more is kept.
        """
        at_least("batch", batch, 1)
        beams = max(n_best, self.search.beams) if beams is None else beams
        penalty = self.search.length_penalty if length_penalty is None else length_penalty
        rest = iter(lines)
        while window := [clean(line) for line in islice(rest, WINDOW)]:
            yield from self._translated(window, beams, penalty, batch, n_best)

    def _translated(
        self, lines: Sequence[str], beams: int, penalty: float, batch: int, n_best: int
    ) -> Iterator[list[Translated]]:
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
            yield self._joined(parts, penalty, untrained) if parts else [Translated("", 0.0)]

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        width = max(map(len, pieces)) + 1
        rows = [[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in pieces]
        source = torch.tensor(rows, device=self.network.embedding.weight.device)
        return beam_search(
            self.network,
            source,
            beams=beams,
            length_penalty=penalty,
            max_length_a=MAX_LENGTH_A,
            max_length_b=MAX_LENGTH_B,
            n_best=n_best,
            stop_early=False,
        )

    def _joined(self, parts: Sequence[list[Hypothesis]], penalty: float, untrained: bool) -> list[Translated]:
        """The best of all pieces together, the second best together …"""
        out = []
        for hypotheses in zip(*parts, strict=False):
            tokens = sum(len(hypothesis.tokens) + 1 for hypothesis in hypotheses)
            score = sum(hypothesis.log_probability for hypothesis in hypotheses) / tokens**penalty
            # A network may spell a line break in bytes; `clean` makes it a space, so that lines stay lines.
            texts = [clean(self.vocabulary.decode(hypothesis.tokens)) for hypothesis in hypotheses]
            out.append(Translated(" ".join(filter(None, texts)), score, untrained))
        return out

    def _pieces(self, line: str) -> list[list[int]]:
        """What is translated by itself, as subwords; the whole line where it is not too long."""
        if not line:
            return []
        ids = self.vocabulary.encode(line)
        most = self.network.config.max_length - 1
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


@with_near_options
def load_translator(folder: str | Path, *, device: str = "auto") -> Translator:
    """The translator of a run's folder, or of a repository of the Hugging Face hub, 'hub:user/name'."""
    network, files = load_seq2seq(run_folder(folder) if is_on_hub(folder) else Path(folder))
    kind = kind_of(None if device == "auto" else device)
    return Translator.of(network.to(kind if device == "auto" else device), files)
