"""Self-attention (ViT), talking-heads attention (CaiT), and class attention (CaiT, PatchConvNet).

Letters: B images, N patches, T class tokens or queries, H heads, d channels per head, C = H·d.
Fused kernels do not return attention weights; inside `record_attention` they are computed and collected.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.kernels import aligned, usable, usable_without_gradients
from patchloom.layers.linear import fold_input_, fold_output_
from patchloom.layers.token_mixing import TokenLinear

MOST_KEYS = 1024  # limit of the kernel `talking_heads`
MOST_TOKENS = 256  # limit of the kernel `talking_attention`


class Attend(nn.Module):
    """softmax(QKᵀ/√d)·V, fused unless the weights are being recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """(B, H, T, d), (B, H, N, d), (B, H, N, d) → (B, T, H·d).

        `mask`, broadcastable to (B, H, T, N), is True where a query may attend. `causal` masks keys after the query.
        """
        if self.recorded is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        else:
            logits = self.logits(q, k)
            if causal:
                mask = logits.new_ones(logits.shape[-2:], dtype=torch.bool).tril()
            if mask is not None:
                logits = logits.masked_fill(~mask, -torch.inf)
            weights = logits.softmax(dim=-1)
            self.recorded.append(weights.detach())
            out = weights @ v
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    def logits(q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, d), (B, H, N, d) → (B, H, T, N)."""
        return (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)


class Attention(Attend):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        b, n, c = tokens.shape
        q, k, v = self.qkv(tokens).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        out = self.proj(self.attend(q, k, v))
        return F.dropout(out, self.dropout) if self.dropout and self.training else out

    def absorb_input_(self, weight: Tensor, bias: Tensor) -> Tensor | None:
        """Fold a preceding weight · x + bias. Returns the factor to apply after the layer."""
        return fold_input_(self.qkv, weight, bias)

    def absorb_output_(self, scale: Tensor) -> None:
        """Fold a following scale · x."""
        fold_output_(self.proj, scale)


class TalkingHeadsAttention(Attention):
    """Attention whose heads are mixed by a matrix before and after the softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.before = TokenLinear((heads,))
        self.after = TokenLinear((heads,))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        before, after = self.before, self.after
        few = tokens.shape[1] <= MOST_TOKENS and self.recorded is None
        if few and usable_without_gradients(tokens, before.weight):
            from patchloom.layers.kernels.talking_attention import talking_attention

            return self.proj(talking_attention(self.qkv(tokens), before.weight, after.weight, after.bias))
        return super().forward(tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        """(B, H, T, d), (B, H, N, d), (B, H, N, d) → (B, T, H·d), without masks."""
        t, n = q.shape[2], k.shape[2]
        if kernel := usable(q) and n <= MOST_KEYS:
            q, k, v = (aligned(each, -2) for each in (q, k, v))
        weights = self._by_kernel(self.logits(q, k), n) if kernel else self._weights(self.logits(q, k))
        if self.recorded is not None:
            self.recorded.append(weights[:, :, :t, :n].detach())
        return (weights @ v)[:, :, :t].transpose(1, 2).flatten(2)

    def _weights(self, logits: Tensor) -> Tensor:
        """Mix heads, softmax, mix heads: (B, H, T, N) → (B, H, T, N)."""
        weights = self.before(logits.flatten(2)).view_as(logits).softmax(dim=-1)
        return self.after(weights.flatten(2)).view_as(weights)

    def _by_kernel(self, logits: Tensor, num_keys: int) -> Tensor:
        """Return the same for the first `num_keys` keys; the others are padding."""
        from patchloom.layers.kernels.talking_heads import talking_heads

        before, after = self.before, self.after
        return talking_heads(logits, before.weight, before.bias, after.weight, after.bias, num_keys)


class ClassAttention(Attend):
    """Attention of class tokens over themselves and the patches, or over the patches alone."""

    def __init__(self, dim: int, heads: int, *, class_in_keys: bool = True) -> None:
        super().__init__()
        self.heads, self.class_in_keys = heads, class_in_keys
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, classes: int) -> Tensor:
        """(B, T+N, C), class tokens first → (B, T, C)."""
        keys = tokens if self.class_in_keys else tokens[:, classes:]
        q = self._split(self.q(tokens[:, :classes]))
        return self.proj(self.attend(q, self._split(self.k(keys)), self._split(self.v(keys))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, ·, d)

    def absorb_input_(self, weight: Tensor, bias: Tensor) -> Tensor | None:
        """Fold a preceding weight · x + bias. Returns the factor to apply after the layer."""
        fold_input_(self.q, weight, bias)
        fold_input_(self.k, weight, bias)
        return fold_input_(self.v, weight, bias)

    def absorb_output_(self, scale: Tensor) -> None:
        """Fold a following scale · x."""
        fold_output_(self.proj, scale)


@contextmanager
def record_attention(network: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the attention weights of every layer while the context is open.

    Yields a dict that is filled as the network runs: layer name → list of (B, heads, queries, keys), one per call.
    """
    layers = {name: module for name, module in network.named_modules() if isinstance(module, Attend)}
    maps: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, module in layers.items():
        module.recorded = maps[name]
    try:
        yield maps
    finally:
        for module in layers.values():
            module.recorded = None
