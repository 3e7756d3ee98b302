"""DINO: learning without labels. A student predicts, from one view of an image, its own average's output for another.

Letters: B images, V views (the first G of them global), K outputs of the head, q teacher, p student, c center.
    q = softmax((t − c)/τ_t),  p = softmax(s/τ_s),  loss = mean over g < G, v ≠ g and B of −Σ_k q_gk log p_vk
The teacher's weights are an average of the student's over an increasing number of updates. The center, an average of t,
keeps the outputs from all choosing one k; the low τ_t keeps them from becoming uniform. It is updated after use.
Paper and code: ResMLP's token-mixing matrix has the size of the global views, and no paper says how the authors applied
it to local ones (NeurIPS version, 3.2). `small_views` offers three ways. The head follows the authors' DINOHead, with
its key names. Its weight norm is written out because torch's old one cannot be copied (the teacher is a copy of the
student's head) and its new one has other key names.
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
from patchloom.layers.init import truncated_normal_
from patchloom.models.network import Network
from patchloom.models.sharding import follow_
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes.parts import DinoPart
from patchloom_runtime.errors import UsageError

# Charts of a report: title → curve → metric name.
CHARTS = {
    "Teacher and student, nats": {
        "teacher entropy": "teacher_entropy",
        "information per image": "teacher_spread",
        "student's KL divergence": "kl",
    },
    "Norm of the center": {"center": "centre_norm"},
}


def temperature_at(part: DinoPart, epoch: int) -> float:
    """Return the teacher's temperature: linear over the warm-up epochs, ending at the final value."""
    start, end, epochs = part.warmup_teacher_temperature, part.teacher_temperature, part.warmup_teacher_epochs
    if epoch >= epochs:
        return end
    return start + (end - start) * epoch / max(1, epochs - 1)


def momentum_at(part: DinoPart, step: int, total_steps: int) -> float:
    """Return the share of the teacher that update number `step` keeps: a cosine that rises to 1."""
    return 1 - (1 - part.teacher_momentum) * 0.5 * (1 + math.cos(math.pi * step / total_steps))


@dataclass(frozen=True)
class DinoTerms:
    """The loss and values that tell a working training from a collapsed one; scalars in nats."""

    loss: Tensor
    teacher_entropy: Tensor  # mean of H(q): log K if every output is uniform, 0 if each has a single k
    kl: Tensor  # mean over the pairs of KL(q ‖ p)
    teacher_spread: Tensor  # H(mean q) − mean H(q): information of q about the image, 0 if all images have the same q


def dino_loss(
    student: Sequence[Tensor],
    teacher: Tensor,
    center: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
) -> DinoTerms:
    """Compare student logits of V views, (B, K) each, with teacher logits (G, B, K) of the first G; center is (K,)."""
    views, known = len(student), len(teacher)
    if views < 2 or views < known:
        raise UsageError(f"DINO compares views, but got {views} for the student and {known} for the teacher")
    log_q = F.log_softmax((at_least_float32(teacher.detach()) - center) / teacher_temperature, dim=-1)
    q = log_q.exp()
    total = q.sum(dim=0)
    loss = torch.zeros_like(total[0, 0])
    for view, logits in enumerate(student):
        # All teacher outputs of the other views at once.
        others = total - q[view] if view < known else total
        loss = loss + F.cross_entropy(at_least_float32(logits) / student_temperature, others)
    loss = loss / (known * (views - 1))
    entropy = -(q * log_q).sum(dim=-1).mean()
    mean_q = q.mean(dim=(0, 1))
    spread = torch.special.entr(mean_q).sum() - entropy
    return DinoTerms(loss, entropy, loss.detach() - entropy, spread)


def collapse(teacher_entropy: float, teacher_spread: float, outputs: int) -> str:
    """Return one line that says how the outputs collapsed, judged by means over an epoch, or "" if they did not.

    Below a hundredth of a nat the teacher's output is the same for every image. Early in training this is nearly
    always so, and with one image per step it cannot be judged.
    """
    if teacher_spread > 0.01:
        return ""
    if teacher_entropy > 0.5 * math.log(outputs):
        return (
            f"DINO collapsed: the teacher's outputs are nearly uniform (entropy {teacher_entropy:.2f} of "
            f"{math.log(outputs):.2f}) for every image. Use batch norm in the head, or lower "
            "teacher_temperature or the learning rate."
        )
    return (
        f"DINO collapsed: the teacher gives every image the same few outputs (entropy {teacher_entropy:.2f} of "
        f"{math.log(outputs):.2f}). Raise teacher_temperature or lower centre_momentum."
    )


