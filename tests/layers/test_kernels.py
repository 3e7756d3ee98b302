"""Kernels, and layers with them, equal their plain forms, gradients too: on a GPU, or interpreted on a CPU."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

# Triton reads TRITON_INTERPRET when a kernel is defined, so what is tested runs in a process of its own.
CODE = """
import sys
import torch
from torch.nn import functional as F
from patchloom.layers import attention, convolution, kernels, mlp, norms, residual, sparse_mlp, token_mixing
from patchloom.layers.kernels import batch_norm_gelu, block_maxima, gated_linear, gelu, gelu_mlp, layer_norm
from patchloom.layers.kernels import linear_gelu
from patchloom.layers.kernels import rows_and_columns, talking_attention, talking_heads, token_mlp
from patchloom.layers.kernels import token_mixing as mixing

DEVICE = sys.argv[1]
torch.manual_seed(0)


def leaves(low, *shapes):
    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [each.to(low).requires_grad_() for each in tensors]


def same(kernel, plain, inputs, tolerance, with_gradients=True):
    actual, expected = kernel(*inputs), plain(*[each.float() for each in inputs])
    actual, expected = [each if isinstance(each, tuple) else (each,) for each in (actual, expected)]
    back = [torch.randn_like(one).float() for one in actual] if with_gradients else []  # as rounded as what it meets
    inputs = inputs if with_gradients else []
    pairs = [*zip(actual, expected, strict=True)]
    if with_gradients:
        own = torch.autograd.grad(actual, inputs, [each.to(other.dtype) for each, other in zip(back, actual)])
        pairs += zip(own, torch.autograd.grad(expected, inputs, back), strict=True)
    for one, other in pairs:
        difference, size = (one.float() - other.float()).norm(), other.float().norm()
        assert difference <= tolerance * size + 1e-6, (kernel, [tuple(each.shape) for each in inputs], difference, size)


def heads(logits, before, idle, after, bias):
    return talking_heads.plain(logits, before, after, bias) + 0 * idle.sum()


def attended(qkv, before, after, bias):
    b, t, c = qkv.shape
    q, k, v = qkv.view(b, t, 3, len(before), -1).permute(2, 0, 3, 1, 4)
    weights = talking_heads.plain(q * q.shape[-1] ** -0.5 @ k.transpose(2, 3), before, after, bias)
    return (weights @ v).transpose(1, 2).flatten(2)


def concat_plain(maps, rows, row_bias, columns, column_bias):
    mixed = torch.einsum("vw,bhwc->bhvc", rows, maps) + row_bias[:, None]
    return torch.cat([maps, mixed, torch.einsum("gh,bhwc->bgwc", columns, maps) + column_bias[:, None, None]], dim=-1)


