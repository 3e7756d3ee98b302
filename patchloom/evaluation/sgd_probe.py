"""Linear evaluation as in DINO: SGD on the features of augmented images for a number of epochs.

name                               value
linear_sgd_top1, linear_sgd_top5   on the test images, in percent; top-5 for more than 5 classes
linear_sgd_held_out_top1           on the held-out part of train, with the selected rate
linear_sgd_rate                    that rate, for a batch of 256

As in the authors' code (arXiv 2104.14294): frozen raw features, a linear layer initialized with N(0, 0.01²) and zero
biases, cross-entropy, momentum 0.9, no weight decay, a cosine to 0, random resized crops and flips. The authors report
the best rate on val; here a fifth of train selects it. Every rate has two layers that learn from the same batches: one
without the fifth, which selects the rate, and one from all of train, which is evaluated. So the features, the most
expensive part, are computed once per epoch for all of them.

Letters: B images of a batch, C channels, K classes, R rates, H = 2R layers: first for selection, then for evaluation.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.probe import HELD_OUT, Linear, held_out_split, ranks_of_labels, top_percent
from patchloom_runtime.errors import UsageError

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
EPOCHS = 100
BATCH = 256
MOMENTUM = 0.9
STARTING_STD = 0.01


@dataclass(frozen=True, eq=False)
class SgdProbe:
    """A linear layer trained with SGD and its per-image results on the test images."""

    classifier: Linear
    rate: float
    held_out_top1: dict[float, float]  # rate tried → percent on the held-out part of train
    ranks: np.ndarray  # (images,) number of classes with a higher score than the label

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "linear_sgd_top1", top_percent(self.ranks, 1)
        if len(self.classifier.bias) > 5:
            yield "linear_sgd_top5", top_percent(self.ranks, 5)
        yield "linear_sgd_held_out_top1", self.held_out_top1[self.rate]
        yield "linear_sgd_rate", self.rate


def check_epochs(epochs: int) -> None:
    """Raise UsageError unless there is at least one epoch."""
    if epochs < 1:
        raise UsageError(f"A linear layer needs at least one epoch of training, got {epochs}; DINO uses {EPOCHS}")


@torch.no_grad()
def sgd_probe(
    augmented: Callable[[int], Iterable[Embeddings]],
    train: Embeddings,
    test: Embeddings,
    *,
    classes: int,
    steps_per_epoch: int,
    epochs: int = EPOCHS,
    rates: Sequence[float] = RATES,
    seed: int = 0,
) -> SgdProbe:
    """Fit on `augmented(epoch)`, the batches of train as augmented in an epoch; evaluate on `test`.

    `train` has the same images without augmentation, of which a fifth selects the rate.
    """
    check_epochs(epochs)
    train, test = train.labeled("train"), test.labeled("val")
    _, places = held_out_split(train.labels.cpu().numpy(), HELD_OUT, np.random.default_rng(seed))
    choosing = train.rows(places)
    layers = _Layers(train.vectors, classes, rates, choosing.index, seed)
    total = epochs * steps_per_epoch
    for epoch in range(epochs):
        for step, batch in enumerate(augmented(epoch), start=epoch * steps_per_epoch):
            layers.learn(batch, (1 + math.cos(math.pi * min(step / total, 1.0))) / 2)
    top1 = {rate: top_percent(ranks_of_labels(layers[i], choosing), 1) for i, rate in enumerate(rates)}
    best = max(range(len(rates)), key=lambda i: top1[rates[i]])  # the first of equal ones
    evaluated = layers[len(rates) + best]
    return SgdProbe(evaluated, rates[best], top1, ranks_of_labels(evaluated, test))


class _Layers:
    """H linear layers and their momentum, trained in parallel."""

    def __init__(self, like: Tensor, classes: int, rates: Sequence[float], held_out: Tensor, seed: int) -> None:
        start = torch.randn(like.shape[1], classes, generator=torch.Generator().manual_seed(seed)) * STARTING_STD
        one = torch.cat([start, torch.zeros(1, classes)]).to(like.device)  # (C+1, K), the bias last
        self.weights = one.repeat(2 * len(rates), 1, 1)  # (H, C+1, K)
        self._momentum = torch.zeros_like(self.weights)
        self._rates = torch.tensor([*rates, *rates], device=like.device)[:, None, None]
        self._choose, self._held_out = len(rates), held_out

    def learn(self, batch: Embeddings, schedule: float) -> None:
        """Update each layer once; those for selection ignore held-out images."""
        batch = batch.rows(torch.nonzero(batch.labels >= 0)[:, 0])
        x = F.pad(batch.vectors, (0, 1), value=1.0)  # (B, C+1)
        counts = torch.ones(len(self.weights), len(x), device=x.device)  # (H, B)
        counts[: self._choose] = (~torch.isin(batch.index, self._held_out)).float()
        counts /= counts.sum(dim=1, keepdim=True).clamp(min=1)
        shares = torch.einsum("bc,hck->hbk", x, self.weights).softmax(dim=-1)
        error = (shares - F.one_hot(batch.labels, shares.shape[-1])) * counts[..., None]
        self._momentum.mul_(MOMENTUM).add_(torch.einsum("bc,hbk->hck", x, error))
        self.weights -= self._rates * (schedule * len(batch) / BATCH) * self._momentum

    def __getitem__(self, place: int) -> Linear:
        """Return one layer, with zeros where it has diverged."""
        weights = self.weights[place].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        zeros = torch.zeros(len(weights) - 1, device=weights.device)
        return Linear(weights[:-1], weights[-1], zeros, zeros + 1)
