"""Load published weights with the names of the authors, timm or Flax into patchloom's networks.

A checkpoint must fit exactly: unknown and missing keys and other shapes raise an error that lists them, and the network
is not changed. Another number of classes or another resolution is handled on request.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.layers.patches import LearnedTokens
from patchloom.layers.resample import Resampled
from patchloom.models.network import Network
from patchloom.models.pretrained.names import TELLTALE, State, renamed
from patchloom.models.pretrained.weights_file import read_weights_file
from patchloom_runtime.errors import CheckpointError, UsageError


def load_published(
    model: Network,
    state_dict_or_path: Mapping[str, Any] | str | os.PathLike[str],
    *,
    new_head: bool = False,
    adapt_resolution: bool = False,
) -> Network:
    """Load published weights into `model`, in place. Returns the model.

    Args:
        model: A network from `create_model`.
        state_dict_or_path: Tensors by name, or a .safetensors, .pth or .npz file.
        new_head: Keep the model's own classifier if the checkpoint has none or another number of classes. Each class
            token of a model with one per class gets the class token of the checkpoint.
        adapt_resolution: Resample weights for another image size to that of the model (`Network.at_resolution`).
    """
    if not isinstance(model, Network) or model.absorbed:
        raise UsageError("load_published takes a network from create_model, not an absorbed copy")
    state = read_state(state_dict_or_path)
    state = renamed_for(model, state)
    if new_head:
        state = _with_as_many_tokens(model, _with_own_head(model, state))
    if adapt_resolution and (size := image_size_of(model, state)) != model.config.image_size:
        small = type(model)(dataclasses.replace(model.config, image_size=size))
        _load_strictly(small, state)
        weight = next(model.parameters())
        adapted = small.to(weight.device, weight.dtype).at_resolution(model.config.image_size)
        model.config = adapted.config  # a Mixer grows hidden units with its grid
        for name, module in adapted.named_children():
            setattr(model, name, module.train(model.training))
        return model
    _load_strictly(model, state)
    return model


def renamed_for(model: Network, state: State) -> State:
    """Return `state` with the names of `model`. Raise CheckpointError if its tensors cannot be concatenated."""
    try:
        return renamed(model, state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the checkpoint does not fit {model.config.name}: {reason}") from error


# Reading ------------------------------------------------------------------------------------------------------------


def read_state(source: Mapping[str, Any] | str | os.PathLike[str]) -> State:
    """Return the tensors of a file or a checkpoint, without the containers they were saved in."""
    return _unwrap(source if isinstance(source, Mapping) else read_weights_file(Path(source)))


def _unwrap(state: Mapping[str, Any]) -> State:
    """Return the tensors inside the containers of training scripts, without the prefixes of wrappers."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the checkpoint is a {type(state).__name__}, expected named tensors")
    for key in ("model", "state_dict", "teacher"):
        inner = state.get(key)
        if isinstance(inner, Mapping):
            return _unwrap(inner)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    for prefix in ("module.", "_orig_mod.", "backbone."):
        if any(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    if not tensors:
        raise CheckpointError(
            f"the checkpoint contains no tensors; its entries are {', '.join(list(state)[:8]) or 'none'}"
        )
    return tensors


# Fitting ------------------------------------------------------------------------------------------------------------


def _with_own_head(model: Network, state: State) -> State:
    """Return `state` with the model's classifiers and projector if the checkpoint's are absent or of another shape."""
    own = model.state_dict()
    for names, known in (
        (tuple(model.classifiers()), ("classifier", "distillation_classifier")),
        (("projector",), ("projector",)),
    ):
        heads = [key for key in own if key.split(".")[0] in names]
        theirs = [key for key in state if key.split(".")[0] in known]
        if set(heads) != set(theirs) or any(state[key].shape != own[key].shape for key in heads):
            body = {key: tensor for key, tensor in state.items() if key not in theirs}
            state = body | {key: own[key] for key in heads}
    return state


def _with_as_many_tokens(model: Network, state: State) -> State:
    """Return `state` with as many class tokens as the model: their mean if the number differs (thesis 5.2.1)."""
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if not isinstance(module, LearnedTokens) or key not in state:
            continue
        tokens, count = state[key], module.weight.shape[1]
        if tokens.ndim == 3 and tokens.shape[1] not in (0, count):
            state = state | {key: tokens.mean(dim=1, keepdim=True).expand(-1, count, -1).clone()}
    return state


def _load_strictly(model: Network, state: State) -> None:
    own = model.state_dict()
    unknown = [key for key in state if key not in own]
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    wrong = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state}
    wrong = {key: shapes for key, shapes in wrong.items() if shapes[0] != shapes[1]}
    if unknown or missing or wrong:
        raise CheckpointError(_misfit(model, state, unknown, missing, wrong))
    model.load_state_dict({**own, **state})


def _misfit(model: Network, state: State, unknown: list[str], missing: list[str], wrong: dict[str, Any]) -> str:
    parts = []
    if wrong:
        shapes = [f"{key} is {actual}, expected {expected}" for key, (actual, expected) in wrong.items()]
        parts.append(f"{len(wrong)} of another shape ({_some(shapes)})")
    if missing:
        parts.append(f"{len(missing)} missing ({_some(missing)})")
    if unknown:
        parts.append(f"{len(unknown)} unknown ({_some(unknown)})")
    advice = _advice(model, state, unknown, missing, wrong)
    return f"the checkpoint does not fit {model.config.name}: {'; '.join(parts)}. {advice}"


def _advice(model: Network, state: State, unknown: list[str], missing: list[str], wrong: dict[str, Any]) -> str:
    heads = (*model.classifiers(), "distillation_classifier")
    if all(key.split(".")[0] in heads for key in (*unknown, *missing, *wrong)):
        return "Only the classifier differs: load with new_head=True, or create the model with its num_classes"
    for pattern, family in TELLTALE:
        if unknown and any(re.fullmatch(pattern, key) for key in unknown):
            return f"Its keys are those of {family}: create that network instead"
    if wrong and not unknown and not missing:
        try:
            size = image_size_of(model, state)
        except CheckpointError:
            size = model.config.image_size
        if size != model.config.image_size:
            return f"It was made for {size[0]}×{size[1]} images: load with adapt_resolution=True"
    return "Create the network with the options it was trained with"


def _some(items: list[str], limit: int = 4) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def image_size_of(model: Network, state: State) -> tuple[int, int]:
    """Return the image size of a checkpoint, from the first weight with one entry per position."""
    for name, module in model.named_modules():
        if not isinstance(module, Resampled) or name.endswith((".before", ".after")):
            continue
        suffix, axis = ("weight1", -1) if hasattr(module, "weight1") else ("weight", 1)
        key = f"{name}.{suffix}"
        if key not in state:
            continue
        positions = state[key].shape[axis] // getattr(module, "groups", 1) - getattr(module, "extra", 0)
        return _size_for(model, module.grid, positions)
    return model.config.image_size


def _size_for(model: Network, grid: tuple[int, ...], positions: int) -> tuple[int, int]:
    height, width = model.config.image_size
    if positions == math.prod(grid):
        return height, width
    patch = height // grid[0] if len(grid) == 2 else width // grid[0]
    side = math.isqrt(positions) if len(grid) == 2 else positions
    if len(grid) == 2 and side * side != positions:
        raise CheckpointError(
            f"the checkpoint has {positions} positions, which is not a square image; "
            "create the network at its size and use at_resolution"
        )
    return side * patch, side * patch
