"""Evaluation of a translation network during training."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from patchloom.data.text.token_batches import TokenLoader
from patchloom.engine.distribution import unwrap
from patchloom.evaluation.translation import token_loss, translation_scores
from patchloom.tasks.task import Judge
from patchloom.tasks.translation.plan import TextPlan
from patchloom.tasks.translation.translator import Translator

GREEDY_SENTENCES = 200  # of val, translated at every evaluation: about a second


class TranslationJudge(Judge):
    """Loss and perplexity of val, and BLEU and exact matches of some greedy translations. Every rank computes all."""

    metric = "loss"
    lower_is_better = True

    def __init__(self, plan: TextPlan) -> None:
        text, recipe, corpus = plan.text, plan.recipe, plan.encoded
        tokens = max(recipe.optim.batch_size, recipe.text.max_length)  # val may have the longest sentence
        self._batches = TokenLoader(corpus.val, tokens=tokens, shuffle=False)
        self._sources, self._references = map(list, zip(*islice(text.val, GREEDY_SENTENCES), strict=True))
        self._corpus, self._languages = corpus, (text.source, text.target)

    def report(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        network: Any = unwrap(model)
        yield from ((name, value) for name, value in token_loss(network, self._batches.epoch(0)) if name != "tokens")
        longest = self._corpus.train.longest[0]
        translator = Translator(network, self._corpus.vocabulary, languages=self._languages, longest=longest)
        translations = [best.text for best, *_ in translator.translate(self._sources, beams=1)]
        scores = translation_scores(translations, self._references, self._languages[1])
        yield "bleu_greedy", scores.bleu
        yield "exact_greedy", scores.exact
