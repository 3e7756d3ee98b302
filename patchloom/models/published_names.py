"""The authors', timm's and Flax's names of every family's weights, and what patchloom calls them."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from patchloom.models.cait import CaiT
from patchloom.models.mixer import Mixer
from patchloom.models.network import Network
from patchloom.models.patchconvnet import PatchConvNet
from patchloom.models.resmlp import ResMLP
from patchloom.models.smlpnet import SMLPNet
from patchloom.models.vit import ViT

State = dict[str, Tensor]
Rule = tuple[str, str]  # a pattern of the whole key, and what it becomes

_COMMON: list[Rule] = [
    (r"(?:patch_embed|stem)\.proj\.(weight|bias)", r"stem.\1"),
    (r"head\.(weight|bias)", r"classifier.\1"),
    (r"head_dist\.(weight|bias)", r"distillation_classifier.\1"),
    (r"pos_embed", "position.weight"),
    (r"norm\.alpha", "norm.weight"),
    (r"norm\.beta", "norm.bias"),
]

# Inside a block: norm1/attn/gamma_1 belong to its first branch, norm2/mlp/gamma_2 to its second.
_BLOCK: list[Rule] = [
    (r"norm1\.(weight|bias)", r"tokens.norm.\1"),
    (r"norm2\.(weight|bias)", r"channels.norm.\1"),
    (r"norm1\.alpha", "tokens.norm.weight"),
    (r"norm1\.beta", "tokens.norm.bias"),
    (r"norm2\.alpha", "channels.norm.weight"),
    (r"norm2\.beta", "channels.norm.bias"),
    (r"(?:gamma_1|ls1|ls1\.gamma)", "tokens.scale"),
    (r"(?:gamma_2|ls2|ls2\.gamma)", "channels.scale"),
    (r"(?:attn|linear_tokens)\.(weight|bias)", r"tokens.mix.\1"),
    (r"attn\.((?:qkv|q|k|v|proj)\.(?:weight|bias))", r"tokens.mix.\1"),
    (r"attn\.proj_l\.(weight|bias)", r"tokens.mix.before.\1"),
    (r"attn\.proj_w\.(weight|bias)", r"tokens.mix.after.\1"),
    (r"(?:mlp|mlp_channels)\.(fc[12]\.(?:weight|bias))", r"channels.mix.\1"),
    (r"mlp_tokens\.fc([12])\.(weight|bias)", r"tokens.mix.\2\1"),
]

# Flax: MixerBlock_0/token_mixing/Dense_0/kernel and so on.
_FLAX: list[Rule] = [
    (r"stem/kernel", "stem.weight"),
    (r"stem/bias", "stem.bias"),
    (r"pre_head_layer_norm/scale", "norm.weight"),
    (r"pre_head_layer_norm/bias", "norm.bias"),
    (r"head/kernel", "classifier.weight"),
    (r"head/bias", "classifier.bias"),
    (r"MixerBlock_(\d+)/LayerNorm_0/scale", r"blocks.\1.tokens.norm.weight"),
    (r"MixerBlock_(\d+)/LayerNorm_0/bias", r"blocks.\1.tokens.norm.bias"),
    (r"MixerBlock_(\d+)/LayerNorm_1/scale", r"blocks.\1.channels.norm.weight"),
    (r"MixerBlock_(\d+)/LayerNorm_1/bias", r"blocks.\1.channels.norm.bias"),
    (r"MixerBlock_(\d+)/token_mixing/Dense_0/kernel", r"blocks.\1.tokens.mix.weight1"),
    (r"MixerBlock_(\d+)/token_mixing/Dense_0/bias", r"blocks.\1.tokens.mix.bias1"),
    (r"MixerBlock_(\d+)/token_mixing/Dense_1/kernel", r"blocks.\1.tokens.mix.weight2"),
    (r"MixerBlock_(\d+)/token_mixing/Dense_1/bias", r"blocks.\1.tokens.mix.bias2"),
    (r"MixerBlock_(\d+)/channel_mixing/Dense_0/kernel", r"blocks.\1.channels.mix.fc1.weight"),
    (r"MixerBlock_(\d+)/channel_mixing/Dense_0/bias", r"blocks.\1.channels.mix.fc1.bias"),
    (r"MixerBlock_(\d+)/channel_mixing/Dense_1/kernel", r"blocks.\1.channels.mix.fc2.weight"),
    (r"MixerBlock_(\d+)/channel_mixing/Dense_1/bias", r"blocks.\1.channels.mix.fc2.bias"),
]

_PATCHCONVNET_BLOCK: list[Rule] = [
    (r"norm1\.(weight|bias|running_mean|running_var|num_batches_tracked)", r"norm.\1"),
    (r"gamma_1", "scale"),
    (r"attn\.qkv_pos\.0\.(weight|bias)", r"mix.first.\1"),
    (r"attn\.qkv_pos\.2\.(weight|bias)", r"mix.spatial.\1"),
    (r"attn\.qkv_pos\.4\.conv_reduce\.(weight|bias)", r"mix.gate.reduce.\1"),
    (r"attn\.qkv_pos\.4\.conv_expand\.(weight|bias)", r"mix.gate.expand.\1"),
    (r"attn\.qkv_pos\.5\.(weight|bias)", r"mix.last.\1"),
]

_SMLP_BLOCK: list[Rule] = [
    (r"token_mix\.0\.conv_merge\.BN\.(.+)", r"tokens.mix.0.norm.\1"),
    (r"token_mix\.0\.conv_merge\.Conv\.weight", "tokens.mix.0.mix.weight"),
    (r"token_mix\.1\.BN\.(.+)", r"tokens.mix.1.norm.\1"),
    (r"token_mix\.1\.proj_h\.(weight|bias)", r"tokens.mix.1.mix.along_width.\1"),
    (r"token_mix\.1\.proh_w\.(weight|bias)", r"tokens.mix.1.mix.along_height.\1"),  # the authors' spelling
    (r"token_mix\.1\.fuse\.weight", "tokens.mix.1.mix.fuse.weight"),
    (r"channel_mix\.1\.(weight|bias)", r"channels.norm.\1"),
    (r"channel_mix\.2\.net\.0\.(weight|bias)", r"channels.mix.fc1.\1"),
    (r"channel_mix\.2\.net\.3\.(weight|bias)", r"channels.mix.fc2.\1"),
]


def _apply(rules: list[Rule], key: str) -> str:
    for pattern, replacement in rules:
        if match := re.fullmatch(pattern, key):
            return match.expand(replacement)
    return key


def renamed(model: Network, state: State) -> State:
    """`state` under patchloom's names and shapes; keys nobody knows keep theirs and are reported later."""
    translate = _TRANSLATORS.get(type(model))
    if translate is not None:
        state = translate(model, dict(state))
    expected = model.state_dict()
    return {key: _shaped(tensor, expected.get(key)) for key, tensor in state.items()}


