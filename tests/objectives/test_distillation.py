import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from patchloom.data.augmentation.mixing import draw_blend
from patchloom.data.batches.sampler import step_seed
from patchloom.data.images.image_batch import normalize
from patchloom.objectives.classification import cross_entropy
from patchloom.objectives.distillation import Distillation, TwoClassTokens, hard_distillation, soft_distillation
from patchloom.objectives.teacher import Teacher
from patchloom.recipes import get_recipe
from patchloom.recipes.parts import AugmentPart, ObjectivePart
from patchloom_runtime.errors import UsageError
from tests.messages import refused
from tests.networks import small
from tests.objectives.test_classification import MEAN, STD, batch

MIXED = AugmentPart(mixup=0.8, cutmix=1.0)


def slow_soft(logits: Tensor, teacher: Tensor, tau: float) -> float:
    """τ² KL(teacher ‖ student), summed over the batch (equation 3.2)."""

    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(z / tau) for z in row]
        return [p / sum(powers) for p in powers]

    total = 0.0
    for student_row, teacher_row in zip(logits.tolist(), teacher.tolist(), strict=True):
        for q, p in zip(softmax(student_row), softmax(teacher_row), strict=True):
            total += tau**2 * p * (math.log(p) - math.log(q))
    return total


def make_teacher(seed: int = 1, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Teacher:
    network = small("resmlp_s12", seed=seed)
    return Teacher(network, mean=mean, std=std, image_size=(32, 32), num_classes=5)


def make(
    objective: ObjectivePart, teacher: Teacher, *, token: bool, augment: AugmentPart = MIXED, classes: int = 5
) -> Distillation:
    return Distillation(
        objective,
        augment,
        teacher=teacher,
        token=token,
        num_classes=classes,
        pixel_mean=MEAN,
        pixel_std=STD,
        seed=3,
    )


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_distillation_is_its_equation(tau):
    logits, teacher = 3 * torch.randn(2, 4, 6, dtype=torch.float64)
    expected = slow_soft(logits, teacher, tau)
    assert soft_distillation(logits, teacher, tau).item() == pytest.approx(expected / 4)
    assert soft_distillation(logits, teacher, tau, "batch_and_classes").item() == pytest.approx(expected / 24)


def test_the_recipe_of_the_thesis_has_its_loss_and_the_authors_is_an_option():
    """Equation 3.2 for 1,000 classes: divided by them too, the teacher's term would be a thousandth."""
    recipe = get_recipe("deit_soft_distilled").objective
    logits, answers = 3 * torch.randn(2, 4, 1000, dtype=torch.float64)
    teacher = Teacher(nn.Identity(), mean=MEAN, std=STD, image_size=(32, 32), num_classes=1000)
    expected = slow_soft(logits, answers, 3.0) / 4
    assert make(recipe, teacher, token=True, classes=1000).teacher_loss(logits, answers).item() == pytest.approx(
        expected
    )
    authors = replace(recipe, soft_mean="batch_and_classes")
    result = make(authors, teacher, token=True, classes=1000).teacher_loss(logits, answers).item()
    assert result == pytest.approx(expected / 1000)


def test_remedies_for_uneven_classes_change_the_term_of_the_labels():
    recipe = ObjectivePart(distillation="hard", distillation_weight=0.3)
    teacher, images, network = make_teacher(), batch(), small("resmlp_s12")
    plain = make(recipe, teacher, token=False)
    before = plain(network, images, epoch=0, step=0)
    pixels, targets = plain.inputs(images, 0, 0)
    numbers = torch.tensor([3.0, 1.0, 0.5, 0.2, 0.1])
    for changes, label_loss in (
        ({"weights": numbers}, cross_entropy(network(pixels), targets, 0.0, numbers)),
        ({"adjustment": numbers}, cross_entropy(network(pixels) + numbers, targets)),
    ):
        remedied = make(recipe, teacher, token=False)
        vars(remedied).update(changes)
        results = remedied(network, images, epoch=0, step=0)
        torch.testing.assert_close(results["label_loss"], label_loss)
        assert results["teacher_loss"] == before["teacher_loss"]
        torch.testing.assert_close(results["loss"], 0.7 * label_loss + 0.3 * before["teacher_loss"])


@pytest.mark.parametrize("kind", ["ce", "softce"])
@pytest.mark.parametrize(("method", "weight", "tau"), [("hard", 0.5, 1.0), ("soft", 0.5, 1.0), ("soft", 0.1, 3.0)])
def test_the_authors_losses(parity, kind, method, weight, tau):
    stored, _ = parity("deit_losses")
    targets = stored["labels"] if kind == "ce" else stored["soft_labels"]
    objective = ObjectivePart(
        distillation=method, distillation_weight=weight, temperature=tau, soft_mean="batch_and_classes"
    )
    teacher = Teacher(nn.Identity(), mean=MEAN, std=STD, image_size=(32, 32), num_classes=10)
    term = make(objective, teacher, token=True, classes=10).teacher_loss(
        stored["student_dist_logits"], stored["teacher_logits"]
    )
    loss = (1 - weight) * cross_entropy(stored["student_class_logits"], targets) + weight * term
    torch.testing.assert_close(loss.reshape(1), stored[f"loss_{method}_alpha{weight}_tau{tau}_{kind}"])


def test_gradients_flow_to_the_student_alone():
    logits, teacher = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda z: soft_distillation(z, teacher.detach(), 3.0), [logits])
    assert torch.autograd.gradcheck(lambda z: hard_distillation(z, teacher.detach()), [logits])
    student, frozen = small("deit_s_distilled").train(), make_teacher()
    make(ObjectivePart(distillation="soft"), frozen, token=True)(student, batch(), epoch=0, step=0)["loss"].backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("method", ["hard", "soft"])
