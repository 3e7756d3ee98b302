"""A network on a GPU as recorded CUDA graphs: the host launches one of them instead of some hundred kernels.

Between two small kernels a GPU waits for the host. A recorded pass has the same kernels, so the same results; every
replay reads and writes the same memory, the network's weights among it, which may change in between.
torch.cuda.make_graphed_callables would draw random numbers and change running statistics as it records, lets no other
thread use the device meanwhile, and overwrites what a second forward pass still needs.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.batches.cuda_graph import capture
from patchloom.models.wrapped import Wrapped

SHAPES = 8  # of images for which inference is recorded; each keeps the memory of one pass
ROUNDS = 2  # before a recording: what is compiled, tuned or made once must not be recorded
# Other threads may use the device meanwhile.
CAPTURE: Any = {"capture_error_mode": "thread_local"}


class CapturedNetwork(Wrapped):
    """Calls a network by replaying what was recorded: a pass with gradients once, one without for each shape of images.

    What cannot be replayed is called as it is: on a CPU; other images than the first, with gradients; a second forward
    pass before the backward pass of the first, whose memory it would overwrite; a network that waits for the device.
    Results with gradients, and the gradients themselves, lie in recorded memory until the next pass: forget them
    (zero_grad) before it.
    """

    def __init__(self, called: nn.Module) -> None:
        """Give a network, or what stands for it, such as a compiled one."""
        super().__init__(getattr(called, "_orig_mod", called))
        self._called = called.__call__  # no module of this one, whose weights would be listed twice
        self._replays: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
        self._pass: _Pass | None = None
        self._records = True

    def forward(self, images: Tensor, **options: Any) -> Any:
        """As the network's."""
        records = images.is_cuda and self._records and not images.requires_grad
        replay = self._replay_of(images, options) if records else None
        return self._called(images, **options) if replay is None else replay(images)

    def _replay_of(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        """What was recorded for such images, now if need be; None where they are to be called."""
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in self._orig_mod.parameters())
        try:
            return (self._with_gradients if learns else self._without_gradients)(images, options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._records = False
            first = str(error).partition("\n")[0]
            warnings.warn(f"the network cannot be recorded and is called kernel by kernel: {first}", stacklevel=2)
            return None

    def _with_gradients(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        if self._pass is None:
            self._pass = _Pass(self._called, self._orig_mod, images, options)
        return self._pass if self._pass.fits(images, options) else None

    def _without_gradients(self, images: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Any] | None:
        key = (images.shape, images.dtype, self._orig_mod.training, _precision())
        if options or (key not in self._replays and len(self._replays) == SHAPES):
            return None
        if key not in self._replays:
            called = _without_cached_casts(self._called)
            with torch.inference_mode(False), torch.no_grad():
                self._replays[key] = capture(lambda x: (called(x),), images.clone())
        recorded = self._replays[key]
        return lambda x: recorded(x)[0]


class _Pass:
    """A recorded forward and backward pass of a network."""

    def __init__(self, called: Callable[..., Any], network: nn.Module, images: Tensor, options: dict[str, Any]) -> None:
        self.network, self.training, self.options = network, network.training, options
        self.precision = _precision()
        self.parameters = [each for each in network.parameters() if each.requires_grad]
        self.images = images.detach().clone()
        self.waits: weakref.ref[_Waiting] | None = None
        noted = [(buffer, buffer.clone()) for buffer in network.buffers()]
        try:
            with torch.random.fork_rng(devices=[images.device]):
                self._record(_without_cached_casts(called))
        finally:
            for buffer, before in noted:  # running statistics
                buffer.copy_(before)

    def _record(self, called: Callable[..., Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                found = _several(called(self.images, **self.options))
                self._gradients(found, tuple(torch.zeros_like(each) for each in found))
            del found
        torch.cuda.synchronize()
        self.ahead, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.ahead, stream=stream, **CAPTURE):
            out = called(self.images, **self.options)
        found = _several(out)
        self.given = tuple(torch.empty_like(each) for each in found)
        with torch.cuda.graph(self.back, stream=stream, pool=self.ahead.pool(), **CAPTURE):
            self.gradients = self._gradients(found, self.given)
        self.one, self.out = isinstance(out, Tensor), tuple(each.detach() for each in found)

    def _gradients(self, out: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(out, self.parameters, given, allow_unused=True)

    def fits(self, images: Tensor, options: dict[str, Any]) -> bool:
        """Whether a replay gives what a call would, and nobody waits for the gradients of the last one."""
        waiting = self.waits() if self.waits else None
        same = images.shape == self.images.shape and images.dtype == self.images.dtype and options == self.options
        same = same and self.network.training == self.training and _precision() == self.precision
        return same and (waiting is None or waiting.done)

    def __call__(self, images: Tensor) -> Any:
        waiting = _Waiting()
        self.waits = weakref.ref(waiting)
        out = _Replay.apply(self, waiting, images, *self.parameters)
        return out[0] if self.one else out


class _Waiting:
    """Whether the backward pass of a forward pass was made; it lives as long as that may come."""

    done = False


class _Replay(torch.autograd.Function):
    """The recorded passes, as autograd calls them."""

    @staticmethod
    def forward(
        ctx: Any, recorded: _Pass, waiting: _Waiting, images: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """What the network gives, in recorded memory."""
        del parameters
        ctx.recorded, ctx.waiting = recorded, waiting
        recorded.images.copy_(images)
        recorded.ahead.replay()
        return tuple(each.detach() for each in recorded.out)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters, in recorded memory."""
        recorded: _Pass = ctx.recorded
        for own, grad in zip(recorded.given, given, strict=True):
            own.copy_(grad)
        recorded.back.replay()
        ctx.waiting.done = True
        return None, None, None, *(each if each is None else each.detach() for each in recorded.gradients)


def _precision() -> torch.dtype | None:
    """Of autocast, where it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _several(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else out


def _without_cached_casts(called: Callable[..., Any]) -> Callable[..., Any]:
    """Under autocast weights are cast anew by every call: a cast made before the recording would never change again."""

    def call(images: Tensor, **options: Any) -> Any:
        with torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            return called(images, **options)

    return call
