"""How good translations are: hypotheses beside references, in the percent that papers print.

name              value
bleu              sacreBLEU: cased, tokenised by 13a; `signature` says exactly which
bleu_tokenised    BLEU of words and marks as `data/text/words.py` finds them, cased
bleu_lowercase    the same, lower-cased: what Multi30k's papers print
bleu_compound     tokenised and cased, hyphens inside words as tokens of their own: what WMT'14 En-De papers print;
                  about half a point higher in German
chrf              chrF2 of sacrebleu
exact             translations that are their reference, to the letter
sentences         pairs counted

loss              mean −log p of the reference's tokens, in nats, by `token_loss`
perplexity        exp(loss)
tokens            target tokens counted, EOS included
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchloom.data.text.token_batches import SentenceBatch
from patchloom.data.text.words import words
from patchloom.evaluation.classification import in_eval_mode
from patchloom.objectives.translation import token_losses
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import PAD

# As fairseq's script for WMT: of two hyphens around one letter it splits the first.
_COMPOUND = re.compile(r"(\S)-(\S)")


@dataclass(frozen=True)
class TranslationScores:
    """Scores of one test set, 0 … 100."""

    bleu: float
    bleu_tokenised: float
    bleu_lowercase: float
    bleu_compound: float
    chrf: float
    exact: float
    sentences: int
    signature: str  # of `bleu`: what makes it comparable
    chrf_signature: str

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for name in ("bleu", "bleu_tokenised", "bleu_lowercase", "bleu_compound", "chrf", "exact"):
            yield name, getattr(self, name)
        yield "sentences", float(self.sentences)


def translation_scores(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> TranslationScores:
    """All scores of translations into `language`, a reference each."""
    metrics = _metrics()
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses):,} translations and {len(references):,} references; expected one reference each"
        )
    for what, lines in (("translation", hypotheses), ("reference", references)):
        for number, line in enumerate(lines, 1):
            if "\n" in line:
                raise DataError(f"{what} {number} has a line break in it; expected one line per sentence")
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    plain = bleu.corpus_score(hypotheses, [references]).score
    characters = chrf.corpus_score(hypotheses, [references]).score
    tokens = [[" ".join(words(line, language)) for line in lines] for lines in (hypotheses, references)]
    compounds = [[split_compounds(line) for line in lines] for lines in tokens]
    return TranslationScores(
        bleu=plain,
        bleu_tokenised=_bleu_of_tokens(metrics, tokens),
        bleu_lowercase=_bleu_of_tokens(metrics, tokens, lowercase=True),
        bleu_compound=_bleu_of_tokens(metrics, compounds),
        chrf=characters,
        exact=100 * sum(map(str.__eq__, hypotheses, references)) / len(references),
        sentences=len(references),
        signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def split_compounds(line: str) -> str:
    """'a well-known' → 'a well ##AT##-##AT## known'."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


@torch.no_grad()
def token_loss(model: nn.Module, batches: Iterable[SentenceBatch]) -> Iterator[tuple[str, float]]:
    """How well the network foretells references: `loss`, `perplexity`, `tokens`; of every row once."""
    device = next(model.parameters()).device
    total, tokens = torch.zeros(2, dtype=torch.float64, device=device)
    with in_eval_mode(model):
        for given in batches:
            batch = given.to(device, non_blocking=True)
            labels = batch.target[:, 1:]
            _, nll = token_losses(model(batch.source, batch.target[:, :-1]), labels)
            counted = batch.weight > 0
            total += nll.sum(dim=1, dtype=torch.float64)[counted].sum()
            tokens += (labels != PAD)[counted].sum()
    if not tokens:
        raise DataError("There is no target token to evaluate on.")
    loss = (total / tokens).item()
    yield "loss", loss
    yield "perplexity", float(torch.tensor(loss, dtype=torch.float64).exp())
    yield "tokens", float(tokens)


def _bleu_of_tokens(metrics: Any, sides: list[list[str]], lowercase: bool = False) -> float:
    # force: sacrebleu warns of text that looks tokenised, as this is meant to be.
    hypotheses, references = sides
    metric = metrics.BLEU(tokenize="none", force=True, lowercase=lowercase)
    return metric.corpus_score(hypotheses, [references]).score


def _metrics() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError:
        raise UsageError("BLEU and chrF need sacrebleu; pip install 'patchloom[translate]'") from None
    return sacrebleu.metrics
