"""Linear evaluation as DINO does it: SGD on the features of augmented images, for a number of epochs.

name                               value
linear_sgd_top1, linear_sgd_top5   on the test images, in percent; top-5 where there are more than 5 classes
linear_sgd_held_out_top1           on the held-out part of train, with the rate it chose
linear_sgd_rate                    that rate, for a batch of 256

As in the authors' code (arXiv 2104.14294): frozen features as they are, a linear layer that starts at N(0, 0.01²) with
biases of 0, cross-entropy, momentum 0.9, no weight decay, a cosine to 0, random resized crops and flips. They print the
best rate on val; here a fifth of train chooses it. Every rate has two layers, which learn from the same batches: one
without the fifth, by which the rate is chosen, and one from all of train, which is judged. So features, which cost
most, are computed once per epoch for all of them.

Letters: B images of a batch, C channels, K classes, R rates, H = 2R layers: those that choose, then those judged.
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
    """A linear layer that SGD trained, and what became of each test image."""

    classifier: Linear
    rate: float
    held_out_top1: dict[float, float]  # rate tried → percent on the held-out part of train
    ranks: np.ndarray  # (images,) classes with a higher score than the label

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "linear_sgd_top1", top_percent(self.ranks, 1)
        if len(self.classifier.bias) > 5:
            yield "linear_sgd_top5", top_percent(self.ranks, 5)
        yield "linear_sgd_held_out_top1", self.held_out_top1[self.rate]
        yield "linear_sgd_rate", self.rate


def check_epochs(epochs: int) -> None:
    """A UsageError where nothing would be learned."""
    if epochs < 1:
        raise UsageError(f"A linear layer is trained for at least one epoch, given {epochs}; DINO takes {EPOCHS}")


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
    """Fit on `augmented(epoch)`, batches of train's images as augmented for an epoch; judge on `test`.

    `train` are the same images without augmentation, of which a fifth chooses the rate.
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
    found = {rate: top_percent(ranks_of_labels(layers[i], choosing), 1) for i, rate in enumerate(rates)}
    best = max(range(len(rates)), key=lambda i: found[rates[i]])  # of equal ones the first
    judged = layers[len(rates) + best]
    return SgdProbe(judged, rates[best], found, ranks_of_labels(judged, test))


class _Layers:
    """H linear layers and their momentum, trained side by side."""

    def __init__(self, like: Tensor, classes: int, rates: Sequence[float], held_out: Tensor, seed: int) -> None:
        start = torch.randn(like.shape[1], classes, generator=torch.Generator().manual_seed(seed)) * STARTING_STD
        one = torch.cat([start, torch.zeros(1, classes)]).to(like.device)  # (C+1, K), the bias last
        self.weights = one.repeat(2 * len(rates), 1, 1)  # (H, C+1, K)
        self._moving = torch.zeros_like(self.weights)
        self._rates = torch.tensor([*rates, *rates], device=like.device)[:, None, None]
        self._choose, self._held_out = len(rates), held_out

    def learn(self, batch: Embeddings, schedule: float) -> None:
        """One step of each layer; those that choose leave held-out images out."""
        batch = batch.rows(torch.nonzero(batch.labels >= 0)[:, 0])
        x = F.pad(batch.vectors, (0, 1), value=1.0)  # (B, C+1)
        counts = torch.ones(len(self.weights), len(x), device=x.device)  # (H, B)
        counts[: self._choose] = (~torch.isin(batch.index, self._held_out)).float()
        counts /= counts.sum(dim=1, keepdim=True).clamp(min=1)
        shares = torch.einsum("bc,hck->hbk", x, self.weights).softmax(dim=-1)
        error = (shares - F.one_hot(batch.labels, shares.shape[-1])) * counts[..., None]
        self._moving.mul_(MOMENTUM).add_(torch.einsum("bc,hbk->hck", x, error))
        self.weights -= self._rates * (schedule * len(batch) / BATCH) * self._moving

    def __getitem__(self, place: int) -> Linear:
        """One layer; one that has diverged says nothing."""
        found = self.weights[place].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        plain = torch.zeros(len(found) - 1, device=found.device)
        return Linear(found[:-1], found[-1], plain, plain + 1)
