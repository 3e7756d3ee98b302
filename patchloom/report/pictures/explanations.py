"""What each patch says for one class, as a map (h, w), of the kind that the network allows:

evidence      the head is linear in the average of patches: each patch's own logit.
contribution  a class token reads the patches: what each gives to the logit in the last layer in which the token reads
              them, the product of its value and that value's gradient. What comes after counts to first order.
attention     each class has a token of its own, or there are no classes: the weights with which it reads the patches.
share         there are no classes and the vector is the average of patches: what each gives to it.

The first two are told beside the mean of all classes, for a logit means something beside the others alone.
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

SIGNED = ("evidence", "contribution")  # patches speak for a class or against it


def map_kind(network: Network) -> str:
    """Which map it has; '' where its answer tells no places apart."""
    if not network.config.num_classes:
        return "share" if has_share(network) else "attention" if network.has_class_attention else ""
    if has_evidence(network):
        return "evidence"
    if network.has_token_per_class:
        return "attention"
    return "contribution" if network.has_class_attention or _class_blocks(network) else ""


def class_map(network: Network, images: Tensor, classes: Tensor) -> Tensor:
    """(B, h, w): what speaks for `classes` (B,) in normalised images (B, channels, H, W); their numbers, or any
    where the network names none."""
    kind, rows = map_kind(network), torch.arange(len(images))
    if kind == "evidence":
        logits = class_evidence(network, images)
        return logits[rows, classes] - logits.mean(dim=1)
    if kind == "contribution":
        return _contribution(network, images, classes)
    if kind == "attention":
        tokens = class_attention(network, images)[-1].weights.mean(dim=1)  # (B, T, h, w)
        return tokens[rows, classes if network.has_token_per_class else 0]
    if kind == "share":
        return vector_share(network, images)
    raise UsageError(f"{network.config.name} tells no places of a picture apart in its answer, so there is no map")


def strengths(maps: Tensor, kind: str, likeliest: Tensor | None = None) -> Tensor:
    """Maps (B, h, w) from −1 to 1, or from 0 to 1 where they have no sign.

    Those with one are told on the scale of the `likeliest` class's maps, so that classes can be compared.
    """
    if kind in SIGNED:
        largest = (maps if likeliest is None else likeliest).abs().amax(dim=(1, 2), keepdim=True)
        return (maps / largest.clamp_min(torch.finfo(maps.dtype).tiny)).clamp(-1, 1)
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)


def _contribution(network: Network, images: Tensor, classes: Tensor) -> Tensor:
    with in_eval_mode(network), torch.enable_grad(), _frozen(network), _values_read(network) as values:
        logits = network.head(network.features(images)).float()
        beside = logits[torch.arange(len(images)), classes] - logits.mean(dim=1)
        gradients = torch.autograd.grad(beside.sum(), values)
    products = [value * gradient for value, gradient in zip(values, gradients, strict=True)]
    given = torch.stack([product.sum(dim=-1) for product in products]).sum(dim=0)  # (B, N)
    return given.unflatten(1, grid_of(network, images, given.shape[1])).detach().float().cpu()


@contextmanager
def _values_read(network: Network) -> Iterator[list[Tensor]]:
    """While it is open: the patches' values (B, N, …) in the last layer in which class tokens read them.

    Gradients go back to these and no further.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, _: object, out: Tensor) -> Tensor:
        tokens, columns = layers[module]
        value = out[:, tokens:, -columns:].detach().requires_grad_()
        found.append(value)
        with_rest = torch.cat([out[:, tokens:, :-columns], value], dim=2) if out.shape[2] > columns else value
        return torch.cat([out[:, :tokens], with_rest], dim=1)

    layers = _reading(network)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _reading(network: Network) -> dict[nn.Module, tuple[int, int]]:
    """What gives the values that class tokens read last → how many tokens before the patches, how many channels."""
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
    """Nothing before what is kept needs a gradient."""
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
