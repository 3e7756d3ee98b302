"""Grafit, its baselines and its transfer (thesis 2.4.2, 2.4.3, 2.4.6, 2.5.1 and 2.5.4).

All but the transfer are the supervised baseline with another objective, so that nothing else differs.
"""

from __future__ import annotations

from patchloom.recipes.deit import deit
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe
from patchloom.recipes.small_images import fit_to_32_pixels


@recipe
def grafit_supervised(model: str = "timm:resnet50") -> Recipe:
    """Cross-entropy on ImageNet-1k, Grafit's baseline: ResNet-50 79.3 % top-1.

    CIFAR-100 is trained at 32 pixels.
    """
    return based_on(
        deit(model),
        source="Thesis 2.5.1; unstated: RandAugment and erasing as DeiT, decay and warm-up as Goyal et al.",
        model={"drop_path": 0.0},
        augment={"mixup": 0.0, "cutmix": 0.0, "repeats": 1},
        objective={"smoothing": 0.0},
        optim={
            "name": "sgd",
            "lr": 0.1,
            "lr_reference_batch": 256,
            "weight_decay": 1e-4,
            "momentum": 0.9,
            "nesterov": True,
        },
        schedule={"epochs": 600, "warmup_lr": 0.0, "min_lr": 0.0},
    )


@recipe
def grafit_transfer(model: str = "timm:resnet50") -> Recipe:
    """Fine-tuning on a fine-grained dataset: Flowers 98.2, Cars 92.5, Food-101 89.5, iNat 69.8 (18), 75.9 % (19).

    Thesis 2.4.6 says that Grafit's trunk "remains fixed", which no fine-tuning is; model.trainable=head keeps it so.
    """
    return based_on(
        grafit_supervised(model),
        source="Thesis 2.4.6 and 2.5.4, rest as grafit_supervised, without warm-up.",
        optim={"lr": 0.01, "lr_reference_batch": None, "batch_size": 512},
        schedule={"epochs": 240, "warmup_epochs": 0},
    )


@recipe
def grafit_transfer_cutmix(model: str = "timm:regnety_080") -> Recipe:
    """The same for longer, then `fixres`: Flowers 99.1, Cars 94.7, Food-101 93.7, iNat 81.2 (18), 84.1 % (19).

    1000 epochs are for Flowers and Cars; Food-101 and iNaturalist took 300.
    """
    return based_on(
        grafit_transfer(model),
        source="Thesis table 2.10 and 2.5.4: CutMix, more epochs; then FixRes at 384 pixels.",
        augment={"cutmix": 1.0},
        schedule={"epochs": 1000},
    )


@recipe
def grafit(model: str = "timm:resnet50") -> Recipe:
    """Coarse labels and instances; kNN on fine labels: CIFAR-100 20 → 100 77.7 %, ImageNet 127 → 1000 69.1 %."""
    return based_on(
        grafit_supervised(model),
        source="Thesis 2.5.1; 4 views (8 for CIFAR-100); λ = 1; the target's decay is BYOL's.",
        objective={"method": "grafit"},
        views={"number": 4},
    )


@recipe
def grafit_fc(model: str = "timm:resnet50") -> Recipe:
    """Grafit with a linear projector: CIFAR-100 20 → 100 with kNN 75.6 %, mAP 55.0."""
    return based_on(grafit(model), source="Thesis table 2.7, as grafit.", objective={"method": "grafit_fc"})


@recipe
def snca(model: str = "timm:resnet50") -> Recipe:
    """The kNN loss alone, linear projector (Wu et al. 2018)."""
    return based_on(
        grafit_supervised(model), source="Thesis 2.4.2, as grafit without instances.", objective={"method": "snca"}
    )


@recipe
def snca_plus(model: str = "timm:resnet50") -> Recipe:
    """SNCA with Grafit's projector and training: CIFAR-100 20 → 100 with kNN 72.2 %, mAP 35.9."""
    return based_on(snca(model), source="Thesis 2.4.2, as snca.", objective={"method": "snca_plus"})


@recipe
def instances(model: str = "timm:resnet50") -> Recipe:
    """Grafit's instance loss alone, without labels: CIFAR-100 with kNN 54.3 %, mAP 14.3."""
    return based_on(
        grafit(model), source="Thesis table 2.7, as grafit without labels.", objective={"method": "instance"}
    )


@recipe
def triplet(model: str = "timm:resnet50") -> Recipe:
    """Triplets of instances, without labels (thesis table 2.1)."""
    return based_on(
        grafit(model), source="Thesis 2.2; margin and choice of triplets as FaceNet.", objective={"method": "triplet"}
    )


@recipe
def clusterfit(model: str = "timm:resnet50") -> Recipe:
    """ClusterFit+: cross-entropy on clusters of another run's features, named by grafit.clusters_of."""
    return based_on(
        grafit_supervised(model),
        source="Thesis 2.4.2: 1500 clusters for CIFAR-100, 15000 for ImageNet.",
        objective={"method": "clusterfit"},
    )


@recipe
def grafit_small_images(model: str = "smlpnet_t") -> Recipe:
    """Grafit FC for small images: CIFAR-100 20 → 100 with kNN 61.6 %; set objective.method for its baselines."""
    return based_on(
        grafit(model),
        source="patchloom's own, after thesis 2.5.1 and SNCA's CIFAR recipe; measured in docs/results.md.",
        model={"image_size": 32, "options": fit_to_32_pixels(model)},
        augment={"crop_min_scale": 0.2, "policy": "none", "erasing": 0.0, "color_jitter": 0.4, "grey": 0.2},
        objective={"method": "grafit_fc"},
        grafit={"instance_weight": 2.0},
        optim={"batch_size": 512, "weight_decay": 5e-4},
        schedule={"epochs": 100},
        test={"crop_ratio": 1.0},
    )
