"""Linear classifiers on frozen features: one trained on all of train, one on a few images per class.

name                          value
linear_top1, linear_top5      linear probe on the test images, in percent; top-5 for more than 5 classes
linear_held_out_top1          on the held-out part of train, with the selected strength
linear_l2                     that strength
few_shot{s}_top1, …_std       few-shot probe with s images per class: mean and std over the draws, percent

The linear probe is multinomial logistic regression: mean cross-entropy + l2/2 · ‖W‖², the bias unregularized. The
result of SGD (`sgd_probe`) depends on a learning rate, a schedule and an order of images. The problem is convex, so
L-BFGS with exact gradients of the whole dataset reaches its one solution, the same every time. Channels are first
standardized: networks differ by orders of magnitude in the scale of their features, and L-BFGS needs similar
curvatures. The strength is the one of a few decades with the best top-1 on a held-out fifth of train, tried from strong
to weak until two in a row bring no improvement; the probe is then trained on all of train.

The few-shot probe is the closed form of MLP-Mixer, ViT and BiT (M 3, MX-5): least squares from features, standardized
over the shots, to targets of −1 and 1, with l2 · ‖W‖² and an unregularized bias. The strength 2¹⁰ and the 10⁻⁵ added to
deviations are those of the authors' code.

Letters: N train images, C channels, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation.embeddings import Embeddings
from patchloom_runtime.errors import UsageError

STRENGTHS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
HELD_OUT = 0.2
MOST_STEPS = 300
# Rows whose logits are in memory at once.
PART_ROWS = 16_384
SHOTS = 5
DRAWS = 5
FEW_SHOT_L2 = 2.0**10


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear classifier of standardized channels, from features (M, C) to scores (M, K)."""

    weight: Tensor  # (C, K)
    bias: Tensor  # (K,)
    mean: Tensor  # (C,) of the features it was fitted to
    std: Tensor  # (C,)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return scores. The weights are float64, products have the precision of the features."""
        scaled = (vectors - self.mean) / self.std
        return torch.addmm(self.bias.to(scaled.dtype), scaled, self.weight.to(scaled.dtype))


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A fitted linear probe and its per-image results on the test images."""

    classifier: Linear
    l2: float
    held_out_top1: dict[float, float]  # strength tried → percent on the held-out part of train
    ranks: np.ndarray  # (images,) number of classes with a higher score than the label

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "linear_top1", top_percent(self.ranks, 1)
        if len(self.classifier.bias) > 5:
            yield "linear_top5", top_percent(self.ranks, 5)
        yield "linear_held_out_top1", self.held_out_top1[self.l2]
        yield "linear_l2", self.l2


@dataclass(frozen=True)
class FewShotProbe:
    """Top-1 per draw of shots."""

    shots: int
    top1: tuple[float, ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield f"few_shot{self.shots}_top1", float(np.mean(self.top1))
        yield f"few_shot{self.shots}_std", float(np.std(self.top1, ddof=min(1, len(self.top1) - 1)))


@torch.no_grad()
def linear_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    classes: int,
    strengths: Sequence[float] = STRENGTHS,
) -> LinearProbe:
    """Fit on `train` with the strength that is best on a held-out part of it; evaluate on `test`."""
    train, test = train.labeled("train"), test.labeled("val")
    fitted, held_out = held_out_split(train.labels.cpu().numpy(), HELD_OUT, np.random.default_rng(0))
    fitting, choosing = train.rows(fitted), train.rows(held_out)
    top1: dict[float, float] = {}
    fits: list[Linear] = []
    best = 0  # position of the best strength so far
    # From strong to weak, each starting from the previous solution, because weak ones are slow to fit.
    for place, l2 in enumerate(sorted(strengths, reverse=True)):
        fits.append(fit_logistic(fitting.vectors, fitting.labels, classes, l2, fits[-1] if fits else None))
        top1[l2] = top_percent(ranks_of_labels(fits[-1], choosing), 1)
        if top1[l2] > list(top1.values())[best]:
            best = place
        if place - best == 2:
            break
    chosen = list(top1)[best]
    probe = fit_logistic(train.vectors, train.labels, classes, chosen, fits[best])
    return LinearProbe(probe, chosen, top1, ranks_of_labels(probe, test))


def fit_logistic(
    vectors: Tensor, labels: Tensor, classes: int, l2: float, start: Linear | None = None, steps: int = MOST_STEPS
) -> Linear:
    """Fit multinomial logistic regression to features (N, C), in at most `steps` steps; see the module docstring."""
    mean, std = vectors.mean(dim=0), vectors.std(dim=0, correction=0).clamp_min(1e-5)
    begin = torch.zeros(vectors.shape[1] + 1, classes, dtype=torch.float64, device=vectors.device)
    if start is not None:
        begin[:-1], begin[-1] = start.weight, start.bias
    at = torch.nn.Parameter(begin)  # (C+1, K), the bias last; float64 so that small steps are not lost
    # Gradients below this leave no top-1 undecided; the change stops a problem without a minimum.
    solver = torch.optim.LBFGS(
        [at], max_iter=steps, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )
    solver.step(_objective(at, vectors, labels, mean, std, l2))
    return Linear(at.data[:-1], at.data[-1], mean, std)


def _objective(
    at: Tensor, vectors: Tensor, labels: Tensor, mean: Tensor, std: Tensor, l2: float
) -> Callable[[], Tensor]:
    """Return a closure that computes the loss and sets `at.grad`, in parts: N × K logits are never in memory."""

    def closure() -> Tensor:
        probe = Linear(at[:-1], at[-1], mean, std)
        loss = l2 / 2 * at[:-1].square().sum()
        gradient = torch.cat([l2 * at[:-1], torch.zeros_like(at[-1:])])
        for x, y in zip(vectors.split(PART_ROWS), labels.split(PART_ROWS), strict=True):
            log_shares = probe(x).log_softmax(dim=1)
            loss += F.nll_loss(log_shares, y, reduction="sum").double() / len(vectors)
            error = (log_shares.exp() - F.one_hot(y, at.shape[1])) / len(vectors)  # (rows, K)
            gradient[:-1] += ((x - mean) / std).T @ error
            gradient[-1] += error.sum(dim=0)
        at.grad = gradient
        return loss

    return closure


@torch.no_grad()
def few_shot_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    classes: Sequence[str],
    shots: int = SHOTS,
    draws: int = DRAWS,
    l2: float = FEW_SHOT_L2,
    seed: int = 0,
) -> FewShotProbe:
    """Fit on `shots` images per class, `draws` times with different images; evaluate each on all of `test`."""
    train, test = train.labeled("train"), test.labeled("val")
    if draws < 1:
        raise UsageError(f"A few-shot probe needs at least one draw, got {draws}")
    labels = train.labels.cpu().numpy()
    wanted = check_shots(labels, test.labels.cpu().numpy(), classes, shots)
    top1 = []
    for draw in range(draws):
        generator = np.random.default_rng((seed, draw))
        chosen = [generator.permutation(np.flatnonzero(labels == c))[:shots] for c in wanted]
        drawn = train.rows(np.concatenate(chosen))
        probe = fit_least_squares(drawn.vectors, drawn.labels, len(classes), l2)
        top1.append(top_percent(ranks_of_labels(probe, test), 1))
    return FewShotProbe(shots, tuple(top1))


def check_shots(train: np.ndarray, test: np.ndarray, classes: Sequence[str], shots: int) -> np.ndarray:
    """Return the classes with labeled images. Raise UsageError if one has fewer than `shots` images in train."""
    train, test = train[train >= 0], test[test >= 0]
    if shots < 1:
        raise UsageError(f"A few-shot probe needs at least one image per class, got {shots}")
    wanted = np.union1d(train, test)
    counts = np.bincount(train, minlength=len(classes))
    if few := [f"{classes[c]!r} has {counts[c]}" for c in wanted if counts[c] < shots]:
        more = f" and {len(few) - 3} more classes" if len(few) > 3 else ""
        raise UsageError(
            f"{shots} shots need {shots} images of each class in train; {', '.join(few[:3])}{more}. Use fewer shots."
        )
    return wanted


def fit_least_squares(vectors: Tensor, labels: Tensor, classes: int, l2: float = FEW_SHOT_L2) -> Linear:
    """Minimize ‖X W + b − Y‖² + l2 ‖W‖² for standardized features X (N, C) and targets Y (N, K) of −1 and 1."""
    x = vectors.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5
    x = (x - mean) / std
    y = 2.0 * F.one_hot(labels, classes).double() - 1
    bias = y.mean(dim=0)  # the optimum, as every channel has mean 0
    if len(x) < x.shape[1]:
        weight = x.T @ torch.linalg.solve(x @ x.T + l2 * torch.eye(len(x)).to(x), y - bias)
    else:
        weight = torch.linalg.solve(x.T @ x + l2 * torch.eye(x.shape[1]).to(x), x.T @ (y - bias))
    return Linear(weight, bias, mean.float(), std.float())


def ranks_of_labels(probe: Linear, images: Embeddings) -> np.ndarray:
    """Return the number of classes (images,) with a higher score than the label; ties go to the lower class."""
    parts = []
    for x, y in zip(images.vectors.split(PART_ROWS), images.labels.split(PART_ROWS), strict=True):
        scores = probe(x)
        label_scores = scores.gather(1, y[:, None])
        earlier = torch.arange(scores.shape[1], device=x.device) < y[:, None]
        parts.append(((scores > label_scores) | ((scores == label_scores) & earlier)).sum(dim=1))
    return torch.cat(parts).cpu().numpy()


def top_percent(ranks: np.ndarray, k: int) -> float:
    """Return the percentage of images whose label is among the first k."""
    return 100 * float(np.mean(ranks < k))


def held_out_split(labels: np.ndarray, share: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return fitted and held-out positions: `share` of each class, none of a class with a single image."""
    held_out = [
        generator.permutation(members)[: min(max(1, round(share * len(members))), len(members) - 1)]
        for members in (np.flatnonzero(labels == c) for c in np.unique(labels))
    ]
    chosen = np.zeros(len(labels), dtype=bool)
    chosen[np.concatenate(held_out)] = True
    if not chosen.any():
        raise UsageError(
            "A linear probe holds out a fifth of train, which needs a class with at least two images in train."
        )
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
