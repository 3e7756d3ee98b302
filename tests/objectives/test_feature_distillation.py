"""Feature distillation against a slow reference, for every kind of teacher, and as a run that resumes exactly."""

import numpy as np
import pytest
import torch
from torch import nn

import patchloom
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.models.registry import build_model
from patchloom.objectives.feature_distillation import FeatureDistillation, FeatureExtractor, regression_loss
from patchloom.objectives.teacher import Teacher
from patchloom.recipes import get_recipe
from patchloom.recipes.schema import override
from patchloom.runs.checkpoints import find_checkpoint, read_checkpoint
from patchloom_runtime.errors import UsageError

SMALL = {"patch_size": 8, "dim": 16, "depth": 1}
STUDENT = {"model.name": "resmlp_s12", "model.image_size": 32, **{f"model.options.{k}": v for k, v in SMALL.items()}}


def student(size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return build_model("resmlp_s12", num_classes=0, image_size=size, **SMALL)


def teacher(name: str = "deit_ti", **options: object) -> Teacher:
    torch.manual_seed(1)
    small = {"patch_size": 16, "dim": 24, "depth": 1, "heads": 2} if name == "deit_ti" else {}
    network = build_model(name, num_classes=0, image_size=64, **(small | options)).eval()
    return Teacher(
        FeatureExtractor(network), mean=(0.5,) * 3, std=(0.5,) * 3, image_size=(64, 64), num_classes=0,
        any_resolution=network.any_resolution,
    )  # fmt: skip


def batch(count: int = 4) -> ImageBatch:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), np.uint8)
    return ImageBatch.of_pixels(list(pixels))


def recipe(**changes: object):
    return override(get_recipe("distill_features"), STUDENT | {"augment.mixup": 0.0} | changes)


def standardized(vector: np.ndarray) -> np.ndarray:
    return (vector - vector.mean()) / np.sqrt(vector.var() + 1e-5)


def test_the_loss_is_the_equation() -> None:
    rng = np.random.default_rng(0)
    predicted, target = rng.normal(size=(5, 7)), rng.normal(2, 3, size=(5, 7))
    slow = np.mean([(p - standardized(t)) ** 2 for p, t in zip(predicted, target, strict=True)])
    assert regression_loss(torch.tensor(predicted), torch.tensor(target)).item() == pytest.approx(slow, rel=1e-6)


def test_pooled_and_position_terms_against_a_slow_reference() -> None:
    network, guide, images = student(), teacher(), batch()
    objective = FeatureDistillation(recipe(**{"objective.position_weight": 0.25}), network, guide)
    values = objective(network, images, epoch=0, step=0)
    pixels = normalize(images.images, network.pixel_mean, network.pixel_std)
    with torch.no_grad():
        tokens = network.features(pixels).numpy()  # (4, 16, 16): a grid of 4×4
        theirs = guide.module.network  # of 64 pixels: a grid of 4×4 and a class token
        scaled = pixels * guide.scale + guide.shift
        large = nn.functional.interpolate(scaled, (64, 64), mode="bicubic", antialias=True)
        taught = theirs.features(large).numpy()
    layers = {name: [p.detach().numpy() for p in layer.parameters()] for name, layer in objective.named_children()}
    pooled, positions = [], []
    for own, target in zip(tokens, taught, strict=True):
        weight, bias = layers["pooled_layer"]
        pooled.append(((weight @ own.mean(0) + bias - standardized(target[0])) ** 2).mean())
        weight, bias = layers["position_layer"]
        positions += [((weight @ s + bias - standardized(t)) ** 2).mean() for s, t in zip(own, target[1:], strict=True)]
    expected = 0.75 * np.mean(pooled) + 0.25 * np.mean(positions)
    assert values["loss"].item() == pytest.approx(expected, rel=1e-4)


def test_the_finer_grid_is_averaged_to_the_coarser() -> None:
    network = student()
    objective = FeatureDistillation(recipe(), network, teacher(patch_size=32))  # 2×2 positions for 4×4
    assert torch.isfinite(objective(network, batch(), epoch=0, step=0)["position_loss"])


