"""Object detection: Mask R-CNN on patchloom's networks (thesis 5.3.3), and a recipe for small datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from patchloom.recipes.auto import Reason, read_overrides
from patchloom.recipes.fit import Facts
from patchloom.recipes.parts import AugmentPart, DetectPart, ModelPart, ObjectivePart, OptimPart, SchedulePart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe, override


@recipe
def mask_rcnn(model: str = "patchconvnet_s60") -> Recipe:
    """COCO, 36 epochs (3×): PatchConvNet-S60 46.4 box AP and 41.3 mask AP, S120 47.0 and 41.9 (thesis table 5.6)."""
    return Recipe(
        name="mask_rcnn",
        source="XCiT's Mask R-CNN, which thesis 5.3.3 follows; the thesis gives no drop path: XCiT-S12's.",
        model=ModelPart(name=model, image_size=1344, drop_path=0.05),
        augment=AugmentPart(flip=0.5),
        objective=ObjectivePart(method="detection"),
        detect=DetectPart(resize="short_side"),
        optim=OptimPart(lr=1e-4, batch_size=16, weight_decay=0.05),
        schedule=SchedulePart(epochs=36, warmup_steps=500, warmup_lr=1e-7, decay="step", step_epochs=(27, 33)),
    )


@recipe
def vitdet(model: str = "deit_b") -> Recipe:
    """COCO, 100 epochs at 1,024 pixels on a columnar network: ViTDet's simple pyramid, heads and large-scale jitter."""
    return based_on(
        mask_rcnn(model),
        source="ViTDet (arXiv 2203.16527) as in detectron2, without its window attention.",
        model={"image_size": 1024, "drop_path": 0.1},
        augment={"scale_min": 0.1, "scale_max": 2.0},
        detect={"resize": "jitter", "pyramid": "simple", "norm": "layer", "box_head": "convolutions"},
        optim={"batch_size": 64, "weight_decay": 0.1, "layer_decay": 0.7},
        schedule={"epochs": 100, "warmup_steps": 250, "step_epochs": (89, 96)},
    )


@recipe
def detection_small(model: str = "patchconvnet_s20") -> Recipe:
    """A few hundred images from scratch on one GPU in minutes; `patchloom train DATA` fits it to the data."""
    return based_on(
        mask_rcnn(model),
        source="Rules of thumb: large-scale jitter, GroupNorm in pyramid and heads; rates were not compared.",
        model={"image_size": 512, "drop_path": 0.0},
        augment={"scale_min": 0.5, "scale_max": 1.5, "color_jitter": 0.3, "saturation": 0.3, "hue": 0.02},
        detect={"resize": "jitter", "min_visible": 0.2, "norm": "group", "proposals": 500, "regions": 128},
        optim={"lr": 5e-4, "batch_size": 16, "clip_norm": 1.0, "ema_decay": 0.998},
        schedule={"epochs": 300, "warmup_steps": 200, "warmup_lr": 0.0, "decay": "cosine", "step_epochs": ()},
    )


# The automatic recipe ------------------------------------------------------------------------------------------------

IMAGES_SEEN = {"cpu": 2_400, "cuda": 60_000}  # in a run, repetitions included
SIDES = {"cpu": (64, 128), "cuda": (320, 640)}  # of the canvas: least and most
# With a GPU small images are enlarged: small objects are detected at a stride of 4 pixels.
LARGER = {"cpu": 1, "cuda": 2}
BATCHES = {"cpu": 8, "cuda": 16}
RATES = {"cpu": 1e-3, "cuda": 5e-4}  # narrow networks learn faster
PRETRAINED_RATE = 2e-4
FEWEST_EPOCHS, FEW_STEPS = 8, 2_000
NETWORKS: dict[str, dict[str, Any]] = {
    "cpu": {"model.name": "smlpnet_t", "model.options.dim": 32, "model.options.depths": (1, 1, 2, 1)},
    "cuda": {"model.name": "patchconvnet_s20"},
}
WHY = {"cpu": "small, with feature maps at every stride", "cuda": "small, and accepts images of any shape"}
# Narrow heads without a GPU: they take most of a small network's time.
NARROW = {
    "detect.channels": 64,
    "detect.hidden": 256,
    "detect.proposals": 50,
    "detect.regions": 16,
    "detect.anchor_scale": 4.0,
    "detect.most": 30,
}
# For short runs, which gain nothing from strong augmentation.
MILD = {
    "augment.scale_min": 0.8,
    "augment.scale_max": 1.25,
    "augment.color_jitter": 0.0,
    "augment.saturation": 0.0,
    "augment.hue": 0.0,
    "optim.ema_decay": None,
}


def auto_detection(facts: Facts, model: str | None, overrides: Mapping[str, Any]) -> tuple[Recipe, list[Reason]]:
    """Fit `detection_small` to data and machine; return it with the reason for every field that differs."""
    known, device = read_overrides(overrides), facts.device
    requested = overrides.get("model.name", model)
    network = {"model.name": requested} if requested else NETWORKS[device]
    chosen = [Reason(key, value, "as requested" if requested else WHY[device]) for key, value in network.items()]
    least, most = SIDES[device]
    side = min(most, max(least, round(LARGER[device] * facts.image_size_median / 64) * 64))
    batch = known.get("optim.batch_size") or min(BATCHES[device], facts.images)
    epochs = known.get("schedule.epochs") or max(FEWEST_EPOCHS, round(IMAGES_SEEN[device] / facts.images))
    steps = epochs * math.ceil(facts.images / batch)
    total = f"{facts.images:,} images: about {epochs * facts.images:,} seen"
    chosen += [
        Reason("model.image_size", side, f"images are about {facts.image_size_median} pixels; {least} to {most}"),
        Reason("optim.batch_size", batch, f"on a {'GPU' if device == 'cuda' else 'CPU'}"),
        Reason("schedule.epochs", epochs, total),
        Reason("schedule.warmup_steps", max(1, min(200, steps // 10)), "a tenth of the steps, up to 200"),
        Reason("optim.lr", PRETRAINED_RATE if facts.pretrained else RATES[device], "AdamW, cosine to 0"),
    ]
    if steps < FEW_STEPS:
        chosen += [Reason(key, value, f"mild, for {steps:,} steps") for key, value in MILD.items()]
    if device == "cpu":
        chosen += [Reason(key, value, "narrow heads without a GPU") for key, value in NARROW.items()]
    reasons = [reason for reason in chosen if reason.field not in overrides]
    base = detection_small(network["model.name"])
    return override(base, known | {reason.field: reason.value for reason in reasons}), reasons