def mean_over_processes(total: Tensor, count: int, add_up: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the mean over all processes from this one's sum `total` (K) of `count` rows; `add_up` sums over them."""
    both = torch.cat([total, total.new_full((1,), float(count))])
    if add_up is not None:
        both = add_up(both)
    return both[:-1] / both[-1]


class Prototypes(nn.Module):
    """A linear layer without bias whose row k is weight_g[k] · weight_v[k] / |weight_v[k]|."""

    def __init__(self, inputs: int, outputs: int, *, fixed_norm: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(outputs, 1), requires_grad=not fixed_norm)
        self.weight_v = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.uniform_(self.weight_v, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs) to (B, outputs)."""
        return F.linear(x, self.weight_g * F.normalize(self.weight_v, dim=1))


class DinoHead(nn.Module):
    """Features → three linear layers with GELU → ℓ2 norm → cosines with K learned prototypes.

    `fixed_norm` keeps every prototype at length 1, which is more stable and slightly worse for the longest trainings.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int = 65536,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        batch_norm: bool = False,
        fixed_norm: bool = True,
    ) -> None:
        super().__init__()
        if min(inputs, outputs, hidden, bottleneck) < 1:
            widths = f"{inputs}, {hidden}, {bottleneck}, {outputs}"
            raise UsageError(f"A DINO head needs at least one unit per layer, got {widths}")
        layers: list[nn.Module] = []
        for width in (inputs, hidden):
            layers += [nn.Linear(width, hidden), *([nn.BatchNorm1d(hidden)] if batch_norm else []), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        truncated_normal_(self.mlp)
        self.last_layer = Prototypes(bottleneck, outputs, fixed_norm=fixed_norm)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, inputs) to (B, outputs)."""
        return self.last_layer(F.normalize(self.mlp(features), dim=1))


class Dino(nn.Module, Objective):
    """DINO's objective. The student is the run's model; the heads, the teacher and the center are held here.

    The network must have no classifier (num_classes=0), so that calling it returns pooled features. The teacher has no
    stochastic depth and is otherwise in the student's mode: batch norm uses the statistics of the batch, and the
    teacher keeps its own. `add_up` sums a tensor over the processes (`Processes.sum_`). Pass this module to the
    optimizer along with the network: only the student's head requires gradients.
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
            raise UsageError(f"global_views is {global_views}, expected at least 1: DINO's teacher sees only these")
        self.options, self.global_views = options, global_views
        self.steps_per_epoch, self.total_steps = steps_per_epoch, steps_per_epoch * epochs
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        self.add_up = add_up
        self.head = head
        self.teacher = _steady_copy(network)
        self.teacher_head = copy.deepcopy(head).requires_grad_(False)
        outputs = head.last_layer.weight_v.shape[0]
        self.register_buffer("centre", torch.zeros(outputs, device=head.last_layer.weight_v.device))
        # Sum and number of teacher logits since the last update. A plain list, which DDP does not broadcast.
        self._teacher_sums: list[tuple[Tensor, int]] = []
        self._statistics: list[Tensor] = []  # entropy and spread per batch since the last call of `collapsed`

    @property
    def averaged(self) -> Network:
        """Return the teacher, which is evaluated and saved."""
        return self.teacher

    @property
    def followers(self) -> list[Network]:
        """Return the networks that follow the model."""
        return [self.teacher]

    def collapsed(self) -> str:
        """Return one line on how the outputs collapsed since the last call, or "". Waits for the device."""
        if not self._statistics:
            return ""
        entropy, spread = torch.stack(self._statistics).mean(dim=0).tolist()
        self._statistics.clear()
        return collapse(entropy, spread, len(self.centre))

    def forget(self) -> None:
        """Discard what was noted for the next update."""
        self._teacher_sums.clear()
        self._statistics.clear()

    def forward(self, model: nn.Module, batch: ViewBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the scalars of one batch: `loss` to be minimized, and values to be logged."""
        views = self.inputs(batch)
        with torch.no_grad():
            global_images = torch.cat(views[: self.global_views])
            teacher = at_least_float32(self.teacher_head(self.teacher(global_images)))  # (G·B, K)
            self._teacher_sums.append((teacher.sum(dim=0), len(teacher)))
        student = self.head(self.features(model, views)).chunk(len(views))
        terms = dino_loss(
            student,
            teacher.unflatten(0, (self.global_views, -1)),
            self.centre,
            student_temperature=self.options.student_temperature,
            teacher_temperature=temperature_at(self.options, epoch),
        )
        self._statistics.append(torch.stack([terms.teacher_entropy, terms.teacher_spread]))
        return {
            "loss": terms.loss,
            "teacher_entropy": terms.teacher_entropy,
            "kl": terms.kl,
            "teacher_spread": terms.teacher_spread,
            "centre_norm": self.centre.norm(),
        }

    def inputs(self, batch: ViewBatch) -> list[Tensor]:
        """Return the views in use, normalized and at their final sizes."""
        known, views = self.global_views, batch.views
        if self.options.small_views == "none":
            views = views[:known]
        if len(views) < max(2, known):
            raise UsageError(f"DINO needs {max(2, known)} or more views per image, got {len(views)}")
        images = [normalize(view, self.pixel_mean, self.pixel_std) for view in views]
        if self.options.small_views == "resize":
            size = self.teacher.config.image_size
            images[known:] = [F.interpolate(v, size, mode="bicubic", antialias=True) for v in images[known:]]
        return images

    def features(self, model: nn.Module, views: list[Tensor]) -> Tensor:
        """Return the student's pooled features (V·B, C), view by view. Views of one size are batched."""
        together = [torch.cat(list(same)) for _, same in groupby(views, key=lambda view: view.shape[2:])]
        return torch.cat([self._features(model, images) for images in together])

    def _features(self, model: nn.Module, images: Tensor) -> Tensor:
        fits = self.teacher.any_resolution or tuple(images.shape[2:]) == self.teacher.config.image_size
        return model(images) if fits else model.forward_resampled(images)  # type: ignore[operator]

    def before_update(self, model: nn.Module, step: int) -> None:  # noqa: ARG002
        """Drop the gradients of the prototypes in the first epochs, so that the optimizer does not change them."""
        if step < self.options.frozen_last_layer_epochs * self.steps_per_epoch:
            for parameter in self.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_update(self, model: nn.Module, step: int) -> None:
        """Update the teacher from the student's parameters and the center from this update's teacher logits."""
        keep = momentum_at(self.options, step, self.total_steps)
        follow_([self.teacher, self.teacher_head], [model, self.head], 1 - keep)
        total = torch.stack([rows for rows, _ in self._teacher_sums]).sum(dim=0)
        mean = mean_over_processes(total, sum(count for _, count in self._teacher_sums), self.add_up)
        self.centre.lerp_(mean, 1 - self.options.centre_momentum)
        self._teacher_sums.clear()


def _steady_copy(network: Network) -> Network:
    """Return a copy with the same weights that takes no gradients and drops no branch."""
    weight = next(network.parameters())
    steady = type(network)(dataclasses.replace(network.config, drop_path=0.0)).to(weight.device, weight.dtype)
    steady.load_state_dict(network.state_dict())
    return steady.requires_grad_(False)


def make_objective(ingredients: Ingredients) -> Dino:
    """Build the recipe's objective with a new head."""
    recipe, part = ingredients.recipe, ingredients.recipe.dino
    head = DinoHead(
        ingredients.network.feature_dim,
        part.outputs,
        hidden=part.hidden,
        bottleneck=part.bottleneck,
        batch_norm=part.batch_norm,
        fixed_norm=part.fixed_norm,
    )
    return Dino(
        ingredients.network,
        head,
        part,
        global_views=recipe.views.number,
        steps_per_epoch=ingredients.steps_per_epoch,
        epochs=recipe.schedule.epochs,
        add_up=ingredients.add_up,
        **ingredients.pixels,
    )
