"""Losses of several labels per image, against slow references written from the equations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.multilabel import MultilabelObjective, asymmetric_losses
from patchloom.objectives.teacher import Teacher
from patchloom.recipes.methods import METHODS
from patchloom.recipes.parts import AugmentPart, ObjectivePart

PIXELS = {"pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.25, 0.25, 0.25)}
COCO = {"negative_focus": 4.0, "positive_focus": 1.0, "margin": 0.05}


def batch(targets):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(targets), 3, 4, 4), dtype=torch.uint8, generator=generator)
    return ImageBatch(images, torch.full((len(targets),), -1), torch.arange(len(targets)), targets=targets)


def objective(asymmetry=None, augment=None, teacher=None, **fields):
    return MultilabelObjective(
        ObjectivePart(method="multilabel", **fields), augment or AugmentPart(), num_classes=3, seed=0,
        asymmetry=asymmetry or {}, teacher=teacher, **PIXELS,
    )  # fmt: skip


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(48, 3)

    def forward(self, images):
        return self.layer(images.flatten(1))


def slow_asymmetric(logit, y, negative_focus, positive_focus, margin):
    """Equations 2 to 6 of Ridnik et al. (2021)."""
    p = 1 / (1 + math.exp(-logit))
    shifted = max(p - margin, 0)
    loss_of_positives = (1 - p) ** positive_focus * math.log(p)
    loss_of_negatives = shifted**negative_focus * math.log(1 - shifted)
    return -y * loss_of_positives - (1 - y) * loss_of_negatives


@pytest.mark.parametrize("options", [COCO, {**COCO, "positive_focus": 0.0}, {**COCO, "margin": 0.0}])
def test_the_asymmetric_loss_is_that_of_the_paper(options):
    logits = torch.linspace(-6, 6, 25, dtype=torch.float64).repeat(3, 1)
    targets = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)[:, None].expand_as(logits)
    losses = asymmetric_losses(logits, targets, **options)
    for logit, y, loss in zip(logits.flatten(), targets.flatten(), losses.flatten(), strict=True):
        assert loss.item() == pytest.approx(slow_asymmetric(logit.item(), y.item(), **options), abs=1e-9)
    assert torch.autograd.gradcheck(lambda x: asymmetric_losses(x, targets, **options), logits.requires_grad_())


def test_without_focus_and_margin_it_is_binary_cross_entropy():
    logits, targets = torch.randn(4, 3), torch.rand(4, 3)
    plain = asymmetric_losses(logits, targets, 0.0, 0.0, 0.0)
    assert torch.allclose(plain, nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none"))
    extreme = asymmetric_losses(torch.tensor([[200.0, -200.0]]), torch.tensor([[0.0, 1.0]]), **COCO)
    assert extreme.isfinite().all()


@pytest.mark.parametrize("asymmetry", [{}, COCO])
def test_unknown_labels_do_not_count(asymmetry):
    targets = torch.tensor([[1.0, 0.0, math.nan], [math.nan] * 3, [0.0, 1.0, 1.0]])
    model, made = Linear(), objective(asymmetry)
    loss = made(model, batch(targets), epoch=0, step=0)["loss"]
    loss.backward()
    assert model.layer.weight.grad.isfinite().all()
    logits = model(made.inputs(batch(targets), 0, 0)[0]).detach()
    total = 0.0
    for row, of in zip(logits, targets, strict=True):
        known = [(x.item(), y.item()) for x, y in zip(row, of, strict=True) if not y.isnan()]
        slow = [slow_asymmetric(x, y, **(asymmetry or dict.fromkeys(COCO, 0.0))) for x, y in known]
        total += sum(slow) / max(1, len(slow))
    assert loss.item() == pytest.approx(total / 3, rel=1e-5)


def test_halves_of_a_batch_average_to_the_whole():
    """As with two processes or micro-batches, also if labels are unknown."""
    targets = torch.tensor([[1.0, 0.0, math.nan], [0.0, math.nan, math.nan], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    model, whole = Linear(), batch(targets)
    halves = [
        replace(whole, **{name: getattr(whole, name)[rows] for name in ("images", "labels", "index", "targets")})
        for rows in (slice(0, 2), slice(2, 4))
    ]
    losses = [objective(COCO)(model, part, epoch=0, step=0)["loss"] for part in halves]
    assert torch.allclose(sum(losses) / 2, objective(COCO)(model, whole, epoch=0, step=0)["loss"])


def test_mixed_images_have_mixed_targets():
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    images, mixed = objective(augment=AugmentPart(mixup=0.8)).inputs(batch(targets), 0, 0)
    share = mixed[0, 0]
    assert 0 < share < 1
    assert torch.allclose(mixed, torch.stack([targets[0] * share + targets[1] * (1 - share),
                                              targets[1] * share + targets[0] * (1 - share)]))  # fmt: skip
    plain, _ = objective().inputs(batch(targets), 0, 0)
    assert torch.allclose(images, plain * share + plain.flip(0) * (1 - share), atol=1e-5)


@pytest.mark.parametrize("mixup", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_teacher_gives_one_decision_per_label(kind, mixup):
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    teacher = Teacher(Linear(), mean=PIXELS["pixel_mean"], std=PIXELS["pixel_std"], image_size=(4, 4), num_classes=3)
    mixing = AugmentPart(mixup=mixup)
    made = objective(teacher=teacher, augment=mixing, distillation=kind, temperature=2.0, distillation_weight=0.25)
    model = Linear()
    nn.init.normal_(model.layer.weight)
    values = made(model, batch(targets), epoch=0, step=0)
    images, mixed = made.inputs(batch(targets), 0, 0)
    assert torch.equal(mixed, targets) == (not mixup)
    student, taught = model(images), teacher(images)  # both see the mixed images
    if kind == "hard":
        slow = nn.functional.binary_cross_entropy(student.sigmoid(), (taught.sigmoid() > 0.5).float())
    else:
        slow = 4 * nn.functional.binary_cross_entropy((student / 2).sigmoid(), (taught / 2).sigmoid())
    assert values["teacher_loss"].item() == pytest.approx(slow.item(), rel=1e-5)
    assert values["loss"].item() == pytest.approx(
        0.75 * values["label_loss"].item() + 0.25 * values["teacher_loss"].item(), rel=1e-6
    )


def test_both_methods_are_rows_of_one_task():
    assert METHODS["multilabel"].task == METHODS["asymmetric"].task == "multilabel"
    assert METHODS["asymmetric"].options["negative_focus"] > METHODS["asymmetric"].options["positive_focus"]
