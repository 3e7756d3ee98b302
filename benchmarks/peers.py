"""PatchConvNet and sMLPNet as their authors lay them out, for speed beside patchloom: timm has neither.

Maps have channels first, every operation is a module, and tensors have the authors' names, so that patchloom's weights
load and the outputs can be compared.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Excite(nn.Module):
    """Squeeze and excite by 1×1 convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(dim, round(dim / 4), 1), nn.Conv2d(round(dim / 4), dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv_expand(F.relu(self.conv_reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class ConvBlock(nn.Module):
    """Tokens to a map and back around the convolutions, in every block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.gamma_1 = nn.LayerNorm(dim, eps=1e-6), nn.Parameter(torch.ones(dim))
        layers = (
            nn.Conv2d(dim, dim, 1),
            nn.GELU(),
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim),
            nn.GELU(),
            Excite(dim),
            nn.Conv2d(dim, dim, 1),
        )
        self.attn = nn.ModuleDict({"qkv_pos": nn.Sequential(*layers)})

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        side = int(n**0.5)
        maps = self.norm1(x).transpose(1, 2).reshape(b, c, side, side)
        return x + self.gamma_1 * self.attn["qkv_pos"](maps).reshape(b, c, n).transpose(1, 2)


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ReadBlock(nn.Module):
    """The class token reads all tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.attn = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("q", "k", "v", "proj")})
        self.mlp = Mlp(dim, 3 * dim)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        every = self.norm1(torch.cat((token, x), dim=1))
        q, k, v = self.attn["q"](every[:, :1]) * every.shape[-1] ** -0.5, self.attn["k"](every), self.attn["v"](every)
        token = token + self.gamma_1 * self.attn["proj"]((q @ k.transpose(1, 2)).softmax(dim=-1) @ v)
        return token + self.gamma_2 * self.mlp(self.norm2(token))


class PatchConvNet(nn.Module):
    """S60 by default."""

    def __init__(self, dim: int = 384, depth: int = 60, classes: int = 1000) -> None:
        super().__init__()
        widths = (3, dim // 8, dim // 4, dim // 2, dim)
        stem: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            stem += [nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)), nn.GELU()]
        self.patch_embed = nn.ModuleDict({"proj": nn.Sequential(*stem[:-1])})
        self.blocks = nn.ModuleList(ConvBlock(dim) for _ in range(depth))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks_token_only = nn.ModuleList([ReadBlock(dim)])
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        token = self.blocks_token_only[0](x, self.cls_token.expand(len(x), -1, -1))
        return self.head(self.norm(torch.cat((token, x), dim=1))[:, 0])


class LocalMix(nn.Module):
    """BatchNorm, GELU, depth-wise 3×3."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.BN, self.Conv = nn.BatchNorm2d(dim), nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.Conv(F.gelu(self.BN(x)))


class RowsAndColumns(nn.Module):
    """BatchNorm, GELU, one matrix along the width, one along the height, fused with the input."""

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.BN, self.fuse = nn.BatchNorm2d(dim), nn.Conv2d(3 * dim, dim, 1, bias=False)
        self.proj_h, self.proh_w = nn.Conv2d(side, side, 1), nn.Conv2d(side, side, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.BN(x))
        along_width = self.proj_h(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        along_height = self.proh_w(x.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        return self.fuse(torch.cat((x, along_width, along_height), dim=1))


class ChannelsFirst(nn.Sequential):
    """LayerNorm and a feed-forward layer on a map whose channels are first."""

    def __init__(self, dim: int, hidden: int) -> None:
        net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Identity(), nn.Linear(hidden, dim))
        super().__init__(nn.Identity(), nn.LayerNorm(dim), nn.ModuleDict({"net": net}))

    def forward(self, x: Tensor) -> Tensor:
        return self[2]["net"](self[1](x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class SMLPNet(nn.Module):
    """T by default."""

    def __init__(self, dim: int = 80, depths: tuple[int, ...] = (2, 8, 14, 2), classes: int = 1000) -> None:
        super().__init__()
        widths, side = [dim * 2**stage for stage in range(4)], 56
        patches = [nn.Conv2d(3, widths[0], 4, stride=4, bias=False)]
        patches += [nn.Conv2d(i, o, 2, stride=2, bias=False) for i, o in itertools.pairwise(widths)]
        self.to_patch_embedding = nn.ModuleList(nn.Sequential(patch) for patch in patches)
        self.depths, self.token_mix, self.channel_mix = depths, nn.ModuleList(), nn.ModuleList()
        for stage, depth in enumerate(depths):
            for _ in range(depth):
                local = nn.ModuleDict({"conv_merge": LocalMix(widths[stage])})
                self.token_mix.append(nn.Sequential(local, RowsAndColumns(widths[stage], side >> stage)))
                self.channel_mix.append(ChannelsFirst(widths[stage], 3 * widths[stage]))
        self.batch_norm, self.mlp_head = nn.BatchNorm2d(widths[-1]), nn.Sequential(nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        number = 0
        for embed, depth in zip(self.to_patch_embedding, self.depths, strict=True):
            x = embed(x)
            for _ in range(depth):
                mix = self.token_mix[number]
                x = x + mix[1](mix[0]["conv_merge"](x))
                x = x + self.channel_mix[number](x)
                number += 1
        return self.mlp_head(self.batch_norm(x).mean((2, 3)))
