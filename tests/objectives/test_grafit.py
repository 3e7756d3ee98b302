"""Grafit's losses, memory and target against slow versions of their equations."""

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from patchloom.data.images.image_batch import normalize
from patchloom.engine.batches import len_of, move, split
from patchloom.engine.optimization import parameter_groups
from patchloom.layers.projector import Projector
from patchloom.objectives.classification import cross_entropy
from patchloom.objectives.clusters import cluster_labels
from patchloom.objectives.grafit import (
    METHODS,
    EmbeddingMemory,
    Grafit,
    Losses,
    instance_loss,
    knn_loss,
    target_decay,
    triplet_loss,
)
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import refused
from tests.networks import ONE_OF_EACH, small
from tests.objectives.test_classification import MEAN, STD

LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1, 2])


@dataclass(frozen=True)
class ViewBatch:
    views: list[Tensor]
    labels: Tensor
    index: Tensor


def batch(index: list[int] | None = None, views: int = 3, side: int = 32, seed: int = 0) -> ViewBatch:
    index = [1, 4, 6, 2] if index is None else index
    generator = torch.Generator().manual_seed(seed)
    shape = (len(index), 3, side, side)
    pixels = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for _ in range(views)]
    return ViewBatch(pixels, LABELS[index], torch.tensor(index))


LOSSES = METHODS | {"cross_entropy": Losses("cross_entropy", "none", "none")}  # what is left of λ = 0


def projector_of(method: str) -> str:
    return LOSSES[method].projector if LOSSES[method].labels == "knn" else "none"


def make(method: str = "grafit", trunk=None, **options) -> tuple[Grafit, torch.nn.Module]:
    classes = 3 if LOSSES[method].labels == "cross_entropy" else 0
    trunk = trunk or small("resmlp_s12", num_classes=classes, projector=projector_of(method)).train()
    torch.manual_seed(5)
    options = {"total_steps": 10, "pixel_mean": MEAN, "pixel_std": STD} | options
    return Grafit(LOSSES[method], trunk, LABELS, **options).train(), trunk


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


# Losses ---------------------------------------------------------------------------------------------------------------


def slow_knn_loss(embeddings: Tensor, index: Tensor, memory: Tensor, labels: Tensor, sigma: float) -> float:
    total = 0.0
    for g, i in zip(embeddings.tolist(), index.tolist(), strict=True):
        weights = {j: math.exp(cosine(g, memory[j].tolist()) / sigma) for j in range(len(memory)) if j != i}
        right = sum(weight for j, weight in weights.items() if labels[j] == labels[i])
        total -= math.log(right / sum(weights.values())) if right else 0.0
    return total / len(embeddings)


@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_the_knn_loss_is_equations_2_2_and_2_3(sigma):
    embeddings, memory = draw(4, 6), torch.nn.functional.normalize(draw(10, 6, seed=1))
    index = torch.tensor([1, 4, 6, 2])
    expected = slow_knn_loss(embeddings, index, memory, LABELS, sigma)
    assert knn_loss(embeddings, index, memory, LABELS, sigma).item() == pytest.approx(expected, rel=1e-12)


def test_an_image_alone_in_its_class_adds_nothing():
    labels = torch.tensor([0, 1, 1, 2])
    embeddings, memory = draw(2, 3).requires_grad_(), torch.nn.functional.normalize(draw(4, 3, seed=1))
    index = torch.tensor([0, 1])
    loss = knn_loss(embeddings, index, memory, labels)
    assert loss.item() == pytest.approx(slow_knn_loss(embeddings.detach(), index, memory, labels, 0.05), rel=1e-12)
    loss.backward()
    assert embeddings.grad[0].abs().max() == 0
    assert embeddings.grad[1].abs().max() > 0


def test_the_knn_loss_keeps_far_neighbours_finite():
    memory = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    loss = knn_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), memory, torch.tensor([0, 0, 1]), 0.001)
    assert loss.item() == pytest.approx(2000.0)


@pytest.mark.parametrize("views", [2, 4])
def test_the_instance_loss_is_equation_2_1(views):
    online, target = draw(views, 3, 5), draw(views, 3, 5, seed=1)
    expected = 0.0
    for b in range(3):
        for i in range(views):
            for j in range(views):
                if i != j:
                    expected -= cosine(online[i, b].tolist(), target[j, b].tolist()) / (views * (views - 1))
    assert instance_loss(online, target).item() == pytest.approx(expected / 3, rel=1e-12)