@pytest.mark.parametrize("name", ["deit_s_distilled", "deit_s", "resmlp_s12", "cait_xxs24"])
def test_each_head_gets_its_term(name, method):
    """With a token the class head learns from labels and the other from the teacher; without, one head from both."""
    student, teacher, images = small(name), make_teacher(), batch()
    objective = ObjectivePart(distillation=method, distillation_weight=0.3, temperature=2.0, smoothing=0.1)
    token = name.endswith("_distilled")
    results = make(objective, teacher, token=token)(student, images, epoch=1, step=4)
    blend = draw_blend(*images.images.shape[2:], mixup=0.8, cutmix=1.0, seed=step_seed(3, 1, 4))
    mixed = blend.images(normalize(images.images, MEAN, STD))
    shares = blend.targets(images.labels, 5, 0.0, torch.float32)
    answer = teacher.module(mixed)
    if token:
        features = student.features(mixed)
        of_class, of_teacher = student.classifier(features[:, 0]), student.distillation_classifier(features[:, 1])
    else:
        of_class = of_teacher = student(mixed)
    label_loss = cross_entropy(of_class, shares, 0.1)
    if method == "hard":
        teacher_loss = cross_entropy(of_teacher, answer.argmax(1), 0.0)
    else:
        teacher_loss = torch.tensor(slow_soft(of_teacher, answer, 2.0) / 6)
    torch.testing.assert_close(results["label_loss"], label_loss.detach())
    torch.testing.assert_close(results["teacher_loss"], teacher_loss.detach())
    torch.testing.assert_close(results["loss"].detach(), (0.7 * label_loss + 0.3 * teacher_loss).detach())
    assert not results["label_loss"].requires_grad


def test_accuracy_is_the_class_heads_where_nothing_is_mixed():
    student, images = small("deit_s_distilled"), batch()
    objective = make(ObjectivePart(distillation="hard"), make_teacher(), token=True, augment=AugmentPart())
    of_class, _ = student(normalize(images.images, MEAN, STD), both_heads=True)
    results = objective(student, images, epoch=0, step=0)
    assert results["accuracy"] == 100 * (of_class.argmax(1) == images.labels).float().mean()


def test_a_teacher_with_its_own_normalization_sees_the_same_mixed_pixels():
    """Mixing pixels and normalising for the teacher = mixing the student's images and renormalising them."""
    student, images = small("resmlp_s12"), batch()
    for step in range(6):
        teacher = make_teacher(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
        objective = make(ObjectivePart(distillation="soft"), teacher, token=False)
        own = normalize(images.images, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
        blend = draw_blend(*own.shape[2:], mixup=0.8, cutmix=1.0, seed=step_seed(3, 0, step))
        mixed = blend.images(own)
        observed: list[Tensor] = []
        teacher.module.register_forward_pre_hook(lambda _, inputs, observed=observed: observed.append(inputs[0]))
        objective(student, images, epoch=0, step=step)
        torch.testing.assert_close(observed[0], mixed, atol=1e-5, rtol=1e-5)


def test_two_heads_through_a_compiled_and_a_distributed_wrapper(tmp_path):
    import torch.distributed as dist

    student, images = small("deit_s_distilled"), batch(2)
    objective = make(ObjectivePart(distillation="hard"), make_teacher(), token=True)
    plain = objective(student, images, epoch=0, step=0)["loss"]
    compiled = torch.compile(student, backend="eager")
    torch.testing.assert_close(objective(compiled, images, epoch=0, step=0)["loss"], plain)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        spread = nn.parallel.DistributedDataParallel(student)
        torch.testing.assert_close(objective(spread, images, epoch=0, step=0)["loss"], plain)
    finally:
        dist.destroy_process_group()


def test_the_teacher_follows_the_students_autocast():
    teacher = make_teacher()
    observed: list[torch.dtype] = []
    teacher.module.classifier.register_forward_hook(lambda *args: observed.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        objective = make(ObjectivePart(distillation="soft"), teacher, token=False)
        loss = objective(small("resmlp_s12"), batch(), epoch=0, step=0)["loss"]
    assert observed == [torch.bfloat16]
    assert loss.dtype == torch.float32


def test_misuse_is_told():
    with refused(UsageError, "objective.distillation", "none", "hard", "soft"):
        make(ObjectivePart(), make_teacher(), token=False)
    with refused(UsageError, 5, 9):
        make(ObjectivePart(distillation="hard"), make_teacher(), token=False, classes=9)
    objective = make(ObjectivePart(distillation="hard"), make_teacher(), token=True)
    with refused(UsageError, "deit_s", "distilled=True"):
        objective(small("deit_s"), batch(), epoch=0, step=0)


def test_two_class_tokens_learn_the_same_labels():
    """The control of thesis 3.3."""
    network, displayed = small("deit_s_distilled"), batch()
    arguments = {"pixel_mean": MEAN, "pixel_std": STD, "seed": 0}
    control = TwoClassTokens(ObjectivePart(distillation="labels"), AugmentPart(), num_classes=5, **arguments)
    loss = control(network, displayed, epoch=0, step=0)["loss"]
    first, second = network(normalize(displayed.images, MEAN, STD), both_heads=True)
    expected = (cross_entropy(first, displayed.labels) + cross_entropy(second, displayed.labels)) / 2
    torch.testing.assert_close(loss, expected)
