"""Names of every family's weights in the authors' code, timm and Flax, and in patchloom; used in both directions.

A naming is a list of pairs (their name, patchloom's name). A star stands for one component of a name and matches in
order on both sides. The first matching pair is used. A tensor with another shape or order of axes is a `Name` with a
`Form`. Conversions that are not renamings of single tensors (class tokens, one classifier per class, sMLPNet's block
numbers) have pairs of functions at the end.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

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
Publisher = Literal["authors", "timm"]


class Form(NamedTuple):
    """Conversion between their form of a tensor and patchloom's."""

    inward: Callable[[Tensor], Tensor]  # to patchloom
    outward: Callable[[Tensor], Tensor]


class Name(NamedTuple):
    """Their name of a tensor that has another form."""

    text: str
    form: Form


Pair = tuple[str | Name, str]

_AS_IT_IS = Form(lambda tensor: tensor, lambda tensor: tensor)
# (out, in) as a 1×1 convolution; biases are unchanged.
_CONVOLUTION = Form(
    lambda tensor: tensor.flatten(1) if tensor.ndim == 4 else tensor,
    lambda tensor: tensor[:, :, None, None] if tensor.ndim == 2 else tensor,
)
_OF_MAPS = Form(lambda tensor: tensor.flatten(), lambda tensor: tensor[None, None])  # (C,) as (1, 1, C)
# Flax: a Dense layer's kernel is (in, out), a convolution's height, width, in, out.
_KERNEL = Form(*(2 * [lambda tensor: tensor.T if tensor.ndim == 2 else tensor]))
_IMAGE_KERNEL = Form(
    lambda tensor: tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor,
    lambda tensor: tensor.permute(2, 3, 1, 0),
)


