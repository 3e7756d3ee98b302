"""The published weights by name, `NETWORK:TAG`: location, training data, preprocessing and accuracy.

This module does not import torch. A tag consists of, in this order: the publisher if not the authors (`miil`), the
training data (`in1k`, `in21k`; `in21k_ft_in1k` fine-tuned; `dino` ImageNet-1k without labels), a variation (`dist`
distilled into one head, `sam` the optimizer, `multi` one class token per class, `p8` patches of 8 pixels), and the
image size if it is not 224.
Sources: the READMEs of facebookresearch/deit and microsoft/SPACH, the folders of gs://mixer_models, timm's
`pretrained_cfg` (`tests/models/test_weights_table.py` compares every row that timm has), and the papers. If timm's crop
differs from the authors', this is the authors', with which their top-1 was measured. Unknown values are empty.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from patchloom.models.catalog import CATALOG, IMAGE_SIZE
from patchloom_runtime.errors import UsageError, nearest

_DEIT = "https://dl.fbaipublicfiles.com/deit/"
_DINO = "https://dl.fbaipublicfiles.com/dino/"
_MIXER = "https://storage.googleapis.com/mixer_models/"
_SPACH = "https://github.com/microsoft/SPACH/releases/download/v1.0/"
_IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_HALVES: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_AS_IT_IS: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
IN1K, IN21K = "ImageNet-1k", "ImageNet-21k"
TUNED = f"{IN21K}, fine-tuned on {IN1K}"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One set of published weights. `hub` and `url` have the same numbers, in timm's and in the authors' layout."""

    variant: str
    tag: str
    hub: str = ""  # repository of the Hugging Face hub with a model.safetensors
    url: str = ""
    trained_on: str = IN1K
    classes: int = 1000  # 0: a network without classifier
    image_size: int = IMAGE_SIZE
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float
    interpolation: str = "bicubic"
    top1: float | None = None  # on ImageNet-1k val, as published
    knn: float | None = None  # k-NN top-1, for a network without classifier
    licence: str = "Apache-2.0"  # "": not stated
    counted: int = 0  # parameters, if the number differs from the catalog's
    options: dict[str, Any] = field(default_factory=dict)  # that differ from those of the variant

    @property
    def name(self) -> str:
        """Name for users, such as resmlp_s12:in1k."""
        return f"{self.variant}:{self.tag}"

    @property
    def parameters(self) -> int:
        """Parameters of the network with these weights."""
        return self.counted or CATALOG[self.variant].parameters

    @property
    def size(self) -> str:
        """Approximate file size: four bytes per parameter."""
        megabytes = 4 * self.parameters / 1e6
        return f"{megabytes / 1e3:.1f} GB" if megabytes >= 1e3 else f"{megabytes:.0f} MB"

    @property
    def digits(self) -> str:
        """First digits of the SHA-256 of the file at `url`, from its name as in torch.hub, or ''."""
        match = re.search(r"-([0-9a-f]{8,})\.[a-z]+$", self.url)
        return match[1] if match else ""

    @property
    def score(self) -> str:
        """Published accuracy as text."""
        if self.knn is not None:
            return f"{self.knn:.1f} (k-NN)"
        return "" if self.top1 is None else f"{self.top1:.1f}"


def _resmlp(variant: str, timm: str, file: str, plain: float | None, distilled: float) -> list[Weights]:
    shared: dict[str, Any] = {"variant": variant, "crop_ratio": 0.9, **_IMAGENET}
    hub = f"timm/resmlp_{timm}_224.fb_"
    return [
        Weights(tag="in1k", hub=f"{hub}in1k", url=f"{_DEIT}{file}_no_dist.pth", top1=plain, **shared),
        Weights(tag="in1k_dist", hub=f"{hub}distilled_in1k", url=f"{_DEIT}{file}_dist.pth", top1=distilled, **shared),
    ]


def _resmlp_dino(variant: str, timm: str, knn: float, counted: int) -> Weights:
    shared: dict[str, Any] = {"crop_ratio": 0.9, "classes": 0, "knn": knn, "counted": counted, **_IMAGENET}
    hub, url = f"timm/resmlp_{timm}_224.fb_dino", f"{_DEIT}resmlp_{timm}_dino.pth"
    return Weights(variant=variant, tag="dino", hub=hub, url=url, **shared)


