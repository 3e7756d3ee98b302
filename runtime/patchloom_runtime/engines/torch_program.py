"""Programs of torch.export (`model.pt2`), run by an interpreter of our own instead of torch's loader.

`torch.export.load` executes what a file says, in more places than can be closed from outside: it unpickles sample
inputs, constants and weights; sympy evaluates the text of symbolic sizes; an operator may be any attribute of torch,
`torch.os.system` included; names and guards become Python source. Here the archive is only data, and torch never sees
it. Only known members are read: the JSON graph and the raw bytes of weights. The operators of the graph are called one
after another; each must be on a fixed list of names. Everything else in the JSON (symbolic sizes, guards, metadata) is
ignored. The alternative, accepting only archives signed by this user, would refuse exports from another machine.

Before a program runs on the CPU, and again whenever a side of an input has doubled, it runs on torch's meta device,
where tensors have sizes but no values. A program that needs more memory than `most_bytes` is refused before it
allocates any.
"""

import math
import operator
import re
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom_runtime.engines.engine import RUN_SECONDS, Graph, run_memory, size_class
from patchloom_runtime.errors import CheckpointError, first_line
from patchloom_runtime.untrusted import check_shape, parse_json

# Allowed members of an archive; `data/sample_inputs/model.pt` may be there if it is empty.
_MEMBERS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)"
    r"|data/sample_inputs/model\.pt"
)
_SAMPLES = "data/sample_inputs/model.pt"
_TARGET = re.compile(r"torch\.ops\.(aten|torchvision)\.(\w+)\.(\w+)")
# Pure functions of tensors. Excluded: operators that read files (from_file), return uninitialized memory (empty), read
# beyond a tensor's values (as_strided, set_, resize_, _unsafe_*), or have a size that depends on data (nonzero, item).
_ATEN = frozenset(
    """
    __and__ __or__ __xor__ abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d add add_ addcdiv addcmul
    addmm alias all amax amin any arange argmax argmin argsort avg_pool1d avg_pool2d baddbmm batch_norm bitwise_and
    bitwise_not bitwise_or bmm broadcast_to cat ceil celu chunk clamp clamp_ clamp_max clamp_min clone
    constant_pad_nd contiguous conv1d conv2d conv_transpose2d cos cumsum detach detach_ diagonal div div_ dropout
    einsum elu embedding eq erf exp expand expand_as feature_dropout fill flatten flip floor floor_divide full
    full_like gather ge gelu glu group_norm gt hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_
    im2col index index_select instance_norm layer_norm le leaky_relu leaky_relu_ lerp lift_fresh_copy
    linalg_vector_norm linear log log1p log_softmax logical_and logical_not logical_or logsumexp lt masked_fill
    masked_fill_ matmul max_pool1d max_pool2d maximum mean meshgrid minimum mish mm movedim mul mul_ narrow ne neg
    new_full new_ones new_zeros norm numpy_T ones ones_like pad permute pixel_shuffle pixel_unshuffle pow prelu prod
    reciprocal reflection_pad2d relu relu6 relu_ remainder repeat replication_pad2d reshape rms_norm roll round
    rsqrt rsub scaled_dot_product_attention select select_scatter selu sigmoid sigmoid_ sign silu silu_ sin slice
    slice_scatter softmax softplus sort split split_with_sizes sqrt square squeeze stack std sub sub_ sum t tan tanh
    tanh_ tile to topk transpose tril triu unbind unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_nearest2d var var_mean view view_as where zeros zeros_like
    """.split()  # noqa: SIM905, 200 quoted names are harder to read
)
_OTHERS: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
}
_ASSERTIONS = re.compile(r"torch\.ops\.aten\.(_assert\w*|sym_constrain_range\w*)\.\w+")  # left by tracing
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
_ARRAYS = {*_DTYPES.values()} - {torch.bfloat16}  # types that numpy has
_LAYOUTS = {7: torch.strided}
_MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
_DEVICE = object()  # placeholder for the device the program runs on: the CPU or the meta device
_MOST_JSON = 1 << 28


class _Name(str):
    """The name of a value of the graph, used as an argument."""

    __slots__ = ()


