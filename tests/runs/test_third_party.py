"""timm:NAME and torchvision:NAME wherever a run is accepted, with weights of one's own or theirs."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision import models

import patchloom
from patchloom.models.pretrained.conversion import converted
from patchloom.models.registry import build_model
from patchloom.runs.config import read_run_files
from patchloom.runs.locate import is_downloaded
from patchloom.runs.third_party import third_party_run
from patchloom.runs.weights import load_network
from patchloom_runtime.errors import CheckpointError, ResourceError, UsageError
from tests.messages import refused


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "patchloom" / "published"


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.eval()


# Convnets that average, one that normalises the average, and a column.
@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit", "test_efficientnet", "test_nfnet"])
def test_a_file_of_timms_network_is_a_run_that_answers_alike(name, tmp_path) -> None:
    theirs = shaken(timm.create_model(name, num_classes=4))
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    network, files = load_network(third_party_run(f"timm:{name}@{tmp_path}/w.safetensors"))
    known = theirs.pretrained_cfg
    assert (files.preprocessing.mean, files.preprocessing.crop_ratio) == (known["mean"], known["crop_pct"])
    assert files.labels == ("0", "1", "2", "3")
    x = torch.randn(2, 3, *files.preprocessing.image_size)
    with torch.no_grad():
        torch.testing.assert_close(network(x), theirs(x), rtol=1e-4, atol=1e-5)
    back = converted(network, "timm").state
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in theirs.state_dict().items())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "squeezenet1_1",
        "googlenet",
        "mnasnet0_5",
        "mobilenet_v3_small",
        *(pytest.param(each, marks=SLOW) for each in ("resnet18", "regnet_y_400mf")),
    ],
)
def test_a_file_of_torchvisions_network(name, tmp_path) -> None:
    theirs = shaken(models.get_model(name, num_classes=3, **({"init_weights": False} if name == "googlenet" else {})))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    spec = f"torchvision:{name}@{tmp_path}/w.pth"
    if name in ("squeezenet1_1", "googlenet", "mnasnet0_5"):
        with refused(UsageError, "torchvision", name):
            third_party_run(spec)
        return
    network, _ = load_network(third_party_run(spec))
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(network(x), theirs(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "convnext_tiny",
        "vit_b_32",
        *(pytest.param(each, marks=SLOW) for each in ("swin_t", "efficientnet_b0", "densenet121", "vgg11", "maxvit_t")),
    ],
)
def test_torchvisions_other_networks_give_features(name) -> None:
    with torch.device("meta"):
        network = build_model("resnet50_attention_pool", backbone=f"torchvision:{name}", pool="average", drop_path=0.1)
        assert network(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
        assert network.features(torch.zeros(2, 3, 224, 224)).shape[-1] == network.feature_dim


def test_maps_of_torchvisions_network_at_every_stride() -> None:
    network = build_model("resnet50_attention_pool", backbone="torchvision:mobilenet_v2", pool="average", image_size=64)
    levels = network.pyramid_levels((4, 8, 16, 32))
    assert [level.stride for level in levels] == [4, 8, 16, 32]
    maps = network.eval().pyramid(torch.zeros(1, 3, 64, 64), (4, 8, 16, 32))
    assert [tuple(each.shape[1:]) for each in maps] == [
        (lv.channels, 64 // lv.stride, 64 // lv.stride) for lv in levels
    ]


def test_the_folder_is_made_once_and_a_changed_file_makes_another(tmp_path, cache) -> None:
    theirs = timm.create_model("test_resnet", num_classes=2)
    spec = f"timm:test_resnet@{tmp_path}/w.safetensors"
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    assert not is_downloaded(spec)
    first = third_party_run(spec)
    assert third_party_run(spec) == first
    assert is_downloaded(spec)
    save_file(shaken(theirs).state_dict(), tmp_path / "w.safetensors")
    assert third_party_run(spec) != first
    assert first.parent == cache


def test_published_weights_are_fetched_by_their_library(monkeypatch) -> None:
    made = shaken(timm.create_model("test_resnet"))
    create = timm.create_model

    def fetch_weights(name, pretrained=False, **options):
        return made if pretrained else create(name, **options)

    monkeypatch.setattr(timm, "create_model", fetch_weights)
    folder = third_party_run("timm:test_resnet")
    assert folder.name == f"timm:test_resnet.{timm.get_pretrained_cfg('test_resnet').tag}"
    files = read_run_files(folder)
    assert files.labels[:2] == ("tench", "goldfish")
    assert files.labels_as(["n01440764"])[0] == "n01440764"


def test_offline_and_wrong_names_are_one_line(monkeypatch, tmp_path, cache) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("timm.models._hub.hf_hub_download", _unreachable)
    monkeypatch.setattr("torch.hub.download_url_to_file", _unreachable)
    with refused(ResourceError, "timm:test_resnet@PATH"):
        third_party_run("timm:test_resnet")
    with refused(ResourceError, "torchvision:resnet18@PATH"):
        third_party_run("torchvision:resnet18")
    with refused(UsageError, "timm", "resnet5", "resnet50"):
        third_party_run("timm:resnet5")
    with refused(UsageError, "torchvision", "resnet5", "resnet50"):
        third_party_run("torchvision:resnet5")
    with refused(UsageError, "nowhere.pth"):
        third_party_run("torchvision:resnet18@nowhere.pth")
    torch.save({"a": torch.zeros(2)}, tmp_path / "w.pth")
    with refused(CheckpointError, "w.pth", "resnet18"):
        third_party_run(f"torchvision:resnet18@{tmp_path}/w.pth")
    with refused(CheckpointError, "w.pth", "test_resnet"):
        third_party_run(f"timm:test_resnet@{tmp_path}/w.pth")
    assert not [path for path in cache.iterdir() if not path.name.startswith(".")]


def _unreachable(*_, **__):
    raise OSError("no network")


def test_fine_tuning_from_it_keeps_its_mean_and_std(tmp_path) -> None:
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, color in (("red", 0), ("blue", 2)):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = generator.integers(0, 80, (32, 32, 3), dtype=np.uint8)
                pixels[..., color] += 120
                Image.fromarray(pixels).save(folder / f"{i}.png")
    theirs = timm.create_model("test_vit", num_classes=3, img_size=160)
    assert theirs.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    spec = f"timm:test_vit@{tmp_path}/w.safetensors"
    run = patchloom.train(
        tmp_path / "data", init=spec, epochs=1, batch=8, out=tmp_path / "run", device="cpu", workers=0
    )
    shown = patchloom.load(run.folder, device="cpu").preprocessing
    assert shown.mean == shown.std == (0.5, 0.5, 0.5)
    answers = patchloom.load(spec, device="cpu").predict(tmp_path / "data" / "val" / "red" / "0.png")
    assert len(answers) == 3