def _mixer(variant: str, letter: str, top1: float, counted: int) -> list[Weights]:
    """Return Google's two. timm names the first goog_in21k_ft_in1k, but its folder and accuracy say ImageNet-1k."""
    shared: dict[str, Any] = {"variant": variant, "crop_ratio": 0.875, **_HALVES}
    hub, file = f"timm/mixer_{letter.lower()}16_224.goog_in21k", f"Mixer-{letter}_16.npz"
    pretrained: dict[str, Any] = {"trained_on": IN21K, "classes": 21843, "counted": counted}
    return [
        Weights(tag="in1k", hub=f"{hub}_ft_in1k", url=f"{_MIXER}imagenet1k/{file}", top1=top1, **shared),
        Weights(tag="in21k", hub=hub, url=f"{_MIXER}imagenet21k/{file}", **pretrained, **shared),
    ]


def _mixer_sam(variant: str, file: str) -> Weights:
    return Weights(variant=variant, tag="in1k_sam", url=f"{_MIXER}sam/{file}.npz", crop_ratio=0.875, **_HALVES)


def _mixer_miil(tag: str, **more: Any) -> Weights:
    """Return Alibaba's weights, trained with timm's network, which has the exact GELU."""
    hub, options = f"timm/mixer_b16_224.{tag}", {"gelu": "exact"}
    return Weights(variant="mixer_b16", tag=tag, hub=hub, crop_ratio=0.875, options=options, **_AS_IT_IS, **more)


def _smlpnet(variant: str, file: str, top1: float) -> Weights:
    shared: dict[str, Any] = {"crop_ratio": 0.875, **_IMAGENET}
    return Weights(variant=variant, tag="in1k", url=f"{_SPACH}{file}.pth", top1=top1, licence="", **shared)


def _deit(variant: str, timm: str, digits: str, top1: float, size: int = 224, counted: int = 0) -> Weights:
    file = f"deit_{timm}_patch16_{size}"
    return Weights(
        variant=variant,
        tag="in1k" if size == IMAGE_SIZE else f"in1k_{size}",
        hub=f"timm/{file}.fb_in1k",
        url=f"{_DEIT}{file}-{digits}.pth",
        image_size=size,
        crop_ratio=0.875,
        top1=top1,
        counted=counted,
        **_IMAGENET,
    )


def _dino(variant: str, letters: str, patch: int, knn: float | None, counted: int) -> Weights:
    """Return the weights of DINO's vision transformers: DeiT's without a classifier."""
    timm = {"deitsmall": "small", "vitbase": "base"}[letters]
    return Weights(
        variant=variant,
        tag="dino" if patch == 16 else f"dino_p{patch}",
        hub=f"timm/vit_{timm}_patch{patch}_224.dino",
        url=f"{_DINO}dino_{letters}{patch}_pretrain/dino_{letters}{patch}_pretrain.pth",
        classes=0,
        crop_ratio=0.875,
        knn=knn,
        counted=counted,
        options={} if patch == 16 else {"patch_size": patch},
        **_IMAGENET,
    )


def _deit3(variant: str, letters: str, scores: tuple[float, float], size: int = 224, counted: int = 0) -> list[Weights]:
    patch = 14 if letters == "huge" else 16
    shared: dict[str, Any] = {
        "variant": variant,
        "image_size": size,
        "crop_ratio": 1.0,
        "counted": counted,
        **_IMAGENET,
    }
    hub, url = f"timm/deit3_{letters}_patch{patch}_{size}.fb_", f"{_DEIT}deit_3_{letters}_{size}_"
    at = "" if size == IMAGE_SIZE else f"_{size}"
    tuned = f"{url}21k_v1.pth" if letters == "huge" else f"{url}21k.pth"
    return [
        Weights(tag=f"in1k{at}", hub=f"{hub}in1k", url=f"{url}1k.pth", top1=scores[0], **shared),
        Weights(
            tag=f"in21k_ft_in1k{at}", hub=f"{hub}in22k_ft_in1k", url=tuned, trained_on=TUNED, top1=scores[1], **shared
        ),
    ]