def slow_triplet(vectors: Tensor, identity: list[int], margin: float) -> float:
    unit = torch.nn.functional.normalize(vectors)
    losses = []
    for a in range(len(unit)):
        far = [
            float((unit[a] - unit[p]).square().sum()) for p in range(len(unit)) if p != a and identity[p] == identity[a]
        ]
        near = [float((unit[a] - unit[n]).square().sum()) for n in range(len(unit)) if identity[n] != identity[a]]
        if far and near:
            losses.append(max(0.0, margin + max(far) - min(near)))
    return sum(losses) / max(1, len(losses))


@pytest.mark.parametrize("identity", [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 2], [3, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5]])
def test_the_triplet_loss_takes_the_hardest_of_the_batch(identity):
    vectors = draw(6, 4).requires_grad_()
    loss = triplet_loss(vectors, torch.tensor(identity), 0.3)
    assert loss.item() == pytest.approx(slow_triplet(vectors.detach(), identity, 0.3), rel=1e-12)
    loss.backward()
    assert vectors.grad.isfinite().all()


def test_gradients_of_the_losses():
    index, memory = torch.tensor([1, 4, 6]), torch.nn.functional.normalize(draw(10, 4, seed=1))
    x = draw(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda g: knn_loss(g, index, memory, LABELS, 0.5), [x])
    assert torch.autograd.gradcheck(lambda v: triplet_loss(v, torch.tensor([0, 0, 1]), 1.0), [x])
    assert torch.autograd.gradcheck(lambda q: instance_loss(q, draw(2, 3, 4, seed=2)), [draw(2, 3, 4).requires_grad_()])


# Parts ----------------------------------------------------------------------------------------------------------------


def test_projectors_have_the_parameters_of_table_2_7():
    def millions(kind: str) -> float:
        return sum(p.numel() for p in Projector(kind, 2048).parameters()) / 1e6

    trunk = 23.508
    assert trunk + millions("fc") == pytest.approx(23.8, abs=0.05)
    assert trunk + millions("mlp") == pytest.approx(32.9, abs=0.06)
    assert Projector("fc", 8)(torch.randn(2, 8)).shape == (2, 128)
    assert Projector("mlp", 8)(torch.randn(2, 8)).shape == (2, 256)


def test_the_memory_starts_as_sncas():
    memory = EmbeddingMemory(500, 12, seed=3)
    torch.testing.assert_close(memory.slots.norm(dim=1), torch.ones(500))
    assert abs(memory.slots.mean().item()) < 0.02
    assert torch.equal(memory.slots, EmbeddingMemory(500, 12, seed=3).slots)
    assert not torch.equal(memory.slots, EmbeddingMemory(500, 12, seed=4).slots)


def test_the_memory_averages_and_normalizes():
    memory, g = EmbeddingMemory(6, 3), 3 * torch.randn(2, 3, requires_grad=True)
    before = memory.slots.clone()
    memory.note(torch.tensor([4, 1]), g)
    assert torch.equal(memory.slots, before)
    memory.update()
    expected = before.clone()
    for place, i in enumerate([4, 1]):
        mean = (before[i] + g[place].detach() / g[place].detach().norm()) / 2
        expected[i] = mean / mean.norm()
    torch.testing.assert_close(memory.slots, expected)
    assert not memory.slots.requires_grad


def test_an_image_seen_twice_is_taken_once():
    once, twice = EmbeddingMemory(6, 3), EmbeddingMemory(6, 3)
    g = torch.randn(3, 3)
    once.note(torch.tensor([2, 5]), g[:2])
    twice.note(torch.tensor([2, 5]), g[:2])
    twice.note(torch.tensor([2]), g[2:])
    once.update()
    twice.update()
    assert torch.equal(once.slots, twice.slots)


def test_processes_keep_the_same_memory():
    """Each process brings its rows; `gather` gives all of them those of both, by rank."""
    rows = [(torch.tensor([0, 3]), torch.randn(2, 4)), (torch.tensor([3, 5]), torch.randn(2, 4))]
    units = [torch.nn.functional.normalize(g) for _, g in rows]

    def gather(own: Tensor) -> Tensor:
        return torch.cat([index for index, _ in rows] if own.dtype == torch.int64 else units)

    memories = [EmbeddingMemory(8, 4, gather=gather) for _ in rows]
    for memory, (index, g) in zip(memories, rows, strict=True):
        memory.note(index, g)
        memory.update()
    alone = EmbeddingMemory(8, 4)
    for index, g in rows:
        alone.note(index, g)
    alone.update()
    assert torch.equal(memories[0].slots, memories[1].slots)
    assert torch.equal(memories[0].slots, alone.slots)


