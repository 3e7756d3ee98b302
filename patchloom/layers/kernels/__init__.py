"""Triton kernels for what PyTorch does in several passes over memory, each beside the plain form that it equals.

A layer asks `usable(x)` and otherwise takes its plain path, which stays the reference on every device. A kernel is here
where it was measured faster (benchmarks/LOG.md). Without a GPU tests run them in Triton's interpreter.
"""

from patchloom.layers.kernels.available import usable as usable
