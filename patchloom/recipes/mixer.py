"""MLP-Mixer: pre-training on three datasets and fine-tuning (paper sections 3, B and C, table 4).

The paper's Adam decouples weight decay from the gradient, in proportion to the learning rate: PyTorch's AdamW.
"""

from __future__ import annotations

from patchloom.recipes.parts import AugmentPart, EvaluationPart, ModelPart, ObjectivePart, OptimPart, SchedulePart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe

# Table 4, ImageNet-21k: RandAugment magnitude and mixup. Sizes that it does not list take B's.
AUGMENT_21K = {"mixer_l32": (20, 0.5), "mixer_l16": (20, 0.5)}
# Table 4, JFT-300M: epochs and learning rate. Its L reads 7/14 epochs: L/32 saw 7, L/16 both (table 3).
JFT = {
    "mixer_s32": (5, 3e-3),
    "mixer_s16": (5, 3e-3),
    "mixer_b32": (7, 3e-3),
    "mixer_b16": (7, 3e-3),
    "mixer_l32": (7, 1e-3),
    "mixer_l16": (14, 1e-3),
    "mixer_h14": (14, 1e-3),
}


@recipe
def mixer_imagenet(model: str = "mixer_b16") -> Recipe:
    """ImageNet-1k from scratch: B/16 76.44, L/16 71.76 % top-1 after fine-tuning (table 3)."""
    return Recipe(
        name="mixer_imagenet",
        source="Mixer table 4 (ImNet), 3 and B. No label smoothing is stated, so there is none.",
        model=ModelPart(name=model, drop_path=0.1, drop_path_rule="linear"),
        augment=AugmentPart(policy="randaugment", policy_magnitude=15, policy_layers=2, mixup=0.5),
        objective=ObjectivePart(),
        optim=OptimPart(name="adamw", lr=1e-3, batch_size=4096, weight_decay=0.1, clip_norm=1.0),
        schedule=SchedulePart(epochs=300, warmup_steps=10_000, decay="linear"),
        test=EvaluationPart(crop_ratio=0.875),
    )


@recipe
def mixer_imagenet21k(model: str = "mixer_b16") -> Recipe:
    """Pre-training on ImageNet-21k.

    Top-1 on ImageNet-1k after fine-tuning: B/16 80.64 %, L/16 at 448 pixels 83.91 %.
    """
    magnitude, mixup = AUGMENT_21K.get(model, (10, 0.2))
    return based_on(
        mixer_imagenet(model),
        source="Mixer table 4 (ImNet-21k).",
        augment={"policy_magnitude": magnitude, "mixup": mixup},
    )


@recipe
def mixer_jft(model: str = "mixer_l16") -> Recipe:
    """Pre-training on JFT-300M: B/16 80.00, L/16 at 448 pixels 86.78, H/14 87.78 % once fine-tuned."""
    epochs, lr = JFT.get(model, JFT["mixer_b16"])
    return based_on(
        mixer_imagenet(model),
        source="Mixer table 4 (JFT-300M) and 3: crop and flip only; of L/16's 7 and 14 epochs, 14.",
        model={"drop_path": 0.0},
        augment=AugmentPart(),
        optim={"lr": lr, "weight_decay": 0.03},
        schedule={"epochs": epochs},
    )


@recipe
def mixer_finetune(model: str = "mixer_b16") -> Recipe:
    """Pre-trained Mixer on ImageNet-1k at 224 pixels: 20,000 steps.

    The learning rate was selected from 0.003, 0.01, 0.03, 0.06. CIFAR used 10,000 steps, Flowers and Pets 500
    (schedule.steps). Inception crops, mixup and weight averaging brought no gain (A.2).
    """
    return Recipe(
        name="mixer_finetune",
        source="Mixer 3, A.2 and C; steps, 500 of warm-up and lr grid as Dosovitskiy et al. 2021, crop as BiT.",
        model=ModelPart(name=model),
        augment=AugmentPart(crop="square_random"),
        optim=OptimPart(name="sgd", lr=0.03, batch_size=512, weight_decay=0.0, momentum=0.9, clip_norm=1.0),
        schedule=SchedulePart(epochs=8, steps=20_000, warmup_steps=500, decay="cosine"),
        test=EvaluationPart(crop_ratio=0.875),
    )


@recipe
def mixer_finetune_448(model: str = "mixer_l16") -> Recipe:
    """Twice the resolution, token mixing widened fourfold, tested on the whole image: the Mixer rows of table 2."""
    return based_on(
        mixer_finetune(model),
        source="Mixer table 2 and C, K = 2; resize-crop test.",
        model={"image_size": 448, "size_from": "recipe"},
        test={"resize": "square"},
    )


@recipe
def mixer_vtab(model: str = "mixer_b16") -> Recipe:
    """VTAB-1k, 1,000 images per task: 74.95 (L/16, ImageNet-21k), 75.33 % (H/14, JFT) on average over 19 tasks.

    --size 448 for tasks with large images. Use 1,000 training images, as a split or by train_share. The learning rate
    was selected from 0.003, 0.01, 0.03.
    """
    return based_on(
        mixer_finetune(model),
        source="Mixer 3 and C: 224 or 448 pixels by image size; steps of BiT-HyperRule below 20,000 images.",
        model={"size_from": "recipe"},
        schedule={"steps": 500, "warmup_steps": 100},
    )


@recipe
def mixer_21k_to_1k(model: str = "mixer_b16") -> Recipe:
    """From ImageNet-21k to ImageNet-1k at 224 pixels: B/16 80.64, L/16 82.89 %; L/16 at 448 pixels 83.91 %."""
    return based_on(mixer_finetune(model), source="Mixer table 3 (ImageNet-21k), as mixer_finetune.")