def test_only_the_student_and_the_layers_learn() -> None:
    network, guide = student(), teacher()
    objective = FeatureDistillation(recipe(), network, guide)
    objective(network, batch(), epoch=0, step=0)["loss"].backward()
    assert all(p.grad is not None for p in objective.parameters())
    assert any(p.grad is not None for p in network.parameters())
    assert not any(p.requires_grad for p in guide.parameters())
    assert not any("teacher" in name for name in objective.state_dict())


def test_a_teacher_without_a_map_is_for_pooled_features() -> None:
    guide = teacher("resnet50_attention_pool", backbone="mobilenetv3_small_050", pool="average")
    with pytest.raises(UsageError, match="position_weight"):
        FeatureDistillation(recipe(), student(), guide)
    objective = FeatureDistillation(recipe(**{"objective.position_weight": 0.0}), network := student(), guide)
    assert set(objective(network, batch(), epoch=0, step=0)) == {"loss", "pooled_loss"}


def test_mixed_images_are_those_that_the_teacher_sees() -> None:
    class Seen(FeatureExtractor):
        def forward(self, images):
            self.images = images
            return super().forward(images)

    guide = teacher()
    guide.module = Seen(guide.module.network)
    mixing = recipe(**{"augment.mixup": 0.8, "augment.mix_probability": 1.0})
    network = student()
    FeatureDistillation(mixing, network, guide)(network, batch(), epoch=0, step=0)
    mixed = guide.module.images
    network2 = student()
    FeatureDistillation(recipe(), network2, guide)(network2, batch(), epoch=0, step=0)
    assert not torch.allclose(mixed, guide.module.images)


def run(folder, teacher_run, **options):
    return patchloom.train(
        "digits", recipe="distill_features", teacher=str(teacher_run), out=str(folder), device="cpu", workers=0,
        model="resmlp_s12", size=32, batch=64, set={f"model.options.{k}": v for k, v in SMALL.items()}, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    patchloom.train(
        "digits", model="resmlp_s12", size=32, epochs=1, batch=128, out=str(folder), device="cpu", workers=0,
        set={"model.options.patch_size": 8, "model.options.dim": 24, "model.options.depth": 1},
    )  # fmt: skip
    return folder


def test_a_run_learns_features_and_is_evaluated_by_neighbors(tmp_path, teacher_run) -> None:
    result = run(tmp_path / "student", teacher_run, epochs=1)
    assert result.metrics[result.metric] > 20  # percent; 10 classes
    assert result.metric.startswith("knn")
    assert patchloom.load(tmp_path / "student").embed is not None


def test_a_teacher_is_required_and_must_exist(tmp_path, teacher_run) -> None:
    with pytest.raises(UsageError, match="--teacher"):
        patchloom.train("digits", recipe="distill_features", out=str(tmp_path / "a"), device="cpu")
    with pytest.raises(UsageError, match="nowhere"):
        run(tmp_path / "b", "nowhere/at/all", epochs=1)


def test_a_method_without_a_teacher_refuses_one() -> None:
    with pytest.raises(UsageError, match=r"objective\.teacher"):
        override(get_recipe("dino"), {"objective.teacher": "timm:resnet18"})


def test_a_stopped_run_resumes_to_the_same_weights(tmp_path, teacher_run) -> None:
    run(tmp_path / "whole", teacher_run, epochs=2)
    run(tmp_path / "cut", teacher_run, epochs=2, stop_after="0.1s")
    run(tmp_path / "cut", teacher_run, epochs=2)
    ended = [find_checkpoint(tmp_path / name, read_checkpoint).snapshot for name in ("whole", "cut")]
    assert ended[0].step == ended[1].step
    for kind in ("weights", "objective"):
        first, second = (each.tensors[kind] for each in ended)
        assert first.keys() == second.keys() != set()
        assert all(torch.equal(first[name], second[name]) for name in first)
