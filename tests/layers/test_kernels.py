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
from patchloom.layers import attention
from patchloom.layers.kernels import talking_heads

DEVICE = sys.argv[1]
torch.manual_seed(0)


def leaves(low, *shapes):
    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [each.to(low).requires_grad_() for each in tensors]


def same(kernel, plain, inputs, tolerance):
    found, expected = kernel(*inputs), plain(*[each.float() for each in inputs])
    found, expected = [each if isinstance(each, tuple) else (each,) for each in (found, expected)]
    back = [torch.randn_like(each) for each in expected]
    own = torch.autograd.grad(found, inputs, [each.to(other.dtype) for each, other in zip(back, found)])
    pairs = [*zip(found, expected, strict=True), *zip(own, torch.autograd.grad(expected, inputs, back), strict=True)]
    for one, other in pairs:
        difference, size = (one.float() - other.float()).norm(), other.float().norm()
        assert difference <= tolerance * size + 1e-6, (kernel, [tuple(each.shape) for each in inputs], difference, size)


def heads(logits, before, idle, after, bias):
    return talking_heads.plain(logits, before, after, bias) + 0 * idle.sum()


# Interpreted products of two bytes a number are wrong in Triton, so they are tried on a GPU alone.
for low, tolerance in ((torch.float32, 1e-5), *([(torch.bfloat16, 1e-2)] if DEVICE == "cuda" else [])):
    for b, h, t, n in ((2, 4, 5, 7), (1, 3, 17, 19)):
        given = leaves(low, (b, h, t, n), (h, h), (h,), (h, h), (h,))
        same(talking_heads.talking_heads, heads, given, tolerance)

layer = attention.TalkingHeadsAttention(12, 3).to(DEVICE)
tokens = torch.randn(2, 5, 12, device=DEVICE)
results = []
for choice in (False, True):
    attention.usable = lambda x: choice
    out = layer(tokens)
    results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
for one, other in zip(*results, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
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
