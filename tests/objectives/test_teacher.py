import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torch import nn

import patchloom
from patchloom.objectives.teacher import Teacher, load_teacher
from patchloom_runtime.errors import CheckpointError, ResourceError, UsageError
from tests.messages import refused

HALF = (0.5, 0.5, 0.5)


class Means(nn.Module):
    """Logits that show what the network saw: the mean of each channel, then height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        size = torch.tensor(images.shape[2:], dtype=images.dtype).expand(len(images), 2)
        return self.dropout(torch.cat([images.mean(dim=(2, 3)), size], dim=1))


def means(image_size: tuple[int, int] = (1, 1), classes: list[str] | None = None, any_resolution=True) -> Teacher:
    return Teacher(
        Means(),
        mean=HALF,
        std=HALF,
        image_size=image_size,
        num_classes=5,
        any_resolution=any_resolution,
        classes=classes,
    )


def test_a_teacher_stays_in_eval_mode_and_gives_no_gradient():
    teacher = means().train()
    assert not any(module.training for module in teacher.modules())
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    answer = teacher(images)
    assert not answer.requires_grad
    torch.testing.assert_close(answer[:, :3], images.detach().mean(dim=(2, 3)))


def test_images_are_resized_to_the_teachers_size():
    images = torch.randn(2, 3, 8, 12)
    teacher = means((6, 4), any_resolution=False)
    assert teacher(images)[0, 3:].tolist() == [6, 4]
    expected = F.interpolate(images, (6, 4), mode="bicubic", antialias=True).mean(dim=(2, 3))
    torch.testing.assert_close(teacher(images)[:, :3], expected)


@pytest.mark.parametrize(("own", "inputs"), [((6, 4), [8, 12]), ((8, 12), [8, 12]), ((16, 16), [16, 16])])
def test_a_teacher_of_any_resolution_is_never_shown_smaller_images_than_it_knows(own, inputs):
    assert means(own)(torch.randn(2, 3, 8, 12))[0, 3:].tolist() == inputs


def test_images_are_renormalized():
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    pixels = torch.rand(2, 3, 8, 8)
    images = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = ((pixels - 0.5) / 0.5).mean(dim=(2, 3))
    torch.testing.assert_close(means().for_images_of(mean, std)(images)[:, :3], expected)


def test_outputs_are_put_in_the_datas_order():
    teacher = means(classes=["red", "green", "blue", "height", "width"])
    images = torch.randn(2, 3, 8, 12)
    plain = teacher(images)
    teacher.match_classes(["blue", "width", "red"])
    assert torch.equal(teacher(images), plain[:, [2, 4, 0]])
    teacher.check_classes(3)
    teacher.match_classes(["green", "red"])
    assert torch.equal(teacher(images), plain[:, [1, 0]])


def test_unknown_classes_are_named():
    teacher = means(classes=["red", "green", "blue", "height", "width"])
    with refused(UsageError, 5, "red", 6, 4, "rot", "grün", "gelb"):
        teacher.match_classes(["blue", "rot", "grün", "gelb", "weiß", "red"])
    with refused(UsageError, 5, 3):
        means().match_classes(["a", "b", "c"])


def test_timm_with_weights_of_ones_own(tmp_path):
    network = timm.create_model("test_resnet", num_classes=4).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    teacher = load_teacher(f"timm:test_resnet@{tmp_path}/weights.safetensors", 4, ["a", "b", "c", "d"])
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(teacher.for_images_of(HALF, HALF)(images), network(images))
    assert (teacher.mean, teacher.std, teacher.image_size) == (HALF, HALF, (160, 160))
    assert "state_dict" not in teacher.module.pretrained_cfg
    with refused(UsageError, 4, 10):
        load_teacher(f"timm:test_resnet@{tmp_path}/weights.safetensors", 10)
    with refused(CheckpointError, "weights.safetensors", "test_vit"):
        load_teacher(f"timm:test_vit@{tmp_path}/weights.safetensors", 4)


@pytest.mark.parametrize(("name", "inputs"), [("test_resnet", 256), ("vit_tiny_patch16_224", 224)])
def test_a_student_at_a_higher_resolution_shows_a_convnet_its_images_as_they_are(name, inputs, tmp_path):
    """Thesis 3.3: the teacher of a fine-tuning sees what the student sees, where it can take it."""
    network = timm.create_model(name, num_classes=4).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    teacher = load_teacher(f"timm:{name}@{tmp_path}/weights.safetensors", 4).for_images_of(HALF, HALF)
    images = torch.randn(1, 3, 256, 256)
    expected = network(
        images if inputs == 256 else F.interpolate(images, (inputs, inputs), mode="bicubic", antialias=True)
    )
    torch.testing.assert_close(teacher(images), expected)


def test_torchvision_with_weights_of_ones_own(tmp_path):
    network = torchvision.models.get_model("squeezenet1_1", num_classes=4).eval()
    torch.save({"state_dict": network.state_dict()}, tmp_path / "weights.pth")
    teacher = load_teacher(f"torchvision:squeezenet1_1@{tmp_path}/weights.pth", 4)
    images = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(teacher(images), network(images))
    assert teacher.image_size == (224, 224)
    with refused(UsageError, 4, 10):
        load_teacher(f"torchvision:squeezenet1_1@{tmp_path}/weights.pth", 10)


def test_a_network_of_patchloom(tmp_path):
    network = patchloom.create_model("resmlp_s12", num_classes=4).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    teacher = load_teacher(f"resmlp_s12@{tmp_path}/weights.safetensors", 4)
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(teacher(images), network(images))
    with refused(UsageError, 4, 10):
        load_teacher(f"resmlp_s12@{tmp_path}/weights.safetensors", 10)


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("timm:regnety_16", ("timm:regnety_16", "regnety_160")),
        ("timm:regnety_160.deit_in2k", ("timm:regnety_160.deit_in2k", "regnety_160.deit_in1k")),
        ("torchvision:resnet51", ("torchvision:resnet51", "resnet50")),
        ("resmlp_24", ("resmlp_24", "resmlp_s24")),
        ("resmlp_s24", ("resmlp_s24@PATH",)),
        ("timm:resnet50@nowhere.pth", ("nowhere.pth",)),
        ("timm:regnety_160.deit_in1k", (1000, 10)),
        ("torchvision:resnet50", (1000, 10)),
    ],
)
def test_errors_before_any_work(monkeypatch, spec, facts):
    def no_work(*args, **options):
        raise AssertionError("a network was made before the teacher was checked")

    monkeypatch.setattr(timm, "create_model", no_work)
    monkeypatch.setattr(torchvision.models, "get_model", no_work)
    with refused(UsageError, *facts):
        load_teacher(spec, 10)


def test_published_teachers_are_matched_by_wordnet_id(monkeypatch):
    """Two classes of ImageNet in another order, from weights that need not be fetched here."""
    made = timm.create_model("test_resnet", num_classes=1000).eval()
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: made)
    teacher = load_teacher("timm:test_resnet", 2, ["n15075141", "n01440764"])
    images = torch.randn(1, 3, 160, 160)
    torch.testing.assert_close(teacher(images), made(images)[:, [999, 0]])
    with refused(UsageError, 1000, "n01440764", 2):
        load_teacher("timm:test_resnet", 2, ["tench", "toilet paper"])


def test_weights_that_cannot_be_had(monkeypatch, tmp_path):
    def offline(*args, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr(timm, "create_model", offline)
    with refused(ResourceError, "OSError: no route to host", "timm:resnet50@PATH"):
        load_teacher("timm:resnet50", 1000)
    (tmp_path / "torn.pth").write_bytes(b"torn")
    with refused(CheckpointError, "torn.pth"):
        load_teacher(f"resmlp_s12@{tmp_path}/torn.pth", 10)