@dataclass(frozen=True)
class _Operation:
    """One operator with its arguments: literals and names."""

    target: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[str]
    returns_sequence: bool
    drops: Sequence[str]  # names that no later operator reads


def open_torch_program(path: Path, threads: int | None = None) -> Graph:
    """Open a checked program. `threads` is ignored: torch has one setting for the whole process."""
    del threads
    program = TorchProgramGraph(path, run_memory(), RUN_SECONDS)

    def run(*arrays: np.ndarray) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = program(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
        return {name: value.numpy() for name, value in outputs.items()}

    return run


class TorchProgramGraph:
    """A checked program. Call it with the inputs in order; it returns outputs by name."""

    def __init__(self, path: Path, most_bytes: int | None = None, most_seconds: float = RUN_SECONDS) -> None:
        self.path, self.most_seconds = path, most_seconds
        self.most_bytes = run_memory() if most_bytes is None else most_bytes
        self._tried: set[tuple[Any, ...]] = set()  # size classes of inputs that fit into memory
        try:
            members = _read_members(path)
            graph_module = parse_json(members["models/model.json"], _MOST_JSON)["graph_module"]
            self._weights, self._inputs = _inputs(graph_module["signature"]["input_specs"], members)
            self._operations, self._outputs = _operations(graph_module), _outputs(graph_module)
        except Exception as error:  # a failed check, or anything that JSON of another form leads to
            reason = (
                first_line(error) if isinstance(error, ValueError) else "it does not have the form that torch writes"
            )
            raise CheckpointError(f"{path} cannot be opened: {reason}. Export it again.") from error

    def operators(self) -> Counter[str]:
        """Count the operators by name."""
        return Counter(operation.target for operation in self._operations)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Run on the CPU. Raises CheckpointError if the program does not fit its inputs, memory or time limit."""
        size = size_class(inputs)
        try:
            if size not in self._tried:
                with torch.device("meta"):
                    self._run([each.to("meta") for each in inputs], "meta")
                self._tried.add(size)
            return self._run(inputs, "cpu")
        except Exception as error:
            raise CheckpointError(f"{self.path} does not fit its artifact: {first_line(error)}.") from error

    def _run(self, inputs: Sequence[Tensor], device: str) -> dict[str, Tensor]:
        if len(inputs) != len(self._inputs):
            raise ValueError(f"it takes {len(self._inputs)} inputs, got {len(inputs)}")
        is_trial, place, until = device == "meta", torch.device(device), time.monotonic() + self.most_seconds
        values: dict[str, Any] = {name: each.to(place) for name, each in self._weights.items()}
        values |= zip(self._inputs, inputs, strict=True)
        for node in self._operations:
            args = [_resolved(each, values, place) for each in node.args]
            result = node.function(*args, **{k: _resolved(v, values, place) for k, v in node.kwargs.items()})
            if isinstance(result, int) and abs(result) >= 1 << 63:
                raise ValueError(f"{node.target} returns a number of more than 64 bits")
            values |= zip(node.outputs, result if node.returns_sequence else [result], strict=True)
            for name in node.drops:
                values.pop(name, None)
            if is_trial and (needed := _bytes_of(values.values())) > self.most_bytes:
                raise ValueError(f"{node.target} needs {needed:,} bytes of memory, allowed are {self.most_bytes:,}")
            if time.monotonic() > until:
                raise ValueError(f"it runs for more than {self.most_seconds:g} seconds")
        outputs = {key: values[name] for key, name in self._outputs.items()}
        if not all(isinstance(each, Tensor) and each.dtype in _ARRAYS for each in outputs.values()):
            raise ValueError(f"its outputs {', '.join(outputs)} are not all arrays")
        return outputs


def _read_members(path: Path) -> dict[str, bytes]:
    """Read the members of an archive by name, without its root folder. Raises ValueError for an unknown member."""
    members: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:
            raise ValueError("its members are larger than the file")
        for each in archive.infolist():
            name = each.filename.partition("/")[2]
            if not _MEMBERS.fullmatch(name) or name in members or each.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its member {each.filename!r} is not one that an export writes")
            if name == _SAMPLES and each.file_size:
                raise ValueError(f"its member {each.filename!r} is a pickle, which could run code")
            members[name] = archive.read(each)
    if members["byteorder"] != b"little":
        raise ValueError("its numbers are not little-endian")
    return members


def _inputs(specs: Sequence[Any], members: dict[str, bytes]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the stored tensors by their name in the graph, and the names of the caller's inputs."""
    stored = _tensors(members, "data/weights/", "weight_", "model_weights_config.json")
    constants = _tensors(members, "data/constants/", "tensor_", "model_constants_config.json")
    weights, passed = {}, []
    for spec in specs:
        ((kind, value),) = spec.items()
        if kind == "parameter":
            weights[value["arg"]["name"]] = stored[value["parameter_name"]]
        elif kind == "buffer":
            weights[value["arg"]["name"]] = (stored if value["persistent"] else constants)[value["buffer_name"]]
        elif kind == "tensor_constant":
            weights[value["arg"]["name"]] = constants[value["tensor_constant_name"]]
        elif kind == "user_input":
            passed.append(value["arg"]["as_tensor"]["name"])
        else:
            raise ValueError(f"one of its inputs is a {kind}, expected tensors")
    return weights, passed


_META = {
    "path_name": str,
    "use_pickle": bool,
    "tensor_meta": {"dtype": int, "sizes": list[dict[str, int]], "strides": list[dict[str, int]],
                    "storage_offset": dict[str, int], "layout": int},
}  # fmt: skip


def _tensors(members: dict[str, bytes], folder: str, prefix: str, config: str) -> dict[str, Tensor]:
    """Return tensors by name, as views of the archive's bytes, so that tied weights stay tied."""
    tensors: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, meta in parse_json(members[folder + config], _MOST_JSON)["config"].items():
        check_shape(meta, _META, name)
        layout, path = meta["tensor_meta"], meta["path_name"]
        if meta["use_pickle"] or not path.startswith(prefix):
            raise ValueError(f"its tensor {name!r} is a pickle, which could run code")
        sizes, strides = ([side["as_int"] for side in layout[each]] for each in ("sizes", "strides"))
        dtype, offset = _DTYPES[layout["dtype"]], layout["storage_offset"]["as_int"]
        if layout["layout"] not in _LAYOUTS:
            raise ValueError(f"its tensor {name!r} is not dense")
        if 0 in sizes:
            tensors[name] = torch.empty(sizes, dtype=dtype)
            continue
        if path not in stored:
            stored[path] = torch.frombuffer(bytearray(members.pop(folder + path)), dtype=torch.uint8)
        flat = stored[path].view(dtype)
        if math.prod(sizes) > len(flat):
            raise ValueError(f"its tensor {name!r} has {math.prod(sizes):,} values, the archive {len(flat):,}")
        tensors[name] = flat.as_strided(sizes, strides, offset)  # raises for values outside
    return tensors


def _operations(graph_module: Mapping[str, Any]) -> list[_Operation]:
    nodes = [node for node in graph_module["graph"]["nodes"] if not _ASSERTIONS.fullmatch(node["target"])]
    read_later = set(_outputs(graph_module).values())
    operations: list[_Operation] = []
    for node in reversed(nodes):
        function = _function(node["target"])
        arguments = [(each["name"], each["kind"], _argument(each["arg"])) for each in node["inputs"]]
        outputs, returns_sequence = _names(node["outputs"])
        names = {name for _, _, value in arguments for name in _names_in(value)} | set(outputs)
        operations.append(
            _Operation(
                node["target"],
                function,
                [value for _, kind, value in arguments if kind == 1],
                {name: value for name, kind, value in arguments if kind != 1},
                outputs,
                returns_sequence,
                sorted(names - read_later),
            )
        )
        read_later |= names
    return operations[::-1]


def _function(target: str) -> Callable[..., Any]:
    """Return the operator with this name. Raises ValueError if it is not on the list."""
    if target in _OTHERS:
        return _OTHERS[target]
    if target == "torch.ops.aten.sym_size.int":
        return Tensor.size
    parts = _TARGET.fullmatch(target)
    if parts and parts.group(1, 2) == ("torchvision", "roi_align"):
        import torchvision  # noqa: F401, registers its operators

        return _roi_align
    if parts is None or parts[1] != "aten" or parts[2] not in _ATEN or "out" in parts[3]:
        raise ValueError(f"its operator {target!r} is not one that an export uses")
    packet = getattr(torch.ops.aten, parts[2])
    if parts[3] not in packet.overloads():
        raise ValueError(f"its operator {target!r} is not known to torch {torch.__version__}")
    overload: Callable[..., Any] = getattr(packet, parts[3])
    return overload


def _roi_align(maps: Tensor, regions: Tensor, *settings: Any) -> Tensor:
    """Call torchvision's operator after checking the regions: its kernel reads whatever address they point to."""
    scale, height, width, samples, aligned = settings
    if not 0 < samples <= 16:
        raise ValueError(f"roi_align takes {samples} samples, expected 1 to 16")
    if regions.device.type == "cpu" and regions.numel():
        numbers = regions[:, 0]
        if not regions.isfinite().all() or numbers.min() < 0 or numbers.max() >= len(maps):
            raise ValueError(f"roi_align reads regions outside its {len(maps)} maps")
    pooled: Tensor = torch.ops.torchvision.roi_align(maps, regions, scale, height, width, samples, aligned)
    return pooled


def _argument(spec: Mapping[str, Any]) -> Any:
    ((kind, value),) = spec.items()
    if kind == "as_none":
        return None
    if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
        return _value(value)
    if kind in ("as_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
        return [_value(each) for each in value]
    if kind == "as_optional_tensors":
        return [_argument(each) for each in value]
    if kind == "as_scalar_type":
        return _DTYPES[value]
    if kind == "as_layout":
        return _LAYOUTS[value]
    if kind == "as_memory_format":
        return _MEMORY_FORMATS[value]
    if kind == "as_device" and value["type"] == "cpu":
        return _DEVICE
    if kind == "as_float":
        return float(value)
    plain = {"as_int": int, "as_bool": bool, "as_string": str, "as_ints": list[int], "as_bools": list[bool]}
    plain["as_floats"] = list[float]
    if kind not in plain:
        raise ValueError(f"one of its arguments is {kind}, which is not a tensor or number")
    check_shape(value, plain[kind])
    return value


def _value(spec: Mapping[str, Any]) -> Any:
    """Return the name of a tensor or size, or a number."""
    ((kind, value),) = spec.items()
    if kind in ("name", "as_name"):
        check_shape(value, str)
        return _Name(value)
    check_shape(value, float if kind == "as_float" else bool if kind == "as_bool" else int)
    return value


def _names(outputs: Sequence[Any]) -> tuple[list[str], bool]:
    """Return the names of an operator's results, and whether it returns a sequence."""
    listed = len(outputs) == 1 and next(iter(outputs[0])) == "as_tensors"
    values = [_value(each) for each in outputs[0]["as_tensors"]] if listed else [_argument(each) for each in outputs]
    if any(not isinstance(each, _Name) and each is not None for each in values):
        raise ValueError("one of its results is not a tensor or size")
    return [each or "" for each in values], listed or len(values) > 1


def _outputs(graph_module: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the program's result with their names in the graph."""
    root = next(each for each in graph_module["module_call_graph"] if each["fqn"] == "")
    spec = parse_json(root["signature"]["out_spec"])[1]
    keys, names = parse_json(spec["context"]), [_argument(each) for each in graph_module["graph"]["outputs"]]
    check_shape(keys, list[str])
    return dict(zip(keys, names, strict=True))


def _names_in(value: Any) -> Iterable[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, _Name)]


def _resolved(value: Any, values: Mapping[str, Any], place: torch.device) -> Any:
    if isinstance(value, _Name):
        return values[value]
    if isinstance(value, list):
        return [values[each] if isinstance(each, _Name) else each for each in value]
    return place if value is _DEVICE else value


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors, counting each storage once."""
    storages = (each.untyped_storage() for each in values if isinstance(each, Tensor))
    return sum({each._cdata: each.nbytes() for each in storages}.values())
