"""Training methods: one row each, with everything the rest of the code needs to know about it.

The loss is implemented in `objectives/`. A row defines which task a method solves, which fields of a recipe it reads,
what it learns from and what its network ends in. A new method is a row here and a file there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from patchloom_runtime.errors import UsageError, nearest

EVERYTHING = ("*",)
# Groups of a recipe that every method reads completely, unless its row lists fields.
_COMMON: Mapping[str, Collection[str]] = dict.fromkeys(("model", "objective", "optim", "schedule"), EVERYTHING)
# What learns is set by `trainable` for image-level networks and by `freeze` for dense ones.
_MODEL = ("name", "image_size", "drop_path", "drop_path_rule", "dropout", "gradient_checkpointing", "options")
_IMAGE_LEVEL = (
    *(*_MODEL, "eval_mode", "fit_head", "trainable", "lora_rank", "frozen_epochs", "size_from", "scales_from"),
    *("quantized_bits", "quantized_share"),
)
_DENSE = (*_MODEL, "eval_mode", "freeze")
_IMAGES = {**_COMMON, "model": _IMAGE_LEVEL, "augment": EVERYTHING, "test": EVERYTHING}
# Augmentations that also apply to masks and boxes; mixing and policies that move pixels do not.
SPATIAL = (
    *("crop", "crop_min_scale", "crop_max_scale", "crop_padding", "short_side", "scale_min", "scale_max"),
    *("largest_class", "flip", "policy", "color_jitter", "saturation", "hue", "jitter_probability"),
    *("grey", "blur", "solarise"),
)
_VIEWS = {**_IMAGES, "views": EVERYTHING}
_GRAFIT = {**_VIEWS, "grafit": EVERYTHING}


@dataclass(frozen=True, kw_only=True)
class Method:
    """Properties of a method."""

    task: str  # a row of `tasks.table`
    objective: str  # the module with its `make_objective`
    reads: Mapping[str, Collection[str]]  # group of a recipe → its fields
    learns_from: Literal["labels", "images", "clusters", "text", "masks", "boxes"]
    views: bool = False  # batches contain several views of each image
    head: Literal["classes", "clusters", "places", "none"] = "none"  # what the network classifies; places: dense
    projector: Literal["fc", "mlp", "none"] = "none"  # of the network: search uses its output
    teacher: Literal["none", "classes", "features"] = "none"  # what a teacher gives, if the method has one
    counts: str = "images"  # unit of optim.batch_size
    options: Mapping[str, Any] = field(default_factory=dict)  # of the objective: which losses are summed

    def reads_field(self, group: str, name: str = "") -> bool:
        """Return whether the method reads a group of a recipe, or a field of it."""
        fields = self.reads.get(group, ())
        return bool(fields) and (not name or fields == EVERYTHING or name in fields)


def _grafit(labels: str, instance: str, projector: str) -> Method:
    """Return a row of thesis tables 2.1, 2.4 and 2.7."""
    return Method(
        task="classification" if labels == "cross_entropy" else "embedding",
        objective="patchloom.objectives.grafit",
        reads=_GRAFIT,
        learns_from="images" if labels == "none" else "labels",
        views=True,
        head="classes" if labels == "cross_entropy" else "none",
        # A projector that only instances train belongs to the objective.
        projector=projector if labels == "knn" else "none",  # type: ignore[arg-type]
        options={"labels": labels, "instance": instance, "projector": projector},
    )


def _multilabel(**options: float) -> Method:
    """Return a row with binary cross-entropy, or with `options` the asymmetric loss (arXiv 2009.14119)."""
    return Method(
        task="multilabel",
        objective="patchloom.objectives.multilabel",
        reads={
            **_IMAGES,
            "objective": ("method", "distillation", "teacher", "distillation_weight", "temperature"),
        },
        learns_from="labels",
        head="classes",
        teacher="classes",
        options=options,
    )


def _regression(loss: str) -> Method:
    return Method(
        task="regression",
        objective="patchloom.objectives.regression",
        reads={**_IMAGES, "objective": ("method",)},
        learns_from="labels",
        head="classes",
        options={"loss": loss},
    )


METHODS: dict[str, Method] = {
    "classification": Method(
        task="classification",
        objective="patchloom.objectives.distillation",
        reads={**_IMAGES, "balance": EVERYTHING},
        learns_from="labels",
        head="classes",
        teacher="classes",
    ),
    "multilabel": _multilabel(),
    "asymmetric": _multilabel(negative_focus=4, positive_focus=0, margin=0.05),  # of the paper, for COCO
    "regression": _regression("huber"),
    "regression_l1": _regression("l1"),
    "regression_l2": _regression("l2"),
    "distill_features": Method(
        task="embedding",
        objective="patchloom.objectives.feature_distillation",
        reads={**_IMAGES, "objective": ("method", "teacher", "position_weight")},
        learns_from="images",
        teacher="features",
    ),
    "dino": Method(
        task="embedding",
        objective="patchloom.objectives.dino",
        reads={**_VIEWS, "dino": EVERYTHING},
        learns_from="images",
        views=True,
    ),
    "grafit": _grafit("knn", "cosine", "mlp"),
    "grafit_fc": _grafit("knn", "cosine", "fc"),
    "snca": _grafit("knn", "none", "fc"),
    "snca_plus": _grafit("knn", "none", "mlp"),
    "instance": _grafit("none", "cosine", "mlp"),
    "cross_entropy_instance": _grafit("cross_entropy", "cosine", "mlp"),
    "triplet": _grafit("none", "triplet", "none"),
    "cross_entropy_triplet": _grafit("cross_entropy", "triplet", "none"),
    "clusterfit": Method(
        task="embedding",
        objective="patchloom.objectives.classification",
        reads={**_IMAGES, "balance": EVERYTHING, "grafit": EVERYTHING},
        learns_from="clusters",
        head="clusters",
    ),
    "segmentation": Method(
        task="segmentation",
        objective="patchloom.objectives.segmentation",
        reads={**_COMMON, "model": _DENSE, "objective": ("method",), "augment": SPATIAL, "segment": EVERYTHING},
        learns_from="masks",
        head="places",
    ),
    "translation": Method(
        task="translation",
        objective="patchloom.objectives.translation",
        reads={
            "model": ("name", "dropout", "options"),
            "objective": ("method", "smoothing"),
            "text": EVERYTHING,
            "optim": (
                *("name", "lr", "lr_reference_batch", "batch_size", "weight_decay", "weight_decay_end"),
                *("betas", "momentum", "nesterov", "clip_norm", "clip_each"),
            ),
            "schedule": (
                *("epochs", "warmup_epochs", "warmup_steps", "warmup_lr", "decay", "power", "min_lr"),
                *("step_epochs", "step_factor"),
            ),
        },
        learns_from="text",
        counts="tokens",
    ),
    "detection": Method(
        task="detection",
        objective="patchloom.objectives.detection",
        reads={
            "model": (*_MODEL, "freeze"),
            "augment": (
                *("scale_min", "scale_max", "flip", "policy", "color_jitter", "saturation", "hue"),
                *("jitter_probability", "grey", "blur", "solarise", "erasing"),
            ),
            "objective": ("method",),
            "detect": EVERYTHING,
            "optim": EVERYTHING,
            "schedule": EVERYTHING,
        },
        learns_from="boxes",
        head="places",
    ),
}


def method_of(name: str) -> Method:
    """Return the row of a method. Raise UsageError with the nearest names if there is none."""
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise UsageError(f"objective.method is {name!r}, expected one of {known}.{nearest(name, list(METHODS))}")
    return METHODS[name]
