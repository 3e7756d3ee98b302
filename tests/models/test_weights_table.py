"""The table of published weights: nothing in it is invented, and its names say what they are."""

import re

import pytest
import timm
import torch

import patchloom
from patchloom.models.catalog import CATALOG
from patchloom.models.pretrained.table import WEIGHTS, weights_named
from patchloom_runtime.errors import UsageError
from tests.weights_server import Shelf, caches, in_hub_cache, published, served, tiny

ALL = {weights.name: weights for weights in WEIGHTS}
IN_TIMM = [name for name, weights in ALL.items() if weights.hub]
# Where timm shows images otherwise than the authors, whose top-1 stands in the table: facts of their READMEs and code.
OTHER_CROPS = {"resmlp": 0.9, "deit": 0.875, "deit3": 1.0}


def test_names_are_unique_and_those_of_networks() -> None:
    assert len(ALL) == len(WEIGHTS)
    assert {weights.variant for weights in WEIGHTS} <= set(CATALOG)
    order = [list(CATALOG).index(weights.variant) for weights in WEIGHTS]
    assert order == sorted(order)


@pytest.mark.parametrize("name", IN_TIMM)
def test_a_row_is_timms(name) -> None:
    weights = ALL[name]
    config = timm.get_pretrained_cfg(weights.hub.removeprefix("timm/"), allow_unregistered=False)
    assert config.hf_hub_id == weights.hub
    assert config.input_size == (3, weights.image_size, weights.image_size)
    assert (config.mean, config.std, config.interpolation) == (weights.mean, weights.std, weights.interpolation)
    assert config.license == weights.licence.lower()
    if weights.tag != "dino":  # the head of timm's repositories of ResMLP's was never trained
        assert config.num_classes == weights.classes
    if weights.url and "mixer" not in name:  # Google's files are timm's in another form
        assert config.url == weights.url
    other = OTHER_CROPS.get(weights.variant.split("_")[0])
    assert weights.crop_ratio == (other or config.crop_pct)


def test_all_of_timms_weights_for_our_networks_are_here() -> None:
    known = {weights.hub.removeprefix("timm/") for weights in WEIGHTS}
    theirs = timm.list_pretrained(["resmlp_*", "mixer_*", "deit*", "cait_*"])
    assert [name for name in theirs if name not in known] == []


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: weights.name)
def test_a_tag_says_what_the_weights_are(weights) -> None:
    tag = weights.tag
    assert ("in21k" in tag) == ("ImageNet-21k" in weights.trained_on)
    assert ("ft_in1k" in tag) == ("fine-tuned" in weights.trained_on)
    size = re.search(r"_(\d{3})$", tag)
    assert weights.image_size == (int(size[1]) if size else 224)
    assert weights.hub or weights.url
    assert (weights.classes == 0) == tag.startswith("dino")
    assert weights.digits == "" or weights.digits in weights.url


COUNTED = [w for w in WEIGHTS if w.counted and w.parameters < 1.2e8]


@pytest.mark.parametrize("weights", COUNTED, ids=lambda weights: weights.name)
def test_parameters_are_counted(weights) -> None:
    with torch.device("meta"):
        network = patchloom.create_model(
            weights.variant, num_classes=weights.classes, image_size=weights.image_size, **weights.options
        )
    assert sum(parameter.numel() for parameter in network.parameters()) == weights.parameters


def test_what_is_not_there_names_what_is() -> None:
    with pytest.raises(UsageError) as error:
        weights_named("resmlp_s12:in2k")
    assert "in2k" in str(error.value)
    assert "resmlp_s12:in1k" in str(error.value)
    assert "resmlp_s12:in1k_d" in str(error.value)
    with pytest.raises(UsageError, match="resmlp_s12:in1k"):
        weights_named("resmlp_s12:")
    with pytest.raises(UsageError) as error:
        weights_named("deit3_t:in1k")
    assert "deit3_t" in str(error.value)
    assert "deit3_b" in str(error.value)
    with pytest.raises(UsageError) as error:
        weights_named("resmlp_s21:in1k")
    assert "resmlp_s21" in str(error.value)
    assert "resmlp_s12" in str(error.value)


def test_a_network_with_published_weights(tmp_path, monkeypatch) -> None:
    from safetensors.torch import save

    caches(monkeypatch, tmp_path)
    row, network = tiny(hub="timm/resmlp_tiny", url="")
    published(monkeypatch, row)
    in_hub_cache(tmp_path, row.hub, save(network.state_dict()))
    pictures = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        same = patchloom.create_model("resmlp_s12", weights="tiny").eval()(pictures)
        torch.testing.assert_close(same, network(pictures), rtol=0, atol=0)
        features = patchloom.create_model("resmlp_s12:tiny", num_classes=3).eval().features(pictures)
        torch.testing.assert_close(features, network.features(pictures), rtol=0, atol=0)
    larger = patchloom.create_model("resmlp_s12", weights="tiny", image_size=64)
    assert larger(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_nothing_is_fetched_for_a_file_that_asks_for_it(tmp_path, monkeypatch) -> None:
    from patchloom.models.registry import build_model

    caches(monkeypatch, tmp_path)
    with served(Shelf()) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        monkeypatch.setenv("HF_ENDPOINT", shelf.address)
        with pytest.raises(UsageError) as error:
            build_model("resmlp_s12", weights="in1k")
        assert "resmlp_s12" in str(error.value)
        assert "weights" in str(error.value)
        with pytest.raises(UsageError, match="resmlp_s12:in1k"):
            build_model("resmlp_s12:in1k")
        assert shelf.requests == []
