"""Capture of many small operations as one CUDA graph.

Launching an operation takes the host some microseconds, which is longer than the GPU needs for small tensors; a graph
is launched once. The captured operations are the same, so results are equal bit for bit.
torch.cuda.make_graphed_callables does this for
training, but returns memory that its next call overwrites. Loaders and `models/cuda_graphs.py` share this file.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def capture(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Return `function` as a CUDA graph for inputs of these shapes. It must not draw random numbers or synchronize.

    The graph keeps the memory of one call.
    """
    function(*inputs)  # constants and plans that are created once must not be captured
    buffers = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function(*buffers)

    def replay(*inputs: Tensor) -> tuple[Tensor, ...]:
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        return tuple(result.clone() for result in results)

    return replay
