"""Semantic segmentation: UperNet as the papers trained it on ADE20K, and rules of thumb for other sets.

The papers' runs are mmsegmentation's, by XCiT's and Swin's configs: 160,000 updates of 16 windows. What they leave open
(test mode of ViT, stride of ResMLP's windows, stochastic depth) is said in each recipe's source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from patchloom.recipes.auto import NARROW_DIM, PATCHED, Reason, fitted_batch, read_overrides
from patchloom.recipes.fit import Facts
from patchloom.recipes.parts import AugmentPart, ModelPart, ObjectivePart, OptimPart, SchedulePart, SegmentPart
from patchloom.recipes.registry import recipe
from patchloom.recipes.schema import Recipe, override

METHOD = "segmentation"
ADE20K_IMAGES = 20_210
UPDATES, BATCH = 160_000, 16
# Families whose weights fix the size of their windows: those of their training.
AT_224 = ("resmlp", "mixer", "smlpnet")
# Letter of a ViT's size → channels of the head (thesis 6.3.5.2); 512 for all others.
NARROW_HEADS = {"t": 192, "ti": 192, "s": 384}
DROP_PATHS = {"t": 0.05, "ti": 0.05, "s": 0.05, "b": 0.15, "l": 0.3, "h": 0.3}


@recipe
def upernet_160k(model: str = "deit3_s") -> Recipe:
    """ADE20K from ImageNet's weights: ViT-S of DeiT III 45.6, PatchConvNet-S60 46.0, ResMLP-S24 39.1 mIoU."""
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
    """The same as BEiT trains it: half the rate, rates that fall towards the image by 0.9 per block."""
    base = upernet_160k(model)
    changes: dict[str, Any] = {
        "optim.lr": 3e-5,
        "optim.weight_decay": 0.05,
        "optim.layer_decay": 0.9,
        "schedule.warmup_lr": 3e-11,
    }
    changes |= {"segment.channels": 768, "source": "BEiT's configs for ADE20K (Bao et al. 2021), rest as upernet_160k."}
    return override(base, changes)


# Rules of thumb -------------------------------------------------------------------------------------------------------

# Windows of all images that a run sees; least and most epochs; the largest window; channels of the head.
BUDGETS = {"cpu": (8_000, (5, 60), 96, 64), "cuda": (240_000, (40, 600), 512, 256)}
PRETRAINED_PIXELS = 128  # largest window on a CPU for a network that is trained already
LEAST_PLACES = 16  # patches along a window
FEW_WINDOWS = 20_000  # below: nothing is altered, as for images that are seen a few times
PRETRAINED_SHARE = 0.4  # of the windows, where the weights know pictures already
NARROW_LR, SCRATCH_LR, PRETRAINED_LR = 3e-3, 1e-3, 1e-4  # of batches of 64; less for smaller ones, by the root


