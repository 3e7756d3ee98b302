"""Learning without labels: a student predicts, from one view of an image, what its own average says of another (DINO).

Letters: B images, V views (the first G of them global), K outputs of the head, q teacher, p student, c centre.
    q = softmax((t − c)/τ_t),  p = softmax(s/τ_s),  loss = mean over g < G, v ≠ g and B of −Σ_k q_gk log p_vk
The teacher's weights are an average of the student's, over more and more updates. The centre, an average of t, keeps
the outputs from all choosing one k; the low τ_t keeps them from becoming uniform. It is renewed after it was used.
Paper and code: ResMLP's matrix has the size of the global views, and no paper says how the authors showed it local
ones (NeurIPS version, 3.2). `small_views` offers three ways.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.batches.views import ViewBatch
from patchloom.data.images.image_batch import normalize
from patchloom.models.network import Network
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.dino_head import DinoHead
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes.parts import DinoPart
from patchloom_runtime.errors import UsageError

# What a report draws of its records: title → curve → name of the value.
CHARTS = {
    "Teacher and student, nats": {
        "teacher's entropy": "teacher_entropy",
        "what it tells of an image": "teacher_spread",
        "student's distance (KL)": "kl",
    },
    "Norm of the centre": {"centre": "centre_norm"},
}


def temperature_at(part: DinoPart, epoch: int) -> float:
    """The teacher's temperature: linear over the epochs of the warm-up, the last of which has the final one."""
    start, end, epochs = part.warmup_teacher_temperature, part.teacher_temperature, part.warmup_teacher_epochs
    if epoch >= epochs:
        return end
    return start + (end - start) * epoch / max(1, epochs - 1)


def momentum_at(part: DinoPart, step: int, total_steps: int) -> float:
    """How much of the teacher the update that follows `step` others keeps: a cosine up to 1."""
    return 1 - (1 - part.teacher_momentum) * 0.5 * (1 + math.cos(math.pi * step / total_steps))


@dataclass(frozen=True)
class DinoTerms:
    """The loss and what tells a training that works from one that collapsed; scalars, in nats."""

    loss: Tensor
    teacher_entropy: Tensor  # mean of H(q): log K where every output is uniform, 0 where each has one k
    kl: Tensor  # mean over the pairs of KL(q ‖ p)
    teacher_spread: Tensor  # H(mean q) − mean H(q): what q tells about the image, 0 where all have the same q


def dino_loss(
    student: Sequence[Tensor],
    teacher: Tensor,
    centre: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
) -> DinoTerms:
    """Student logits of V views, (B, K) each, teacher logits (G, B, K) of the first G, centre (K) → terms."""
    views, seen = len(student), len(teacher)
    if views < 2 or views < seen:
        raise UsageError(f"DINO compares views: given {views} for the student and {seen} for the teacher")
    log_q = F.log_softmax((at_least_float32(teacher.detach()) - centre) / teacher_temperature, dim=-1)
    q = log_q.exp()
    total = q.sum(dim=0)
    loss = torch.zeros_like(total[0, 0])
    for view, logits in enumerate(student):
        # All teachers of a view at once; its own answer is left out.
        others = total - q[view] if view < seen else total
        loss = loss + F.cross_entropy(at_least_float32(logits) / student_temperature, others)
    loss = loss / (seen * (views - 1))
    entropy = -(q * log_q).sum(dim=-1).mean()
    mean_q = q.mean(dim=(0, 1))
    spread = torch.special.entr(mean_q).sum() - entropy
    return DinoTerms(loss, entropy, loss.detach() - entropy, spread)


def collapse(teacher_entropy: float, teacher_spread: float, outputs: int) -> str:
    """One line on how the outputs collapsed, judged by means over an epoch, or "" where they did not.

    Below a hundredth of a nat the teacher says the same of every image. Early in a training it always nearly does,
    and with one image per step this cannot be told.
    """
    if teacher_spread > 0.01:
        return ""
    if teacher_entropy > 0.5 * math.log(outputs):
        return (
            f"DINO collapsed: the teacher's outputs are nearly uniform (entropy {teacher_entropy:.2f} of "
            f"{math.log(outputs):.2f}) for every image. Give the head batch norm, or lower "
            "teacher_temperature or the learning rate."
        )
    return (
        f"DINO collapsed: the teacher gives every image the same few outputs (entropy {teacher_entropy:.2f} of "
        f"{math.log(outputs):.2f}). Raise teacher_temperature or lower centre_momentum."
    )


