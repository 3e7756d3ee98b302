"""timm's networks: every kind of features trains, is saved, resized, absorbed and looked at, or is refused by name."""

import copy
import warnings

import pytest
import timm
import torch
from PIL import Image

import patchloom
from patchloom.models.cost import cost
from patchloom.models.timm_trunk import trunk_layout
from patchloom.recipes import get_recipe, override
from patchloom.report.pictures.pictures import pictures_of
from patchloom.tasks.images.networks import make_network
from patchloom_runtime.errors import UsageError

# Small ones of every kind: name, what it gives at 64 pixels, whether it takes other sizes as it is.
QUICK = [
    ("test_resnet", "map", True),
    ("resnetv2_18", "map", True),
    ("densenet121", "map", True),
    ("mobilenetv3_small_050", "vector", True),
    ("mobilenetv4_conv_small_035", "vector", True),
    ("vgg11", "vector", True),
    ("ghostnet_050", "vector", True),
    ("lcnet_035", "vector", True),
    ("test_vit", "tokens", True),
    ("deit_tiny_distilled_patch16_224", "tokens", False),
    ("pit_ti_distilled_224", "tokens", False),
    ("convit_tiny", "tokens", False),
    ("tnt_s_patch16_224", "tokens", False),
    ("swin_tiny_patch4_window7_224", "nhwc", False),
    ("mambaout_femto", "vector", True),
    ("coat_lite_tiny", "tokens", False),
    ("crossvit_9_240", "vector", True),
    ("efficientvim_m1", "vector", True),
    ("xcit_nano_12_p8_224", "tokens", True),
]


# One of each kind of trunk; the others are tried with the slow tests.
OFTEN = (
    "test_resnet",
    "mobilenetv3_small_050",
    "test_vit",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
)


def of_timm(name: str, *, size: int = 64, classes: int = 5, **options):
    return patchloom.create_model(
        "resnet50_attention_pool", backbone=name, pool="average", image_size=size, num_classes=classes, **options
    )


@pytest.mark.parametrize(
    ("name", "gives", "any_size"),
    [each if each[0] in OFTEN else pytest.param(*each, marks=pytest.mark.slow) for each in QUICK],
)
def test_what_a_network_gives_is_found_without_weights(name, gives, any_size) -> None:
    with torch.device("meta"):
        network = of_timm(name, drop_path=0.1).eval()
        features = network.features(torch.zeros(2, 3, 64, 64))
        logits = network.head(features)
    assert (trunk_layout(name, (64, 64), 3).gives, network.any_resolution) == (gives, any_size)
    assert features.shape[-1] == network.feature_dim
    assert network.pool(features).shape == (2, network.feature_dim)
    assert logits.shape == (2, 5)
    assert cost(network).parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "mobilenetv3_small_050", "pit_ti_224"])
def test_the_features_are_those_of_timms_own_network(name) -> None:
    torch.manual_seed(0)
    network = of_timm(name).eval()
    size = {} if network._gives in ("map", "vector") else {"img_size": 64}
    own = timm.create_model(name, num_classes=0, **size).eval()
    own.load_state_dict(network.trunk.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(network.pool(network.features(images)), own(images), atol=1e-5)


def test_a_seed_gives_the_weights_it_gave_before() -> None:
    trunk_layout.cache_clear()
    torch.manual_seed(3)
    network = of_timm("test_resnet")
    torch.manual_seed(3)
    own = timm.create_model("test_resnet", num_classes=0, global_pool="", drop_path_rate=0.0)
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in network.trunk.state_dict().items())


@pytest.mark.parametrize("name", ["test_vit", "mobilenetv3_small_050", "swin_tiny_patch4_window7_224"])
def test_gradients_reach_the_weights_and_an_absorbed_copy_says_the_same(name) -> None:
    torch.manual_seed(0)
    network = of_timm(name).train()
    with torch.no_grad():
        for key, tensor in network.state_dict().items():  # statistics that folding must not lose
            if key.endswith("running_mean"):
                tensor.normal_()
            elif key.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
    images = torch.randn(2, 3, 64, 64)
    network(images).square().sum().backward()
    assert [key for key, parameter in network.named_parameters() if parameter.grad is None] == []
    lean, network = patchloom.absorb(network), network.eval()
    with torch.no_grad():
        assert torch.allclose(lean(images), network(images), atol=1e-3)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in lean.modules())


