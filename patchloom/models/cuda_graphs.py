"""Networks as captured CUDA graphs: the host launches one graph instead of hundreds of kernels.

Between small kernels a GPU waits for the host. A captured pass has the same kernels and so the same results. Every
replay reads and writes the same memory, including the network's weights, which may change between replays.
torch.cuda.make_graphed_callables is not used, because its capture draws random numbers, changes running statistics and
blocks the device for other threads, and its replay overwrites what a second forward pass still needs.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.batches.cuda_graph import capture
from patchloom.models.compiled import NetworkWrapper

SHAPES = 8  # image shapes for which inference is captured; each holds the memory of one pass
ROUNDS = 2  # warm-up passes before a capture, for compilation, tuning and lazy allocation
# Other threads may use the device during a capture.
CAPTURE: Any = {"capture_error_mode": "thread_local"}


class CapturedNetwork(NetworkWrapper):
    """A network that replays captured CUDA graphs: one for training, and one per image shape for inference.

    The network is called directly if a replay is not possible: on a CPU; for training with images of another shape
    than the first; for a second forward pass before the backward pass of the first, whose memory it would overwrite;
    and if the network synchronizes with the device.

    Outputs with gradients and the gradients themselves are in graph memory, which the next pass overwrites: release
    them (zero_grad) before it.
    """

    def __init__(self, called: nn.Module) -> None:
        # `called` is a network or a wrapper of one, such as a compiled network.
        super().__init__(getattr(called, "_orig_mod", called))
        self._called = called.__call__  # a bound method: as a submodule, its weights would be listed twice
        self._replays: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
        self._pass: _Pass | None = None
        self._captures = True

    def forward(self, images: Tensor, **options: Any) -> Any:
        """Call the network."""
        captures = images.is_cuda and self._captures and not images.requires_grad
        replay = self._replay_of(images, options) if captures else None
        return self._called(images, **options) if replay is None else replay(images)

    def _replay_of(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        """Return the replay for such images, capturing it on first use, or None to call the network directly."""
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in self._orig_mod.parameters())
        try:
            return (self._with_gradients if learns else self._no_gradients)(images, options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captures = False
            first = str(error).partition("\n")[0]
            warnings.warn(
                f"the network cannot be captured as a CUDA graph and runs kernel by kernel: {first}", stacklevel=2
            )
            return None

    def _with_gradients(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        if self._pass is None:
            self._pass = _Pass(self._called, self._orig_mod, images, options)
        return self._pass if self._pass.fits(images, options) else None

    def _no_gradients(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        key = (images.shape, images.dtype, self._orig_mod.training, _precision())
        if options or (key not in self._replays and len(self._replays) == SHAPES):
            return None
        if key not in self._replays:
            called = _no_cached_casts(self._called)
            with torch.inference_mode(False), torch.no_grad():
                self._replays[key] = capture(lambda x: (called(x),), images.clone())
        replay = self._replays[key]
        return lambda x: replay(x)[0]


class _Pass:
    """A captured forward and backward pass of a network."""

    def __init__(self, called: Callable[..., Any], network: nn.Module, images: Tensor, options: dict[str, Any]) -> None:
        self.network, self.training, self.options = network, network.training, options
        self.precision = _precision()
        self.parameters = [each for each in network.parameters() if each.requires_grad]
        self.images = images.detach().clone()
        self.waits: weakref.ref[_Waiting] | None = None
        saved = [(buffer, buffer.clone()) for buffer in network.buffers()]
        try:
            with torch.random.fork_rng(devices=[images.device]):
                self._capture(_no_cached_casts(called))
        finally:
            for buffer, before in saved:  # running statistics
                buffer.copy_(before)

    def _capture(self, called: Callable[..., Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                outputs = _as_tuple(called(self.images, **self.options))
                self._gradients(outputs, tuple(torch.zeros_like(each) for each in outputs))
            del outputs
        torch.cuda.synchronize()
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, stream=stream, **CAPTURE):
            out = called(self.images, **self.options)
        outputs = _as_tuple(out)
        self.output_gradients = tuple(torch.empty_like(each) for each in outputs)
        with torch.cuda.graph(self.backward_graph, stream=stream, pool=self.forward_graph.pool(), **CAPTURE):
            self.gradients = self._gradients(outputs, self.output_gradients)
        self.is_single, self.out = isinstance(out, Tensor), tuple(each.detach() for each in outputs)

    def _gradients(self, out: tuple[Tensor, ...], output_gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(out, self.parameters, output_gradients, allow_unused=True)

    def fits(self, images: Tensor, options: dict[str, Any]) -> bool:
        """Return whether a replay equals a call, and no backward pass of the last replay is pending."""
        waiting = self.waits() if self.waits else None
        same = images.shape == self.images.shape and images.dtype == self.images.dtype and options == self.options
        same = same and self.network.training == self.training and _precision() == self.precision
        return same and (waiting is None or waiting.done)

    def __call__(self, images: Tensor) -> Any:
        waiting = _Waiting()
        self.waits = weakref.ref(waiting)
        out = _Replay.apply(self, waiting, images, *self.parameters)
        return out[0] if self.is_single else out


class _Waiting:
    """Whether a backward pass has run. This object lives as long as the backward pass is possible."""

    done = False


class _Replay(torch.autograd.Function):
    """The captured passes as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, captured: _Pass, waiting: _Waiting, images: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the network, in graph memory."""
        del parameters
        ctx.captured, ctx.waiting = captured, waiting
        captured.images.copy_(images)
        captured.forward_graph.replay()
        return tuple(each.detach() for each in captured.out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the parameters, in graph memory."""
        captured: _Pass = ctx.captured
        for own, grad in zip(captured.output_gradients, gradients, strict=True):
            own.copy_(grad)
        captured.backward_graph.replay()
        ctx.waiting.done = True
        return None, None, None, *(each if each is None else each.detach() for each in captured.gradients)


def _precision() -> torch.dtype | None:
    # The dtype of autocast, or None if it is off.
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _as_tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else out


def _no_cached_casts(called: Callable[..., Any]) -> Callable[..., Any]:
    """Cast weights at every call under autocast: a cast cached before the capture would never be updated."""

    def call(images: Tensor, **options: Any) -> Any:
        with torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            return called(images, **options)

    return call
