"""The cost of a network (CO-1): parameters and operations are counted, throughput and memory are measured.

"Multiply-adds" are those of matrix products and convolutions, which the papers call FLOPs. They are counted on one
image of zeros, for which products are not computed: only their shapes are. (The meta device would do the same, but its
first operation imports torch's compiler, which takes two to three seconds.)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from patchloom.machine import accelerator_name
from patchloom.models.catalog import human as human
from patchloom.models.network import Network, Size
from patchloom.models.peak_memory import largest_batch, peak_mem_mib
from patchloom_runtime.errors import ResourceError, UsageError

aten = torch.ops.aten

# Scalar operations per output element, if not one: (with weight and bias, without).
_NORMS = {
    aten.native_layer_norm: (5, 4),
    aten.native_batch_norm: (2, 1),
    aten._native_batch_norm_legit_no_training: (2, 1),
}
_TWO = {aten.addcmul}
# Matrix products: positions of the factors among the arguments.
_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}


@dataclass(frozen=True)
class Cost:
    """Parameters, and operations per image."""

    parameters: int
    multiply_adds: int  # of matrix products and convolutions
    elementwise: int  # scalar operations of everything else: norms, activations, sums, scales

    @property
    def operations(self) -> int:
        return self.multiply_adds + self.elementwise


@dataclass(frozen=True)
class Speed:
    """Measured throughput on one device, at the best batch size (MX-6)."""

    images_per_second: float
    batch_size: int
    peak_mem_mib: float | None  # at that batch size; None for a compiled network on a CPU
    device: str
    dtype: str


@dataclass(frozen=True)
class Tradeoff:
    """Accuracy and cost of a network: a point of thesis figures 3.3 and 5.7."""

    name: str
    top1: float  # percent
    parameters: int
    multiply_adds: int  # per image
    images_per_second: float
    batch_size: int
    peak_mem_mib: float | None
    device: str
    training_multiply_adds: int | None = None  # these three: of the run's training; None if it did not record them
    training_s: float | None = None
    training_device: str = ""


def training_multiply_adds(images_seen: int, per_image: int) -> int:
    """Return the multiply-adds of a training run, by the usual convention that a step costs three forward passes.

    The backward pass takes two products (with the weights and with the activations) for every one of the forward pass.
    Evaluations, teachers and averages are not counted, nor is what frozen weights save.
    """
    return 3 * images_seen * per_image


def cost(model: nn.Module, image_size: Size | None = None) -> Cost:
    """Count the parameters, and the operations for one image of the network's size or of `image_size`."""
    size = _size_of(model, image_size)
    channels = model.config.channels if isinstance(model, Network) else 3
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    zeros = {name: _zeros_like(tensor) for name, tensor in state.items()}
    images = torch.zeros(1, channels, *size, device="cpu", dtype=next(model.parameters()).dtype)
    was_training = model.training
    nn.Module.train(model, False)
    try:
        # The operations inside fused attention would not be counted.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Counter() as counter:
            functional_call(model, zeros, (images,))
    finally:
        nn.Module.train(model, was_training)
    return Cost(parameters, counter.multiply_adds, counter.elementwise)


def _zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros on the CPU that take no memory until written to. NumPy allocates zeroed pages, torch does not."""
    pages = np.zeros(tensor.numel() * tensor.element_size(), dtype=np.uint8)
    return torch.from_numpy(pages).view(tensor.dtype).view(tensor.shape)


class _Counter(TorchDispatchMode):
    """Counts the operations of a forward pass. Of equal operations, as in repeated blocks, only the first is run."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.elementwise = 0
        self._known: dict[Any, tuple[int, int, Any]] = {}  # operation, inputs → both counts, output

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default would import the compiler, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return self._run(func, args, kwargs or {})[2]
        key = (func, _outline(args), _outline(tuple((kwargs or {}).items())))
        if key not in self._known:
            self._known[key] = result = self._run(func, args, kwargs or {})
            return result[2]
        multiply_adds, elementwise, out = self._known[key]
        self.multiply_adds += multiply_adds
        self.elementwise += elementwise
        return _new_zeros(out)

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int, Any]:
        out = _product(func, args)
        if out is None:
            out = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in flop_registry:
            counts = flop_registry[packet](*args, **kwargs, out_val=out) // 2, 0
        else:
            counts = 0, _elementwise(packet, args, out)
        self.multiply_adds += counts[0]
        self.elementwise += counts[1]
        return *counts, out


