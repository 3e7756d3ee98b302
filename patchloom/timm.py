"""Register patchloom's networks with timm: `import patchloom.timm`, then `timm.create_model("resmlp_s12")`.

The networks have timm's methods (forward_features, forward_head, reset_classifier, num_features), so timm's scripts can
train and evaluate them. `img_size`, `in_chans` and `drop_path_rate` mean what they mean in timm.
"""

from pathlib import Path
from typing import Any

import timm
from timm.models import register_model

from patchloom.models.network import Network
from patchloom.models.pretrained.downloads import in_cache
from patchloom.models.pretrained.published import load_published
from patchloom.models.pretrained.table import Weights, published
from patchloom.models.registry import build_model, family_of, list_models
from patchloom_runtime.errors import UsageError

_OPTION_NAMES = {"img_size": "image_size", "in_chans": "channels", "drop_path_rate": "drop_path"}


class _TimmConfig:
    """The settings of a network that timm's scripts read."""

    pretrained_cfg: dict[str, Any]

    @property
    def default_cfg(self) -> dict[str, Any]:
        """The settings that timm.data.resolve_data_config reads."""
        return self.pretrained_cfg


def _in_cache(name: str) -> tuple[Weights, Path]:
    """Return the first published weights of a network that are in the cache, and their file."""
    known = published(name)
    if not known:
        raise UsageError(f"{name} has no published weights; pass pretrained=False")
    for weights in known:
        if (file := in_cache(weights)) is not None:
            return weights, file
    names = ", ".join(weights.name for weights in known)
    raise UsageError(
        f"the published weights of {name} are not in the cache ({names}); "
        f"fetch them with patchloom.load({known[0].name!r}), {known[0].size}"
    )


def _register(name: str) -> None:
    def entry(pretrained: bool = False, **options: Any) -> Network:
        weights = _in_cache(name) if pretrained else None
        for unused in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(unused, None)
        options = {_OPTION_NAMES.get(key, key): value for key, value in options.items() if value is not None}
        if weights:
            row, file = weights
            options = {"image_size": row.image_size, "num_classes": row.classes, **row.options, **options}
        network = build_model(name, **options)
        if weights:
            load_published(network, file, new_head=True, adapt_resolution=True)
        network.__class__ = _with_timm_config(type(network))
        network.pretrained_cfg = {  # type: ignore[assignment]
            "input_size": (network.config.channels, *network.config.image_size),
            "mean": network.pixel_mean,
            "std": network.pixel_std,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "num_classes": network.config.num_classes,
            "classifier": "classifier",
        }
        return network

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = __name__
    entry.__doc__ = f"Create {name} of patchloom's {family_of(name).__name__} family."
    register_model(entry)


_CLASSES: dict[type[Network], type[Network]] = {}


def _with_timm_config(family: type[Network]) -> type[Network]:
    if family not in _CLASSES:
        _CLASSES[family] = type(family.__name__, (_TimmConfig, family), {"__module__": family.__module__})
    return _CLASSES[family]


for _name in list_models():
    if not timm.is_model(_name):
        _register(_name)
