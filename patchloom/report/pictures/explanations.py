"""Explanations of one class as a map (h, w) over patches, of the kind that the network allows:

evidence      if the head is linear in the average of patches: the logit of each patch.
contribution  if a class token attends to patches: the contribution of each patch to the logit in the last layer with
              such attention, value times gradient. Later layers count to first order.
attention     if each class has its own token, or there are no classes: the attention weights of the token.
share         if there are no classes and the vector is the average of patches: the contribution of each patch to it.

The first two are relative to the mean of all classes, since a logit has a meaning only relative to the others. Labels
and numbers do not compete: their maps are relative to outputs that speak neither for nor against them, `neutral`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from patchloom.evaluation.classification import in_eval_mode
from patchloom.layers.attention import Attention, ClassAttention
from patchloom.layers.residual import ClassBlock
from patchloom.models.network import Network
from patchloom.report.pictures.attention import (
    class_attention,
    class_evidence,
    grid_of,
    has_evidence,
    has_share,
    vector_share,
)
from patchloom_runtime.errors import UsageError

SIGNED = ("evidence", "contribution")  # positive for a class, negative against it


def map_kind(network: Network) -> str:
    """Return the kind of map the network has; '' if its output does not depend on single patches."""
    if not network.config.num_classes:
        return "share" if has_share(network) else "attention" if network.has_class_attention else ""
    if has_evidence(network):
        return "evidence"
    if network.has_token_per_class:
        return "attention"
    return "contribution" if network.has_class_attention or _class_blocks(network) else ""


def class_map(network: Network, images: Tensor, classes: Tensor, neutral: Tensor | None = None) -> Tensor:
    """Return the maps (B, h, w) of class numbers `classes` (B,) for normalized images (B, channels, H, W).

    The numbers are ignored if the network has no classes; `neutral` (K,) is for outputs that do not compete.
    """
    kind, rows = map_kind(network), torch.arange(len(images))
    if kind == "evidence":
        return relative(class_evidence(network, images), neutral)[rows, classes]
    if kind == "contribution":
        return _contribution(network, images, classes, compete=neutral is None)
    if kind == "attention":
        tokens = class_attention(network, images)[-1].weights.mean(dim=1)  # (B, T, h, w)
        return tokens[rows, classes if network.has_token_per_class else 0]
    if kind == "share":
        return vector_share(network, images)
    raise UsageError(f"the output of {network.config.name} does not depend on single patches, so there is no map")


def relative(logits: Tensor, neutral: Tensor | None = None) -> Tensor:
    """Return the logits (B, K, h, w) of patches relative to the mean of all classes, or to `neutral` (K,)."""
    return logits - (logits.mean(dim=1, keepdim=True) if neutral is None else neutral[:, None, None].to(logits))


def strengths(maps: Tensor, kind: str, likeliest: Tensor | None = None) -> Tensor:
    """Scale maps (B, h, w) to −1…1, or to 0…1 if they have no sign.

    Signed maps use the scale of the most likely class's maps, `likeliest`, so that classes can be compared.
    """
    if kind in SIGNED:
        largest = (maps if likeliest is None else likeliest).abs().amax(dim=(1, 2), keepdim=True)
        return (maps / largest.clamp_min(torch.finfo(maps.dtype).tiny)).clamp(-1, 1)
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)


def _contribution(network: Network, images: Tensor, classes: Tensor, *, compete: bool) -> Tensor:
    with in_eval_mode(network), torch.enable_grad(), _frozen(network), _recording_values(network) as values:
        logits = network.head(network.features(images)).float()
        explained = logits[torch.arange(len(images)), classes] - (logits.mean(dim=1) if compete else 0)
        gradients = torch.autograd.grad(explained.sum(), values)
    products = [value * gradient for value, gradient in zip(values, gradients, strict=True)]
    contributions = torch.stack([product.sum(dim=-1) for product in products]).sum(dim=0)  # (B, N)
    grid = grid_of(network, images, contributions.shape[1])
    return contributions.unflatten(1, grid).detach().float().cpu()


@contextmanager
def _recording_values(network: Network) -> Iterator[list[Tensor]]:
    """Record the values of the patches (B, N, …) in the last layer in which class tokens attend to them, while open.

    Gradients stop at these values.
    """
    values: list[Tensor] = []

    def keep(module: nn.Module, _: object, out: Tensor) -> Tensor:
        tokens, columns = layers[module]
        value = out[:, tokens:, -columns:].detach().requires_grad_()
        values.append(value)
        with_rest = torch.cat([out[:, tokens:, :-columns], value], dim=2) if out.shape[2] > columns else value
        return torch.cat([out[:, :tokens], with_rest], dim=1)

    layers = _value_layers(network)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield values
    finally:
        for hook in hooks:
            hook.remove()


def _value_layers(network: Network) -> dict[nn.Module, tuple[int, int]]:
    """Return layer → (tokens before the patches, channels) of the layers that compute the last values of patches."""
    count = 2 if network.has_distillation_token else 1
    if blocks := _class_blocks(network):
        branch = blocks[-1].attend
        if not isinstance(branch.mix, ClassAttention):
            return {branch.norm: (count, network.feature_dim)}
        value = branch.mix.v
        return {value: (count if branch.mix.class_in_keys else 0, value.out_features)}
    layers = [module for module in list(network.taps())[-1].modules() if isinstance(module, Attention)]
    return {layer.qkv: (count, layer.qkv.out_features // 3) for layer in layers}


def _class_blocks(network: Network) -> list[ClassBlock]:
    return [module for module in network.modules() if isinstance(module, ClassBlock)]


@contextmanager
def _frozen(network: Network) -> Iterator[None]:
    """Freeze all parameters while open: nothing before the recorded values needs a gradient."""
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