def _outline(value: Any) -> Any:
    """Return a key of everything that determines the shape of an operation's output."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(_outline(each) for each in value)
    return type(value), value


def _new_zeros(out: Any) -> Any:
    """Return new zeros of the same shapes and strides."""
    if isinstance(out, Tensor):
        return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).zero_()
    return type(out)(_new_zeros(each) for each in out) if isinstance(out, tuple | list) else out


def _product(func: Any, args: Any) -> Tensor | None:
    """Return zeros in the shape of a matrix product or convolution, or None for other, cheap operations."""
    if func in _PRODUCTS:
        left, right = (args[position] for position in _PRODUCTS[func])
        return left.new_zeros(*left.shape[:-1], right.shape[-1])
    if func is aten.convolution.default:
        images, weight, _, stride, padding, dilation, is_transposed, *_ = args
        if is_transposed or images.ndim != 4:
            return None
        taps = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sides = zip(images.shape[2:], taps, stride, padding, strict=True)
        shape = (len(images), len(weight), *((side + 2 * pad - tap) // step + 1 for side, tap, step, pad in sides))
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if is_last else torch.contiguous_format
        return torch.zeros(shape, dtype=images.dtype, device=images.device).contiguous(memory_format=layout)
    return None


def _elementwise(packet: Any, args: Any, out: Any) -> int:
    first = out[0] if isinstance(out, tuple | list) else out
    if not isinstance(first, Tensor):
        return 0
    if packet in _NORMS:
        has_affine = any(isinstance(arg, Tensor) for arg in args[1:4])
        return first.numel() * _NORMS[packet][0 if has_affine else 1]
    # A reduction reads more than it writes.
    read = max((arg.numel() for arg in args if isinstance(arg, Tensor)), default=0)
    return max(first.numel(), read) * (2 if packet in _TWO else 1)


def measure(
    models: Mapping[str, nn.Module],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    image_size: Size | None = None,
    batch_sizes: Sequence[int] = (1, 4, 16, 64),
    seconds: float = 2.0,
) -> dict[str, Speed]:
    """Measure the throughput of each network: images per second, median of the passes, at the best batch size.

    The networks take turns, so that other load on the machine affects all of them alike. `seconds` is the time per
    network and batch size. Batches that do not fit into memory are skipped.
    """
    device = torch.device(device)
    models = {name: model.to(device, dtype).eval() for name, model in models.items()}
    best: dict[str, Speed] = {}
    for batch in batch_sizes:
        images = {
            name: torch.randn(batch, 3, *_size_of(model, image_size), device=device, dtype=dtype)
            for name, model in models.items()
        }
        for name, speed in _take_turns(models, images, seconds).items():
            if name not in best or speed.images_per_second > best[name].images_per_second:
                best[name] = speed
    if failed := [name for name in models if name not in best]:
        raise ResourceError(
            f"{', '.join(failed)}: a batch of {min(batch_sizes)} does not fit into the memory of {device}"
        )
    return best


def measure_largest(
    models: Mapping[str, nn.Module],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    image_size: Size | None = None,
    seconds: float = 2.0,
    limit_mib: float | None = None,
) -> dict[str, Speed]:
    """Measure each network, alone on the device, at the largest batch that fits into its memory or `limit_mib`."""
    device = torch.device(device)
    speeds: dict[str, Speed] = {}
    for name, model in models.items():
        network, size = model.to(device, dtype).eval(), _size_of(model, image_size)
        batch = largest_batch(network, (3, *size), limit_mib)
        if batch:
            images = torch.randn(batch, 3, *size, device=device, dtype=dtype)
            speeds |= _take_turns({name: network}, {name: images}, seconds)
        model.to("cpu")
        if name not in speeds:
            limit = f"{limit_mib:g} MiB" if limit_mib else f"the memory of {device}"
            raise ResourceError(f"{name}: a batch of {batch or 1} does not fit into {limit}")
    return speeds


def _take_turns(models: Mapping[str, nn.Module], images: Mapping[str, Tensor], seconds: float) -> dict[str, Speed]:
    times: dict[str, list[float]] = {}
    peaks: dict[str, float | None] = {}
    with torch.inference_mode():
        for name, model in models.items():  # also the warm-up
            try:
                peaks[name] = _peak_mem_mib(model, images[name])
                times[name] = []
            except torch.OutOfMemoryError:
                continue
        deadline = time.perf_counter() + seconds * len(times)
        while times and (time.perf_counter() < deadline or min(map(len, times.values())) < 3):
            for name in times:
                times[name].append(_seconds_of(models[name], images[name]))
    return {name: _speed(images[name], sorted(of)[len(of) // 2], peaks[name]) for name, of in times.items()}


def tradeoffs(models: Mapping[str, nn.Module], top1: Mapping[str, float], **measuring: Any) -> list[Tradeoff]:
    """Return accuracy and cost of several networks. `measuring` are options of `measure`."""
    costs = {name: cost(model, measuring.get("image_size")) for name, model in models.items()}
    speeds = measure(models, **measuring)
    return [
        Tradeoff(
            name,
            top1[name],
            costs[name].parameters,
            costs[name].multiply_adds,
            speeds[name].images_per_second,
            speeds[name].batch_size,
            speeds[name].peak_mem_mib,
            speeds[name].device,
        )
        for name in models
    ]


def _peak_mem_mib(model: nn.Module, images: Tensor) -> float | None:
    if images.device.type == "cpu" and hasattr(model, "_orig_mod"):  # counting bytes would disable the compiled code
        model(images)
        return None
    return peak_mem_mib(model, images)


def _seconds_of(model: nn.Module, images: Tensor) -> float:
    _synchronize(images.device)
    before = time.perf_counter()
    model(images)
    _synchronize(images.device)
    return time.perf_counter() - before


def _speed(images: Tensor, seconds: float, peak_mem_mib: float | None) -> Speed:
    device = images.device
    threads = torch.get_num_threads()
    name = accelerator_name(device) or f"cpu, {threads} threads"
    dtype = str(images.dtype).removeprefix("torch.")
    return Speed(len(images) / seconds, len(images), peak_mem_mib, name, dtype)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _size_of(model: nn.Module, image_size: Size | None) -> tuple[int, int]:
    if image_size is None:
        if not isinstance(model, Network):
            raise UsageError(f"{type(model).__name__} has no image size of its own: pass image_size")
        return model.config.image_size
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def cost_rows(cost: Cost) -> list[tuple[str, str, str]]:
    """Return rows of name, value and explanation for a report."""
    return [
        ("parameters", human(cost.parameters), f"{cost.parameters:,}"),
        ("weights as float32", f"{cost.parameters * 4 / 2**20:.1f} MiB", ""),
        ("multiply-adds per image", human(cost.multiply_adds), "matrix products and convolutions"),
        ("other operations per image", human(cost.elementwise), "norms, activations, sums, scales"),
    ]
