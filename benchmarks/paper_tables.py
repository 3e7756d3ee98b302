"""The tables of the papers that `benchmarks/papers.py` tests at small scale: variants, published numbers and claims.

All variants of a table share recipe, width, epochs and learning rate; a variant states what differs.
"""

from dataclasses import dataclass, field
from typing import Any

OPTIONS = "model.options."
QUARTERS = ("top1_1_of_4", "top1_2_of_4", "top1_3_of_4")  # test accuracy after a part of the epochs
HALVES = ("top1_first_half", "top1_second_half")  # of the test images


@dataclass(frozen=True)
class Variant:
    """A row of a table: recipe changes, and the number in the paper."""

    changes: dict[str, Any] = field(default_factory=dict)
    published: float | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper as differences between variants.

    It is confirmed if every variant of `better` is ahead of every one of `worse`, beyond the interval. With `within`,
    it says instead that they differ by no more than so many points.
    """

    text: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    measure: str = "top1"
    within: float | None = None
    gains_over: tuple[str, str] | None = None  # compare the gains of `better` and `worse` over these two


@dataclass(frozen=True)
class Table:
    """A table of a paper. `choice` names the tables that share a learning rate, chosen on the first variant."""

    place: str
    base: dict[str, Any]
    variants: dict[str, Variant]
    claims: tuple[Claim, ...]
    choice: str
    lr: float = 2e-3
    extras: tuple[str, ...] = ()  # further measures, as columns
    teacher: bool = False


def options(**values: Any) -> dict[str, Any]:
    """Return network options as recipe changes."""
    return {OPTIONS + name: value for name, value in values.items()}


# Crops and flips alone: so few epochs do not overfit.
LIGHT = {
    "augment.policy": "none",
    "augment.erasing": 0.0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "model.drop_path": 0.0,
    "optim.ema_decay": None,
    "optim.weight_decay": 0.1,
    "schedule.warmup_epochs": 1,
}
DIM = 128
RESMLP = {"model.name": "resmlp_s12", **LIGHT, **options(dim=DIM)}
VIT = {"model.name": "deit_s", **LIGHT, **options(dim=DIM, heads=4)}
# DeiT as CaiT without its changes, as in thesis tables 3.11 and 3.13.
FRAME = {
    "model.name": "cait_s24",
    **LIGHT,
    **options(depth=12, dim=DIM, heads=4, talking_heads=False, class_depth=0, insert_class_at=0, residual="none"),
}
SMLPNET = {"model.name": "smlpnet_t2", **LIGHT, **options(dim=48, depths=(2, 4, 2), patch_size=2, alpha=2.0)}
STAGES = (1, 2, 3)
SGD = {
    "optim.name": "sgd",
    "optim.nesterov": True,
    "optim.lr": 0.2,
    "optim.weight_decay": 5e-4,
    "optim.clip_norm": None,
}
# As resmlp_old_fashioned: the rate drops twice, by ten.
OLD_FASHIONED = {
    "optim.name": "sgd",
    "optim.lr": 0.2,
    "optim.weight_decay": 1e-4,
    "optim.clip_norm": None,
    "objective.smoothing": 0.0,
    "schedule.warmup_epochs": 0,
    "schedule.decay": "step",
    "schedule.step_epochs": (4, 7),
}
# The teacher of the distillation table.
TEACHER = {"model.name": "timm:resnet18", **LIGHT, **SGD}
TEACHER_EPOCHS = 0.6  # of the students'

TABLES: dict[str, Table] = {}

TABLES["resmlp"] = Table(
    "ResMLP table 3, 3.4 and (arXiv) A",
    RESMLP,
    {
        "matrix": Variant({}, 76.6),
        "none": Variant(options(communication="none"), 56.5),
        "MLP": Variant(options(communication="mlp"), 77.3),
        "convolution": Variant(options(communication="conv"), 77.3),
        "depth-wise": Variant(options(communication="depthwise"), 76.3),
        "separable": Variant(options(communication="separable"), 77.0),
        "LayerNorm": Variant(options(norm="layer"), 77.7),
        "class-MLP": Variant(options(pool="class_mlp"), 77.5),
        "patches of 8": Variant(options(patch_size=8)),
        "old-fashioned": Variant(OLD_FASHIONED, 69.2),
        "ReLU": Variant(options(activation="relu")),
        "positions": Variant(options(position=True)),
        "post-norm": Variant(options(norm_place="post")),
    },
    (
        Claim("Without communication between patches, ResMLP loses about 20 points", ("matrix",), ("none",)),
        Claim("LayerNorm is more accurate than Aff", ("LayerNorm",), ("matrix",)),
        Claim("Class-MLP pooling is more accurate than the average", ("class-MLP",), ("matrix",)),
        Claim(
            "MLPs or convolutions between patches are more accurate than a matrix",
            ("MLP", "convolution", "separable"),
            ("matrix",),
        ),
        Claim("Depth-wise convolutions are no better than a matrix", ("matrix",), ("depth-wise",)),
        Claim("Smaller patches are more accurate", ("matrix",), ("patches of 8",)),
        Claim("The training of ResNets costs 7 points", ("matrix",), ("old-fashioned",)),
        Claim("Position encodings do not help", ("positions",), ("matrix",), within=1.0),
        Claim("ReLU is nearly as good as GELU", ("ReLU",), ("matrix",), within=1.0),
        Claim("Norms may also stand after the sum", ("post-norm",), ("matrix",), within=1.0),
    ),
    choice="resmlp",
    extras=("sparse_A", "sparse_B", "sparse_C"),
)

DISTILLED = {"model.name": "deit_s_distilled"}
HARD = {"objective.distillation": "hard", "objective.distillation_weight": 0.5}
TABLES["distillation"] = Table(
    "Thesis tables 3.3 and 3.4, 3.3",
    VIT,
    {
        "none": Variant({}, 79.8),
        "soft": Variant(
            {
                "objective.distillation": "soft",
                "objective.distillation_weight": 0.1,
                "objective.temperature": 3.0,
            },
            79.8,
        ),
        "hard": Variant(HARD, 80.9),
        "token": Variant({**DISTILLED, **HARD}, 81.2),
        "two class tokens": Variant({**DISTILLED, "objective.distillation": "labels"}),
    },
    (
        Claim("Hard distillation helps DeiT", ("hard",), ("none",)),
        Claim("Soft distillation with little weight does not help", ("soft",), ("none",), within=1.0),
        Claim("The distillation token is better than hard labels on the class token", ("token",), ("hard",)),
        Claim("A second class token with the same labels does not help", ("two class tokens",), ("none",), within=1.0),
        Claim("The distilled network agrees more with the convnet", ("token", "hard"), ("none",), "teacher_agreement"),
        Claim(
            "The distillation head agrees more with the convnet than the class head",
            ("token, distillation head",),
            ("token, class head",),
            "teacher_agreement",
        ),
        Claim(
            "Both heads together are better than either",
            ("token",),
            ("token, class head", "token, distillation head"),
        ),
    ),
    choice="vit",
    extras=("teacher_agreement", "cosine_first", "cosine_last"),
    teacher=True,
)

TABLES["smlpnet"] = Table(
    "sMLPNet tables 1, 3, 4 and 5",
    {**SMLPNET, **options(global_stages=STAGES)},
    {
        "sMLPNet": Variant({}, 81.3),
        "local only": Variant(options(global_stages=(), instead_of_global="nothing", dim=68), 80.7),
        "global only": Variant(options(local=False), 80.6),
        "sum": Variant(options(fusion="sum")),
        "weighted sum": Variant(options(fusion="weighted")),
        "sequential": Variant(options(sequential=True), 81.1),
        "no identity": Variant(options(identity=False), 80.9),
        "sequential, no identity": Variant(options(sequential=True, identity=False), 80.6),
        "dense": Variant(options(global_stages=(), token_mlp=(2, 3)), 77.8),
        "dense, one stage": Variant(
            options(global_stages=(), token_mlp=(1,), depths=(8,), dim=144, patch_size=4), 76.8
        ),
    },
    (
        Claim("Local and global mixing are both needed", ("sMLPNet",), ("local only", "global only")),
        Claim("Fusing by a linear layer is better than a sum or a weighted sum", ("sMLPNet",), ("sum", "weighted sum")),
        Claim("The identity branch helps", ("sMLPNet", "sequential"), ("no identity", "sequential, no identity")),
        Claim("Parallel branches are better than sequential ones", ("sMLPNet",), ("sequential",)),
        Claim("Sparse mixing is better than dense", ("sMLPNet",), ("dense",)),
        Claim("With dense mixing, several stages are better than one", ("dense",), ("dense, one stage",)),
    ),
    choice="smlpnet",
)

# Thesis table 3.11: the option of a residual weight, and published top-1 by depth.
RESIDUALS = {
    "no weight": ("none", {12: 79.9, 24: 78.9, 36: 78.9}),
    "ReZero": ("rezero", {12: 78.3, 24: 80.8, 36: 81.6}),
    "T-Fixup": ("tfixup", {12: 79.4, 24: 81.5, 36: 82.1}),
    "Fixup": ("fixup", {12: 80.7, 24: 82.3, 36: 82.4}),
    "scalar": ("scalar", {12: 80.4, 24: 81.1, 36: 81.6}),
    "LayerScale": ("layerscale", {12: 80.5, 24: 82.4, 36: 82.9}),
}
SCALE_INIT = {12: 0.1, 24: 1e-5, 36: 1e-6}  # ε by depth, thesis 3.5.2


def depth_table(base: dict[str, Any], depths: tuple[int, ...], choice: str) -> Table:
    """Return tables 3.11 and 3.13 at these depths."""
    variants = {
        "12, class token at 8": Variant(options(insert_class_at=8), 80.0),
        "12, class token at 10": Variant(options(insert_class_at=10), 80.5),
        "10 + 2 class attention": Variant(options(depth=10, class_depth=2, insert_class_at=None), 80.3),
        "12 + 2 class attention": Variant(options(class_depth=2, insert_class_at=None), 80.8),
    }
    for depth in depths:
        for name, (residual, published) in RESIDUALS.items():
            changes = options(depth=depth, residual=residual)
            if name in ("scalar", "LayerScale"):
                changes |= options(scale_init=SCALE_INIT[depth])
            variants[f"{depth}, {name}"] = Variant(changes, published[depth])
    deepest = depths[-1]
    claims = [
        Claim(
            f"At depth {depth}, LayerScale is better than {'ReZero, T-Fixup and a scalar' if others else 'no weight'}",
            (f"{depth}, LayerScale",),
            tuple(f"{depth}, {name}" for name in others or ("no weight",)),
        )
        for depth in depths
        for others in ((), ("ReZero", "T-Fixup", "scalar"))
    ]
    claims += [
        Claim(
            f"With LayerScale, {deepest} layers are better than 12",
            (f"{deepest}, LayerScale",),
            ("12, LayerScale",),
        ),
        Claim("A class token inserted late is better", ("12, class token at 10",), ("12, no weight",)),
        Claim("Class attention is better than a class token", ("12 + 2 class attention",), ("12, no weight",)),
    ]
    first = "12, no weight"  # the learning rate is chosen on it
    return Table(
        "Thesis tables 3.11 and 3.13", base, {first: variants.pop(first), **variants}, tuple(claims), choice=choice
    )


TABLES["depth"] = depth_table(FRAME, (12, 24, 36), "vit")
# For one CPU core: 16 patches and a width of 48.
TABLES["depth_small"] = depth_table(
    {**FRAME, **options(dim=48, heads=3, patch_size=8), "optim.batch_size": 64}, (12, 24), "depth_small"
)

FULL = {
    "model.name": "deit_s",
    **options(dim=DIM, heads=4),
    "model.drop_path": 0.0,
    "optim.ema_decay": None,
    "optim.weight_decay": 0.1,
    "schedule.warmup_epochs": 1,
}
TABLES["ingredients"] = Table(
    "Thesis tables 3.8, 6.3 and 6.4",
    FULL,
    {
        "DeiT": Variant({}, 81.8),
        "SGD": Variant(SGD, 74.5),
        "no RandAugment": Variant({"augment.policy": "none"}, 79.6),
        "no Mixup, no CutMix": Variant({"augment.mixup": 0.0, "augment.cutmix": 0.0}, 75.8),
        "no erasing": Variant({"augment.erasing": 0.0}),
        "3-Augment": Variant({"augment.policy": "three_augment", "augment.color_jitter": 0.3}),
        "binary cross-entropy": Variant({"objective.loss": "bce", "objective.smoothing": 0.0}),
        "LayerScale": Variant(options(layer_scale=True)),
        "DeiT III, AdamW": Variant(
            {
                "augment.policy": "three_augment",
                "augment.color_jitter": 0.3,
                "augment.erasing": 0.0,
                "objective.loss": "bce",
                "objective.smoothing": 0.0,
                **options(layer_scale=True),
            }
        ),
    },
    (
        Claim("AdamW is much better than SGD", ("DeiT",), ("SGD",)),
        Claim("RandAugment is needed", ("DeiT",), ("no RandAugment",)),
        Claim("Mixup and CutMix are needed", ("DeiT",), ("no Mixup, no CutMix",)),
        Claim("3-Augment is better for ViTs than RandAugment", ("3-Augment",), ("DeiT",)),
        Claim("Binary cross-entropy is at least as good as cross-entropy", ("binary cross-entropy",), ("DeiT",)),
        Claim("LayerScale helps", ("LayerScale",), ("DeiT",)),
        Claim("DeiT III is better than DeiT", ("DeiT III, AdamW",), ("DeiT",)),
    ),
    choice="vit",
)


def data_networks(dim: int, depth: int, patch_size: int, resnet: str) -> dict[str, dict[str, Any]]:
    """Return a ViT and a Mixer of one size, and a ResNet."""
    size = options(dim=dim, depth=depth, patch_size=patch_size)
    return {
        "ViT": {"model.name": "deit_s", **size, **options(heads=4)},
        "Mixer": {"model.name": "mixer_s16", **size, **options(token_dim=dim // 2, channel_dim=4 * dim)},
        "ResNet": {"model.name": resnet},
    }


def data_table(
    base: dict[str, Any], networks: dict[str, dict[str, Any]], shares: tuple[float, ...], choice: str
) -> Table:
    """Return figure 2, right, at equal steps: a tenth of the images has ten times the epochs, those of warm-up too."""
    variants = {
        f"{name}, {share:.0%}": Variant(changes | {"train_share": share, "schedule.warmup_epochs": round(1 / share)})
        for name, changes in networks.items()
        for share in shares
    }
    least = f"{shares[-1]:.0%}"
    claims = [
        Claim(
            f"Mixer gains more from data than {other}",
            ("Mixer, 100%",),
            (f"{other}, 100%",),
            gains_over=(f"Mixer, {least}", f"{other}, {least}"),
        )
        for other in ("ViT", "ResNet")
    ]
    claims += [
        Claim("Trained on a small dataset alone, Mixer is behind ViT", ("ViT, 100%",), ("Mixer, 100%",)),
        Claim("With little data, ResNet is ahead of Mixer", (f"ResNet, {least}",), (f"Mixer, {least}",)),
    ]
    return Table("Mixer figure 2, right", base, variants, tuple(claims), choice=choice)


TABLES["data"] = data_table(LIGHT, data_networks(DIM, 12, 4, "timm:resnet18"), (1.0, 0.3, 0.1, 0.03), "data")
# For one CPU core; timm's test_resnet has 0.4 M parameters.
TABLES["data_small"] = data_table(
    {**LIGHT, "optim.batch_size": 64}, data_networks(64, 4, 8, "timm:test_resnet"), (1.0, 0.1), "data_small"
)


def patchconvnet_table(base: dict[str, Any], choice: str) -> Table:
    """Return the rows of tables 5.7 and 5.8 that fit images of 32 pixels."""
    return Table(
        "Thesis tables 5.7 and 5.8",
        {"model.name": "patchconvnet_s20", **LIGHT, **options(stem="linear", scale_init=0.1), **base},
        {
            "PatchConvNet": Variant({}, 82.1),
            "average": Variant(options(pool="average"), 81.9),
            "4 heads": Variant(options(pool_heads=4), 81.9),
            "a token per class": Variant(options(class_tokens="per_class"), 81.1),
            "BatchNorm": Variant(options(norm="batch"), 82.4),
        },
        (
            Claim("Attention pooling is a little better than the average", ("PatchConvNet",), ("average",)),
            Claim("One head of the pooling is as good as several", ("PatchConvNet",), ("4 heads",), within=1.0),
            Claim("One class token is better than one per class", ("PatchConvNet",), ("a token per class",)),
            Claim("BatchNorm is a little better than LayerNorm", ("BatchNorm",), ("PatchConvNet",)),
        ),
        choice=choice,
    )


TABLES["patchconvnet"] = patchconvnet_table(options(dim=DIM, depth=12, patch_size=4), "patchconvnet")
# For one CPU core.
TABLES["patchconvnet_small"] = patchconvnet_table(
    {**options(dim=64, depth=4, patch_size=8), "optim.batch_size": 64}, "patchconvnet_small"
)

# One small network on a tenth of the images with many seeds: --seeds 50 --epochs 1, which is 10 epochs of them.
# benchmarks/paper_seeds.py has its statistics.
TABLES["seeds"] = Table(
    "Thesis figures 6.7 to 6.10",
    {
        "model.name": "resmlp_s12",
        **LIGHT,
        **options(dim=48, depth=3, patch_size=8),
        "optim.batch_size": 64,
        "train_share": 0.1,
    },
    {"small ResMLP": Variant()},
    (),
    choice="seeds",
    extras=(*QUARTERS, *HALVES),
)
