"""patchloom's networks through timm.create_model."""

import pytest
import timm
import timm.optim
import torch
from safetensors.torch import save_file

import patchloom
import patchloom.timm
from patchloom.models.registry import list_models
from patchloom_runtime.errors import UsageError
from tests.messages import refused


def test_every_name_is_known_to_timm() -> None:
    assert all(timm.is_model(name) for name in list_models())


def test_a_network_answers_timms_names() -> None:
    network = timm.create_model("resmlp_s12", num_classes=7, img_size=32, drop_path_rate=0.1, depth=2, dim=16).eval()
    x = torch.randn(2, 3, 32, 32)
    features = network.forward_features(x)
    assert torch.equal(network.forward_head(features), network(x))
    assert network.forward_head(features, pre_logits=True).shape == (2, network.num_features)
    assert (network.num_classes, network.config.drop_path) == (7, 0.1)
    network.reset_classifier(3)
    assert network(x).shape == (2, 3)
    assert network.get_classifier().out_features == 3
    network.set_grad_checkpointing()
    assert network.gradient_checkpointing


def test_timms_data_configuration_and_optimizer_read_it() -> None:
    network = timm.create_model("mixer_b16", img_size=32, depth=2, dim=16)
    config = timm.data.resolve_model_data_config(network)
    assert (config["input_size"], config["mean"]) == ((3, 32, 32), (0.5, 0.5, 0.5))
    deit = timm.create_model("deit_s", depth=1, dim=16, heads=2)
    assert deit.no_weight_decay() == {"class_tokens.weight", "position.weight"}
    timm.optim.create_optimizer_v2(deit, opt="lamb", lr=1e-3, weight_decay=0.05)


def test_pretrained_names_the_published_weights_and_takes_them_from_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"resmlp_s12:in1k"):
        timm.create_model("resmlp_s12", pretrained=True)
    with refused(UsageError, "cait_b12"):
        timm.create_model("cait_b12", pretrained=True)
    trained = patchloom.create_model("resmlp_s12")
    torch.nn.init.normal_(trained.classifier.weight)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr("patchloom.timm.in_cache", lambda _: tmp_path / "w.safetensors")
    network = timm.create_model("resmlp_s12", pretrained=True)
    assert torch.equal(network.classifier.weight, trained.classifier.weight)
    assert timm.create_model("resmlp_s12", pretrained=True, num_classes=3).num_classes == 3


def test_the_names_are_those_of_every_network() -> None:
    options = {"image_size": 32, "patch_size": 8, "depth": 1, "dim": 24, "heads": 2, "num_classes": 0}
    network = patchloom.create_model("deit_ti", **options).eval()
    x = torch.randn(2, 3, 32, 32)
    assert network(x).shape == (2, network.num_features)
    network.reset_classifier(5)
    assert torch.equal(network.forward_head(network.forward_features(x)), network(x))
    assert (network.num_classes, network.get_classifier().out_features) == (5, 5)
    with refused(UsageError, "global_pool"):
        network.reset_classifier(5, global_pool="max")


def test_features_only_returns_maps() -> None:
    maps = patchloom.create_model("smlpnet_t", features_only=True, image_size=64)
    outputs = maps(torch.zeros(1, 3, 64, 64))
    assert [tuple(each.shape[1:]) for each in outputs] == [
        (level.channels, 64 // level.stride, 64 // level.stride) for level in maps.levels
    ]
    assert [level.stride for level in maps.levels] == [4, 8, 16, 32]


def test_pretrained_is_the_first_of_the_published_weights(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        "patchloom.models.registry._with_weights", lambda weights, classes, *_: calls.append((weights.name, classes))
    )
    patchloom.create_model("resmlp_s12", pretrained=True, num_classes=3)
    assert calls == [("resmlp_s12:in1k", 3)]
    with refused(UsageError, "cait_b12"):
        patchloom.create_model("cait_b12", pretrained=True)
    with refused(UsageError, "resmlp_s13", "resmlp_s12"):
        patchloom.create_model("resmlp_s13", pretrained=True)
