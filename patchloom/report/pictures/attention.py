"""Where a network looks: attention of class tokens, rollout, and what each patch says for a class.

Letters: B images, T class tokens, h×w patches. A map is (h, w) and comes from one of four places:

class attention   the weights with which class tokens read the patches: in every layer of a ViT, in the class layers of
                  a CaiT, in the pooling of a PatchConvNet. With talking heads they may be negative.
rollout           of a ViT: the layers' attention, averaged over heads, mixed half and half with the identity (the
                  residual connection), multiplied from the first layer to the last: A = Π (½ Āₗ + ½ I); the row of a
                  class token (or the mean of all rows, where the network averages patches), its patches alone
                  (Abnar and Zuidema 2020, arXiv 2005.00928). Rows of A sum to one.
evidence          where the head is linear in the average of patches: each patch's own logit of a class. The mean over
                  patches is the logit, so red patches speak for the class and blue ones against it.
share             of a network without a classifier whose vector v is the average of patches p: ⟨p, v⟩ / ⟨v, v⟩, what
                  each patch gives to it. The mean over patches is one.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from patchloom.evaluation.classification import in_eval_mode
from patchloom.layers.attention import Attention, ClassAttention, record_attention
from patchloom.models.network import Network
from patchloom_runtime.errors import UsageError


class ClassAttentionMaps(NamedTuple):
    """One layer's attention from class tokens to patches."""

    layer: str  # "layer 3", "class layer 1", "pooling"
    weights: Tensor  # (B, heads, T, h, w) float32; what is missing to a sum of 1 goes to class tokens


@torch.no_grad()
def class_attention(network: Network, images: Tensor) -> list[ClassAttentionMaps]:
    """Of every layer in which class tokens read patches; `images` (B, channels, H, W) are normalised."""
    if not network.has_class_attention:
        raise UsageError(
            f"{type(network).__name__} has no class token that attends to patches. Give it a DeiT, CaiT or "
            "PatchConvNet; class_evidence shows networks that average."
        )
    found: list[ClassAttentionMaps] = []
    counts = {"layer": 0, "class layer": 0}
    for module, weights in _recorded(network, images):
        kind = "layer" if isinstance(module, Attention) else "class layer"
        counts[kind] += 1
        to_patches = _to_patches(network, module, weights)
        if to_patches.shape[2]:
            name = "pooling" if network.pools_by_attention else f"{kind} {counts[kind]}"
            found.append(
                ClassAttentionMaps(name, to_patches.unflatten(-1, grid_of(network, images, to_patches.shape[-1])))
            )
    return found


@torch.no_grad()
def attention_rollout(network: Network, images: Tensor) -> Tensor:
    """(B, T, h, w) of a ViT: class token, then distillation token; T is 1 where the network averages patches."""
    if not network.attends_in_every_block:
        raise UsageError(f"rollout is of a ViT, whose layers all attend; {type(network).__name__} has other maps")
    layers = {module: weights.mean(dim=1) for module, weights in _recorded(network, images)}  # (B, T+N, T+N) each
    size = next(iter(layers.values())).shape[-1]
    rolled = torch.eye(size).expand(len(images), size, size)
    for block in network.taps():
        side_by_side = torch.stack([layers[module] for module in block.modules() if module in layers]).mean(dim=0)
        rolled = (0.5 * side_by_side + 0.5 * torch.eye(size)) @ rolled
    tokens = _class_tokens(network, size)
    rows = rolled[:, :tokens, tokens:] if tokens else rolled.mean(dim=1, keepdim=True)
    return rows.unflatten(-1, grid_of(network, images, size - tokens))


@torch.no_grad()
def class_evidence(network: Network, images: Tensor) -> Tensor:
    """(B, classes, h, w): the logits of each patch alone; their mean over patches are the network's logits."""
    if not has_evidence(network):
        raise UsageError(
            f"{type(network).__name__} does not classify the average of its patches, so a patch has no logits of its "
            "own." + (" class_attention shows what its class token reads." if network.has_class_attention else "")
        )
    with in_eval_mode(network):
        logits = network.classifier(_patches(network, images))
    return logits.float().cpu().permute(0, 3, 1, 2)


@torch.no_grad()
def vector_share(network: Network, images: Tensor) -> Tensor:
    """(B, h, w): what each patch gives to the image's vector, its average; the mean over patches is one."""
    if not network.averages_patches:
        raise UsageError(f"the vector of {type(network).__name__} is not the average of its patches; it has other maps")
    with in_eval_mode(network):
        patches = _patches(network, images).float()
    vectors = patches.mean(dim=(1, 2))
    shares = torch.einsum("bhwc,bc->bhw", patches, vectors)
    return (shares / vectors.square().sum(dim=1)[:, None, None]).cpu()


def has_evidence(network: Network) -> bool:
    """Whether the logits are linear in the average of the patches."""
    return network.averages_patches and isinstance(network.classifier, nn.Linear)


def has_share(network: Network) -> bool:
    """Whether the average of the patches is all the network tells: it has no classifier."""
    return network.averages_patches and not network.config.num_classes


def _patches(network: Network, images: Tensor) -> Tensor:
    """(B, h, w, C): what is averaged."""
    features = network.features(images)  # (B, N, C) or (B, h, w, C)
    return features.unflatten(1, grid_of(network, images, features.shape[1])) if features.ndim == 3 else features


def _recorded(network: Network, images: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """Each attention layer with its weights (B, heads, queries, keys), in float32 on the CPU."""
    modules = dict(network.named_modules())
    with in_eval_mode(network), record_attention(network) as maps:
        network.features(images)
    return [(modules[name], weights.float().cpu()) for name, calls in maps.items() for weights in calls]


def _to_patches(network: Network, module: nn.Module, weights: Tensor) -> Tensor:
    """(B, heads, queries, keys) → (B, heads, T, N): class tokens alone as queries, patches alone as keys."""
    if isinstance(module, ClassAttention):
        tokens = weights.shape[2]
        return weights[..., tokens:] if module.class_in_keys else weights
    tokens = _class_tokens(network, weights.shape[-1])
    return weights[:, :, :tokens, tokens:]


def _class_tokens(network: Network, tokens: int) -> int:
    """How many of the tokens that attend to one another are no patches."""
    assert network.grid is not None  # whatever has self-attention keeps one grid
    return tokens - network.grid[0] * network.grid[1]


def grid_of(network: Network, images: Tensor, patches: int) -> tuple[int, int]:
    """Patches down and across; of a network for any size, those of the stride that gives so many."""
    if network.grid is not None:
        return network.grid
    height, width = images.shape[2:]
    for stride in range(1, max(height, width) + 1):
        grid = (-(-height // stride), -(-width // stride))
        if grid[0] * grid[1] == patches:
            return grid
    raise UsageError(
        f"{patches} patches fill no grid of {height}×{width} images; use images of a multiple of 32 pixels"
    )
