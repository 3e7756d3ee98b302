import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from patchloom.data.augmentation.mixing import Blend, draw_blend
from patchloom.data.batches.sampler import step_seed
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.objectives.classification import ClassificationObjective, binary_cross_entropy, cross_entropy
from patchloom.objectives.objective import Ingredients, make_objective
from patchloom.recipes import get_recipe, override
from patchloom.recipes.parts import AugmentPart, ObjectivePart
from patchloom_runtime.errors import UsageError
from tests.messages import refused
from tests.networks import small

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def slow_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> float:
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        shares = target if isinstance(target, list) else [float(k == target) for k in range(len(row))]
        normalizer = math.log(sum(math.exp(z) for z in row))
        for z, share in zip(row, shares, strict=True):
            total -= ((1 - smoothing) * share + smoothing / len(row)) * (z - normalizer)
    return total / len(logits)


def slow_binary_cross_entropy(logits: Tensor, targets: Tensor) -> float:
    losses = []
    for row, shares in zip(logits.tolist(), targets.tolist(), strict=True):
        for z, share in zip(row, shares, strict=True):
            probability = 1 / (1 + math.exp(-z))
            losses.append(-math.log(probability if share > 0 else 1 - probability))
    return sum(losses) / len(losses)


def slow_weighted(loss, logits: Tensor, targets: Tensor, weights: Tensor, *options: float) -> float:
    """Σ_k share_k · weight_k · loss of the image with label k, mean over images."""
    classes, total = logits.shape[1], 0.0
    for row, shares in zip(logits, targets, strict=True):
        for k, share in enumerate(shares.tolist()):
            one = torch.tensor([k]) if loss is slow_cross_entropy else (shares > 0).double()[None]
            total += share * weights[k].item() * loss(row[None], one, *options)
    assert classes == len(weights)
    return total / len(logits)


def batch(size: int = 6, classes: int = 5, side: int = 32, seed: int = 0) -> ImageBatch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, (size,), generator=generator)
    return ImageBatch(images.permute(0, 3, 1, 2), labels, torch.arange(size))