@pytest.mark.parametrize(
    ("name", "resampled"), [("test_vit", True), ("vit_tiny_patch16_224", True), ("mobilenetv3_small_050", False)]
)
def test_another_size_is_resampled_by_timm(name, resampled) -> None:
    torch.manual_seed(0)
    network = of_timm(name).eval()
    larger = network.at_resolution(96)
    assert larger.config.image_size == (96, 96)
    with torch.no_grad():
        assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 5)
    shapes = [(tensor.shape, larger.state_dict()[key].shape) for key, tensor in network.state_dict().items()]
    assert any(a != b for a, b in shapes) is resampled
    if resampled:
        assert network.trunk.pos_embed.shape[1] < larger.trunk.pos_embed.shape[1]


def test_a_size_that_cannot_be_changed_is_said() -> None:
    network = of_timm("pit_ti_224")
    with pytest.raises(UsageError) as error:
        network.at_resolution(96)
    assert "pit_ti_224" in str(error.value)
    assert "64×64" in str(error.value)
    assert "96×96" in str(error.value)
    with pytest.raises(UsageError, match="32×32"):
        network.forward_resampled(torch.zeros(1, 3, 32, 32))


def test_what_cannot_be_used_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as error:
        of_timm("inception_v3")
    assert "inception_v3" in str(error.value)
    assert "--size 96" in str(error.value)
    with pytest.raises(UsageError, match="vit_tinny_patch16"):
        of_timm("vit_tinny_patch16")
    with pytest.raises(UsageError, match="test_vit"):
        patchloom.create_model("resnet50_attention_pool", backbone="test_vit", image_size=64)


def test_stochastic_depth_that_a_network_has_not_is_noted() -> None:
    with torch.device("meta"):
        (note,) = of_timm("densenet121", drop_path=0.1).notes
        assert [fact for fact in ("densenet121", "drop_path", "0.1") if fact not in note] == []
        assert of_timm("densenet121").notes == of_timm("test_vit", drop_path=0.1).notes == ()


@pytest.mark.parametrize("name", ["test_vit", "mobilenetv3_small_050"])
def test_pictures_are_drawn_of_what_is_there(name) -> None:
    torch.manual_seed(0)
    network = of_timm(name).eval()
    drawn = pictures_of(network, [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(3)])
    assert drawn
    assert all("patch" not in picture.title.lower() for picture in drawn)


def smallest(module: str) -> str:
    """The network of a module of timm's with the fewest parameters among its first ones."""
    sizes = {}
    warnings.simplefilter("ignore")  # pytest's own filters come back after the test
    for name in [name for name in timm.list_models(module=module) if not name.startswith("test_")][:40]:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=0).parameters())
    return min(sizes, key=sizes.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("module", timm.models.list_modules())
def test_every_family_of_timms_trains_or_is_refused_in_one_line(module) -> None:
    name = smallest(module)
    recipe = override(get_recipe("small_images", f"timm:{name}"), {"model.image_size": 64})
    refused = None
    try:
        with torch.device("meta"):
            network = make_network(recipe, 5)
    except UsageError as error:
        refused = str(error)
    if refused:
        assert name in refused
        assert "\n" not in refused
        return
    assert cost(network).parameters
    if sum(p.numel() for p in network.parameters()) > 60e6:
        return
    network = make_network(recipe, 5).train()
    network(torch.randn(2, 3, 64, 64)).sum().backward()
    assert network.classifier.weight.grad.abs().sum() > 0
    again = make_network(recipe, 5)
    again.load_state_dict(copy.deepcopy(network.state_dict()))