def auto_segmentation(facts: Facts, model: str | None, given: Mapping[str, Any]) -> tuple[Recipe, list[Reason]]:
    """A recipe for masks nobody has published numbers for, with the reason for each choice."""
    known = read_overrides(given)
    windows, (fewest, most), largest, channels = BUDGETS[facts.device]
    name = str(given.get("model.name", model or ("smlpnet_t" if facts.device == "cpu" else "patchconvnet_s20")))
    reasons = [Reason("model.name", name, "as asked" if model or "model.name" in given else _why_network(name))]
    if facts.device == "cpu" and facts.pretrained:
        largest = PRETRAINED_PIXELS
    side = known.get("model.image_size") or max(32, min(facts.image_size_median, largest) // 32 * 32)
    why = f"windows of images whose shorter side is about {facts.image_size_median} pixels, in multiples of 32"
    reasons.append(Reason("model.image_size", side, why))
    if facts.device == "cpu" and facts.image_size_median > side:
        reasons.append(
            Reason("augment.short_side", side, "without a GPU images are resized, so a window is most of one")
        )
    if not facts.pretrained:
        reasons += _fine_patches(name, side, known) + (_small(name) if facts.device == "cpu" and not model else [])
    batch = known.get("optim.batch_size") or min(32, fitted_batch(facts.images, 32))
    share = PRETRAINED_SHARE if facts.pretrained else 1.0
    wanted = max(fewest, min(most, round(share * windows / facts.images)))
    epochs = known.get("schedule.epochs") or wanted
    updates = max(1, facts.images // batch) * epochs
    narrow = {reason.field: reason.value for reason in reasons}.get("model.options.dim", NARROW_DIM + 1) <= NARROW_DIM
    peak = PRETRAINED_LR if facts.pretrained else NARROW_LR if narrow else SCRATCH_LR
    lr = float(f"{peak * min(1.0, math.sqrt(batch / 64)):.1e}")
    reasons += [
        Reason("schedule.epochs", epochs, f"about {epochs * facts.images:,} windows seen"),
        Reason(
            "optim.batch_size", batch, f"{facts.images // batch:,} updates per epoch; 8 or more for batch statistics"
        ),
        Reason(
            "optim.lr",
            lr,
            f"AdamW, {peak:g} {'from trained weights' if facts.pretrained else 'from scratch'}, less "
            "for batches below 64",
        ),
        Reason("schedule.warmup_steps", max(1, updates // 20), f"a twentieth of {updates:,} updates"),
        Reason("segment.channels", channels, "a head as wide as small networks need"),
        Reason("optim.ema_decay", 0.999 if updates >= 4_000 else None, f"{updates:,} updates"),
    ]
    short = epochs * facts.images < FEW_WINDOWS
    why = "short run: overfitting is unlikely, so augmentation is weak" if short else "as the papers"
    reasons += [
        Reason("augment.scale_min", 0.9 if short else 0.5, why),
        Reason("augment.scale_max", 1.1 if short else 2.0, why),
        Reason("augment.policy", "none" if short else "photometric", why),
        Reason("segment.dropout", 0.0 if short else 0.1, why),
        Reason("model.drop_path", 0.0 if short else 0.1, why if short else "against overfitting"),
    ]
    start = Recipe(
        name="auto",
        source=f"Rules of thumb for {facts.images:,} images with masks.",
        model=ModelPart(name=name, drop_path_rule="linear"),
        augment=AugmentPart(crop="scaled", largest_class=0.75),
        objective=ObjectivePart(method=METHOD),
        optim=OptimPart(lr=lr, batch_size=batch, weight_decay=0.05, clip_norm=1.0),
        schedule=SchedulePart(epochs=epochs, decay="poly"),
    )
    warmups = {"schedule.warmup_epochs", "schedule.warmup_steps"}
    left = given.keys() | (warmups if warmups & given.keys() else set())
    reasons = [reason for reason in reasons if reason.field not in left]
    return override(start, known | {reason.field: reason.value for reason in reasons}), reasons


def _why_network(name: str) -> str:
    if name.startswith("smlpnet"):
        return "maps at four strides of its own learn fastest, without a GPU"
    return "convolutions learn from few images"


def _fine_patches(name: str, side: int, known: Mapping[str, Any]) -> list[Reason]:
    """Patches so small that a window has enough of them, where the network's can be chosen."""
    family = name.partition("_")[0]
    if family not in (*PATCHED, "patchconvnet"):
        return []
    patch = known.get("model.options.patch_size") or next((p for p in (16, 8, 4) if side >= LEAST_PLACES * p), 4)
    if patch == 16:
        return []
    reasons = [Reason("model.options.patch_size", patch, f"{(side // patch) ** 2} patches in a window")]
    if family == "patchconvnet":
        reasons.append(Reason("model.options.stem", "linear", "the convolutional one has patches of 16"))
        reasons.append(Reason("model.options.scale_init", 0.1, "short runs have no time to wake its blocks up"))
    return reasons


def _small(name: str) -> list[Reason]:
    if not name.startswith("smlpnet"):
        return []
    return [
        Reason("model.options.depths", (1, 2, 2, 1), "six blocks without a GPU"),
        Reason("model.options.dim", 32, "narrow without a GPU"),
    ]
