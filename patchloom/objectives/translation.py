"""Translation: predicting each target token from the source and the preceding target tokens.

Letters: B pairs, S and T positions of source and target, V pieces of the vocabulary. The network is called as
`model(source (B, S), target (B, T − 1)) → logits (B, T − 1, V)`: from BOS … it predicts … EOS.

The loss is a mean over the target tokens of the whole batch, without padding. Smoothing puts ε/V on every piece, as
torch's cross-entropy does; fairseq puts ε/(V − 1) on every other one. The two differ by a factor of V/(V − 1) in ε.
"""

import torch
from torch import Tensor, nn

from patchloom.data.text.token_batches import SentenceBatch
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.objective import Ingredients, Objective
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.vocabulary import PAD

CHARTS: dict[str, dict[str, str]] = {}  # charts of a report: title → curve → metric name


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return smoothed loss and −log p(label) per token, (B, T) each, 0 at padding, from (B, T, V) and (B, T).

    Loss = −Σ_v q_v log p_v with q = (1 − ε)·[v is the label] + ε/V.
    """
    log_p = at_least_float32(logits).log_softmax(dim=-1)
    padding = labels == PAD
    nll = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).masked_fill(padding, 0.0)
    if not smoothing:
        return nll, nll
    even = -log_p.mean(dim=-1).masked_fill(padding, 0.0)
    return (1 - smoothing) * nll + smoothing * even, nll


class TranslationObjective(Objective):
    """Smoothed cross-entropy of sentence pairs.

    `nll` is the loss without smoothing, so exp(nll) is the perplexity; `tokens` counts the target tokens of the step.
    `loss`, `nll` and `tokens` are weighted (`SentenceBatch.weight`) so that their means over micro-batches and
    processes are those of the whole batch.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing is {smoothing}, expected a number from 0 to below 1")
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: SentenceBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the scalars of one batch."""
        logits = model(batch.source, batch.target[:, :-1])
        losses, nll = token_losses(logits, batch.target[:, 1:], self.smoothing)
        return {
            "loss": (losses.sum(dim=1) * batch.weight).mean(),
            "nll": (nll.detach().sum(dim=1) * batch.weight).mean(),
            "tokens": batch.batch_tokens.to(torch.float32).mean(),
        }


def make_objective(ingredients: Ingredients) -> TranslationObjective:
    """Build the recipe's objective."""
    return TranslationObjective(ingredients.recipe.objective.smoothing)
