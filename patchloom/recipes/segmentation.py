"""Semantic segmentation: UperNet as in the papers on ADE20K, and rules of thumb for other datasets.

The papers' runs are mmsegmentation's, by XCiT's and Swin's configs: 160,000 updates of 16 windows. What they do not
state (test mode of ViT, stride of ResMLP's windows, stochastic depth) is noted in each recipe's source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from patchloom.recipes.auto import NARROW_DIM, PATCHED, Reason, drop_overridden, fitted_batch, read_overrides
from patchloom.recipes.fit import Facts
from patchloom.recipes.parts import AugmentPart, ModelPart, ObjectivePart, OptimPart, SchedulePart, SegmentPart
from patchloom.recipes.registry import recipe
from patchloom.recipes.schema import Recipe, override

METHOD = "segmentation"
ADE20K_IMAGES = 20_210
UPDATES, BATCH = 160_000, 16
# Families whose weights fix the window size to that of their training.
AT_224 = ("resmlp", "mixer", "smlpnet")
# Size letter of a ViT → channels of the head (thesis 6.3.5.2); 512 for all others.
NARROW_HEADS = {"t": 192, "ti": 192, "s": 384}
DROP_PATHS = {"t": 0.05, "ti": 0.05, "s": 0.05, "b": 0.15, "l": 0.3, "h": 0.3}


@recipe
def upernet_160k(model: str = "deit3_s") -> Recipe:
    """ADE20K from ImageNet weights: ViT-S of DeiT III 45.6, PatchConvNet-S60 46.0, ResMLP-S24 39.1 mIoU."""
    family, _, size = model.partition("_")
    side = 224 if family in AT_224 else 512
    letter = size.rstrip("0123456789x_")
    channels = NARROW_HEADS.get(letter, 512) if family.startswith("deit") else 512
    return Recipe(
        name="upernet_160k",
        source="Thesis 4.3.6, 5.3.3, 6.3.5.2 after XCiT's and Swin's configs; stochastic depth and test mode are ours.",
        model=ModelPart(name=model, image_size=side, drop_path=DROP_PATHS.get(letter, 0.05), drop_path_rule="linear"),
        augment=AugmentPart(
            crop="scaled", short_side=side, scale_min=0.5, scale_max=2.0, largest_class=0.75, policy="photometric"
        ),
        objective=ObjectivePart(method=METHOD),
        segment=SegmentPart(channels=channels, test_short_side=512, reduce_zero_label=True),
        optim=OptimPart(lr=6e-5, batch_size=BATCH, weight_decay=0.01),
        schedule=SchedulePart(
            epochs=round(UPDATES / (ADE20K_IMAGES // BATCH)),
            steps=UPDATES,
            warmup_steps=1500,
            warmup_lr=6e-11,
            decay="poly",
            power=1.0,
        ),
    )


@recipe
def upernet_beit(model: str = "deit3_b") -> Recipe:
    """The same as in BEiT: half the learning rate, decaying by 0.9 per block towards the image."""
    base = upernet_160k(model)
    changes: dict[str, Any] = {
        "optim.lr": 3e-5,
        "optim.weight_decay": 0.05,
        "optim.layer_decay": 0.9,
        "schedule.warmup_lr": 3e-11,
    }
    changes |= {"segment.channels": 768, "source": "BEiT's configs for ADE20K (Bao et al. 2021), rest as upernet_160k."}
    return override(base, changes)


# The automatic recipe ------------------------------------------------------------------------------------------------


class SegmentationBudget(NamedTuple):
    """Default limits of a run on one kind of machine."""

    windows: int  # of all images, seen in a run
    epochs: tuple[int, int]  # least and most
    largest_window: int  # pixels
    channels: int  # of the head
    network: str
    why: str


BUDGETS = {
    "cpu": SegmentationBudget(
        8_000, (5, 60), 96, 64, "smlpnet_t", "its feature maps at four strides learn fastest without a GPU"
    ),
    "cuda": SegmentationBudget(240_000, (40, 600), 512, 256, "patchconvnet_s20", "convolutions learn from few images"),
}
PRETRAINED_PIXELS = 128  # largest window on a CPU for a pretrained network
LEAST_PLACES = 16  # patches along a window
FEW_WINDOWS = 20_000  # below: a short run
PRETRAINED_SHARE = 0.4  # of the windows, with pretrained weights
# For batches of 64; smaller ones scale by the root. A short run has to fit a new head in a few dozen updates (LOG.md).
NARROW_LR, SCRATCH_LR, PRETRAINED_LR, SHORT_PRETRAINED_LR = 3e-3, 1e-3, 1e-4, 2e-3
# Augmentation and regularization. In a short run each image is seen a few times only.
SHORT_RUN = {
    "augment.scale_min": 0.9,
    "augment.scale_max": 1.1,
    "augment.policy": "none",
    "segment.dropout": 0.0,
    "model.drop_path": 0.0,
}
LONG_RUN = {
    "augment.scale_min": 0.5,
    "augment.scale_max": 2.0,
    "augment.policy": "photometric",
    "segment.dropout": 0.1,
    "model.drop_path": 0.1,
}


def auto_segmentation(facts: Facts, model: str | None, overrides: Mapping[str, Any]) -> tuple[Recipe, list[Reason]]:
    """Choose a recipe for any dataset with masks, with the reason for each choice."""
    known, budget = read_overrides(overrides), BUDGETS[facts.device]
    reasons = _network(facts, model, overrides, known, budget)
    chosen = {reason.field: reason.value for reason in reasons}
    reasons += _training(facts, known, budget, narrow=chosen.get("model.options.dim", NARROW_DIM + 1) <= NARROW_DIM)
    chosen = {reason.field: reason.value for reason in reasons}
    start = Recipe(
        name="auto",
        source=f"Rules of thumb for {facts.images:,} images with masks.",
        model=ModelPart(name=chosen["model.name"], drop_path_rule="linear"),
        augment=AugmentPart(crop="scaled", largest_class=0.75),
        objective=ObjectivePart(method=METHOD),
        optim=OptimPart(lr=chosen["optim.lr"], batch_size=chosen["optim.batch_size"], weight_decay=0.05, clip_norm=1.0),
        schedule=SchedulePart(epochs=chosen["schedule.epochs"], decay="poly"),
    )
    reasons = drop_overridden(reasons, overrides)
    return override(start, known | {reason.field: reason.value for reason in reasons}), reasons


def _network(
    facts: Facts,
    model: str | None,
    overrides: Mapping[str, Any],
    known: Mapping[str, Any],
    budget: SegmentationBudget,
) -> list[Reason]:
    """Choose network, window and patches."""
    on_cpu, median = facts.device == "cpu", facts.image_size_median
    requested = overrides.get("model.name", model)
    name = str(requested or budget.network)
    largest = PRETRAINED_PIXELS if on_cpu and facts.pretrained else budget.largest_window
    side = known.get("model.image_size") or max(32, min(median, largest) // 32 * 32)
    reasons = [
        Reason("model.name", name, "as requested" if requested else budget.why),
        Reason(
            "model.image_size",
            side,
            f"windows of images whose shorter side is about {median} pixels, in multiples of 32",
        ),
    ]
    if on_cpu and median > side:
        why = "without a GPU images are resized, so that a window covers most of one"
        reasons.append(Reason("augment.short_side", side, why))
    if not facts.pretrained:
        reasons += _fine_patches(name, side, known)
    if not facts.pretrained and on_cpu and not model and name.startswith("smlpnet"):
        reasons += [
            Reason("model.options.depths", (1, 2, 2, 1), "six blocks without a GPU"),
            Reason("model.options.dim", 32, "narrow without a GPU"),
        ]
    return reasons


def _fine_patches(name: str, side: int, known: Mapping[str, Any]) -> list[Reason]:
    """Choose patches that are small enough for a window, if the network's can be chosen."""
    family = name.partition("_")[0]
    if family not in (*PATCHED, "patchconvnet"):
        return []
    patch = known.get("model.options.patch_size") or next((p for p in (16, 8, 4) if side >= LEAST_PLACES * p), 4)
    if patch == 16:
        return []
    reasons = [Reason("model.options.patch_size", patch, f"{(side // patch) ** 2} patches in a window")]
    if family == "patchconvnet":
        reasons.append(Reason("model.options.stem", "linear", "the convolutional stem has patches of 16"))
        reasons.append(Reason("model.options.scale_init", 0.1, "its blocks would contribute too late in a short run"))
    return reasons


