"""Sentence pairs in batches with a token budget.

Letters: B pairs of a batch, S and T positions of its longest source and target.

Pairs are sorted by their longer side and cut into batches so that B · max(S, T − 1) stays within the budget. Every
epoch shuffles pairs of equal length, and the order of the batches. Most pairs of a batch therefore change, while its
lengths, and hence the number of batches, are the same in every epoch: the learning-rate schedule needs that number. The
order follows from (seed, epoch), so a run resumes from any step. In Multi30k's batches of 4,096 tokens, 93 % is text
and 7 % padding; sorting by both sides would save 1 to 3 % and mix the pairs less.

Several processes divide the rows of each batch, and an accumulating run divides them again. The loss is a mean over the
target tokens of the whole batch, which no process sees alone: `weight` scales each row's summed loss so that a mean
over rows, taken in any parts and averaged over processes, equals that mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from patchloom.data.batches.sampler import epoch_order, mixed_seeds
from patchloom.data.text.encoded import EncodedPairs, Sentences
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD

# Batches with more rows than this have a multiple of it: processes then get equal shares, and a GPU full tiles.
_ROWS_MULTIPLE = 8
NOBODY = -1  # the index of a padding row


@dataclass(frozen=True)
class SentenceBatch:
    """Pairs of one step, of one process; padded at the right."""

    source: Tensor  # (B, S) int64: subwords, EOS
    target: Tensor  # (B, T) int64: BOS, subwords, EOS
    index: Tensor  # (B,) int64, in the text; −1 for a row that only makes processes equal
    weight: Tensor  # (B,) float32: rows of this process · processes / target tokens of all; 0 where index is −1
    batch_tokens: Tensor  # (B,) int64: target tokens, EOS included, of all processes' rows

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SentenceBatch":
        """Return the same batch on another device."""
        return SentenceBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors()))

    def split(self, parts: int) -> "list[SentenceBatch]":
        """Split into at most `parts` micro-batches of consecutive rows, as equal as possible."""
        rows = [tensor.tensor_split(min(parts, len(self))) for tensor in self._tensors()]
        return [SentenceBatch(*part) for part in zip(*rows, strict=True)]

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


class TokenLoader:
    """A loader of encoded pairs in batches of at most `tokens`, over all processes; this one yields its rows.

    Each process gets the same number of rows, so that all do the same work; if they do not divide evenly, a repeated
    row with weight 0 is added. Without `shuffle`, batches are ordered from short to long.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"Process {rank} of {world} does not exist; processes are numbered from 0.")
        if seed < 0:
            raise UsageError(f"The seed is {seed}, expected 0 or more.")
        if not len(pairs):
            raise DataError("There are no pairs to make batches of.")
        longer = np.maximum(pairs.source.lengths, pairs.target.lengths) + 1  # with its EOS
        if longer.max() > tokens:
            raise UsageError(
                f"A batch of {tokens} tokens cannot hold a sentence of {longer.max()}. "
                f"Use at least {longer.max()} tokens, or a smaller max_length."
            )
        self.broken: dict[int, str] = {}  # everything has been read already
        self._pairs, self._seed, self._shuffle, self._pin = pairs, seed, shuffle, pin
        self._rank, self._world = rank, world
        self._longer = longer
        self._cuts = _cuts(np.sort(longer), tokens)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._cuts) - 1

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[SentenceBatch]:
        """Yield the batches of `epoch` from `start_step` on."""
        order = epoch_order(len(self._pairs), self._seed, epoch, self._shuffle)
        order = order[np.argsort(self._longer[order], kind="stable")]
        batches = np.arange(self.steps_per_epoch)
        if self._shuffle:
            batches = np.argsort(mixed_seeds(self._seed, epoch, 0, batches), kind="stable")
        for number in batches[start_step:]:
            yield self._batch(order[self._cuts[number] : self._cuts[number + 1]])

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def _batch(self, rows: np.ndarray) -> SentenceBatch:
        """Return this process's share of the pairs at `rows`."""
        pairs = self._pairs
        longest = pairs.source.lengths[rows].max(), pairs.target.lengths[rows].max()
        tokens = int((pairs.target.lengths[rows] + 1).sum())
        share = -(-len(rows) // self._world)
        own = rows[self._rank :: self._world]
        missing = share - len(own)
        own = np.concatenate([own, rows[:missing]])
        filling = np.arange(share) >= share - missing
        source = _padded(pairs.source, own, longest[0] + 1)
        target = _padded(pairs.target, own, longest[1] + 2, first=BOS)
        index = np.where(filling, NOBODY, pairs.places[own])
        weight = np.where(filling, 0.0, share * self._world / tokens).astype(np.float32)
        arrays = (source, target, index, weight, np.full(share, tokens))
        tensors = [torch.from_numpy(array) for array in arrays]
        return SentenceBatch(*(tensor.pin_memory() for tensor in tensors) if self._pin else tensors)


def _cuts(longer: np.ndarray, tokens: int) -> np.ndarray:
    """Return where batches begin, and the end, in pairs sorted by their longer side."""
    cuts = [0]
    while (start := cuts[-1]) < len(longer):
        # As many rows as would fit if all had the length of the first, then fewer if the last one is too long.
        rows = min(tokens // int(longer[start]), len(longer) - start)
        fits = longer[start : start + rows] * np.arange(1, rows + 1) <= tokens
        rows = int(fits.sum())
        if rows > _ROWS_MULTIPLE and start + rows < len(longer):
            rows -= rows % _ROWS_MULTIPLE
        cuts.append(start + rows)
    return np.array(cuts)


def _padded(sentences: Sentences, rows: np.ndarray, width: int, first: int | None = None) -> np.ndarray:
    """Return (rows, width) int64: `first` if any, the subwords, EOS, padding."""
    begin = int(first is not None)
    out = np.full((len(rows), width), PAD, dtype=np.int64)
    if first is not None:
        out[:, 0] = first
    lengths = sentences.lengths[rows]
    columns = np.arange(width)
    inside = (columns >= begin) & (columns < begin + lengths[:, None])
    at = np.repeat(sentences.starts[rows] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    out[inside] = sentences.subwords[at]
    out[np.arange(len(rows)), begin + lengths] = EOS
    return out
