"""patchloom's networks through timm.create_model."""

import pytest
import timm
import timm.optim
import torch

import patchloom.timm  # noqa: F401
from patchloom.errors import UsageError
from patchloom.models.registry import list_models


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


def test_timms_data_configuration_and_optimiser_read_it() -> None:
    network = timm.create_model("mixer_b16", img_size=32, depth=2, dim=16)
    config = timm.data.resolve_model_data_config(network)
    assert (config["input_size"], config["mean"]) == ((3, 32, 32), (0.5, 0.5, 0.5))
    deit = timm.create_model("deit_s", depth=1, dim=16, heads=2)
    assert deit.no_weight_decay() == {"class_tokens.weight", "position.weight"}
    timm.optim.create_optimizer_v2(deit, opt="lamb", lr=1e-3, weight_decay=0.05)


def test_weights_that_are_not_shipped() -> None:
    with pytest.raises(UsageError, match="patchloom ships no weights"):
        timm.create_model("resmlp_s12", pretrained=True)