def _training(facts: Facts, known: Mapping[str, Any], budget: SegmentationBudget, *, narrow: bool) -> list[Reason]:
    """Choose length, batch, learning rate and augmentation."""
    images, pretrained = facts.images, facts.pretrained
    batch = known.get("optim.batch_size") or min(32, fitted_batch(images, 32))
    windows = budget.windows * (PRETRAINED_SHARE if pretrained else 1.0)
    fewest, most = budget.epochs
    epochs = known.get("schedule.epochs") or max(fewest, min(most, round(windows / images)))
    updates = max(1, images // batch) * epochs
    short = epochs * images < FEW_WINDOWS
    if pretrained:
        peak, start = SHORT_PRETRAINED_LR if short else PRETRAINED_LR, "from trained weights"
    else:
        peak, start = NARROW_LR if narrow else SCRATCH_LR, "from scratch"
    why = "short run: overfitting is unlikely" if short else "long run: as in the papers"
    return [
        Reason("schedule.epochs", epochs, f"about {epochs * images:,} windows seen"),
        Reason("optim.batch_size", batch, f"{images // batch:,} updates per epoch; 8 or more for batch statistics"),
        Reason(
            "optim.lr",
            float(f"{peak * min(1.0, math.sqrt(batch / 64)):.1e}"),
            f"AdamW, {peak:g} {start} in a {'short' if short else 'long'} run, less for batches below 64",
        ),
        Reason("schedule.warmup_steps", max(1, updates // 20), f"a twentieth of {updates:,} updates"),
        Reason("segment.channels", budget.channels, "a head as wide as small networks need"),
        Reason("optim.ema_decay", 0.999 if updates >= 4_000 else None, f"{updates:,} updates"),
        *(Reason(field, value, why) for field, value in (SHORT_RUN if short else LONG_RUN).items()),
    ]