def mean_over_processes(total: Tensor, count: int, add_up: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The mean of which this process knows `total` (K), a sum over `count` rows; `add_up` sums over the processes."""
    both = torch.cat([total, total.new_full((1,), float(count))])
    if add_up is not None:
        both = add_up(both)
    return both[:-1] / both[-1]


class Dino(nn.Module, Objective):
    """Views → loss. The student is the model of the run; the heads, the teacher and the centre are here.

    The network has no classifier (num_classes=0), so that calling it gives its pooled features. The teacher is
    without stochastic depth and otherwise in the student's mode: batch norm uses the statistics of the batch, and
    the teacher keeps its own. `add_up` sums a tensor over the processes (`Processes.sum_`). An optimiser takes this
    module along with the network: only the student's head asks for gradients.
    """

    centre: Tensor

    def __init__(
        self,
        network: Network,
        head: DinoHead,
        options: DinoPart,
        *,
        global_views: int = 2,
        steps_per_epoch: int,
        epochs: int,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if network.config.num_classes:
            raise UsageError(
                f"DINO learns features, but {network.config.name or 'the network'} has a classifier. "
                "Create it with num_classes=0 or call reset_head(0)."
            )
        if global_views < 1:
            raise UsageError(f"DINO's teacher sees at least one view, given {global_views}")
        self.options, self.global_views = options, global_views
        self.steps_per_epoch, self.total_steps = steps_per_epoch, steps_per_epoch * epochs
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        self.add_up = add_up
        self.head = head
        self.teacher = _steady_copy(network)
        self.teacher_head = copy.deepcopy(head).requires_grad_(False)
        outputs = head.last_layer.weight_v.shape[0]
        self.register_buffer("centre", torch.zeros(outputs, device=head.last_layer.weight_v.device))
        # Teacher logits since the last update: their sum and number. A plain list, which DDP does not broadcast.
        self._seen: list[tuple[Tensor, int]] = []
        self._watched: list[Tensor] = []  # entropy and spread of each batch since `collapsed` was asked

    @property
    def averaged(self) -> Network:
        """The teacher: what is evaluated and kept."""
        return self.teacher

    @property
    def followers(self) -> list[Network]:
        """The networks that follow the model."""
        return [self.teacher]

    def collapsed(self) -> str:
        """One line on how the outputs collapsed since this was last asked, or ''. Waits for the device."""
        if not self._watched:
            return ""
        entropy, spread = torch.stack(self._watched).mean(dim=0).tolist()
        self._watched.clear()
        return collapse(entropy, spread, len(self.centre))

    def forget(self) -> None:
        """Drop what was noted for the next update."""
        self._seen.clear()
        self._watched.clear()

    def forward(self, model: nn.Module, batch: ViewBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Scalars of one batch: `loss`, to be minimised, and what is only looked at."""
        views = self.inputs(batch)
        with torch.no_grad():
            seen = torch.cat(views[: self.global_views])
            teacher = at_least_float32(self.teacher_head(self.teacher(seen)))  # (G·B, K)
            self._seen.append((teacher.sum(dim=0), len(teacher)))
        student = self.head(self.features(model, views)).chunk(len(views))
        terms = dino_loss(
            student,
            teacher.unflatten(0, (self.global_views, -1)),
            self.centre,
            student_temperature=self.options.student_temperature,
            teacher_temperature=temperature_at(self.options, epoch),
        )
        self._watched.append(torch.stack([terms.teacher_entropy, terms.teacher_spread]))
        return {
            "loss": terms.loss,
            "teacher_entropy": terms.teacher_entropy,
            "kl": terms.kl,
            "teacher_spread": terms.teacher_spread,
            "centre_norm": self.centre.norm(),
        }

    def inputs(self, batch: ViewBatch) -> list[Tensor]:
        """The views that are used, normalised, at the sizes they are shown at."""
        known, views = self.global_views, batch.views
        if self.options.small_views == "none":
            views = views[:known]
        if len(views) < max(2, known):
            raise UsageError(f"DINO needs {max(2, known)} views or more of an image, given {len(views)}")
        images = [normalize(view, self.pixel_mean, self.pixel_std) for view in views]
        if self.options.small_views == "resize":
            size = self.teacher.config.image_size
            images[known:] = [F.interpolate(v, size, mode="bicubic", antialias=True) for v in images[known:]]
        return images

    def features(self, model: nn.Module, views: list[Tensor]) -> Tensor:
        """The student's pooled features (V·B, C), view by view; views of one size go through it together."""
        together = [torch.cat(list(same)) for _, same in groupby(views, key=lambda view: view.shape[2:])]
        return torch.cat([self._features(model, images) for images in together])

    def _features(self, model: nn.Module, images: Tensor) -> Tensor:
        fits = self.teacher.any_resolution or tuple(images.shape[2:]) == self.teacher.config.image_size
        return model(images) if fits else model.forward_resampled(images)  # type: ignore[operator]

    def before_update(self, model: nn.Module, step: int) -> None:  # noqa: ARG002
        """In the first epochs the prototypes stay: their gradients are dropped, so that no optimiser touches them."""
        if step < self.options.frozen_last_layer_epochs * self.steps_per_epoch:
            for parameter in self.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_update(self, model: nn.Module, step: int) -> None:
        """The teacher follows the student's parameters, the centre the teacher's logits of this update."""
        keep = momentum_at(self.options, step, self.total_steps)
        mine: list[Tensor] = [*self.teacher.parameters(), *self.teacher_head.parameters()]
        theirs: list[Tensor] = [*model.parameters(), *self.head.parameters()]
        torch._foreach_lerp_(mine, theirs, 1 - keep)
        total = torch.stack([rows for rows, _ in self._seen]).sum(dim=0)
        mean = mean_over_processes(total, sum(count for _, count in self._seen), self.add_up)
        self.centre.lerp_(mean, 1 - self.options.centre_momentum)
        self._seen.clear()


def _steady_copy(network: Network) -> Network:
    """A copy with the same weights that takes no gradients and drops no branch."""
    weight = next(network.parameters())
    steady = type(network)(dataclasses.replace(network.config, drop_path=0.0)).to(weight.device, weight.dtype)
    steady.load_state_dict(network.state_dict())
    return steady.requires_grad_(False)


def make_objective(given: Ingredients) -> Dino:
    """By the recipe, with a head of its own."""
    recipe, part = given.recipe, given.recipe.dino
    head = DinoHead(
        given.network.feature_dim,
        part.outputs,
        hidden=part.hidden,
        bottleneck=part.bottleneck,
        batch_norm=part.batch_norm,
        fixed_norm=part.fixed_norm,
    )
    return Dino(
        given.network,
        head,
        part,
        global_views=recipe.views.number,
        steps_per_epoch=given.steps_per_epoch,
        epochs=recipe.schedule.epochs,
        add_up=given.add_up,
        **given.pixels,
    )
