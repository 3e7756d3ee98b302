"""Which weights are trained, by what, at which rate."""

import math

import pytest
import timm.optim
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from patchloom.engine.lamb import Lamb
from patchloom.engine.optimization import (
    Schedule,
    clip_each_,
    freeze,
    make_optimizer,
    set_rates,
)
from patchloom.layers.attention import Attend
from patchloom.recipes import get_recipe
from patchloom.recipes.parts import SchedulePart
from patchloom_runtime.errors import UsageError
from tests.engine.toys import network, optim_part
from tests.networks import small

OPTIMIZERS = ("adamw", "lamb", "sgd", "adam", "adagrad")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_trainable_weight_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    model = network()
    optimizer = make_optimizer(model, optim_part(name))
    inputs = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(inputs) == sorted(id(p) for p in model.parameters())
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.ndim <= 1} == {0.0}
    assert 0.05 in decay.values() or name == "adagrad"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_recipe_s_numbers_reach_the_optimizer(name: str) -> None:
    part = optim_part(name, lr=0.1, lr_reference_batch=4, betas=(0.8, 0.95), momentum=0.7, nesterov=True)
    group = make_optimizer(network(), part).param_groups[0]
    assert group["lr"] == pytest.approx(0.2)
    assert group["weight_decay"] == 0.05
    assert group.get("betas", part.betas) == (0.8, 0.95)
    assert (group.get("momentum", 0.7), group.get("nesterov", True)) == (0.7, True)


def test_a_foreign_module_is_grouped_by_dimensions() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decayed, free = make_optimizer(model, optim_part()).param_groups
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in free["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)


def test_other_modules_learn_along() -> None:
    head = nn.Linear(3, 3)
    optimizer = make_optimizer(network(), optim_part(), head)
    assert any(p is head.weight for group in optimizer.param_groups for p in group["params"])


def test_attention_only_trains_attention_and_the_classifier() -> None:
    model = small("deit_s_distilled")
    trained = freeze(model, "attention")
    inside = {id(p) for m in model.modules() if isinstance(m, Attend) for p in m.parameters()}
    inside |= {id(p) for name in model.classifiers() for p in getattr(model, name).parameters()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == inside
    assert trained == sum(p.numel() for p in model.parameters() if id(p) in inside)
    optimizer = make_optimizer(model, optim_part())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == inside


def test_head_only_trains_the_classifier() -> None:
    model = network()
    freeze(model, "head")
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["classifier.weight", "classifier.bias"]


def test_head_and_norm_train_the_last_norm_too() -> None:
    model = small("deit_s", head="mlp")
    freeze(model, "head_and_norm")
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"norm", "classifier"}
    convnet = small("resnet50_attention_pool", pool="average")
    freeze(convnet, "head_and_norm")
    names = [name for name, p in convnet.named_parameters() if p.requires_grad and not name.startswith("classifier")]
    assert len(names) == 2
    assert [name for name, module in convnet.named_modules() if isinstance(module, nn.BatchNorm2d)][-1] in names[0]


def test_all_trains_all() -> None:
    model = network()
    assert freeze(model, "all") == sum(p.numel() for p in model.parameters())


def test_attention_of_a_network_without_any_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"\bresmlp_s12\b"):
        freeze(network(), "attention")


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"\bresmlp_s12\b"):
        make_optimizer(network().requires_grad_(False), optim_part())


