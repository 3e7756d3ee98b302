"""Mixing along sentences: ResMLP's matrix over positions, self-attention and cross-attention.

Letters: B sentences, T positions, S source positions, C channels, H heads, d channels per head, N rows that are decoded
together. Sentences start at position 0 and are padded at the end. Every mixer has two methods: `forward` takes whole
sentences; `step` takes the next position of N rows, with a cache of the previous positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.attention import Attend, Attention
from patchloom.layers.residual import Branch
from patchloom.layers.token_mixing import AcrossPositions, mix_tokens


class StepCache:
    """States of the positions decoded so far, in a buffer for all positions."""

    def __init__(self, buffer: Tensor, rows: int, positions: int, *, rows_first: bool) -> None:
        # `rows_first`: the buffer is (rows, positions, channels) rather than (positions, rows, channels).
        self.positions, self.rows_first = positions, rows_first
        self.channels = buffer.numel() // (rows * positions)
        self._take(buffer, rows)

    def _take(self, buffer: Tensor, rows: int) -> None:
        self.buffer = buffer
        shape = (rows, self.positions) if self.rows_first else (self.positions, rows)
        self.states = buffer[: rows * self.positions * self.channels].view(*shape, self.channels)

    def reorder(self, rows: Tensor, length: int, spare: Tensor) -> Tensor:
        """Replace row i by row rows[i], writing to the buffer `spare`. Returns the buffer that is now free.

        `length` is the number of filled positions.
        """
        buffer, states = self.buffer, self.states
        self._take(spare, rows.shape[0])
        if self.rows_first:
            torch.index_select(states[:, :length], 0, rows, out=self.states[:, :length])
        else:
            torch.index_select(states[:length], 1, rows, out=self.states[:length])
        return buffer


class PositionLinear(AcrossPositions):
    """One matrix across positions, shared by all channels. Shorter sentences use its upper left part.

    With `causal` the matrix is triangular: position t reads positions 0 to t.
    """

    cached = 1  # vectors per position in the cache

    def __init__(self, max_length: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.weight = nn.Parameter(torch.empty(max_length, max_length))
        self.bias = nn.Parameter(torch.zeros(max_length))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """(B, T, C), (B, T) False at padding → (B, T, C)."""
        length = x.shape[1]
        weight = self.weight[:length, :length]
        # In every layer, because norms, biases and MLPs make padding nonzero again.
        x = x.masked_fill(~keep.unsqueeze(-1), 0.0)
        y = mix_tokens(weight.tril() if self.causal else weight, x, self.bias[:length])
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def start(self, buffer: Tensor, rows: int, positions: int) -> StepCache:
        """Return an empty cache. Positions come first, so that a step is one product."""
        return StepCache(buffer, rows, positions, rows_first=False)

    def step(self, x: Tensor, cache: StepCache, position: int) -> Tensor:
        """Add (N, C) at `position` to the cache and return the mixed (N, C)."""
        cache.states[position] = x
        past = cache.states[: position + 1].flatten(1)  # (t, N·C)
        return torch.addmv(self.bias[position], past.T, self.weight[position, : position + 1]).view_as(x)


class SequenceAttention(Attention):
    """Multi-head self-attention of a sentence. With `causal`, a position attends to itself and earlier ones."""

    cached = 2  # vectors per position in the cache: key and value

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout=dropout)
        self.causal = causal

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, C), (B, T) False at padding → (B, T, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        # Padding comes after all words, so a causal mask hides it too.
        mask = None if self.causal else keep[:, None, None]  # (B, 1, 1, T)
        y = self.proj(self.attend(q, k, v, mask=mask, causal=self.causal))
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def start(self, buffer: Tensor, rows: int, positions: int) -> StepCache:
        """Return an empty cache."""
        return StepCache(buffer, rows, positions, rows_first=True)

    def step(self, x: Tensor, cache: StepCache, position: int) -> Tensor:
        """Add (N, C) at `position` to the cache and return the mixed (N, C)."""
        q, keys_values = self.qkv(x).split([x.shape[1], 2 * x.shape[1]], dim=1)
        cache.states[:, position] = keys_values
        past = cache.states[:, : position + 1].view(x.shape[0], position + 1, 2, self.heads, -1)
        k, v = past.permute(2, 0, 3, 1, 4)  # (N, H, t, d) each
        return self.proj(self.attend(q.view(x.shape[0], self.heads, 1, -1), k, v).squeeze(1))


class AttendedSource(NamedTuple):
    """Keys and values of a source sentence for cross-attention."""

    k: Tensor  # (B, H, S, d)
    v: Tensor  # (B, H, S, d)
    mask: Tensor | None  # (B, 1, 1, S), False at padding; None without padding


class CrossAttention(Attend):
    """Multi-head attention of one sentence to another."""

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def prepare(self, states: Tensor, mask: Tensor | None) -> AttendedSource:
        """Return keys and values of the source sentence, (B, S, C)."""
        k, v = self.kv(states).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return AttendedSource(k, v, mask)

    def forward(self, x: Tensor, source: AttendedSource) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        q = self.q(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, T, d)
        y = self.proj(self.attend(q, source.k, source.v, mask=source.mask))
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def step(self, x: Tensor, source: AttendedSource) -> Tensor:
        """(N, C) → (N, C). Rows of the same sentence are adjacent and share its keys and values."""
        return self(x.view(source.k.shape[0], -1, x.shape[1]), source).flatten(0, 1)


class SequenceResidual(Branch):
    """x + scale · mix(norm(x), …): a branch whose mixer takes further inputs."""

    def forward(self, x: Tensor, *inputs: object) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.add_to(x, self.mix(self.norm(x), *inputs))

    def step(self, x: Tensor, *inputs: object) -> Tensor:
        """(N, C) → (N, C)."""
        return self.add_to(x, self.mix.step(self.norm(x), *inputs))  # type: ignore[operator]


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (N, C) · weightᵀ (C, V): (N, V), for small N and large V.

    On a CPU, a product with two to eight rows is twice as fast with the large matrix on the left (32,768 × 512 on one
    core: 5 ms instead of 10), and one row is faster as two (3 ms instead of 6).
    """
    rows = x.shape[0]
    if rows > 8 or x.device.type != "cpu":
        return F.linear(x, weight)
    several = x if rows > 1 else x.repeat(2, 1)
    return (weight @ several.T).T[:rows].contiguous()