def make(objective: ObjectivePart | None = None, augment: AugmentPart | None = None) -> ClassificationObjective:
    return ClassificationObjective(
        objective or ObjectivePart(),
        augment or AugmentPart(),
        num_classes=5,
        pixel_mean=MEAN,
        pixel_std=STD,
        seed=3,
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    classes=st.integers(2, 7),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_is_its_equation(rows, classes, smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    shares = torch.rand(rows, classes, dtype=torch.float64, generator=generator).softmax(dim=1)
    for targets in (labels, shares):
        expected = slow_cross_entropy(logits, targets, smoothing)
        assert cross_entropy(logits, targets, smoothing).item() == pytest.approx(expected, rel=1e-9)


def test_binary_cross_entropy_takes_every_mixed_class_as_right():
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]], dtype=torch.float64)
    shares = torch.tensor([[0.99, 0.01, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert binary_cross_entropy(logits, shares).item() == pytest.approx(slow_binary_cross_entropy(logits, shares))
    one_hot = torch.eye(3, dtype=torch.float64)[[2, 0]]
    expected = slow_binary_cross_entropy(logits, one_hot)
    assert binary_cross_entropy(logits, torch.tensor([2, 0])).item() == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_multiply_the_loss_of_each_label(smoothing):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 4, dtype=torch.float64, generator=generator)
    weights = torch.tensor([0.2, 0.5, 1.7, 6.0], dtype=torch.float64)
    labels = torch.randint(4, (6,), generator=generator)
    mixed = Blend(0.7).targets(labels, 4, 0.0, torch.float64)
    for targets in (labels, mixed):
        shares = torch.eye(4, dtype=torch.float64)[targets] if targets.ndim == 1 else targets
        expected = slow_weighted(slow_cross_entropy, logits, shares, weights, smoothing)
        assert cross_entropy(logits, targets, smoothing, weights).item() == pytest.approx(expected)
        expected = slow_weighted(slow_binary_cross_entropy, logits, shares, weights)
        assert binary_cross_entropy(logits, targets, weights).item() == pytest.approx(expected)
    halves = [cross_entropy(logits[rows], labels[rows], smoothing, weights) for rows in (slice(3), slice(3, 6))]
    torch.testing.assert_close(sum(halves) / 2, cross_entropy(logits, labels, smoothing, weights))


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_adjusted_logits_are_those_of_the_loss_alone(loss, mixup):
    """Menon et al., equation 10: −log of e^(f_y + τ log π_y) over the sum of all; predictions do not change."""
    images, network = batch(), small("resmlp_s12")
    labels = torch.tensor([0] * 12 + [1] * 5 + [2, 3, 4])
    changes = {"balance.logit_adjustment": 1.5, "objective.loss": loss, "augment.mixup": mixup, "seed": 3}
    recipe = override(get_recipe("small_images"), changes | {"augment.cutmix": 0, "objective.smoothing": 0})
    objective = make_objective(Ingredients(recipe=recipe, network=network, labels=labels))
    assert isinstance(objective, ClassificationObjective)
    results = objective(network, images, epoch=0, step=0)
    pixels, targets = objective.inputs(images, 0, 0)
    shares = torch.eye(5)[targets] if targets.ndim == 1 else targets
    priors = torch.tensor([12, 5, 1, 1, 1]).double() / 20
    logits = network(pixels).double()
    if loss == "bce":
        odds = (priors / (1 - priors)).log() - math.log(1 / 4)
        expected = slow_binary_cross_entropy(logits + 1.5 * odds, shares)
    else:
        expected = slow_cross_entropy(logits + 1.5 * priors.log(), shares.double(), 0.0)
    assert results["loss"].item() == pytest.approx(expected, rel=1e-5)
    if not mixup:
        assert results["accuracy"] == 100 * (logits.argmax(1) == images.labels).float().mean()


def test_the_authors_losses(parity):
    stored, _ = parity("deit_losses")
    logits = stored["student_class_logits"]
    # The file does not say which targets its BCE had: of those tried, labels mixed with the reversed batch give it.
    mixed = Blend(0.7).targets(stored["labels"], 10, 0.0, torch.float32)
    pairs = {
        "label_smoothing_ce_0.1": cross_entropy(logits, stored["labels"], 0.1),
        "loss_none_alpha0.5_tau1.0_ce": cross_entropy(logits, stored["labels"]),
        "loss_none_alpha0.5_tau1.0_softce": cross_entropy(logits, stored["soft_labels"]),
        "bce_binarised": binary_cross_entropy(logits, mixed),
    }
    for name, loss in pairs.items():
        torch.testing.assert_close(loss.reshape(1), stored[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy])
def test_gradients(loss):
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(3, 4, dtype=torch.float64).softmax(dim=1)
    assert torch.autograd.gradcheck(lambda z: loss(z, shares), [logits])


def test_half_precision_logits_are_widened_before_the_loss():
    logits = torch.randn(64, 10).bfloat16()
    labels = torch.arange(64) % 10
    assert torch.equal(cross_entropy(logits, labels), cross_entropy(logits.float(), labels))
    assert binary_cross_entropy(logits, labels).dtype == torch.float32


def test_a_plain_batch_gives_the_loss_and_the_accuracy():
    network, images = small("resmlp_s12"), batch()
    results = make(ObjectivePart(smoothing=0.1))(network, images, epoch=0, step=0)
    logits = network(normalize(images.images, MEAN, STD))
    assert set(results) == {"loss", "accuracy"}
    torch.testing.assert_close(results["loss"], cross_entropy(logits, images.labels, 0.1))
    assert results["accuracy"] == 100 * (logits.argmax(1) == images.labels).float().mean()


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_a_mixed_batch_follows_from_seed_epoch_and_step(loss):
    network, images = small("resmlp_s12"), batch()
    objective = make(ObjectivePart(loss=loss), AugmentPart(mixup=0.8, cutmix=1.0))
    observed = {}
    for epoch, step in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        results = objective(network, images, epoch=epoch, step=step)
        assert set(results) == {"loss"}
        blend = draw_blend(*images.images.shape[2:], mixup=0.8, cutmix=1.0, seed=step_seed(3, epoch, step))
        mixed = blend.images(normalize(images.images, MEAN, STD))
        shares = blend.targets(images.labels, 5, 0.0, torch.float32)
        expected = (binary_cross_entropy if loss == "bce" else cross_entropy)(network(mixed), shares)
        torch.testing.assert_close(results["loss"], expected)
        assert observed.setdefault((epoch, step), results["loss"].item()) == results["loss"].item()
    assert len(set(observed.values())) == 3


def test_smoothing_before_or_after_mixing_is_the_same():
    """The authors smooth labels before mixing them, here the loss does it afterwards."""
    network, images = small("resmlp_s12"), batch()
    pixels = normalize(images.images, MEAN, STD)
    results = make(ObjectivePart(smoothing=0.1), AugmentPart(mixup=0.8))(network, images, epoch=0, step=2)
    blend = draw_blend(*pixels.shape[2:], mixup=0.8, cutmix=0, seed=step_seed(3, 0, 2))
    shares = blend.targets(images.labels, 5, 0.1, torch.float32)
    torch.testing.assert_close(results["loss"], cross_entropy(network(blend.images(pixels)), shares))


def test_the_model_is_called_as_a_whole():
    """DDP and compiled models do their work in __call__; nothing may reach around it."""

    class Wrapped(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.hidden = [network]

        def forward(self, images: Tensor) -> Tensor:
            return self.hidden[0](images)

    network, images = small("deit_s"), batch()
    wrapped = make()(Wrapped(network), images, epoch=0, step=0)
    assert wrapped["loss"] == make()(network, images, epoch=0, step=0)["loss"]


def test_gradients_reach_every_parameter_also_under_autocast():
    network = small("resmlp_s12").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = make(augment=AugmentPart(mixup=0.8))(network, batch(), epoch=0, step=0)["loss"]
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_a_network_of_other_classes_is_refused():
    with refused(UsageError, 7, 5, "num_classes"):
        make()(small("resmlp_s12", num_classes=7), batch(), epoch=0, step=0)