def test_lamb_is_timm_s_without_its_clipping() -> None:
    ours, theirs = network(), network()
    mine = make_optimizer(ours, optim_part("lamb", weight_decay=0.1))
    assert isinstance(mine, Lamb)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in mine.param_groups]
    own = {id(p): q for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)}
    reference = timm.optim.Lamb(
        [g | {"params": [own[id(p)] for p in g["params"]]} for g in groups], lr=0.01, max_grad_norm=None
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = 30 * torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def schedule(**fields: object) -> Schedule:
    part = SchedulePart(**({"epochs": 10, "warmup_epochs": 2, "warmup_lr": 0.001} | fields))
    return Schedule(optim_part(lr=0.5), part, steps_per_epoch=7)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_schedule_against_a_slow_reference(decay: str) -> None:
    ours = schedule(decay=decay, min_lr=0.0 if decay == "constant" else 0.01)
    for step in range(70):
        if step < 14:
            expected = 0.001 * (14 - step) / 14 + 0.5 * step / 14
        else:
            share = (step - 14) / 56
            factor = {"cosine": math.cos(math.pi * share / 2) ** 2, "linear": 1 - share, "constant": 1.0}[decay]
            expected = ours.schedule.min_lr * (1 - factor) + 0.5 * factor
        assert ours.lr(step) == pytest.approx(expected, rel=1e-12)
    assert ours.total_steps == 70


def test_step_decay_drops_at_its_epochs() -> None:
    ours = schedule(decay="step", step_epochs=(3, 6), step_factor=0.1)
    assert [round(ours.lr(step), 6) for step in (20, 21, 41, 42, 69)] == [0.5, 0.05, 0.05, 0.005, 0.005]


def test_inverse_square_root_after_the_warm_up() -> None:
    ours = schedule(decay="inverse_sqrt", warmup_epochs=0, warmup_steps=4, warmup_lr=0.0)
    assert [ours.lr(step) for step in (2, 4, 16, 64)] == [0.25, 0.5, 0.25, 0.125]


def test_warm_up_in_steps() -> None:
    ours = schedule(warmup_epochs=0, warmup_steps=4, warmup_lr=0.0)
    assert [ours.lr(step) for step in range(5)] == [0, 0.125, 0.25, 0.375, 0.5]


def test_deit_s_schedule_is_timm_s_with_a_warm_up_before_the_cosine() -> None:
    recipe = get_recipe("deit")
    steps = 13
    ours = Schedule(recipe.optim, recipe.schedule, steps)
    parameter = nn.Parameter(torch.zeros(1))
    theirs = CosineLRScheduler(
        torch.optim.SGD([parameter], lr=1e-3),
        t_initial=295 * steps,
        lr_min=1e-5,
        warmup_t=5 * steps,
        warmup_lr_init=1e-6,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    for step in range(0, 300 * steps, 7):
        assert ours.lr(step) == pytest.approx(theirs._get_lr(step)[0], rel=1e-9)


def test_set_rates_respects_a_group_s_scale() -> None:
    optimizer = make_optimizer(network(), optim_part())
    optimizer.param_groups[1]["lr_scale"] = 0.1
    set_rates(optimizer, 2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.2]


# DINO's decay and clipping ------------------------------------------------------------------------------------------


def test_the_decay_grows_as_the_authors(parity) -> None:
    stored, _ = parity("dino_loss")
    schedule = Schedule(optim_part(weight_decay=0.04, weight_decay_end=0.4), SchedulePart(epochs=4), 5)
    inputs = [schedule.weight_decay(step) for step in range(20)]
    assert inputs == pytest.approx(stored["wd_schedule_0.04_0.4_ep4_it5"].tolist(), abs=1e-12)


def test_the_decay_starts_and_ends_where_it_is_told() -> None:
    schedule = Schedule(optim_part(weight_decay=0.1, weight_decay_end=0.3), SchedulePart(epochs=10), 1)
    assert [schedule.weight_decay(step) for step in (0, 5, 10)] == pytest.approx([0.1, 0.2, 0.3])
    assert Schedule(optim_part(weight_decay=0.1), SchedulePart(epochs=10), 1).weight_decay(3) is None


def test_only_groups_that_decay_get_the_decay_of_the_step() -> None:
    optimizer = make_optimizer(network(), optim_part())
    for decay in (0.04, 0.2, 0.4):
        set_rates(optimizer, 0.1, decay)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, 0.0]


def test_each_tensor_is_clipped_by_itself() -> None:
    """The authors' loop, one tensor after the other."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 5), (7,), (2, 3), (1,))]
    for parameter, size in zip(parameters[:3], (100.0, 0.01, 3.0), strict=True):
        parameter.grad = torch.randn_like(parameter) * size
    expected = []
    for parameter in parameters[:3]:
        factor = 3.0 / (parameter.grad.norm().item() + 1e-6)
        expected.append(parameter.grad * factor if factor < 1 else parameter.grad.clone())
    clip_each_(parameters, 3.0)
    for parameter, gradient in zip(parameters[:3], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert parameters[0].grad.norm() == pytest.approx(3.0, rel=1e-5)
    assert parameters[3].grad is None
    clip_each_([], 3.0)
