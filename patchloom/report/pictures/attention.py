"""Maps of the patches a network uses: class attention, rollout, evidence for a class, and shares of the vector.

Letters: B images, T class tokens, h×w patches. A map is (h, w) and of one of four kinds:

class attention   the attention weights from class tokens to patches: in every layer of a ViT, in the class layers of a
                  CaiT, in the pooling of a PatchConvNet. With talking heads they may be negative.
rollout           for a ViT: the attention of each layer, averaged over heads and mixed half and half with the identity
                  (the residual connection), multiplied from the first layer to the last: A = Π (½ Āₗ + ½ I). The map is
                  the row of a class token, or the mean of all rows for a network that averages patches, without the
                  columns of class tokens (Abnar and Zuidema 2020, arXiv 2005.00928). Rows of A sum to one.
evidence          for a head that is linear in the average of patches: the logit of each patch for a class. The mean
                  over patches is the network's logit, so red patches speak for the class and blue ones against it.
share             for a network without a classifier whose vector v is the average of patches p: ⟨p, v⟩ / ⟨v, v⟩, the
                  contribution of each patch. The mean over patches is one.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from patchloom.evaluation.classification import in_eval_mode
from patchloom.layers.attention import Attention, ClassAttention, record_attention
from patchloom.models.network import Network
from patchloom_runtime.errors import UsageError


class ClassAttentionMaps(NamedTuple):
    """The attention from class tokens to patches in one layer."""

    layer: str  # "layer 3", "class layer 1", "pooling"
    weights: Tensor  # (B, heads, T, h, w) float32; the rest of each sum of 1 goes to class tokens


@torch.no_grad()
def class_attention(network: Network, images: Tensor) -> list[ClassAttentionMaps]:
    """Return the maps of every layer in which class tokens attend to patches; `images` (B, C, H, W) are normalized."""
    if not network.has_class_attention:
        raise UsageError(
            f"{type(network).__name__} has no class token that attends to patches. Use a DeiT, CaiT or "
            "PatchConvNet; for networks that average patches, use class_evidence."
        )
    maps: list[ClassAttentionMaps] = []
    counts = {"layer": 0, "class layer": 0}
    for module, weights in _attention_weights(network, images):
        kind = "layer" if isinstance(module, Attention) else "class layer"
        counts[kind] += 1
        to_patches = _to_patches(network, module, weights)
        if to_patches.shape[2]:
            name = "pooling" if network.pools_by_attention else f"{kind} {counts[kind]}"
            grid = grid_of(network, images, to_patches.shape[-1])
            maps.append(ClassAttentionMaps(name, to_patches.unflatten(-1, grid)))
    return maps


@torch.no_grad()
def attention_rollout(network: Network, images: Tensor) -> Tensor:
    """Return the rollout of a ViT, (B, T, h, w): class, then distillation token; T is 1 if patches are averaged."""
    if not network.attends_in_every_block:
        raise UsageError(
            "attention rollout needs a network with self-attention in every block, such as a ViT; "
            f"{type(network).__name__} is not one"
        )
    layers = {
        module: weights.mean(dim=1) for module, weights in _attention_weights(network, images)
    }  # (B, T+N, T+N) each
    size = next(iter(layers.values())).shape[-1]
    rolled = torch.eye(size).expand(len(images), size, size)
    for block in network.taps():
        parallel = torch.stack([layers[module] for module in block.modules() if module in layers]).mean(dim=0)
        rolled = (0.5 * parallel + 0.5 * torch.eye(size)) @ rolled
    tokens = _class_tokens(network, size)
    rows = rolled[:, :tokens, tokens:] if tokens else rolled.mean(dim=1, keepdim=True)
    return rows.unflatten(-1, grid_of(network, images, size - tokens))


@torch.no_grad()
def class_evidence(network: Network, images: Tensor) -> Tensor:
    """Return the logits of each patch, (B, classes, h, w); their mean over patches is the network's logits."""
    if not has_evidence(network):
        raise UsageError(
            f"{type(network).__name__} does not classify the average of its patches, so a patch has no logits."
            + (" Use class_attention." if network.has_class_attention else "")
        )
    with in_eval_mode(network):
        logits = network.classifier(_patches(network, images))
    return logits.float().cpu().permute(0, 3, 1, 2)


@torch.no_grad()
def vector_share(network: Network, images: Tensor) -> Tensor:
    """Return the contribution of each patch to the image's vector, (B, h, w); the mean over patches is one."""
    if not network.averages_patches:
        raise UsageError(f"the vector of {type(network).__name__} is not the average of its patches; it has other maps")
    with in_eval_mode(network):
        patches = _patches(network, images).float()
    vectors = patches.mean(dim=(1, 2))
    shares = torch.einsum("bhwc,bc->bhw", patches, vectors)
    return (shares / vectors.square().sum(dim=1)[:, None, None]).cpu()


def has_evidence(network: Network) -> bool:
    """Return whether the logits are linear in the average of the patches."""
    return network.averages_patches and isinstance(network.classifier, nn.Linear)


def has_share(network: Network) -> bool:
    """Return whether the network averages patches and has no classifier."""
    return network.averages_patches and not network.config.num_classes


def _patches(network: Network, images: Tensor) -> Tensor:
    """Return the patches before averaging, (B, h, w, C)."""
    features = network.features(images)  # (B, N, C) or (B, h, w, C)
    return features.unflatten(1, grid_of(network, images, features.shape[1])) if features.ndim == 3 else features


def _attention_weights(network: Network, images: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """Return each attention layer with its weights (B, heads, queries, keys), float32 on the CPU."""
    modules = dict(network.named_modules())
    with in_eval_mode(network), record_attention(network) as maps:
        network.features(images)
    return [(modules[name], weights.float().cpu()) for name, calls in maps.items() for weights in calls]


def _to_patches(network: Network, module: nn.Module, weights: Tensor) -> Tensor:
    """Select class tokens as queries and patches as keys: (B, heads, queries, keys) → (B, heads, T, N)."""
    if isinstance(module, ClassAttention):
        tokens = weights.shape[2]
        return weights[..., tokens:] if module.class_in_keys else weights
    tokens = _class_tokens(network, weights.shape[-1])
    return weights[:, :, :tokens, tokens:]


def _class_tokens(network: Network, tokens: int) -> int:
    """Return how many of the tokens are not patches."""
    assert network.grid is not None  # networks with self-attention have a fixed grid
    return tokens - network.grid[0] * network.grid[1]


def grid_of(network: Network, images: Tensor, patches: int) -> tuple[int, int]:
    """Return the rows and columns of the patch grid; for a network of any size, from the stride that fits."""
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