def _shaped(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """1×1 convolutions as matrices, (1, 1, C) as (C): the same numbers in the shape asked for."""
    if expected is None or tensor.shape == expected.shape:
        return tensor
    without_ones = [n for n in tensor.shape if n != 1]
    same = without_ones == [n for n in expected.shape if n != 1]
    return tensor.reshape(expected.shape) if same else tensor


def _resmlp(_: Network, state: State) -> State:
    return {_columns(key): tensor for key, tensor in state.items()}


def _columns(key: str) -> str:
    """Names of a network whose blocks are numbered `blocks.N.…`."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", key):
        return f"blocks.{match[1]}.{_apply(_BLOCK, match[2])}"
    return _apply(_COMMON, key)


def _mixer(_: Network, state: State) -> State:
    out = {}
    for key, tensor in state.items():
        if key == "stem/kernel":
            tensor = tensor.permute(3, 2, 0, 1)  # height, width, in, out → out, in, height, width
        elif key.endswith("/kernel"):
            tensor = tensor.T
        out[_apply(_FLAX, key) if "/" in key else _columns(key)] = tensor
    return out


def _vit(model: Network, state: State) -> State:
    tokens = [state.pop(key) for key in ("cls_token", "dist_token") if key in state]
    out = {"class_tokens.weight": torch.cat(tokens, dim=1)} if tokens else {}
    for key, tensor in state.items():
        # A parallel block numbers its second branch by one more 1: attn1, norm11, norm21, mlp1, gamma_1_1, gamma_2_1.
        match = re.fullmatch(r"(blocks\.\d+\.)(?:(attn|mlp)1|(norm[12])1|(gamma_[12])_1)(\..+|)", key)
        if match:
            first = f"{match[1]}{match[2] or match[3] or match[4]}{match[5]}"
            out[re.sub(r"\.(tokens|channels)\.", r".\1.1.", _columns(first), count=1)] = tensor
            continue
        name = _columns(key)
        if model.config.parallel > 1 and name != key:  # type: ignore[attr-defined]
            name = re.sub(r"^(blocks\.\d+)\.(tokens|channels)\.", r"\1.\2.0.", name)
        out[name] = tensor
    return out


def _class_block(name: str) -> str:
    """Names of a block of the authors' `blocks_token_only`."""
    return re.sub(r"^tokens\.", "attend.", _apply(_BLOCK, name))


def _cait(_: Network, state: State) -> State:
    out = {}
    for key, tensor in state.items():
        if key == "cls_token":
            key = "class_token.weight"
        elif match := re.fullmatch(r"blocks_token_only\.(\d+)\.(.+)", key):
            key = f"class_blocks.{match[1]}.{_class_block(match[2])}"
        out[_columns(key)] = tensor
    return out


def _patchconvnet(_: Network, state: State) -> State:
    out = {}
    heads = {key: tensor for key, tensor in state.items() if re.fullmatch(r"head\.\d+\.(weight|bias)", key)}
    for kind in ("weight", "bias"):
        rows = [heads.get(f"head.{k}.{kind}") for k in range(len(heads) // 2)]
        if rows and all(row is not None for row in rows):
            out[f"classifier.{kind}"] = torch.cat(rows)  # type: ignore[arg-type]
    for key, tensor in state.items():
        if key in heads:
            continue
        if key == "cls_token":
            key = "attention_pool.token.weight"
        elif match := re.fullmatch(r"patch_embed\.proj\.([0246])\.0\.weight", key):
            key = f"stem.convs.{int(match[1]) // 2}.weight"
        elif match := re.fullmatch(r"blocks\.(\d+)\.(.+)", key):
            key = f"blocks.{match[1]}.{_apply(_PATCHCONVNET_BLOCK, match[2])}"
        elif match := re.fullmatch(r"blocks_token_only\.0\.(.+)", key):
            key = f"attention_pool.block.{_class_block(match[1])}"
        out[_apply(_COMMON, key)] = tensor
    return out


def _smlpnet(model: Network, state: State) -> State:
    depths = model.config.depths  # type: ignore[attr-defined]
    place = [f"stages.{stage}.{i}" for stage, depth in enumerate(depths) for i in range(depth)]
    out = {}
    for key, tensor in state.items():
        if match := re.fullmatch(r"to_patch_embedding\.(\d+)\.0\.weight", key):
            key = "stem.weight" if match[1] == "0" else f"merges.{int(match[1]) - 1}.weight"
        elif (match := re.fullmatch(r"(token_mix|channel_mix)\.(\d+)\.(.+)", key)) and int(match[2]) < len(place):
            key = f"{place[int(match[2])]}.{_apply(_SMLP_BLOCK, f'{match[1]}.{match[3]}')}"
        elif key.startswith("batch_norm."):
            key = key.replace("batch_norm", "norm")
        elif key.startswith("mlp_head.0."):
            key = key.replace("mlp_head.0", "classifier")
        out[key] = tensor
    return out


_TRANSLATORS: dict[type[Network], Callable[[Network, State], State]] = {
    ResMLP: _resmlp,
    Mixer: _mixer,
    ViT: _vit,
    CaiT: _cait,
    PatchConvNet: _patchconvnet,
    SMLPNet: _smlpnet,
}

# A key that only one family's checkpoints have, to say what a foreign one is.
TELLTALE = [
    (r"token_mix\.0\..*|to_patch_embedding\..*", "sMLPNet"),
    (r".*\.qkv_pos\..*", "PatchConvNet"),
    (r"blocks_token_only\..*", "CaiT"),
    (r"MixerBlock_0/.*|.*\.mlp_tokens\..*", "MLP-Mixer"),
    (r".*\.(?:linear_tokens\..*|norm1\.alpha)", "ResMLP"),
    (r".*\.attn\.qkv\.weight", "a vision transformer"),
    (r"layer1\.0\.conv1\.weight", "a ResNet"),
]