# Interpreted products of two bytes a number are wrong in Triton, so they are tried on a GPU alone.
for low, tolerance in ((torch.float32, 1e-5), *([(torch.bfloat16, 1e-2)] if DEVICE == "cuda" else [])):
    for b, h, t, n in ((2, 4, 5, 7), (1, 3, 17, 19)):
        tensors = leaves(low, (b, h, t, n), (h, h), (h,), (h, h), (h,))
        for num_keys in (n, n - 3):
            kernel = lambda *x: talking_heads.talking_heads(*x, num_keys)
            same(kernel, lambda x, *w: F.pad(heads(x[..., :num_keys], *w), (0, n - num_keys)), tensors, tolerance)
    for b, n, m, c in ((3, 7, 7, 130), (1, 19, 5, 3), (2, 56, 1, 16)):
        tensors = leaves(low, (b, n, c), (m, n), (m,))
        same(mixing.mixed, lambda x, w, s: w @ x + s[:, None], tensors, tolerance)
    for b, n, c in ((2, 7, 130), (1, 66, 24)):
        tensors = [each.detach() for each in leaves(low, (b, n, c), (n, n), (c,), (n, c))]
        plain = lambda x, w, scale, shift: x + scale * (w @ x + shift)
        same(mixing.mixed_and_added, plain, tensors, tolerance, with_gradients=False)
    for b, n, c, d, how in ((2, 5, 7, 9, "none"), (1, 17, 130, 70, "tanh")):
        tensors = leaves(low, (b, n, c), (b, n, c), (d, n), (d,), (n, d), (n,))
        plain = lambda to, x, u, s, v, t: to + v @ F.gelu(u @ x + s[:, None], approximate=how) + t[:, None]
        same(lambda *x: token_mlp.token_mlp(*x, how == "tanh"), plain, tensors, tolerance)
    for b, n, c, d, e, how in ((2, 5, 7, 9, 3, "none"), (1, 77, 12, 130, 20, "tanh"), (3, 33, 4, 260, 8, "none")):
        tensors = leaves(low, (b, n, c), (d, c), (d,), (e, d), (e,))
        plain = lambda x, u, s, v, t: F.linear(F.gelu(F.linear(x, u, s), approximate=how), v, t)
        same(lambda *x: gelu_mlp.GeluMLP.apply(*x, how == "tanh"), plain, tensors, tolerance)
    tensors = [each.detach() for each in leaves(low, (2, 3, 5), (7, 5), (7,))]
    same(linear_gelu.linear_gelu, lambda x, w, s: F.gelu(F.linear(x, w, s)), tensors, 1e-2, with_gradients=False)
    for b, t, h, d in ((2, 5, 4, 6), (1, 19, 3, 50), (1, 33, 8, 16)):
        tensors = [each.detach() for each in leaves(low, (b, t, 3 * h * d), (h, h), (h, h), (h,))]
        same(talking_attention.talking_attention, attended, tensors, tolerance, with_gradients=False)
    for b, h, w, c in ((2, 3, 5, 4), (1, 17, 9, 130)):
        tensors = [each.detach() for each in leaves(low, (b, h, w, c), (w, w), (w,), (h, h), (h,))]
        same(rows_and_columns.concat_rows_and_columns, concat_plain, tensors, tolerance, with_gradients=False)
    for b, p, c, d in ((2, 5, 7, 9), (3, 70, 130, 140)):
        tensors = [each.detach() for each in leaves(low, (b, p, d), (b, p, c), (b, c), (d, c), (d,))]
        plain = lambda to, x, gate, w, s: to + F.linear(x * gate[:, None], w, s)
        same(gated_linear.gated_linear, plain, tensors, tolerance, with_gradients=False)
        tensors = [each.detach() for each in leaves(low, (b, p, c), (c,))]
        plain = lambda x, s: (F.gelu(x + s), F.gelu(x + s).mean(dim=1))
        same(gelu.gelu_and_mean, plain, tensors, tolerance, with_gradients=False)
        tensors = [each.detach() for each in leaves(low, (b, p, c), (c,), (c,))]
        same(gelu.affine_gelu, lambda x, w, s: F.gelu(w * x + s), tensors, tolerance, with_gradients=False)
        plain = lambda x, w, s: F.layer_norm(x, (c,), w, s, 1e-5)
        same(lambda *x: layer_norm.layer_norm(*x, 1e-5), plain, tensors, tolerance, with_gradients=False)
    for shape in ((2, 5, 7, 6), (4, 8, 8, 40), (3, 1, 67, 130)):
        x, *weights = leaves(low, shape, shape[-1:], shape[-1:])
        x = (3 + x).detach().requires_grad_()
        plain = lambda x, w, s: F.gelu(F.batch_norm(x.flatten(0, 2), None, None, w, s, True)).view_as(x)
        same(lambda *x: batch_norm_gelu.batch_norm_gelu(*x, 1e-5)[0], plain, [x, *weights], 2 * tolerance)
        actual = batch_norm_gelu.batch_norm_gelu(x, *weights, 1e-5)[1:]
        for one, other in zip(actual, (x.float().mean((0, 1, 2)), x.float().var((0, 1, 2), correction=0)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    tensors = [each.detach() for each in leaves(low, (2, 3, 4, 9))]
    same(lambda x: layer_norm.layer_norm(x, None, None, 1e-6), lambda x: F.layer_norm(x, (9,), eps=1e-6), tensors,
         tolerance, with_gradients=False)


def with_and_without(layer, x, tolerance, gradients):
    results = []
    for choice in (False, True):
        for module in (kernels, attention, mlp, norms, token_mixing):
            module.usable = lambda x: choice
        with torch.set_grad_enabled(gradients):
            out = layer(x)
        also = torch.autograd.grad(out.square().sum(), list(layer.parameters())) if gradients else ()
        results.append([out, *also])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


tokens = torch.randn(2, 6, 12, device=DEVICE)
talking = attention.TalkingHeadsAttention(12, 3).to(DEVICE)
with_and_without(talking, tokens, 1e-4, True)
with_and_without(talking, tokens, 1e-4, False)
with_and_without(norms.LayerNorm(12).to(DEVICE), tokens, 1e-4, False)
mixer = residual.Residual(torch.nn.LayerNorm(12), token_mixing.TokenMLP((2, 3), 10)).to(DEVICE)
with_and_without(mixer, tokens, 1e-4, True)
with_and_without(token_mixing.TokenLinear((6,)).to(DEVICE), tokens, 1e-4, True)
for name in ("gelu", "gelu_tanh"):
    with_and_without(mlp.MLP(12, 20, activation=name).to(DEVICE), tokens, 1e-4, True)
branches = [token_mixing.TokenLinear((2, 3)), mlp.MLP(12, 4)]
for each in branches:
    scaled = residual.Residual(norms.Affine(12), each, torch.nn.Parameter(torch.rand(12) + 0.1)).to(DEVICE)
    with_and_without(scaled, tokens, 1e-4, True)
branches = [residual.Residual(norms.Affine(12), each, torch.nn.Parameter(torch.rand(12) + 0.1)) for each in branches]
block = residual.Block(tokens=branches[0], channels=branches[1]).to(DEVICE).eval()
expected = block(tokens)
for each in (*branches, block):
    each.absorb_()
assert block.channels.mix.fc2.bias is None
torch.testing.assert_close(block(tokens), expected, rtol=1e-4, atol=1e-5)
with_and_without(block, tokens, 1e-2, False)

maps = torch.randn(2, 3, 5, 12, device=DEVICE)
conv = residual.Residual(norms.LayerNorm(12), convolution.PatchConv(12), torch.nn.Parameter(torch.rand(12)))
units = [convolution.Conv3x3(12, depthwise=True, bias=False), sparse_mlp.SparseMLP(12, (3, 5))]
units = sparse_mlp.NormActMixes(*(sparse_mlp.NormActMix(12, each) for each in units))
sparse = residual.Residual(torch.nn.Identity(), units)
statistics = []
for choice in (False, True):
    norms.usable = lambda x: choice
    norm = norms.BatchNorm(12).to(DEVICE)
    norm.activated(maps)
    norm.activated(2 * maps + 1)
    statistics.append([each.float() for each in norm.buffers()])
for one, other in zip(*statistics, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
with_and_without(sparse_mlp.NormActMix(12, torch.nn.Linear(12, 3)).to(DEVICE), maps, 1e-3, True)
for layer in (conv, sparse):
    layer.to(DEVICE)(maps)  # statistics
    expected = layer.eval()(maps)
    for each in reversed(list(layer.modules())):
        if hasattr(each, "absorb_"):
            each.absorb_()
    torch.testing.assert_close(layer(maps), expected, rtol=1e-4, atol=1e-5)
    with_and_without(layer, maps, 1e-2, False)

for q, n, c in ((1, 256, 64), (5, 4096, 128), (130, 384, 192)):
    queries, vectors = (torch.randn(rows, c, device=DEVICE).half() for rows in (q, n))
    for count in (n, n - 1, n - 70):  # the last blocks are not full, or hold none
        products = queries.float() @ vectors.float().T
        products[:, count:] = float("-inf")
        actual = block_maxima.block_maxima(queries, vectors, count)
        torch.testing.assert_close(actual, products.view(q, -1, 64).amax(dim=2), rtol=1e-4, atol=1e-3)
print("all equal")
"""


def test_kernels_and_layers_with_them_equal_the_plain_forms() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATCHLOOM_KERNELS": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", CODE, device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "all equal\n", done.stderr[-2000:]
