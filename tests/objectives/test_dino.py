"""DINO: its head and loss against the authors' and against the equation, and what moves, what does not, and when."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchloom.data.images.image_batch import normalize
from patchloom.engine.loop import train
from patchloom.engine.optimization import make_optimizer
from patchloom.engine.run import Run
from patchloom.engine.signals import Stopped
from patchloom.objectives.dino import (
    Dino,
    DinoHead,
    collapse,
    dino_loss,
    mean_over_processes,
    momentum_at,
    temperature_at,
)
from patchloom.recipes.parts import DinoPart
from patchloom.runs.checkpoints import find_checkpoint
from patchloom_runtime.errors import UsageError
from tests.engine.toys import make_run, optim_part
from tests.forked import forked_ranks
from tests.messages import missing, refused
from tests.networks import assert_same, small
from tests.objectives.test_classification import MEAN, STD

OUTPUTS = 12
TEMPERATURES = {"student_temperature": 0.5, "teacher_temperature": 0.3}


@dataclass
class Seen:
    """A batch: two global views of 32 pixels, two local ones of 16."""

    views: list[Tensor]


def views(images: int = 3, *, seed: int = 0, sides: tuple[int, ...] = (32, 32, 16, 16)) -> Seen:
    generator = torch.Generator().manual_seed(seed)
    return Seen([torch.randint(256, (images, 3, side, side), dtype=torch.uint8, generator=generator) for side in sides])


def network(name: str = "resmlp_s12", **options: Any) -> Any:
    return small(name, num_classes=0, **options).train()


def head(inputs: int = 16, **options: Any) -> DinoHead:
    torch.manual_seed(5)
    return DinoHead(inputs, OUTPUTS, hidden=20, bottleneck=8, **options)


def make(
    student: nn.Module, *, heads: DinoHead | None = None, add_up: Any = None, global_views: int = 2, **options: Any
) -> Dino:
    return Dino(
        student,  # type: ignore[arg-type]
        heads or head(student.feature_dim),  # type: ignore[arg-type]
        DinoPart(**options),
        global_views=global_views,
        steps_per_epoch=5,
        epochs=3,
        pixel_mean=MEAN,
        pixel_std=STD,
        add_up=add_up,
    )


# The head -----------------------------------------------------------------------------------------------------------


def test_the_authors_head(parity) -> None:
    stored, config = parity("dino_head_official")
    args = config["args"]
    own = DinoHead(args["in_dim"], args["out_dim"], hidden=args["hidden_dim"], bottleneck=args["bottleneck_dim"])
    own.load_state_dict({k.removeprefix("state."): v for k, v in stored.items() if k.startswith("state.")})
    torch.testing.assert_close(own(stored["input"]), stored["output"], rtol=0, atol=1e-5)
    torch.testing.assert_close(own.double()(stored["input"].double()), stored["output_float64"], rtol=0, atol=1e-10)


def test_a_head_starts_as_the_authors_and_gives_cosines() -> None:
    own = DinoHead(64, 100)
    assert [tuple(p.shape) for p in own.parameters() if p.ndim > 1 and p.shape[1] > 1] == [
        (2048, 64),
        (2048, 2048),
        (256, 2048),
        (100, 256),
    ]
    assert own.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert own.mlp[0].bias.abs().max() == 0
    assert own(torch.randn(9, 64)).abs().max() <= 1 + 1e-6
    assert not own.last_layer.weight_g.requires_grad
    assert DinoHead(4, 5, fixed_norm=False).last_layer.weight_g.requires_grad
    with refused(UsageError, 4, 2048, 256, 0):
        DinoHead(4, 0)


def test_a_head_with_batch_norm_has_the_authors_names() -> None:
    names = [name for name, _ in head(batch_norm=True).named_parameters()]
    assert names[:4] == ["mlp.0.weight", "mlp.0.bias", "mlp.1.weight", "mlp.1.bias"]
    assert names[-4:] == ["mlp.6.weight", "mlp.6.bias", "last_layer.weight_g", "last_layer.weight_v"]


# The loss -----------------------------------------------------------------------------------------------------------


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(z - max(row)) for z in row]
    return [p / sum(powers) for p in powers]


def slow_loss(student: list[Tensor], teacher: Tensor, centre: Tensor, tau_s: float, tau_t: float) -> float:
    """Mean over pairs of different views and over images of −Σ q log p."""
    losses = []
    for g, answers in enumerate(teacher.tolist()):
        for v, guesses in enumerate(student):
            if v == g:
                continue
            for answer, guess in zip(answers, guesses.tolist(), strict=True):
                q = softmax([(t - c) / tau_t for t, c in zip(answer, centre.tolist(), strict=True)])
                p = softmax([s / tau_s for s in guess])
                losses.append(-sum(a * math.log(b) for a, b in zip(q, p, strict=True)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("teacher_views", "student_views"), [(2, 2), (2, 5), (1, 3), (3, 4)])
def test_the_loss_is_its_equation(teacher_views: int, student_views: int) -> None:
    torch.manual_seed(teacher_views)
    student = list(torch.randn(student_views, 3, 6, dtype=torch.float64))
    teacher, centre = torch.randn(teacher_views, 3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    terms = dino_loss(student, teacher, centre, student_temperature=0.5, teacher_temperature=0.3)
    assert terms.loss.item() == pytest.approx(slow_loss(student, teacher, centre, 0.5, 0.3))
    q = ((teacher - centre) / 0.3).softmax(-1)
    entropy = -(q * q.log()).sum(-1).mean()
    torch.testing.assert_close(terms.teacher_entropy, entropy)
    kl = [
        (q[g] * (q[g].log() - (student[v] / 0.5).log_softmax(-1))).sum(-1).mean()
        for g in range(teacher_views)
        for v in range(student_views)
        if v != g
    ]
    torch.testing.assert_close(terms.kl, torch.stack(kl).mean())
    mean = q.mean((0, 1))
    torch.testing.assert_close(terms.teacher_spread, -(mean * mean.log()).sum() - entropy)


def test_the_authors_loss_and_centre_over_three_updates(parity) -> None:
    stored, _ = parity("dino_loss")
    centre = stored["center_before"][0]
    options = DinoPart(warmup_teacher_epochs=3, teacher_temperature=0.07)
    temperatures = [temperature_at(options, epoch) for epoch in range(6)]
    assert temperatures == pytest.approx(stored["teacher_temp_schedule"].tolist())
    momenta = [momentum_at(options, step, 20) for step in range(20)]
    assert momenta == pytest.approx(stored["momentum_schedule_0.996_1_ep4_it5"].tolist(), abs=1e-12)
    for epoch in (0, 1, 4):
        teacher = stored[f"epoch{epoch}_teacher"]
        terms = dino_loss(
            stored[f"epoch{epoch}_student"].chunk(5),
            teacher.unflatten(0, (2, 3)),
            centre,
            student_temperature=0.1,
            teacher_temperature=temperatures[epoch],
        )
        torch.testing.assert_close(terms.loss.reshape(1), stored[f"epoch{epoch}_loss"], rtol=1e-6, atol=1e-5)
        centre = centre.lerp(mean_over_processes(teacher.sum(0), len(teacher), None), 1 - options.centre_momentum)
        torch.testing.assert_close(centre[None], stored[f"epoch{epoch}_center_after"])


def test_gradients_of_the_loss() -> None:
    student = [torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    teacher = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    centre = torch.zeros(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *s: dino_loss(s, teacher, centre, **TEMPERATURES).loss, student)
    dino_loss(student, teacher, centre, **TEMPERATURES).loss.backward()
    assert teacher.grad is None


def test_the_loss_of_bfloat16_logits_is_in_float32() -> None:
    logits = torch.randn(2, 3, 4).bfloat16()
    terms = dino_loss(list(logits), logits, torch.zeros(4), student_temperature=0.1, teacher_temperature=0.04)
    assert terms.loss.dtype == terms.teacher_entropy.dtype == torch.float32


def test_the_centre_is_the_mean_over_all_processes() -> None:
    torch.manual_seed(0)
    mine, theirs = torch.randn(4, 6), torch.randn(2, 6)
    box = torch.cat([theirs.sum(0), torch.tensor([2.0])])
    mean = mean_over_processes(mine.sum(0), 4, lambda values: values + box)
    torch.testing.assert_close(mean, torch.cat([mine, theirs]).mean(0))


# Collapse -----------------------------------------------------------------------------------------------------------


def judged(teacher: Tensor) -> str:
    """Logits (images, K), the same for both views and for a student who knows them."""
    logits = teacher.expand(2, -1, -1)
    terms = dino_loss(
        list(logits), logits, torch.zeros(teacher.shape[1]), student_temperature=0.04, teacher_temperature=0.04
    )
    return collapse(terms.teacher_entropy.item(), terms.teacher_spread.item(), teacher.shape[1])


def test_collapse_is_told() -> None:
    torch.manual_seed(0)
    uniform = judged(torch.zeros(8, 64))
    assert missing(uniform, "4.16", "teacher_temperature") == []  # the entropy, which is all it can be
    assert "0.00" not in uniform
    one = torch.zeros(8, 64)
    one[:, 7] = 1.0
    assert missing(judged(one), "0.00", "4.16", "teacher_temperature") == []
    assert judged(torch.eye(8, 64)) == ""  # sure of itself, and different for every image
    assert judged(0.06 * torch.randn(8, 64)) == ""  # cosines with random prototypes, as a training starts


# The objective ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small_views", ["resample", "resize", "none"])
def test_the_objective_is_its_parts(small_views: Any) -> None:
    student, batch = network(), views()
    dino = make(student, small_views=small_views, teacher_temperature=0.05)
    with torch.no_grad():
        for tensor in (*dino.teacher.parameters(), dino.centre):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    student_views = [normalize(view, MEAN, STD) for view in batch.views]
    if small_views == "none":
        student_views = student_views[:2]
    if small_views == "resize":
        student_views[2:] = [
            nn.functional.interpolate(v, (32, 32), mode="bicubic", antialias=True) for v in student_views[2:]
        ]
    copies = [student.for_images_of(tuple(view.shape[2:])) for view in student_views]
    guesses = [dino.head(model(view)) for model, view in zip(copies, student_views, strict=True)]
    answers = torch.stack([dino.teacher_head(dino.teacher(view)) for view in student_views[:2]])
    values = dino(student, batch, epoch=0, step=0)
    assert set(values) == {"loss", "teacher_entropy", "kl", "teacher_spread", "centre_norm"}
    assert values["loss"].item() == pytest.approx(slow_loss(guesses, answers, dino.centre, 0.1, 0.05), rel=1e-4)
    assert values["centre_norm"].item() == pytest.approx(dino.centre.norm().item())
    assert [name for name, value in values.items() if value.requires_grad] == ["loss"]


@pytest.mark.parametrize("small_views", ["resample", "resize", "none"])
def test_gradients_reach_the_whole_student_and_nothing_of_the_teacher(small_views: Any) -> None:
    student = network()
    dino = make(student, small_views=small_views)
    dino(student, views(), epoch=0, step=0)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters())
    assert all(p.grad is not None for p in dino.head.parameters() if p.requires_grad)
    for module in (dino.teacher, dino.teacher_head):
        assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    optimized = {id(p) for g in make_optimizer(student, optim_part(), dino).param_groups for p in g["params"]}
    learning = [*student.parameters(), *(p for p in dino.head.parameters() if p.requires_grad)]
    assert optimized == {id(p) for p in learning}


def test_the_teacher_and_the_centre_follow_in_closed_form() -> None:
    student = network()
    dino = make(student, teacher_momentum=0.9, centre_momentum=0.8)
    expected = {name: tensor.clone() for name, tensor in dino.teacher.named_parameters()}
    centre, weights = dino.centre.clone(), dict(student.named_parameters())
    for step in range(4):
        with torch.no_grad():
            answers = [
                dino.teacher_head(dino.teacher(normalize(view, MEAN, STD))) for view in views(seed=step).views[:2]
            ]
            for parameter in student.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        before = dino.centre.clone()
        dino(student, views(seed=step), epoch=0, step=step)
        assert torch.equal(dino.centre, before)  # renewed after it was used
        dino.after_update(student, step)
        keep = 1 - 0.1 * (1 + math.cos(math.pi * step / 15)) / 2
        expected = {name: keep * old + (1 - keep) * weights[name] for name, old in expected.items()}
        centre = 0.8 * centre + 0.2 * torch.cat(answers).mean(0)
        torch.testing.assert_close(dict(dino.teacher.named_parameters()), expected)
        torch.testing.assert_close(dino.centre, centre)


def test_micro_batches_make_one_centre() -> None:
    student = network()
    whole, parts = make(student), make(student)
    batch = views(4)
    whole(student, batch, epoch=0, step=0)
    for rows in (slice(0, 1), slice(1, 4)):
        parts(student, Seen([view[rows] for view in batch.views]), epoch=0, step=0)
    for dino in (whole, parts):
        dino.after_update(student, 0)
    torch.testing.assert_close(whole.centre, parts.centre)
    assert whole.centre.abs().sum() > 0


def test_the_teacher_has_no_stochastic_depth_and_keeps_its_own_statistics() -> None:
    student = network("smlpnet_t", drop_path=0.5)
    dino = make(student).train()
    assert dino.teacher.training
    assert dino.teacher.config.drop_path == 0
    image = torch.randn(3, 3, 64, 64)
    assert torch.equal(dino.teacher(image), dino.teacher(image))
    assert not torch.equal(student(image), student(image))
    before = {name: tensor.clone() for name, tensor in dino.teacher.named_buffers()}
    dino.eval()
    dino(student, views(sides=(64, 64)), epoch=0, step=0)
    dino.after_update(student, 0)
    for name, tensor in dino.teacher.named_buffers():
        assert torch.equal(tensor, before[name])


def test_the_last_layer_waits_for_its_epoch() -> None:
    student = network()
    dino = make(student, frozen_last_layer_epochs=2, heads=head(fixed_norm=False))
    for step, dropped in ((0, True), (9, True), (10, False)):
        dino(student, views(), epoch=step // 5, step=step % 5)["loss"].backward()
        dino.before_update(student, step)
        assert [p.grad is None for p in dino.head.last_layer.parameters()] == [dropped, dropped]
        assert all(p.grad is not None for p in dino.head.mlp.parameters())


def test_misuse_is_told() -> None:
    with refused(UsageError, "resmlp_s12", "num_classes"):
        make(small("resmlp_s12"))
    with refused(UsageError, "small_views", "crop", "resample", "resize", "none"):
        DinoPart(small_views="crop")  # type: ignore[arg-type]
    with refused(UsageError, 2, 1):
        make(network())(network(), views(sides=(32,)), epoch=0, step=0)
    with refused(UsageError, 1):
        dino_loss([torch.zeros(1, 2)], torch.zeros(1, 1, 2), torch.zeros(2), **TEMPERATURES)
    with refused(UsageError, "teacher_temperature", 0.0):
        DinoPart(teacher_temperature=0.0)
    with refused(UsageError, "centre_momentum", 1.5):
        DinoPart(centre_momentum=1.5)


# Small views --------------------------------------------------------------------------------------------------------


def test_a_small_view_is_seen_as_by_the_network_at_its_resolution() -> None:
    student = network()
    images = torch.randn(2, 3, 16, 16)
    assert_same(student.forward_resampled(images), student.at_resolution(16)(images))
    student.forward_resampled(images).square().sum().backward()
    matrix = student.blocks[0].tokens.mix.weight
    assert matrix.grad.shape == (16, 16)
    assert matrix.grad.abs().sum() > 0


def test_compiled_networks_take_small_views() -> None:
    student = network()
    dino = make(student)
    plain = dino(student, views(), epoch=0, step=0)["loss"]
    compiled = torch.compile(student, backend="eager")
    torch.testing.assert_close(dino(compiled, views(), epoch=0, step=0)["loss"], plain)


# A run --------------------------------------------------------------------------------------------------------------


class ViewBatches:
    """Views made from (epoch, step), and a SIGTERM before those of `stop_at`."""

    steps_per_epoch = 5

    def __init__(self, stop_at: tuple[int, int] | None = None) -> None:
        self.stop_at = stop_at

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Seen]:
        for step in range(start_step, self.steps_per_epoch):
            if (epoch, step) == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield views(4, seed=100 * epoch + step)


def dino_run(folder: Path, stop_at: tuple[int, int] | None = None) -> Run:
    student = network(drop_path=0.2)
    dino = make(student)
    optimizer = make_optimizer(student, optim_part(), dino)
    loader = ViewBatches(stop_at)
    parts = {"model": student, "objective": dino, "optimizer": optimizer, "loader": loader}
    return make_run(folder, accumulate=2, evaluators=(), metric=None, **parts)


@pytest.mark.parametrize("stop_at", [(0, 2), (1, 3)])
def test_a_stopped_run_goes_on_exactly(tmp_path: Path, stop_at: tuple[int, int]) -> None:
    """Also from within the epoch in which the optimiser has not yet seen the last layer."""
    whole = dino_run(tmp_path / "whole")
    train(whole)
    with pytest.raises(Stopped):
        train(dino_run(tmp_path / "parts", stop_at))
    result = find_checkpoint(tmp_path / "parts")
    assert result is not None
    resumed = dino_run(tmp_path / "parts")
    train(resumed, result.snapshot)
    for name, tensor in whole.objective.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, resumed.objective.state_dict()[name]), name  # type: ignore[attr-defined]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_run_leaves_the_last_layer_alone_in_its_first_epoch(tmp_path: Path) -> None:
    run = dino_run(tmp_path)
    start = run.objective.head.last_layer.weight_v.detach().clone()  # type: ignore[attr-defined]
    remaining = []

    def look(model: nn.Module, epoch: int) -> None:
        remaining.append(torch.equal(run.objective.head.last_layer.weight_v, start))  # type: ignore[attr-defined]

    run.after_epoch = look
    train(run)
    assert remaining == [True, False, False]


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    from tests.objectives.dino_worker import train_and_write  # which imports from here

    ended = {}
    for world in (1, 2):
        running = forked_ranks(partial(train_and_write, str(tmp_path / f"{world}-")), world)
        output = [process.communicate(timeout=120) for process in running]
        assert [process.returncode for process in running] == [0] * world, output
        ended[world] = [torch.load(tmp_path / f"{world}-{rank}") for rank in range(world)]
    (alone,), (first, second) = ended[1], ended[2]
    for part, weights in alone.items():
        for name, tensor in weights.items():
            assert torch.equal(first[part][name], second[part][name]), name
            torch.testing.assert_close(first[part][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
