"""What every registered network does, checked on all of them at a small size."""

import re
from pathlib import Path

import pytest
import torch

import patchloom
from patchloom.models.network import Network
from patchloom.models.registry import family_of, list_models
from patchloom_runtime.errors import UsageError
from tests.networks import ONE_OF_EACH, SMALL, assert_same, images, small

every_network = pytest.mark.parametrize("name", list_models())
every_family = pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())


@every_network
def test_features_head_and_forward(name) -> None:
    network = small(name)
    x = images(network)
    with torch.no_grad():
        features = network.features(x)
        logits = network(x)
        torch.testing.assert_close(network.head(features), logits, rtol=0, atol=0)
    assert logits.shape == (2, 5)
    assert features.shape[-1] == network.feature_dim
    assert torch.isfinite(logits).all()
    assert (logits[0] - logits[1]).abs().max() > 1e-4  # it looks at the picture


@every_network
def test_gradient_reaches_every_parameter(name) -> None:
    network = small(name).train()
    network(images(network, 16)).square().mean().backward()
    silent = [key for key, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # Adding a constant to all logits of a softmax changes nothing, so key biases get none.
    assert [key for key in silent if not key.endswith("mix.k.bias")] == []


@every_network
def test_absorb_gives_the_same_outputs_with_fewer_operations(name) -> None:
    network = small(name)
    lean = patchloom.absorb(network)
    x = images(network)
    with torch.no_grad():
        assert_same(lean(x), network(x))
        assert_same(lean.features(x), network.features(x))
    full, less = patchloom.cost(network), patchloom.cost(lean)
    assert less.operations < full.operations
    assert less.multiply_adds <= full.multiply_adds


@every_network
def test_save_and_load(name, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    network, other = small(name), small(name, seed=1)
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    with torch.no_grad():
        assert torch.equal(other(images(network)), network(images(network)))


@every_network
def test_reset_head(name) -> None:
    network = small(name)
    with torch.no_grad():
        features = network.features(images(network))
        assert network.reset_head(3) is network
        assert network.config.num_classes == 3
        if network.config.__dict__.get("class_tokens") == "per_class":
            return
        assert torch.equal(network.features(images(network)), features)
        assert network(images(network)).shape == (2, 3)
        assert network.reset_head(0)(images(network)).shape == (2, network.feature_dim)


@every_network
def test_at_resolution_there_and_back(name) -> None:
    network = small(name)
    size = network.config.image_size
    bigger = tuple(2 * side for side in size)
    there = network.at_resolution(bigger)
    back = there.at_resolution(size)
    x = images(network)
    with torch.no_grad():
        assert there(images(there)).shape == (2, 5)
        assert back.state_dict().keys() == network.state_dict().keys()
        assert torch.equal(network.at_resolution(size)(x), network(x))
        # Interpolation loses a little; with these rough random weights the answer still has to be recognisable.
        close = torch.nn.functional.cosine_similarity(back.features(x).flatten(1), network.features(x).flatten(1))
    assert close.min() > 0.2
    assert network.config.image_size == size


@every_family
def test_at_resolution_not_a_multiple_and_not_square(name) -> None:
    network = small(name)
    step = 32 if family_of(name).__name__ == "SMLPNet" else 8
    height, width = network.config.image_size
    for size in ((height + step, width + 2 * step), (height + step, width), (height, width + step)):
        other = network.at_resolution(size)
        with torch.no_grad():
            assert other(images(other)).shape == (2, 5)


@every_family
def test_resampled_forward_is_that_of_the_copy_and_gradients_reach_the_network(name) -> None:
    network = small(name)
    for factor in (2, 1.5):
        size = tuple(int(factor * side) for side in network.config.image_size)
        other = network.at_resolution(size)
        x = images(other)
        drawn = torch.get_rng_state()
        out = network.forward_resampled(x)
        assert torch.equal(torch.get_rng_state(), drawn)
        torch.testing.assert_close(out, other(x), rtol=1e-5, atol=1e-5)
        network.zero_grad()
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        smaller = other.forward_resampled(images(network))
        torch.testing.assert_close(smaller, other.at_resolution(network.config.image_size)(images(network)))
    assert torch.equal(network.forward_resampled(images(network)), network(images(network)))


@every_family
def test_gradient_checkpointing_changes_nothing_but_memory(name) -> None:
    plain, recomputing = small(name, seed=2, drop_path=0.3).train(), small(name, seed=2, drop_path=0.3).train()
    recomputing.gradient_checkpointing = True
    losses = []
    for network in (plain, recomputing):
        torch.manual_seed(0)
        losses.append(network(images(network, 4)).square().mean())
        losses[-1].backward()
    assert torch.equal(*losses)
    for parameter, expected in zip(recomputing.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-6)
    for statistics, expected in zip(recomputing.buffers(), plain.buffers(), strict=True):
        assert torch.equal(statistics, expected)  # noted once a step


@every_network
def test_parameter_groups(name) -> None:
    network = small(name)
    decayed, free = network.parameter_groups(0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    both = [*decayed["params"], *free["params"]]
    assert len(both) == len(set(map(id, both))) == len(list(network.parameters()))
    names = {id(parameter): key for key, parameter in network.named_parameters()}
    for parameter in decayed["params"]:
        assert parameter.ndim > 1
        assert not any(
            word in names[id(parameter)]
            for word in ("norm", "bias", "scale", "token.weight", "tokens.weight", "position")
        )


@every_family
def test_bfloat16_forward_is_finite(name) -> None:
    network = small(name).bfloat16()
    with torch.no_grad():
        assert torch.isfinite(network(images(network).bfloat16())).all()


@every_family
def test_compiles_in_one_graph(name) -> None:
    network = small(name)
    x = images(network)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(network, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@every_family
def test_compiles_with_inductor(name) -> None:
    network = small(name)
    x = images(network)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(network)(x), network(x), rtol=1e-4, atol=1e-4)


@every_family
def test_exports_with_any_batch(name) -> None:
    network = small(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(network, (images(network, 3),), dynamic_shapes=({0: batch},))
    x = images(network, 5, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), network(x), rtol=1e-5, atol=1e-5)


@every_family
def test_stochastic_depth_acts_in_training_alone(name) -> None:
    network = small(name, drop_path=0.5)
    x = images(network, 8)
    with torch.no_grad():
        assert torch.equal(network(x), network(x))
    if family_of(name).__name__ != "PooledConvNet":
        network.train()
        torch.manual_seed(0)
        assert not torch.equal(network(x), network(x))


def refused(network: Network, x: torch.Tensor) -> str:
    with pytest.raises(UsageError) as caught:
        network(x)
    message = str(caught.value)
    assert "\n" not in message
    assert network.config.name in message
    return message


@every_family
def test_images_it_cannot_take(name) -> None:
    network = small(name)
    size = network.config.image_size
    assert "(2, 1," in refused(network, torch.zeros(2, 1, *size))
    assert "images[None]" in refused(network, torch.zeros(3, *size))
    assert "255" in refused(network, torch.zeros(2, 3, *size, dtype=torch.uint8))
    assert "images.to(torch.float32)" in refused(network, torch.zeros(2, 3, *size, dtype=torch.float64))
    if not network.any_resolution:
        message = refused(network, torch.zeros(2, 3, 2 * size[0], 2 * size[1]))
        assert f"{size[0]}×{size[1]}" in message
        assert f"model.at_resolution({2 * size[0]})" in message


def test_any_resolution_without_change() -> None:
    for name in ("patchconvnet_s60", "resnet50_attention_pool"):
        network = small(name)
        with torch.no_grad():
            for size in ((64, 64), (96, 160), (70, 50)):
                assert network(torch.randn(1, 3, *size)).shape == (1, 5)


def test_an_absorbed_copy_is_for_inference_alone() -> None:
    lean = patchloom.absorb(small("resmlp_s12"))
    with pytest.raises(UsageError):
        lean.train()
    with pytest.raises(UsageError, match="at_resolution"):
        lean.at_resolution(64)
    with pytest.raises(UsageError, match="at_resolution"):
        lean.forward_resampled(torch.zeros(1, 3, 64, 64))
    with pytest.raises(UsageError, match="Linear"):
        patchloom.absorb(torch.nn.Linear(1, 1))


def test_a_misspelt_name() -> None:
    with pytest.raises(UsageError) as error:
        patchloom.create_model("resmpl_s12")
    assert "resmpl_s12" in str(error.value)
    assert "resmlp_s12" in str(error.value)


def test_a_misspelt_option_and_one_of_another_family() -> None:
    with pytest.raises(UsageError) as error:
        patchloom.create_model("resmlp_s12", dept=3)
    assert "resmlp_s12" in str(error.value)
    assert "'dept'" in str(error.value)
    assert "depth" in str(error.value)
    with pytest.raises(UsageError) as error:
        patchloom.create_model("resmlp_s12", talking_heads=True)
    assert "talking_heads" in str(error.value)
    assert "CaiT" in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("resmlp_s12", {"norm": "group"}, ("norm", "affine", "layer", "batch", "l2", "group")),
        ("resmlp_s12", {"depth": "12"}, ("depth", "'12'")),
        ("smlpnet_t", {"depths": ("a", 2)}, ("depths", "('a', 2)")),
        ("smlpnet_t", {"depths": "2,2"}, ("depths", "'2,2'")),
        ("resmlp_s12", {"image_size": 225}, ("225", "16", "224×224")),
        ("resmlp_s12", {"drop_path": 1.5}, ("drop_path", "1.5")),
        ("smlpnet_t", {"image_size": 240}, ("240", "32", "224×224")),
        ("deit_s", {"heads": 7}, ("7", "heads", "384")),
        ("cait_xxs24", {"insert_class_at": 24}, ("insert_class_at", "23", "24")),
        ("mixer_b16", {"groups": 5}, ("groups", "dim", "768", "5")),
        ("mixer_b16", {"pyramid": "3-49"}, ("pyramid", "3-49")),
        ("mixer_b16", {"pyramid": ("12:4",)}, ("pyramid", "11", "12:4")),
        ("mixer_b16", {"pyramid": ("1:4", "1:2")}, ("pyramid", "1:4", "1:2")),
        ("mixer_b16", {"dropout": 1.0}, ("dropout", "1.0")),
        ("cait_xxs24", {"exchanged": (24,)}, ("exchanged", "23", "24")),
        ("cait_xxs24", {"communication": "mlp", "insert_class_at": 1}, ("communication", "mlp", "insert_class_at")),
        ("cait_xxs24", {"communication": "mlp", "residual": "fixup"}, ("residual", "fixup")),
        (
            "cait_xxs24",
            {"class_communication": "mlp", "class_in_keys": False},
            ("class_in_keys", "class_communication", "mlp"),
        ),
        ("deit_s", {"num_classes": -1}, ("num_classes", "-1")),
    ],
)
def test_options_that_cannot_be(name, options, facts) -> None:
    with pytest.raises(UsageError) as caught:
        patchloom.create_model(name, **options)
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


# Every choice of every option that the registry does not use by itself.
OPTIONS = [
    *[(name, {"head": "mlp"}) for name in ONE_OF_EACH.values()],
    *[("resmlp_s12", {"norm": norm}) for norm in ("layer", "batch", "l2")],
    *[("resmlp_s12", {"communication": c}) for c in ("none", "mlp", "conv", "depthwise", "separable")],
    *[("resmlp_s12", {"activation": a}) for a in ("silu", "hardswish", "relu", "gelu_tanh")],
    ("resmlp_s12", {"communication": "mlp", "communication_expansion": 0.5}),
    ("resmlp_s12", {"pool": "class_mlp"}),
    ("resmlp_s12", {"position": True}),
    *[("resmlp_s12", {"norm_place": "post", "norm": norm}) for norm in ("affine", "layer", "batch")],
    ("resmlp_s12", {"channels": 1}),
    ("mixer_b16", {"untied": True}),
    ("mixer_b16", {"groups": 4}),
    ("mixer_b16", {"pyramid": "0:4"}),
    ("mixer_b16", {"untied": True, "groups": 4}),
    ("mixer_b16", {"untied": True, "pyramid": ("0:4", "1:3")}),
    ("mixer_b16", {"groups": 4, "pyramid": {0: 4}}),
    ("mixer_b16", {"untied": True, "groups": 4, "pyramid": {0: 4}}),
    ("mixer_b16", {"dropout": 0.1}),
    ("mixer_b16", {"gelu": "exact"}),
    ("smlpnet_t", {"local": False}),
    ("smlpnet_t", {"global_stages": (3,)}),
    ("smlpnet_t", {"global_stages": (), "instead_of_global": "nothing"}),
    ("smlpnet_t", {"global_stages": (), "token_mlp": (2, 3, 4)}),
    *[
        ("smlpnet_t", {"fusion": f, "identity": i, "sequential": s})
        for f in ("concat", "sum", "weighted") for i in (True, False) for s in (True, False)
    ],
    ("smlpnet_t", {"sequential": True, "columns_first": True}),
    ("deit_s", {"norm_place": "post"}),
    ("deit_s", {"position_interpolation": "bilinear"}),
    *[("cait_xxs24", {"norm_place": p}) for p in ("post", "none")],
    *[("cait_xxs24", {"norm_place": "none", "residual": r}) for r in ("fixup", "tfixup", "scalar")],
    *[("deit_s_distilled", {"fusion": f}) for f in ("softmax", "class", "distillation")],
    ("deit_s", {"pool": "average"}),
    ("deit_s", {"dropout": 0.1}),
    ("deit_s", {"layer_scale": True, "parallel": 2}),
    ("cait_xxs24", {"talking_heads": False}),
    ("cait_xxs24", {"class_in_keys": False}),
    ("cait_xxs24", {"insert_class_at": 1}),
    ("cait_xxs24", {"insert_class_at": 0, "class_depth": 0}),
    *[("cait_xxs24", {"residual": r}) for r in ("rezero", "fixup", "tfixup", "scalar", "none")],
    ("cait_xxs24", {"scale_uniform": True}),
    ("cait_xxs24", {"class_scale": False}),
    *[("cait_xxs24", {"distilled": True, "fusion": f}) for f in ("logits", "softmax", "class", "distillation")],
    ("cait_xxs24", {"distilled": True, "insert_class_at": 1}),
    ("cait_xxs24", {"communication": "mlp"}),
    ("cait_xxs24", {"communication": "linear", "class_communication": "mlp"}),
    ("cait_xxs24", {"class_communication": "mlp", "distilled": True}),
    ("cait_xxs24", {"exchanged": (1,), "communication_expansion": 0.5}),
    ("cait_xxs24", {"communication": "linear", "exchanged": (1,), "insert_class_at": 1}),
    ("patchconvnet_s60", {"norm": "batch"}),
    ("patchconvnet_s60", {"pool": "average"}),
    ("patchconvnet_s60", {"pool_heads": 4}),
    ("patchconvnet_s60", {"class_tokens": "per_class"}),
    ("patchconvnet_s60", {"stem": "linear"}),
    ("resnet50_attention_pool", {"class_tokens": "per_class"}),
    ("resnet50_attention_pool", {"small_stem": True, "pool": "average"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{o}" for n, o in OPTIONS])
def test_every_option_keeps_the_contract(name, options) -> None:
    network = small(name, **options)
    x = images(network)
    with torch.no_grad():
        logits = network(x)
        assert logits.shape == (2, 5)
        assert_same(patchloom.absorb(network)(x), logits)
        twice = network.at_resolution(tuple(2 * side for side in network.config.image_size))
        assert twice(images(twice)).shape == (2, 5)
    network.train()
    network(images(network, 16)).square().mean().backward()
    heads = {"class": "distillation_classifier", "distillation": "classifier"}
    unread = heads.get(options.get("fusion", ""), "-")
    silent = [key for key, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    without_effect = ("mix.k.bias", "mix.k.shift")
    assert [key for key in silent if not key.endswith(without_effect) and not key.startswith(unread)] == []


@pytest.mark.parametrize("pyramid", [{0: 4, 1: 2}, {"0": 4, "1": 2}, ["1:2", "0:4"], ("0:4", "1:2")])
def test_a_pyramid_of_tokens_as_python_a_recipe_and_a_config_say_it(pyramid) -> None:
    network = small("mixer_b16", pyramid=pyramid)
    assert network.config.pyramid == ("0:4", "1:2")
    larger = network.at_resolution((40, 64))
    with torch.no_grad():
        assert network.features(images(network)).shape == (2, 2, 16)
        assert larger.features(images(larger)).shape == (2, 2, 16)
        same = network.at_resolution(network.config.image_size)
        assert torch.equal(same(images(network)), network(images(network)))


@pytest.mark.parametrize("options", [{"groups": 4}, {"untied": True}, {"untied": True, "groups": 2, "pyramid": {0: 4}}])
def test_weights_of_grouped_and_untied_mixers_are_brought_to_another_size(options) -> None:
    trained = small("mixer_b16", **options)
    started = small("mixer_b16", seed=1, image_size=40, **options)
    patchloom.load_published(started, trained.state_dict(), adapt_resolution=True)
    with torch.no_grad():
        assert torch.equal(started(images(started)), trained.at_resolution(40)(images(started)))


def test_attention_is_replaced_one_block_at_a_time_and_the_other_way_round() -> None:
    """ResMLP appendix A, in CaiT's frame."""

    def kinds(**options):
        return [type(block.tokens.mix).__name__ for block in small("cait_xxs24", depth=3, **options).blocks]

    attention = "TalkingHeadsAttention"
    assert kinds(exchanged=(1,)) == [attention, "TokenMLP", attention]
    assert kinds(communication="mlp") == ["TokenMLP"] * 3
    assert kinds(communication="linear", exchanged=(0, 2)) == [attention, "TokenLinear", attention]
    without = small("cait_xxs24", communication="mlp", class_communication="mlp")
    assert not any("attention" in type(module).__name__.lower() for module in without.modules())
    assert not without.has_class_attention


@pytest.mark.parametrize(("name", "norm"), [("resmlp_s12", {"norm": "layer"}), ("deit_s", {}), ("cait_xxs24", {})])
def test_post_norm_stands_after_the_sum(name, norm) -> None:
    network = small(name, norm_place="post", depth=1, **({"layer_scale": True} if name == "deit_s" else norm))
    branch, x = network.blocks[0].channels, torch.randn(2, 16, 16)
    torch.testing.assert_close(branch(x), branch.norm(x + branch.scale * branch.mix(x)))


def test_class_blocks_without_layer_scale_and_with_a_second_token() -> None:
    bare = small("cait_xxs24", class_scale=False)
    assert all(block.attend.scale is None and block.channels.scale is None for block in bare.class_blocks)
    assert all(block.tokens.scale is not None for block in bare.blocks)
    distilled = small("cait_xxs24", distilled=True)
    with torch.no_grad():
        of_class, of_teacher = distilled(images(distilled), both_heads=True)
        assert distilled.features(images(distilled)).shape[1] == 2 + 16
        torch.testing.assert_close(distilled(images(distilled)), (of_class + of_teacher) / 2)
    assert not torch.equal(of_class, of_teacher)


def test_small_options_cover_every_family() -> None:
    assert set(SMALL) == {family_of(name) for name in list_models()}


ASKED = (
    "averages_patches",
    "has_class_attention",
    "pools_by_attention",
    "has_token_per_class",
    "attends_in_every_block",
    "has_distillation_token",
)


@pytest.mark.parametrize(("name", "options", "has"), [
    ("resmlp_s12", {}, {"averages_patches"}),
    ("resmlp_s12", {"pool": "class_mlp"}, set()),
    ("mixer_b16", {}, {"averages_patches"}),
    ("mixer_b16", {"pyramid": {0: 4}}, set()),
    ("smlpnet_t", {}, {"averages_patches"}),
    ("deit_s", {}, {"has_class_attention", "attends_in_every_block"}),
    ("deit_s", {"pool": "average"}, {"averages_patches", "attends_in_every_block"}),
    ("deit_s_distilled", {}, {"has_class_attention", "attends_in_every_block", "has_distillation_token"}),
    ("cait_xxs24", {}, {"has_class_attention"}),
    ("cait_xxs24", {"distilled": True}, {"has_class_attention", "has_distillation_token"}),
    ("cait_xxs24", {"class_communication": "mlp"}, set()),
    ("patchconvnet_s60", {}, {"has_class_attention", "pools_by_attention"}),
    ("patchconvnet_s60", {"pool": "average"}, {"averages_patches"}),
    (
        "patchconvnet_s60",
        {"class_tokens": "per_class"},
        {"has_class_attention", "pools_by_attention", "has_token_per_class"},
    ),
    ("resnet50_attention_pool", {}, {"has_class_attention", "pools_by_attention"}),
    ("resnet50_attention_pool", {"pool": "average"}, {"averages_patches"}),
    ("resnet50_attention_pool", {"backbone": "test_vit", "pool": "average"}, set()),
])  # fmt: skip
def test_each_family_says_what_it_has(name, options, has) -> None:
    network = small(name, **options)
    assert {asked for asked in ASKED if getattr(network, asked)} == has
    assert len(network.stages_in_order()) == (4 if name == "smlpnet_t" else 0)
    if "has_distillation_token" not in has:
        with pytest.raises(UsageError, match="distilled=True"):
            network.both_heads(torch.zeros(1, 2, network.feature_dim))


MODULES_OF_FAMILIES = {
    module.removeprefix("patchloom.models.")
    for family in map(family_of, list_models())
    for module in (each.__module__ for each in family.__mro__)
    if module.startswith("patchloom.models.") and module != Network.__module__
}
KNOW_FAMILIES = {"exporters/single_page/layers.py", "exporters/single_page/networks.py", "tasks/images/networks.py"}


def test_only_two_exporters_and_the_teachers_name_families() -> None:
    """All other code asks a network for its properties, so that a new family needs no change there."""
    package = Path(patchloom.__file__).parent
    assert {"resmlp", "vit"} <= MODULES_OF_FAMILIES
    naming = set()
    for folder in ("evaluation", "report", "inference", "exporters", "serving", "tasks"):
        files = list((package / folder).rglob("*.py"))
        assert files, folder
        for path in files:
            imported = set(re.findall(r"^\s*from patchloom\.models\.(\w+) import", path.read_text(), re.MULTILINE))
            if imported & MODULES_OF_FAMILIES:
                naming.add(path.relative_to(package).as_posix())
    assert naming == KNOW_FAMILIES
