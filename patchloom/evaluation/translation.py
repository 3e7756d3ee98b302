"""Translation metrics from hypotheses and references, in percent as in papers.

name              value
bleu              sacreBLEU: cased, tokenized by 13a; `signature` defines it exactly
bleu_tokenised    cased BLEU of words and punctuation as split by `data/text/words.py`
bleu_lowercase    the same, lowercased: reported in papers on Multi30k
bleu_compound     tokenized and cased, with hyphens inside words as separate tokens: reported in papers on WMT'14 En-De;
                  about half a point higher in German
chrf              sacrebleu's chrF2
exact             translations equal to their reference
sentences         number of pairs

loss              mean −log p of the reference's tokens, in nats, from `token_loss`
perplexity        exp(loss)
tokens            number of target tokens, EOS included
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
from patchloom.machine import widest_float
from patchloom.objectives.translation import token_losses
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import PAD

# As in fairseq's script for WMT: of two hyphens around one letter it splits the first.
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
    signature: str  # definition of `bleu`, for comparability
    chrf_signature: str

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for name in ("bleu", "bleu_tokenised", "bleu_lowercase", "bleu_compound", "chrf", "exact"):
            yield name, getattr(self, name)
        yield "sentences", float(self.sentences)


def translation_scores(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> TranslationScores:
    """Return all scores of translations into `language`, one reference each."""
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
    """Split compounds: 'a well-known' → 'a well ##AT##-##AT## known'."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


@torch.no_grad()
def token_loss(model: nn.Module, batches: Iterable[SentenceBatch]) -> Iterator[tuple[str, float]]:
    """Yield `loss`, `perplexity` and `tokens` of the references under the network; each row counts once."""
    device = next(model.parameters()).device
    wide = widest_float(device)
    total, tokens = torch.zeros(2, dtype=wide, device=device)
    with in_eval_mode(model):
        for host_batch in batches:
            batch = host_batch.to(device, non_blocking=True)
            labels = batch.target[:, 1:]
            _, nll = token_losses(model(batch.source, batch.target[:, :-1]), labels)
            counted = batch.weight > 0
            total += nll.sum(dim=1, dtype=wide)[counted].sum()
            tokens += (labels != PAD)[counted].sum()
    if not tokens:
        raise DataError("There is no target token to evaluate on.")
    loss = (total / tokens).item()
    yield "loss", loss
    yield "perplexity", float(torch.tensor(loss, dtype=torch.float64).exp())
    yield "tokens", float(tokens)


def _bleu_of_tokens(metrics: Any, sides: list[list[str]], lowercase: bool = False) -> float:
    # force: sacrebleu warns about tokenized text, which is intended here.
    hypotheses, references = sides
    metric = metrics.BLEU(tokenize="none", force=True, lowercase=lowercase)
    return metric.corpus_score(hypotheses, [references]).score


def _metrics() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError:
        raise UsageError("BLEU and chrF need sacrebleu. Install it with: pip install 'patchloom[translate]'") from None

    return sacrebleu.metrics
