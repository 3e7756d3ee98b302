"""Create networks by name. A new family is a file next to this one and a row of `_FAMILIES`.

docs/internals/tour.md has all steps. The names and costs of all networks are also in `catalog`, as constants that do
not need torch.
"""

import dataclasses
import fnmatch
import typing
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from patchloom.models.network import FeatureMaps, Network, Size
from patchloom.plugins import MODULE
from patchloom_runtime.errors import PatchloomError, UsageError, nearest

# The table of published weights is imported where it is used: predicting loads few modules.
if TYPE_CHECKING:
    from patchloom.models.pretrained.table import Weights

# Prefix of the names of a family → its module and class, in the order of `list_models`.
_FAMILIES = {
    "resmlp": ("resmlp", "ResMLP"),
    "mixer": ("mixer", "Mixer"),
    "smlpnet": ("smlpnet", "SMLPNet"),
    "deit": ("vit", "ViT"),
    "deit3": ("vit", "ViT"),
    "cait": ("cait", "CaiT"),
    "patchconvnet": ("patchconvnet", "PatchConvNet"),
    "resnet50": ("pooled_convnet", "PooledConvNet"),
}


@cache
def _family(prefix: str) -> tuple[type[Network], dict[str, Any]]:
    """Return the class and the variants of a family, whose module is imported on first use."""
    module_name, class_name = _FAMILIES[prefix]
    module = import_module(f"patchloom.models.{module_name}")
    return getattr(module, class_name), module.VARIANTS


def _families() -> dict[type[Network], dict[str, Any]]:
    return dict(map(_family, _FAMILIES))


@overload
def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: Size | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    features_only: Literal[False] = False,
    **options: Any,
) -> Network: ...


@overload
def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: Size | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    features_only: Literal[True],
    **options: Any,
) -> FeatureMaps: ...


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: Size | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    features_only: bool = False,
    **options: Any,
) -> Network | FeatureMaps:
    """Create a network by name, with random or published weights.

    Args:
        name: Name of a network, such as "resmlp_s12". "resmlp_s12:in1k" also selects weights.
        num_classes: Default: as published, or 1,000 without weights. Another number gets a new classifier.
        image_size: Default: as published, or 224 pixels without weights. Weights are resampled to another size.
        weights: Tag of published weights, such as "in1k" (`patchloom models NAME` lists them). They are downloaded on
            first use.
        pretrained: Use the first published weights of the network.
        features_only: Return a module that maps images to the feature maps of `Network.pyramid`, finest first.
        options: Options of the family.

    Raises UsageError with the nearest match for an unknown name or option.
    """
    if features_only:
        num_classes = 0
    if row := _published_weights(name, weights, pretrained=pretrained):
        network = _with_weights(row, num_classes, image_size, options)
    else:
        sizes: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size}
        network = build_model(name, **{key: value for key, value in sizes.items() if value is not None}, **options)
    return FeatureMaps(network) if features_only else network


def _published_weights(name: str, tag: str | None, *, pretrained: bool) -> "Weights | None":
    """Return the weights that `name:tag`, a name with a tag or `pretrained` select, or None for random weights."""
    if tag is None and ":" not in name and not pretrained:
        return None
    from patchloom.models.pretrained.table import is_published_name, published, weights_named

    if tag is not None:
        return weights_named(f"{name}:{tag}")
    if is_published_name(name):
        return weights_named(name)
    if not pretrained:
        return None
    family_of(name)  # raises UsageError for an unknown name
    known = published(name)
    if not known:
        raise UsageError(f"{name} has no published weights; drop pretrained")
    return known[0]


def _with_weights(
    weights: "Weights", num_classes: int | None, image_size: Size | None, options: dict[str, Any]
) -> Network:
    from patchloom.models.pretrained.downloads import fetch_weights
    from patchloom.models.pretrained.published import load_published

    requested = {"num_classes": num_classes, "image_size": image_size}
    values: dict[str, Any] = {"num_classes": weights.classes, "image_size": weights.image_size, **weights.options}
    values |= {key: value for key, value in requested.items() if value is not None}
    network = build_model(weights.variant, **values | options)
    return load_published(network, fetch_weights(weights), new_head=True, adapt_resolution=True)


def build_model(name: str, *, num_classes: int = 1000, image_size: Size = 224, **options: Any) -> Network:
    """Create a network with random weights. Safe for untrusted names and options: nothing is ever downloaded."""
    values = {"num_classes": num_classes, "image_size": image_size, **options}
    family = family_of(name)
    variant = _variant(name)
    _check_options(name, family, values)
    try:
        return family(family.Config(name=name, **(variant | values)))
    except PatchloomError:
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as error:  # unforeseen values
        listed = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise UsageError(f"{name} cannot be built with {listed[:300]}: {' '.join(str(error).split())[:200]}") from error


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all networks that match a shell pattern, in the order of the papers."""
    names = [name for variants in _families().values() for name in variants]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def family_of(name: str) -> type[Network]:
    """Return the class of a network. Raise UsageError for an unknown name."""
    prefix = name.split("_")[0]
    if name.startswith(MODULE):
        from patchloom.models.own_module import OwnModule

        return OwnModule
    if prefix in _FAMILIES and name in _family(prefix)[1]:
        return _family(prefix)[0]
    from patchloom.models.pretrained.table import unknown_network

    raise unknown_network(name)


def _variant(name: str) -> dict[str, Any]:
    """Return the published options of a network; a user's module has none."""
    return {} if name.startswith(MODULE) else dict(_family(name.split("_")[0])[1][name])


def options_of(family: type[Network]) -> list[str]:
    """Return the option names of a family, shared ones first."""
    return [field.name for field in dataclasses.fields(family.Config) if field.name != "name"]


def default_options(name: str) -> dict[str, Any]:
    """Return all options of a network with their published values."""
    family = family_of(name)
    return dataclasses.asdict(family.Config(name=name, **_variant(name)))


def choices_of(name: str) -> dict[str, str]:
    """Return the options of a network that have a fixed set of choices, with these choices."""
    hints = typing.get_type_hints(family_of(name).Config)
    return {
        key: ", ".join(typing.get_args(hint))
        for key, hint in hints.items()
        if typing.get_origin(hint) is typing.Literal
    }


def _check_options(name: str, family: type[Network], options: dict[str, Any]) -> None:
    known = options_of(family)
    for option in options:
        if option not in known:
            elsewhere = [other.__name__ for other in _families() if option in options_of(other)]
            hint = f" It is an option of {', '.join(elsewhere)}." if elsewhere else nearest(option, known)
            raise UsageError(f"{name} has no option {option!r}.{hint} Its options: {', '.join(known)}")
