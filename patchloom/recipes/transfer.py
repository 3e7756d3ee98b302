"""Fine-tuning an ImageNet network on another dataset (thesis 3.4.4, 3.7.1.3, 6.3.5.1) or at another size (FixRes).

The network's own training recipe continues with a smaller learning rate and without its teacher. An author also reports
SGD for CIFAR-10 and Cars with DeiT: batch 768, lr 0.01, weight decay 1e-4, no erasing, no stochastic depth (issue 45 of
the code). Mixer has its own fine-tuning for CIFAR, Flowers and Pets (sections 3 and C).
"""

from __future__ import annotations

from collections.abc import Callable

from patchloom.recipes.cait import cait
from patchloom.recipes.deit import deit
from patchloom.recipes.deit3 import deit3
from patchloom.recipes.grafit import grafit_transfer
from patchloom.recipes.mixer import mixer_finetune, mixer_imagenet
from patchloom.recipes.parts import AugmentPart, EvaluationPart, ModelPart, OptimPart, SchedulePart
from patchloom.recipes.patchconvnet import patchconvnet
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.resmlp import resmlp
from patchloom.recipes.schema import Recipe
from patchloom.recipes.smlpnet import smlpnet

TRAINED_WITH: dict[str, Callable[[str], Recipe]] = {
    "resmlp": resmlp,
    "mixer": mixer_imagenet,
    "smlpnet": smlpnet,
    "cait": cait,
    "patchconvnet": patchconvnet,
    "deit3": deit3,
}


@recipe
def transfer_cifar10(model: str = "deit_b") -> Recipe:
    """CIFAR-10 enlarged to 224 pixels: DeiT-B 99.1, ViT-B of DeiT III 99.3 % top-1."""
    return _mixer_transfer(model, 10_000) or _transfer(model, lr_divisor=100, epochs=1000)


@recipe
def transfer_cifar100(model: str = "deit_b") -> Recipe:
    """CIFAR-100 enlarged to 224 pixels: DeiT-B 90.8, ViT-B of DeiT III 92.5 % top-1."""
    return _mixer_transfer(model, 10_000) or _transfer(model, lr_divisor=100, epochs=1000)


@recipe
def transfer_flowers(model: str = "deit_b") -> Recipe:
    """Flowers-102: DeiT-B 98.4, ViT-B of DeiT III 98.6 % top-1."""
    return _mixer_transfer(model, 500) or _transfer(model, lr_divisor=10, epochs=1000)


@recipe
def transfer_flowers_attention(model: str = "deit3_b") -> Recipe:
    """Flowers-102 with only the attention layers trained: 0.2 points more than all layers for DeiT III."""
    return based_on(
        transfer_flowers(model),
        source="Thesis 6.3.5.1: only the attention layers, rest as transfer_flowers.",
        model={"trainable": "attention"},
    )


@recipe
def transfer_cars(model: str = "deit_b") -> Recipe:
    """Stanford Cars: DeiT-B 92.1, ViT-B of DeiT III 93.4 % top-1."""
    return _transfer(model, lr_divisor=10, epochs=1000)


@recipe
def transfer_inat18(model: str = "deit_b") -> Recipe:
    """iNaturalist 2018: DeiT-B 73.2, ViT-B of DeiT III 73.6 % top-1."""
    return _transfer(model, lr_divisor=10, epochs=360)


@recipe
def transfer_inat19(model: str = "deit_b") -> Recipe:
    """iNaturalist 2019: DeiT-B 77.7, ViT-B of DeiT III 78.0 % top-1."""
    return _transfer(model, lr_divisor=10, epochs=360)


@recipe
def transfer_pets(model: str = "mixer_b16") -> Recipe:
    """Oxford-IIIT Pets, one of Mixer's five tasks; other networks train as on Flowers, which has a similar size."""
    return based_on(transfer_flowers(model), source="Mixer 3 has Pets; training as transfer_flowers.")


@recipe
def transfer_food101(model: str = "timm:resnet50") -> Recipe:
    """Food-101: ResNet-50 of Grafit 89.5 % in 240 epochs; RegNetY-8GF 93.7 % in these 300, CutMix and FixRes."""
    if ":" in model:
        return based_on(
            grafit_transfer(model), source="Thesis 2.5.4: 300 epochs, as grafit_transfer.", schedule={"epochs": 300}
        )
    return based_on(
        _transfer(model, lr_divisor=10, epochs=300), source="Thesis 2.5.4: 300 epochs; lr / 10 as on Cars (3.7.1.3)."
    )


@recipe
def fixres(model: str = "timm:resnet50") -> Recipe:
    """Fine-tuning classifier and last norm at the test size, on images preprocessed as in testing.

    ResNet-50, trained at 224 pixels, gains 2 points at 384 (77.0 to 79.0 %). DeiT and later networks are instead
    fine-tuned as a whole, with augmentation (deit_finetune_384, deit3_finetune).
    """
    return Recipe(
        name="fixres",
        source="Thesis 2.5.4 and 3.4.5; numbers of FixRes' code: lr 8e-3 at 512, a tenth from epoch 30 on.",
        model=ModelPart(name=model, image_size=384, size_from="recipe", trainable="head_and_norm", eval_mode=True),
        augment=AugmentPart(crop="centre", flip=0.0),
        optim=OptimPart(name="sgd", lr=8e-3, lr_reference_batch=512, batch_size=512, weight_decay=1e-4),
        schedule=SchedulePart(epochs=56, decay="step", step_epochs=(30,)),
        test=EvaluationPart(crop_ratio=0.875),
    )


def _mixer_transfer(model: str, steps: int) -> Recipe | None:
    """Return Mixer's own fine-tuning, or None for other networks."""
    if not model.startswith("mixer"):
        return None
    return based_on(
        mixer_finetune(model),
        source=f"Mixer 3 and C: {steps:,} steps as Dosovitskiy et al. 2021; the length of the warm-up is ours.",
        schedule={"steps": steps, "warmup_steps": min(500, steps // 5)},
    )


def _transfer(model: str, *, lr_divisor: int, epochs: int) -> Recipe:
    family = model.partition("_")[0]
    trained = TRAINED_WITH.get(family, deit)(model)
    schedule = trained.schedule
    return based_on(
        trained,
        source=f"Thesis 3.7.1.3: lr / {lr_divisor}, {epochs} epochs, rest as training; tables 3.19, 6.11.",
        optim={"lr": trained.optim.lr / lr_divisor},
        schedule={
            "epochs": epochs,
            "min_lr": schedule.min_lr / lr_divisor,
            "warmup_lr": schedule.warmup_lr / lr_divisor,
        },
        test={"crop_ratio": 1.0 if family == "deit3" else 0.875},
    )
