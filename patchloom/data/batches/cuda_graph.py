"""Many small operations on a CUDA device in one launch.

The host takes some microseconds to launch each; with small tensors the device is done sooner and waits. The recorded
operations are the same ones, so the results are the same to the bit. torch.cuda.make_graphed_callables does this for
training, and hands out memory that its next call overwrites.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def record(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """`function` for inputs of these shapes, as a CUDA graph; it must not draw random numbers or wait for the device.

    The graph keeps the memory of one call.
    """
    function(*inputs)  # constants and plans that are made once must not be recorded
    own = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function(*own)

    def replay(*inputs: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return tuple(result.clone() for result in results)

    return replay
