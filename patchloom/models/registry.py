"""Names of published networks → networks."""

import dataclasses
import fnmatch
import typing
from functools import cache
from importlib import import_module
from typing import Any

from patchloom.models.network import Network, Size
from patchloom_runtime.errors import PatchloomError, UsageError, nearest

# How the names of a family begin → its module and its class; the order is that of `list_models`.
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
def _family(beginning: str) -> tuple[type[Network], dict[str, Any]]:
    """The class of a family and its variants; its module is imported when it is first asked for."""
    module, name = _FAMILIES[beginning]
    found = import_module(f"patchloom.models.{module}")
    return getattr(found, name), found.VARIANTS


def _families() -> dict[type[Network], dict[str, Any]]:
    return dict(map(_family, _FAMILIES))


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: Size | None = None,
    weights: str | None = None,
    **options: Any,
) -> Network:
    """A network by its published name, with random weights, or with published ones: `weights="in1k"` or NAME:in1k.

    Published weights (`patchloom models NAME` lists them) are fetched where they are not here yet. With another number
    of classes the classifier is new, at another image size they are resampled; by default it is as published, without
    weights for 1,000 classes and 224 pixels. `options` are the family's; an unknown name or option is an error that
    names the nearest ones.
    """
    if weights is None and ":" in name:
        from patchloom.models.pretrained.table import is_published_name

        if is_published_name(name):
            name, _, weights = name.partition(":")
    if weights is not None:
        return _with_weights(name, weights, num_classes, image_size, options)
    given: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size}
    return build_model(name, **{key: value for key, value in given.items() if value is not None}, **options)


def _with_weights(
    name: str, tag: str, num_classes: int | None, image_size: Size | None, options: dict[str, Any]
) -> Network:
    from patchloom.models.pretrained.downloads import fetch_weights
    from patchloom.models.pretrained.published import load_published
    from patchloom.models.pretrained.table import weights_named

    found = weights_named(f"{name}:{tag}")
    asked = {"num_classes": num_classes, "image_size": image_size}
    given: dict[str, Any] = {"num_classes": found.classes, "image_size": found.image_size, **found.options}
    given |= {key: value for key, value in asked.items() if value is not None}
    network = build_model(name, **given | options)
    return load_published(network, fetch_weights(found), new_head=True, adapt_resolution=True)


def build_model(name: str, *, num_classes: int = 1000, image_size: Size = 224, **options: Any) -> Network:
    """The same with random weights, where a file says name and options: nothing is fetched, whatever stands there."""
    given = {"num_classes": num_classes, "image_size": image_size, **options}
    family = family_of(name)
    variant = _variant(name)
    _check_options(name, family, given)
    try:
        return family(family.Config(name=name, **(variant | given)))
    except PatchloomError:
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as error:  # values nobody foresaw
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise UsageError(f"{name} cannot be built with {shown[:300]}: {' '.join(str(error).split())[:200]}") from error


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern, in the order of the papers."""
    names = [name for variants in _families().values() for name in variants]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def family_of(name: str) -> type[Network]:
    """The class of the network called `name`."""
    beginning = name.split("_")[0]
    if beginning in _FAMILIES and name in _family(beginning)[1]:
        return _family(beginning)[0]
    from patchloom.models.pretrained.table import unknown_network

    raise unknown_network(name)


def _variant(name: str) -> dict[str, Any]:
    """The options a network that is known is published with."""
    return dict(_family(name.split("_")[0])[1][name])


def options_of(family: type[Network]) -> list[str]:
    """Option names of a family, the shared ones first."""
    return [field.name for field in dataclasses.fields(family.Config) if field.name != "name"]


def default_options(name: str) -> dict[str, Any]:
    """Every option of the network called `name` with the value it is published with."""
    family = family_of(name)
    return dataclasses.asdict(family.Config(name=name, **_variant(name)))


def choices_of(name: str) -> dict[str, str]:
    """The options of the network called `name` that are one of a few words → those words."""
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
