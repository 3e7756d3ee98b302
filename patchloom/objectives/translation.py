"""Learning to translate: each target token from the source and the target tokens before it.

Letters: B pairs, S and T positions of source and target, V pieces of the vocabulary. The network is asked
`model(source (B, S), target (B, T − 1)) → logits (B, T − 1, V)`: given BOS … it tells … EOS.

The loss is a mean over the target tokens of the whole batch, padding left out. Smoothing puts ε/V on every piece, as
torch's cross-entropy does; fairseq puts ε/(V − 1) on every other one. The two differ by a factor in ε of V/(V − 1).
"""

import torch
from torch import Tensor, nn

from patchloom.data.text.token_batches import SentenceBatch
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.objective import Ingredients, Objective
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.vocabulary import PAD

CHARTS: dict[str, dict[str, str]] = {}  # what a report draws of its records: title → curve → name of the value


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(B, T, V) and (B, T) → smoothed loss and −log p(label) of each token, (B, T) each, 0 at padding.

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
    """Sentence pairs → loss.

    `nll` is the loss without smoothing, so exp(nll) is the perplexity; `tokens` are the target tokens of the step. All
    three come out right as the engine's means over micro-batches and processes, see `SentenceBatch.weight`.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing is {smoothing}, expected a number from 0 to below 1")
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: SentenceBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Scalars of one batch."""
        logits = model(batch.source, batch.target[:, :-1])
        losses, nll = token_losses(logits, batch.target[:, 1:], self.smoothing)
        return {
            "loss": (losses.sum(dim=1) * batch.weight).mean(),
            "nll": (nll.detach().sum(dim=1) * batch.weight).mean(),
            "tokens": batch.batch_tokens.to(torch.float32).mean(),
        }


def make_objective(given: Ingredients) -> TranslationObjective:
    """By the recipe."""
    return TranslationObjective(given.recipe.objective.smoothing)
