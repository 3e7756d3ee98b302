"""Networks as captured CUDA graphs: the host launches one graph instead of hundreds of kernels.

Between small kernels a GPU waits for the host. A captured pass has the same kernels and so the same results. Every
replay reads and writes the same memory, including the network's weights, which may change between replays.
torch.cuda.make_graphed_callables is not used, because its capture draws random numbers, changes running statistics and
blocks the device for other threads, and its replay overwrites what a second forward pass still needs.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchloom.data.batches.cuda_graph import capture
from patchloom.models.compiled import NetworkWrapper

SHAPES = 8  # image shapes for which inference is captured; each holds the memory of one pass
PASSES = 4  # of training that are captured: views of several sizes, or several forward passes before the backward ones
ROUNDS = 2  # warm-up passes before a capture, for compilation, tuning and lazy allocation
# Other threads may use the device during a capture.
CAPTURE: Any = {"capture_error_mode": "thread_local"}


class CapturedNetwork(NetworkWrapper):
    """A network that replays captured CUDA graphs: a few for training, and one per image shape for inference.

    The network is called directly if a replay is not possible: on a CPU; if more than `PASSES` forward passes of
    training differ in shape or wait for their backward pass, whose memory another replay would overwrite; and if the
    network synchronizes with the device.

    Outputs with gradients and the gradients themselves are in graph memory, which the next pass overwrites: release
    them (zero_grad) before it. With `accumulates`, gradients are copied, so that those of several passes add up.
    """

    def __init__(self, called: nn.Module, *, accumulates: bool = False) -> None:
        # `called` is a network or a wrapper of one, such as a compiled network.
        super().__init__(getattr(called, "_orig_mod", called))
        # Bound methods: as a submodule, the wrapper's weights would be listed twice. `_call_impl` is `__call__` without
        # what `capture_calls_` puts in its place.
        self._calls = {"forward": called.__call__ if called is not self._orig_mod else called._call_impl}
        self._accumulates = accumulates
        self._replays: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
        self._passes: list[_Pass] = []
        self._later: list[tuple[_Call, Tensor, dict[str, Any]]] = []
        self._captures = True

    def forward(self, images: Tensor, **options: Any) -> Any:
        return self._run("forward", images, options)

    def features(self, images: Tensor) -> Any:
        return self._run("features", images, {})

    def forward_resampled(self, images: Tensor) -> Any:
        """Call the network's `forward_resampled`, for images of another size than its own."""
        return self._run("forward_resampled", images, {})

    def _run(self, method: str, images: Tensor, options: dict[str, Any]) -> Any:
        called = self._calls.get(method) or getattr(self._orig_mod, method)
        captures = images.is_cuda and self._captures and not images.requires_grad
        replay = self._replay_of(_Call(method, called), images, options) if captures else None
        return called(images, **options) if replay is None else replay(images)

    def _replay_of(self, call: "_Call", images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        """Return the replay for such images, capturing it on first use, or None to call the network directly."""
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in self._orig_mod.parameters())
        try:
            return (self._with_gradients if learns else self._no_gradients)(call, images, options)
        except RuntimeError as error:  # which an OutOfMemoryError is, too: a captured pass keeps its memory
            self._captures = False
            self._passes.clear()
            self._later.clear()
            self._replays.clear()
            first = str(error).partition("\n")[0]
            warnings.warn(
                f"the network cannot be captured as a CUDA graph and runs kernel by kernel: {first}", stacklevel=2
            )
            return None

    def _with_gradients(self, call: "_Call", images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        # A backward pass that is still possible ties the weights to the stream of its forward pass, so that nothing can
        # be captured: a second pass is called directly in the first step, and captured before the second.
        waits = any(each.waits_for_backward for each in self._passes)
        while self._later and not waits:
            self._add_pass(*self._later.pop())
        free = next((each for each in self._passes if each.fits(call, images, options)), None)
        if free is None and len(self._passes) + len(self._later) < PASSES:
            if waits:
                self._later.append((call, images.detach().clone(), options))
            else:
                free = self._add_pass(call, images, options)
        return free

    def _add_pass(self, call: "_Call", images: Tensor, options: dict[str, Any]) -> "_Pass":
        self._passes.append(_Pass(call, self._orig_mod, images, options, accumulates=self._accumulates))
        return self._passes[-1]

    def _no_gradients(self, call: "_Call", images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        key = (call.method, images.shape, images.dtype, self._orig_mod.training, _precision())
        if options or (key not in self._replays and len(self._replays) == SHAPES):
            return None
        if key not in self._replays:
            self._replays[key] = _inference(_no_cached_casts(call.called), images)
        return self._replays[key]


def capture_calls_(network: nn.Module) -> None:
    """Make calls of `network`, which others hold and call, replay captured graphs."""
    network._compiled_call_impl = CapturedNetwork(network).forward


def capture_method_(network: nn.Module, method: str, *, accumulates: bool = False) -> None:
    """Make a method of `network` that maps images to tensors replay captured graphs."""
    captured = CapturedNetwork(network, accumulates=accumulates)
    captured._calls[method] = getattr(network, method)
    setattr(network, method, lambda images: captured._run(method, images, {}))


def _inference(called: Callable[[Tensor], Any], images: Tensor) -> Callable[[Tensor], Any]:
    joined: list[Callable[[tuple[Tensor, ...]], Any]] = []

    def tensors(images: Tensor) -> tuple[Tensor, ...]:
        outputs, join = _separated(called(images))
        joined.append(join)
        return outputs

    with torch.inference_mode(False), torch.no_grad():
        replay = capture(tensors, images.clone())
    join = joined[-1]
    return lambda images: join(replay(images))


class _Call(NamedTuple):
    """A method of a network and the function that runs it."""

    method: str
    called: Callable[..., Any]


class _Pass:
    """A captured forward and backward pass of a network."""

    def __init__(
        self,
        call: _Call,
        network: nn.Module,
        images: Tensor,
        options: dict[str, Any],
        *,
        accumulates: bool,
    ) -> None:
        self.network, self.training, self.options = network, network.training, options
        self.method, self.accumulates = call.method, accumulates
        self.precision = _precision()
        self.parameters = [each for each in network.parameters() if each.requires_grad]
        self.images = images.detach().clone()
        self._waiting: weakref.ref[_Waiting] | None = None
        saved = [(buffer, buffer.clone()) for buffer in network.buffers()]
        try:
            with torch.random.fork_rng(devices=[images.device]):
                self._capture(_no_cached_casts(call.called))
        finally:
            for buffer, before in saved:  # running statistics
                buffer.copy_(before)

    def _capture(self, called: Callable[..., Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                outputs, _ = _separated(called(self.images, **self.options))
                self._gradients(outputs, tuple(torch.zeros_like(each) for each in outputs))
            del outputs
        torch.cuda.synchronize()
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, stream=stream, **CAPTURE):
            outputs, self.join = _separated(called(self.images, **self.options))
        self.output_gradients = tuple(torch.empty_like(each) for each in outputs)
        with torch.cuda.graph(self.backward_graph, stream=stream, pool=self.forward_graph.pool(), **CAPTURE):
            self.gradients = self._gradients(outputs, self.output_gradients)
        self.out = tuple(each.detach() for each in outputs)

    def _gradients(self, out: tuple[Tensor, ...], output_gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(out, self.parameters, output_gradients, allow_unused=True)

    def fits(self, call: _Call, images: Tensor, options: dict[str, Any]) -> bool:
        """Return whether a replay equals a call, and no backward pass of the last replay is pending."""
        same = images.shape == self.images.shape and images.dtype == self.images.dtype and options == self.options
        same = same and call.method == self.method
        same = same and self.network.training == self.training and _precision() == self.precision
        return same and (self.waiting is None or self.waiting.done)

    @property
    def waits_for_backward(self) -> bool:
        """Whether a backward pass of the last replay is still possible, or its results are in use."""
        return self.waiting is not None

    @property
    def waiting(self) -> "_Waiting | None":
        """Return the state of the last replay, if its autograd graph is alive."""
        return self._waiting() if self._waiting else None

    def __call__(self, images: Tensor) -> Any:
        waiting = _Waiting()
        self._waiting = weakref.ref(waiting)
        return self.join(_Replay.apply(self, waiting, images, *self.parameters))


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
        """Return the gradients of the parameters, in graph memory or as copies."""
        captured: _Pass = ctx.captured
        for own, grad in zip(captured.output_gradients, gradients, strict=True):
            own.copy_(grad)
        captured.backward_graph.replay()
        ctx.waiting.done = True
        kept = Tensor.clone if captured.accumulates else Tensor.detach
        return None, None, None, *(each if each is None else kept(each) for each in captured.gradients)


def _precision() -> torch.dtype | None:
    # The dtype of autocast, or None if it is off.
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _separated(out: Any) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Any]]:
    """Return the tensors of an output (a tensor, or a sequence that may contain None), and what joins them again."""
    if isinstance(out, Tensor):
        return (out,), lambda tensors: tensors[0]
    kind, is_tensor = getattr(type(out), "_make", type(out)), [each is not None for each in out]

    def join(tensors: tuple[Tensor, ...]) -> Any:
        left = iter(tensors)
        return kind(next(left) if there else None for there in is_tensor)

    return tuple(each for each in out if each is not None), join


def _no_cached_casts(called: Callable[..., Any]) -> Callable[..., Any]:
    """Cast weights at every call under autocast: a cast cached before the capture would never be updated."""

    def call(images: Tensor, **options: Any) -> Any:
        with torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            return called(images, **options)

    return call