def test_the_targets_decay_is_byols():
    assert target_decay(0, 100, 0.99) == pytest.approx(0.99)
    assert target_decay(100, 100, 0.99) == pytest.approx(1.0)
    assert target_decay(25, 100, 0.9) == pytest.approx(1 - 0.1 * (math.cos(math.pi / 4) + 1) / 2)


# The objective --------------------------------------------------------------------------------------------------------


def slow_grafit(objective: Grafit, model, views: ViewBatch, weight: float) -> float:
    """Equation 2.4 image by image, from embeddings of each view; batch statistics are those of all views."""
    count, size = len(views.views), len(views.index)
    images = normalize(torch.cat(views.views), MEAN, STD)
    target = objective.target
    with torch.no_grad():
        g = model.projector(model.pool(model.features(images)))
        q = objective.predictor(g).double().split(size)
        xi = target.trunk.projector(target.trunk.pool(target.trunk.features(images))).double().split(size)
    knn = slow_knn_loss(g[:size].double(), views.index, objective.memory.slots.double(), LABELS, 0.05)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    cosines = [cosine(q[i][b].tolist(), xi[j][b].tolist()) for b in range(len(views.index)) for i, j in pairs]
    return knn - weight * sum(cosines) / len(cosines)


@pytest.mark.parametrize("method", ["grafit", "grafit_fc"])
def test_the_loss_is_equation_2_4(method):
    objective, model = make(method, instance_weight=0.7)
    # Another target than the online network, or mixing them up would not show.
    with torch.no_grad():
        for parameter in objective.target.parameters():
            parameter.mul_(1.1)
    expected = slow_grafit(copy.deepcopy(objective), copy.deepcopy(model), batch(), 0.7)
    values = objective(model, batch(), epoch=0, step=0)
    assert values["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert values["loss"].item() == pytest.approx(values["label_loss"].item() + 0.7 * values["instance_loss"].item())


@pytest.mark.parametrize(("grafit", "snca"), [("grafit", "snca_plus"), ("grafit_fc", "snca")])
def test_without_the_instance_loss_it_is_snca(grafit, snca):
    trained = []
    for method, weight in ((grafit, 0.0), (snca, 1.0)):
        objective, model = make(method, instance_weight=weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            loss = objective(model, batch(seed=step), epoch=0, step=step)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            objective.after_update(model, step)
        trained.append((loss, objective.state_dict(), model.state_dict()))
    assert torch.equal(trained[0][0], trained[1][0])
    for mine, theirs in zip(trained[0][1:], trained[1][1:], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("method", ["cross_entropy_instance", "cross_entropy_triplet"])
def test_without_the_instance_loss_only_labels_are_left(method):
    objective, model = make(method, instance_weight=0.0)
    plain, _ = make("cross_entropy")
    assert objective.method == plain.method
    assert [*objective.parameters()] == []
    assert torch.equal(*(o(model, batch(), epoch=0, step=0)["loss"] for o in (objective, plain)))


def test_after_an_update_memory_and_target_follow():
    objective, model = make(decay=0.9)
    views = batch()
    before, slots = copy.deepcopy(objective.target), objective.memory.slots.clone()
    objective(model, views, epoch=0, step=0)["loss"].backward()
    assert torch.equal(objective.memory.slots, slots)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    objective.after_update(model, 4)
    decay = target_decay(4, 10, 0.9)
    online = model.parameters()
    for new, old, theirs in zip(objective.target.parameters(), before.parameters(), online, strict=True):
        torch.testing.assert_close(new, decay * old + (1 - decay) * theirs)
    changed = (objective.memory.slots != slots).any(dim=1).nonzero()[:, 0]
    assert changed.tolist() == sorted(views.index.tolist())


def test_gradients_reach_what_is_trained_and_nothing_else():
    objective, model = make()
    objective(model, batch(), epoch=0, step=0)["loss"].backward()
    trained = [*model.parameters(), *objective.predictor.parameters()]
    assert all(parameter.grad is not None for parameter in trained)
    assert all(parameter.grad is None for parameter in objective.target.parameters())
    inputs = {id(p) for group in parameter_groups(objective, 0.1) for p in group["params"]}
    assert inputs == {id(p) for p in objective.predictor.parameters()}


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_any_trunk(name):
    trunk = small(name, num_classes=0, projector="mlp").train()
    objective, model = make(trunk=trunk)
    side = trunk.config.image_size[0]
    objective(model, batch(side=side, views=2), epoch=0, step=0)["loss"].backward()
    objective.after_update(model, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_resumes(method):
    objective, model = make(method)
    values = objective(model, batch(), epoch=0, step=0)
    values["loss"].backward()
    objective.after_update(model, 0)
    assert values["loss"].isfinite()
    other, _ = make(method, seed=9)
    other.load_state_dict(objective.state_dict())
    copied = copy.deepcopy(model)
    again = [m(network, batch(seed=1), epoch=0, step=1)["loss"] for m, network in ((objective, model), (other, copied))]
    assert torch.equal(*again)


def test_cross_entropy_is_that_of_the_first_view():
    objective, model = make("cross_entropy")
    views = batch()
    values = objective(model, views, epoch=0, step=0)
    assert torch.equal(values["loss"], cross_entropy(model(normalize(views.views[0], MEAN, STD)), views.labels))


def test_labels_are_those_of_the_objective():
    objective, model = make("snca")
    views = batch()
    wrong = replace(views, labels=torch.zeros_like(views.labels))
    assert torch.equal(*(objective(model, b, epoch=0, step=0)["loss"] for b in (views, wrong)))


def test_low_precision_reaches_the_trunk_alone():
    objective, model = make("snca")
    exact = objective(model, batch(), epoch=0, step=0)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        values = objective(model, batch(), epoch=0, step=0)
    assert values["loss"].dtype == torch.float32
    assert values["loss"].item() == pytest.approx(exact.item(), rel=0.1)


def test_batches_of_views_go_through_the_engine():
    views = move(batch(), torch.device("cpu"))
    assert len_of(views) == 4
    parts = split(views, 2)
    assert [len(part.views) for part in parts] == [3, 3]
    objective, model = make("snca")
    for part in parts:
        objective(model, part, epoch=0, step=0)
    slots = objective.memory.slots.clone()
    objective.after_update(model, 0)
    assert (objective.memory.slots != slots).any(dim=1).sum() == 4


def test_what_only_instances_train_stays_with_the_objective():
    objective, model = make("cross_entropy_instance")
    assert isinstance(objective.projector, Projector)
    assert [*model.projector.parameters()] == []
    objective, model = make("grafit")
    assert [*objective.projector.parameters()] == []
    assert isinstance(model.projector, Projector)


def test_what_was_noted_can_be_forgotten():
    objective, model = make("snca")
    objective(model, batch([1, 2]), epoch=0, step=0)
    objective.forget()
    slots = objective.memory.slots.clone()
    objective(model, batch([5, 6]), epoch=0, step=0)
    objective.after_update(model, 0)
    assert (objective.memory.slots != slots).any(dim=1).nonzero()[:, 0].tolist() == [5, 6]


def test_errors_say_what_to_do():
    objective, model = make()
    with refused(UsageError, 1, 2):
        objective(model, batch(views=1), epoch=0, step=0)
    with refused(UsageError, 5, "reset_head(0)"):
        make(trunk=small("resmlp_s12", projector="mlp"))
    with refused(UsageError, "none", "projector='mlp'"):
        make(trunk=small("resmlp_s12", num_classes=0))
    with refused(UsageError, 2, "reset_head(3)"):
        make("cross_entropy", trunk=small("resmlp_s12", num_classes=2))
    with refused(UsageError, "instance_weight"):
        make("triplet", instance_weight=0.0)
    with refused(DataError, 1, 3):
        Grafit(METHODS["snca_plus"], model, torch.tensor([0, -1, 0]), total_steps=1, pixel_mean=MEAN, pixel_std=STD)


# ClusterFit+ ----------------------------------------------------------------------------------------------------------


def test_clusters_find_clouds():
    centers = 10 * torch.eye(4, 8)
    truth = torch.arange(200) % 4
    vectors = centers[truth] + torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    # Of several starts one in each cloud; k-means keeps what it starts from.
    result = min((cluster_labels(vectors, 4, seed=seed) for seed in range(8)), key=lambda x: x.bincount().max().item())
    pairs = {(a, b) for a, b in zip(truth.tolist(), result.tolist(), strict=True)}
    assert len(pairs) == 4
    assert torch.equal(cluster_labels(vectors, 4, seed=1), cluster_labels(vectors, 4, seed=1))


def test_no_cluster_is_empty():
    same = torch.ones(9, 3)
    assert cluster_labels(same, 9).sort().values.tolist() == list(range(9))
    assert cluster_labels(torch.randn(40, 3), 25).unique().tolist() == list(range(25))
    assert cluster_labels(same, 1).tolist() == [0] * 9
    with refused(UsageError, "clusters", 10, 9):
        cluster_labels(same, 10)