def _cait(variant: str, size: int, top1: float, counted: int = 0) -> Weights:
    return Weights(
        variant=variant,
        tag="in1k_dist" if size == IMAGE_SIZE else f"in1k_dist_{size}",
        hub=f"timm/{variant}_{size}.fb_dist_in1k",
        url=f"{_DEIT}{variant.removeprefix('cait_').upper()}_{size}.pth",
        image_size=size,
        crop_ratio=1.0,
        top1=top1,
        counted=counted,
        **_IMAGENET,
    )


def _patchconvnet(variant: str, file: str, top1: float, size: int = 224, **more: Any) -> Weights:
    tag = more.pop("tag", "in1k" if file.endswith("1k") and not file.endswith("21k") else "in21k_ft_in1k")
    trained_on = TUNED if tag.startswith("in21k") else IN1K
    at = "" if size == IMAGE_SIZE else f"_{size}"
    shared: dict[str, Any] = {"crop_ratio": 1.0, "image_size": size, "trained_on": trained_on, **_IMAGENET}
    return Weights(variant=variant, tag=f"{tag}{at}", url=f"{_DEIT}{file}.pth", top1=top1, **shared, **more)


_PER_CLASS: dict[str, Any] = {"options": {"class_tokens": "per_class"}, "counted": 25_614_712}

# In the order of the catalog.
WEIGHTS: tuple[Weights, ...] = (
    *_resmlp("resmlp_s12", "12", "resmlp_12", 76.6, 77.8),
    _resmlp_dino("resmlp_s12", "12", 62.6, 14_965_872),
    *_resmlp("resmlp_s24", "24", "resmlp_24", 79.4, 80.8),
    _resmlp_dino("resmlp_s24", "24", 69.4, 29_635_680),
    *_resmlp("resmlp_s36", "36", "resmlp_36", None, 81.1),
    *_resmlp("resmlp_b24_8", "big_24", "resmlpB_24", 81.0, 83.6),
    Weights(
        variant="resmlp_b24_8",
        tag="in21k_ft_in1k",
        hub="timm/resmlp_big_24_224.fb_in22k_ft_in1k",
        url=f"{_DEIT}resmlpB_24_22k.pth",
        trained_on=TUNED,
        crop_ratio=0.9,
        top1=84.4,
        **_IMAGENET,
    ),
    _mixer_sam("mixer_b32", "Mixer-B_32"),
    *_mixer("mixer_b16", "B", 76.44, 75_908_739),
    _mixer_sam("mixer_b16", "Mixer-B_16"),
    _mixer_miil("miil_in21k", trained_on=IN21K, classes=11221, counted=67_740_421),
    _mixer_miil("miil_in21k_ft_in1k", trained_on=TUNED),
    *_mixer("mixer_l16", "L", 71.76, 229_560_243),
    _smlpnet("smlpnet_s", "smlp_s", 83.1),
    _smlpnet("smlpnet_b", "smlp_b", 83.4),
    _deit("deit_ti", "tiny", "a1311bcf", 72.2),
    _deit("deit_s", "small", "cd65a155", 79.9),
    _dino("deit_s", "deitsmall", 16, 74.5, 21_665_664),
    _dino("deit_s", "deitsmall", 8, 78.3, 21_670_272),
    _deit("deit_b", "base", "b5f2ef4d", 81.8),
    _deit("deit_b", "base", "8de9b5d1", 82.9, 384, 86_859_496),
    _dino("deit_b", "vitbase", 16, 76.1, 85_798_656),
    _dino("deit_b", "vitbase", 8, None, 85_807_872),
    _deit("deit_ti_distilled", "tiny_distilled", "b40b3cf7", 74.5),
    _deit("deit_s_distilled", "small_distilled", "649709d9", 81.2),
    _deit("deit_b_distilled", "base_distilled", "df68dfff", 83.4),
    _deit("deit_b_distilled", "base_distilled", "d0272ac0", 85.2, 384, 87_630_032),
    *_deit3("deit3_s", "small", (81.4, 83.1)),
    *_deit3("deit3_s", "small", (83.4, 84.8), 384, 22_205_416),
    *_deit3("deit3_m", "medium", (83.0, 84.5)),
    *_deit3("deit3_b", "base", (83.8, 85.7)),
    *_deit3("deit3_b", "base", (85.0, 86.7), 384, 86_877_160),
    *_deit3("deit3_l", "large", (84.9, 87.0)),
    *_deit3("deit3_l", "large", (85.8, 87.7), 384, 304_763_880),
    *_deit3("deit3_h", "huge", (85.2, 87.2)),
    _cait("cait_xxs24", 224, 78.4),
    _cait("cait_xxs24", 384, 80.9, 12_029_224),
    _cait("cait_xxs36", 224, 79.7),
    _cait("cait_xxs36", 384, 82.2, 17_372_680),
    _cait("cait_xs24", 384, 84.1, 26_670_088),
    _cait("cait_s24", 224, 83.5),
    _cait("cait_s24", 384, 85.1, 47_062_120),
    _cait("cait_s36", 384, 85.4, 68_366_632),
    _cait("cait_m36", 384, 86.1, 271_221_352),
    _cait("cait_m48", 448, 86.5, 356_460_520),
    _patchconvnet("patchconvnet_s60", "s60_224_1k", 82.1),
    _patchconvnet("patchconvnet_s60", "s60_224_21k", 83.5),
    _patchconvnet("patchconvnet_s60", "s60_384_21k", 84.9, 384),
    _patchconvnet("patchconvnet_s60", "s60_512_21k", 85.4, 512),
    _patchconvnet("patchconvnet_s60", "s60_multi_scratch_1k", 81.1, tag="in1k_multi", **_PER_CLASS),
    _patchconvnet("patchconvnet_s60", "s60_multi_finetune_1k", 82.0, tag="in1k_multi_ft", **_PER_CLASS),
    _patchconvnet("patchconvnet_s120", "s120_224_1k", 83.2),
    _patchconvnet("patchconvnet_b60", "b60_224_1k", 83.5),
    _patchconvnet("patchconvnet_b60", "b60_224_21k", 85.4),
    _patchconvnet("patchconvnet_b60", "b60_384_21k", 86.5, 384),
    _patchconvnet("patchconvnet_b120", "b120_224_1k", 84.1),
    _patchconvnet("patchconvnet_b120", "b120_224_21k", 86.0),
    _patchconvnet("patchconvnet_b120", "b120_384_21k", 86.9, 384),
)


