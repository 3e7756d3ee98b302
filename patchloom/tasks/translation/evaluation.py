"""Evaluation of translators against references; every line of a split is translated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchloom.data.text.encoded import encode_pairs
from patchloom.data.text.pairs import Pairs, Spec, open_splits
from patchloom.data.text.token_batches import TokenLoader
from patchloom.evaluation.translation import TranslationScores, token_loss, translation_scores
from patchloom.tasks.translation.model import Translator
from patchloom_runtime.errors import DataError

TOKENS = 8192  # per batch; a longer sentence is a batch alone


@dataclass(frozen=True, eq=False)
class TextEvaluation:
    """Scores of one split, the loss of its references, and the translations."""

    scores: TranslationScores
    losses: dict[str, float]  # empty if no pair fits the network
    sources: Sequence[str]
    references: Sequence[str]
    translations: Sequence[str]
    notes: Sequence[str]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield from self.scores
        yield from self.losses.items()


def evaluate_text(
    translator: Translator, spec: Spec, *, split: str | None = None, **search: Any
) -> dict[str, TextEvaluation]:
    """Return the scores by split; by default, of all tests of the text, else of val. `search`: see `translate`."""
    splits = open_splits(spec, translator.source, translator.target, split)
    return {name: evaluate_pairs(translator, pairs, **search) for name, pairs in splits.items()}


def evaluate_pairs(translator: Translator, pairs: Pairs, **search: Any) -> TextEvaluation:
    """Translate the sources and compare with the references."""
    sources, references = pairs.sources(), pairs.targets()
    best = [hypotheses[0] for hypotheses in translator.translate(sources, **search)]
    translations = [each.text for each in best]
    scores = translation_scores(translations, references, translator.target)
    notes = []
    if untrained := sum(each.untrained for each in best):
        notes.append(f"{untrained:,} sources have a sentence longer than any of training")
    losses: dict[str, float] = {}
    max_length = translator.network.config.max_length
    try:
        encoded = encode_pairs(pairs, translator.vocabulary, max_length=max_length, max_ratio=None)
    except DataError as error:
        notes.append(f"no loss: {error}")
    else:
        losses = dict(
            token_loss(translator.network, TokenLoader(encoded, tokens=max(TOKENS, max_length), shuffle=False).epoch(0))
        )
        if encoded.left_out:
            first = encoded.left_out[0]
            notes.append(f"{len(encoded.left_out):,} pairs have no loss, first {first.where}: {first.reason}")
    return TextEvaluation(scores, losses, sources, references, translations, tuple(notes))