def _under(prefix: str, ours: str, pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs with `prefix` before their names and `ours` before patchloom's."""
    result: list[Pair] = []
    for theirs, own in pairs:
        name = f"{prefix}{theirs.text if isinstance(theirs, Name) else theirs}"
        result.append((Name(name, theirs.form) if isinstance(theirs, Name) else name, f"{ours}{own}"))
    return result


_ENDS: list[Pair] = [
    ("patch_embed.proj.*", "stem.*"),
    ("pos_embed", "position.weight"),
    ("norm.*", "norm.*"),
    ("head.*", "classifier.*"),
    ("head_dist.*", "distillation_classifier.*"),
]
# Inside a block: norm1/attn/gamma_1 belong to its first branch, norm2/mlp/gamma_2 to its second.
_NORMS: list[Pair] = [("norm1.*", "tokens.norm.*"), ("norm2.*", "channels.norm.*")]
_GAMMAS: list[Pair] = [("gamma_1", "tokens.scale"), ("gamma_2", "channels.scale")]
_ATTENTION: list[Pair] = [("attn.*.*", "tokens.mix.*.*"), ("mlp.*.*", "channels.mix.*.*")]
_TALKING: list[Pair] = [("attn.proj_l.*", "tokens.mix.before.*"), ("attn.proj_w.*", "tokens.mix.after.*")]
# A block of the authors' `blocks_token_only`, in which the class token attends.
_CLASS_BLOCK: list[Pair] = [
    (theirs, re.sub(r"^tokens\.", "attend.", ours)) for theirs, ours in [*_NORMS, *_GAMMAS, *_ATTENTION]
]
# Two parallel branches: the names of the second have one more 1.
_PARALLEL: list[Pair] = [
    pair
    for first, second, ours in (
        ("norm1.*", "norm11.*", "tokens.{}.norm.*"),
        ("attn.*.*", "attn1.*.*", "tokens.{}.mix.*.*"),
        ("gamma_1", "gamma_1_1", "tokens.{}.scale"),
        ("norm2.*", "norm21.*", "channels.{}.norm.*"),
        ("mlp.*.*", "mlp1.*.*", "channels.{}.mix.*.*"),
        ("gamma_2", "gamma_2_1", "channels.{}.scale"),
    )
    for pair in ((first, ours.format(0)), (second, ours.format(1)))
]

_RESMLP_AUTHORS: list[Pair] = [
    *_under("blocks.*.", "blocks.*.", [
        ("norm1.alpha", "tokens.norm.weight"),
        ("norm1.beta", "tokens.norm.bias"),
        ("norm2.alpha", "channels.norm.weight"),
        ("norm2.beta", "channels.norm.bias"),
        *_NORMS,  # for networks with LayerNorm
        *_GAMMAS,
        ("attn.*", "tokens.mix.*"),
        ("mlp.*.*", "channels.mix.*.*"),
    ]),
    ("norm.alpha", "norm.weight"),
    ("norm.beta", "norm.bias"),
    *_ENDS,
]  # fmt: skip
_RESMLP_TIMM: list[Pair] = [
    *_under("blocks.*.", "blocks.*.", [
        (Name("norm1.alpha", _OF_MAPS), "tokens.norm.weight"),
        (Name("norm1.beta", _OF_MAPS), "tokens.norm.bias"),
        (Name("norm2.alpha", _OF_MAPS), "channels.norm.weight"),
        (Name("norm2.beta", _OF_MAPS), "channels.norm.bias"),
        ("ls1", "tokens.scale"),
        ("ls2", "channels.scale"),
        ("linear_tokens.*", "tokens.mix.*"),
        ("mlp_channels.*.*", "channels.mix.*.*"),
    ]),
    (Name("norm.alpha", _OF_MAPS), "norm.weight"),
    (Name("norm.beta", _OF_MAPS), "norm.bias"),
    ("stem.proj.*", "stem.*"),
    ("head.*", "classifier.*"),
]  # fmt: skip
_MIXER_TIMM: list[Pair] = [
    *_under("blocks.*.", "blocks.*.", [
        *_NORMS,
        ("mlp_tokens.fc1.weight", "tokens.mix.weight1"),
        ("mlp_tokens.fc1.bias", "tokens.mix.bias1"),
        ("mlp_tokens.fc2.weight", "tokens.mix.weight2"),
        ("mlp_tokens.fc2.bias", "tokens.mix.bias2"),
        ("mlp_channels.*.*", "channels.mix.*.*"),
    ]),
    ("stem.proj.*", "stem.*"),
    *_ENDS,
]  # fmt: skip
_MIXER_FLAX: list[Pair] = [
    *_under("MixerBlock_*/", "blocks.*.", [
        ("LayerNorm_0/scale", "tokens.norm.weight"),
        ("LayerNorm_0/bias", "tokens.norm.bias"),
        ("LayerNorm_1/scale", "channels.norm.weight"),
        ("LayerNorm_1/bias", "channels.norm.bias"),
        (Name("token_mixing/Dense_0/kernel", _KERNEL), "tokens.mix.weight1"),
        ("token_mixing/Dense_0/bias", "tokens.mix.bias1"),
        (Name("token_mixing/Dense_1/kernel", _KERNEL), "tokens.mix.weight2"),
        ("token_mixing/Dense_1/bias", "tokens.mix.bias2"),
        (Name("channel_mixing/Dense_0/kernel", _KERNEL), "channels.mix.fc1.weight"),
        ("channel_mixing/Dense_0/bias", "channels.mix.fc1.bias"),
        (Name("channel_mixing/Dense_1/kernel", _KERNEL), "channels.mix.fc2.weight"),
        ("channel_mixing/Dense_1/bias", "channels.mix.fc2.bias"),
    ]),
    (Name("stem/kernel", _IMAGE_KERNEL), "stem.weight"),
    ("stem/bias", "stem.bias"),
    ("pre_head_layer_norm/scale", "norm.weight"),
    ("pre_head_layer_norm/bias", "norm.bias"),
    (Name("head/kernel", _KERNEL), "classifier.weight"),
    ("head/bias", "classifier.bias"),
]  # fmt: skip
_VIT_AUTHORS = [*_under("blocks.*.", "blocks.*.", [*_NORMS, *_GAMMAS, *_ATTENTION]), *_ENDS]
_VIT_TIMM = [
    *_under("blocks.*.", "blocks.*.", [("ls1.gamma", "tokens.scale"), ("ls2.gamma", "channels.scale")]),
    *_under("blocks.*.", "blocks.*.", [*_NORMS, *_ATTENTION]),
    *_ENDS,
]
_VIT_PARALLEL = [*_under("blocks.*.", "blocks.*.", _PARALLEL), *_ENDS]
_CAIT = [
    ("cls_token", "class_token.weight"),
    *_under("blocks.*.", "blocks.*.", [*_TALKING, *_NORMS, *_GAMMAS, *_ATTENTION]),
    *_under("blocks_token_only.*.", "class_blocks.*.", _CLASS_BLOCK),
    *_ENDS,
]
_PATCHCONVNET: list[Pair] = [
    ("cls_token", "attention_pool.token.weight"),
    *((f"patch_embed.proj.{2 * i}.0.weight", f"stem.convs.{i}.weight") for i in range(4)),
    *_under("blocks.*.", "blocks.*.", [
        ("norm1.*", "norm.*"),
        ("gamma_1", "scale"),
        (Name("attn.qkv_pos.0.*", _CONVOLUTION), "mix.first.*"),
        ("attn.qkv_pos.2.*", "mix.spatial.*"),
        (Name("attn.qkv_pos.4.conv_reduce.*", _CONVOLUTION), "mix.gate.reduce.*"),
        (Name("attn.qkv_pos.4.conv_expand.*", _CONVOLUTION), "mix.gate.expand.*"),
        (Name("attn.qkv_pos.5.*", _CONVOLUTION), "mix.last.*"),
    ]),
    *_under("blocks_token_only.0.", "attention_pool.block.", _CLASS_BLOCK),
    *_ENDS,
]  # fmt: skip
_SMLPNET: list[Pair] = [  # blocks are numbered over all stages, see `_numbered`
    ("to_patch_embedding.0.0.weight", "stem.weight"),
    *((f"to_patch_embedding.{i + 1}.0.weight", f"merges.{i}.weight") for i in range(8)),
    ("token_mix.*.0.conv_merge.BN.*", "stages.*.tokens.mix.0.norm.*"),
    ("token_mix.*.0.conv_merge.Conv.weight", "stages.*.tokens.mix.0.mix.weight"),
    ("token_mix.*.1.BN.*", "stages.*.tokens.mix.1.norm.*"),
    (Name("token_mix.*.1.proj_h.*", _CONVOLUTION), "stages.*.tokens.mix.1.mix.along_width.*"),
    (Name("token_mix.*.1.proh_w.*", _CONVOLUTION), "stages.*.tokens.mix.1.mix.along_height.*"),  # the authors' spelling
    (Name("token_mix.*.1.fuse.weight", _CONVOLUTION), "stages.*.tokens.mix.1.mix.fuse.weight"),
    ("channel_mix.*.1.*", "stages.*.channels.norm.*"),
    ("channel_mix.*.2.net.0.*", "stages.*.channels.mix.fc1.*"),
    ("channel_mix.*.2.net.3.*", "stages.*.channels.mix.fc2.*"),
    ("batch_norm.*", "norm.*"),
    ("mlp_head.0.*", "classifier.*"),
]

_NAMINGS: dict[type[Network], dict[Publisher, list[Pair]]] = {
    ResMLP: {"authors": _RESMLP_AUTHORS, "timm": _RESMLP_TIMM},
    Mixer: {"authors": _MIXER_FLAX, "timm": _MIXER_TIMM},
    ViT: {"authors": _VIT_AUTHORS, "timm": _VIT_TIMM},
    CaiT: {"authors": _CAIT, "timm": _CAIT},
    PatchConvNet: {"authors": _PATCHCONVNET},
    SMLPNet: {"authors": _SMLPNET},
}


def namings(model: Network) -> Mapping[Publisher, list[Pair]]:
    """Return the namings of a network by publisher."""
    if isinstance(model, ViT) and model.config.parallel > 1:
        return {"authors": _VIT_PARALLEL}
    return next((layout for family, layout in _NAMINGS.items() if isinstance(model, family)), {})


def renamed(model: Network, state: State) -> State:
    """Return `state` with patchloom's names and shapes. Unknown keys are kept, for the caller to report."""
    pairs = [(_text(theirs), ours, _form(theirs)) for layout in namings(model).values() for theirs, ours in layout]
    out: State = {}
    for key, tensor in _joined(model, state).items():
        match = _translated(key, pairs)
        out[match[0] if match else key] = match[1].inward(tensor) if match else tensor
    out = _numbered(model, out)
    expected = model.state_dict()
    return {key: _shaped(tensor, expected.get(key)) for key, tensor in out.items()}


def named_as(model: Network, publisher: Publisher) -> tuple[State, list[str]]:
    """Return the weights of `model` with their names and shapes, and the names that they do not have."""
    pairs = [(ours, _text(theirs), _form(theirs)) for theirs, ours in namings(model).get(publisher, [])]
    out: State = {}
    unknown = []
    for key, tensor in _counted(model, dict(model.state_dict())).items():
        if match := _translated(key, pairs):
            out[match[0]] = match[1].outward(tensor.detach())
        elif key in _SPLIT:
            out[key] = tensor.detach()
        else:
            unknown.append(key)
    return {key: tensor.contiguous().clone() for key, tensor in _separated(model, out).items()}, unknown


def _text(name: str | Name) -> str:
    return name.text if isinstance(name, Name) else name


def _form(name: str | Name) -> Form:
    return name.form if isinstance(name, Name) else _AS_IT_IS


def _translated(key: str, pairs: Iterable[tuple[str, str, Form]]) -> tuple[str, Form] | None:
    for source, target, form in pairs:
        if match := _pattern(source).fullmatch(key):
            parts = iter(match.groups())
            return re.sub(r"\*", lambda _, parts=parts: next(parts), target), form  # type: ignore[misc]
    return None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\*", "([^./]+)"))


def _shaped(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """Reshape if shapes differ only by ones: 1×1 convolutions to matrices, (1, 1, C) to (C)."""
    if expected is None or tensor.shape == expected.shape:
        return tensor
    squeezed = [n for n in tensor.shape if n != 1]
    same = squeezed == [n for n in expected.shape if n != 1]
    return tensor.reshape(expected.shape) if same else tensor


# Conversions that are not renamings of single tensors -----------------------------------------------------------------

_SPLIT = ("class_tokens.weight",)  # class and distillation token of a vision transformer
_TOKENS = ("cls_token", "dist_token")


def _joined(model: Network, state: State) -> State:
    """Concatenate tensors that are several there and one here."""
    state = dict(state)
    if isinstance(model, ViT) and (tokens := [state.pop(key) for key in _TOKENS if key in state]):
        state["class_tokens.weight"] = torch.cat(tokens, dim=1)
    if isinstance(model, PatchConvNet):  # one classifier per class
        for kind in ("weight", "bias"):
            rows = [state.pop(key) for k in range(len(state)) if (key := f"head.{k}.{kind}") in state]
            state |= {f"classifier.{kind}": torch.cat(rows)} if rows else {}
    return state


def _separated(model: Network, state: State) -> State:
    if "class_tokens.weight" in state:
        tokens = state.pop("class_tokens.weight").split(1, dim=1)
        state = dict(zip(_TOKENS, tokens, strict=False)) | state
    if isinstance(model, PatchConvNet) and model.config.class_tokens == "per_class":
        for kind in ("weight", "bias"):
            if (rows := state.pop(f"head.{kind}", None)) is not None:
                state |= {f"head.{k}.{kind}": rows[k : k + 1] for k in range(len(rows))}
    return state


def _places(model: Network) -> list[str]:
    """Return "stage.block" of all blocks of sMLPNet, in order."""
    depths = model.config.depths if isinstance(model, SMLPNet) else ()
    return [f"{stage}.{i}" for stage, depth in enumerate(depths) for i in range(depth)]


def _numbered(model: Network, state: State) -> State:
    """Rename `stages.N.…`, numbered over all stages by the authors, to `stages.STAGE.BLOCK.…`. Reverse: `_counted`."""
    if not (places := _places(model)):
        return state
    out: State = {}
    for key, tensor in state.items():
        match = re.fullmatch(r"stages\.(\d+)\.((?:tokens|channels)\..+)", key)
        known = match is not None and int(match[1]) < len(places)
        out[f"stages.{places[int(match[1])]}.{match[2]}" if match and known else key] = tensor
    return out


def _counted(model: Network, state: State) -> State:
    number = {f"stages.{place}.": f"stages.{n}." for n, place in enumerate(_places(model))}
    if not number:
        return state
    prefix = re.compile(r"stages\.\d+\.\d+\.")
    return {prefix.sub(lambda match: number[match[0]], key): tensor for key, tensor in state.items()}


# Keys that occur in the checkpoints of one family only, to name the family of a checkpoint that does not fit.
TELLTALE = [
    (r"token_mix\.0\..*|to_patch_embedding\..*", "sMLPNet"),
    (r".*\.qkv_pos\..*", "PatchConvNet"),
    (r"blocks_token_only\..*", "CaiT"),
    (r"MixerBlock_0/.*|.*\.mlp_tokens\..*", "MLP-Mixer"),
    (r".*\.(?:linear_tokens\..*|norm1\.alpha)", "ResMLP"),
    (r".*\.attn\.qkv\.weight", "a vision transformer"),
    (r"layer1\.0\.conv1\.weight", "a ResNet"),
]