def published(variant: str) -> list[Weights]:
    """Return the published weights of a network, the most basic first."""
    return [weights for weights in WEIGHTS if weights.variant == variant]


def is_published_name(source: str) -> bool:
    """Return whether `source` is NETWORK:TAG of a known network."""
    variant, colon, _ = source.partition(":")
    return bool(colon) and variant in CATALOG


def is_tag(text: str) -> bool:
    """Return whether `text` is the tag of some weights, such as in1k."""
    return any(weights.tag == text for weights in WEIGHTS)


def weights_named(name: str) -> Weights:
    """Return the weights NETWORK:TAG. Raise UsageError with the available ones if there are none."""
    variant, _, tag = name.partition(":")
    if variant not in CATALOG:
        raise unknown_network(variant)
    known = {weights.tag: weights for weights in published(variant)}
    if not known:
        others = sorted({w.variant for w in WEIGHTS if w.variant.split("_")[0] == variant.split("_")[0]})
        raise UsageError(
            f"there are no published weights of {variant}; networks of its family that have some: "
            f"{', '.join(others) or 'none'}"
        )
    if tag not in known:
        problem = f"{variant} has no published weights {tag!r}." if tag else f"which weights of {variant}?"
        raise UsageError(f"{problem} There are {', '.join(w.name for w in known.values())}")
    return known[tag]


def unknown_network(name: str) -> UsageError:
    """Return the error for an unknown network name."""
    return UsageError(
        f"there is no network {name!r}.{nearest(name, list(CATALOG))} `patchloom models` lists all of them; "
        "`patchloom train --model timm:NAME` trains timm's networks"
    )
