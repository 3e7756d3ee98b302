"""Sentence pairs encoded as subwords, in memory: 2 bytes per subword for up to 65,536 pieces."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from patchloom.data.text.pairs import LeftOut, Pairs
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import Vocabulary

# Moses' limit for cleaning a corpus: beyond it the sides hardly mean the same. For WMT'14 the usual limit is 1.5.
MAX_RATIO = 9.0
# A part of a large text shows which subwords are frequent, and all lines to learn from are held in memory.
VOCABULARY_PAIRS = 4_000_000
_PAIRS_AT_ONCE = 10_000


@dataclass(frozen=True, eq=False)
class Sentences:
    """Concatenated sentences of any lengths, without BOS and EOS."""

    subwords: np.ndarray  # (all subwords,) uint16 or int32
    starts: np.ndarray  # (sentences + 1,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.subwords[self.starts[index] : self.starts[index + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the lengths (sentences,) int64."""
        return np.diff(self.starts)


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Both sides of the pairs that fit; pair i is at `places[i]` of the text."""

    source: Sentences
    target: Sentences
    places: np.ndarray  # (pairs,) int64
    left_out: tuple[LeftOut, ...]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def longest(self) -> tuple[int, int]:
        """Return the lengths of the longest source and target: weights of later positions were never trained."""
        return int(self.source.lengths.max()), int(self.target.lengths.max())


def learn_vocabulary(pairs: Pairs, size: int) -> Vocabulary:
    """Learn one vocabulary for both sides; for a large text, from an evenly spaced part of it."""
    return Vocabulary.train((side for pair in pairs.sample(VOCABULARY_PAIRS) for side in pair), size)


def encode_pairs(
    pairs: Pairs, vocabulary: Vocabulary, *, max_length: int, max_ratio: float | None = MAX_RATIO
) -> EncodedPairs:
    """Encode the pairs whose sides both have 1 … max_length − 1 subwords and differ by no more than the ratio.

    A network of `max_length` positions reads a source with its EOS, and a target after its BOS. Other pairs are skipped
    and listed with file and line; `max_ratio=None` accepts any ratio.
    """
    if max_length < 2 or (max_ratio is not None and max_ratio < 1):
        raise UsageError(f"max_length is {max_length} and max_ratio {max_ratio}; expected at least 2 and at least 1")
    kind = "H" if len(vocabulary) <= 2**16 else "i"
    subwords, lengths = (array(kind), array(kind)), (array("q"), array("q"))
    places = array("q")
    left_out: list[LeftOut] = []
    for place, both in enumerate(_encoded(pairs, vocabulary)):
        if reason := _unfit(len(both[0]), len(both[1]), max_length, max_ratio):
            left_out.append(LeftOut(pairs.where(place), reason))
            continue
        places.append(place)
        for ids, all_ids, count in zip(both, subwords, lengths, strict=True):
            all_ids.extend(ids)
            count.append(len(ids))
    if not places:
        first = f"; the first: {left_out[0].where}, {left_out[0].reason}" if left_out else ""
        raise DataError(f"None of {len(pairs)} pairs fits{first}")
    source, target = (
        Sentences(np.array(all_ids), np.concatenate([[0], np.cumsum(count, dtype=np.int64)]))
        for all_ids, count in zip(subwords, lengths, strict=True)
    )
    return EncodedPairs(source, target, np.array(places), tuple(left_out))


def _encoded(pairs: Pairs, vocabulary: Vocabulary) -> Iterator[tuple[list[int], list[int]]]:
    rest = iter(pairs)
    while some := list(islice(rest, _PAIRS_AT_ONCE)):
        sources, targets = zip(*some, strict=True)
        yield from zip(vocabulary.encode_all(sources), vocabulary.encode_all(targets), strict=True)


def _unfit(source: int, target: int, max_length: int, max_ratio: float | None) -> str:
    """Return why a pair is skipped, or ""."""
    if not source or not target:
        return "empty sentence"
    if max(source, target) > max_length - 1:
        return f"{source} and {target} subwords, at most {max_length - 1} fit"
    if max_ratio is not None and max(source, target) > max_ratio * min(source, target):
        return f"{source} and {target} subwords, a ratio above {max_ratio:g}"
    return ""
