"""The check of an ONNX file before onnxruntime opens it. It does not need the onnx package.

The file is a protocol buffer, parsed here field by field. Fields, operators and tensor types that exports do not use
are refused, so there are no subgraphs (`Loop`, `Scan`, `If`), functions, custom operators, sparse tensors or external
files. Every tensor must have as many bytes as its sides say, and literal sizes are bounded. Sizes that a graph computes
are bounded when it runs, by the memory limit of `onnx.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from patchloom_runtime.engines.engine import MOST_VALUES

MOST_NODES = 100_000
_LONGEST_SIZE = 64  # values of a tensor that may be a size
# Functions of tensors in ONNX's own domain, without subgraphs, randomness, text, sequences or state.
OPERATORS = frozenset(
    """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast
    CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos CumSum DepthToSpace
    DequantizeLinear Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax LpNormalization MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg Not
    OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize RoiAlign Round
    ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size Slice Softmax Softplus SpaceToDepth Split Sqrt Squeeze
    Sub Sum Tan Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()  # noqa: SIM905, 130 quoted names are harder to read
)
# Operator → the input that determines how many values it creates, or by which factor.
_SIZES = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "Reshape": 1, "Pad": 1, "OneHot": 1, "Resize": 3}
# Allowed fields of each message, by their number in onnx.proto.
_MODEL = {1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version", 6: "doc_string",
          7: "graph", 8: "opset_import", 14: "metadata_props"}  # fmt: skip
_GRAPH = {1: "node", 2: "name", 5: "initializer", 10: "doc_string", 11: "input", 12: "output", 13: "value_info",
          14: "quantization_annotation", 16: "metadata_props"}  # fmt: skip
_NODE = {1: "input", 2: "output", 3: "name", 4: "op_type", 5: "attribute", 6: "doc_string", 7: "domain",
         9: "metadata_props"}  # fmt: skip
_ATTRIBUTE = {1: "name", 2: "f", 3: "i", 4: "s", 5: "t", 7: "floats", 8: "ints", 9: "strings", 13: "doc_string",
              20: "type"}  # fmt: skip
_TENSOR = {1: "dims", 2: "data_type", 4: "float_data", 5: "int32_data", 7: "int64_data", 8: "name", 9: "raw_data",
           10: "double_data", 11: "uint64_data", 12: "doc_string", 13: "external_data", 14: "data_location",
           16: "metadata_props"}  # fmt: skip
_REPEATED = frozenset(
    """
    opset_import metadata_props node initializer input output value_info quantization_annotation attribute floats ints
    strings dims float_data int32_data int64_data double_data uint64_data external_data
    """.split()  # noqa: SIM905
)
_INTEGERS = {"ir_version", "model_version", "i", "type", "data_type", "data_location"}
_PACKED = {"ints", "dims", "int32_data", "int64_data", "uint64_data"}  # packed into bytes, or repeated
_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}  # per value of each type
_SIZE_TYPES = {1: "<f4", 6: "<i4", 7: "<i8"}

Message = dict[str, list[Any]]  # field → values: integers, or bytes of texts, messages and packed numbers
Sizes = dict[str, list[Any]]  # small tensors by name, which may be used as sizes


def check_onnx(data: bytes) -> None:
    """Raise ValueError if the file holds anything that no export writes, or sizes that no network has."""
    model = _message(memoryview(data), _MODEL, "the model")
    sizes: Sizes = {}
    nodes = []
    for graph in model.get("graph", []):
        fields = _message(graph, _GRAPH, "the graph")
        for tensor in fields.get("initializer", []):
            name, values = _tensor(tensor)
            sizes[name] = values
        nodes += fields.get("node", [])
    if not nodes or len(nodes) > MOST_NODES:
        raise ValueError(f"it has {len(nodes):,} operators, expected 1 to {MOST_NODES:,}")
    for node in nodes:
        _check_node(_message(node, _NODE, "an operator"), sizes)


def _check_node(node: Message, sizes: Sizes) -> None:
    kind, domain = _text(node, "op_type"), _text(node, "domain")
    if kind not in OPERATORS or domain not in ("", "ai.onnx"):
        raise ValueError(f"its operator {kind!r} of {domain or 'ai.onnx'!r} is not one that an export uses")
    inputs, outputs = ([bytes(each).decode() for each in node.get(field, [])] for field in ("input", "output"))
    for attribute in node.get("attribute", []):
        fields = _message(attribute, _ATTRIBUTE, f"an attribute of {kind}")
        values = [_tensor(each)[1] for each in fields.get("t", [])]
        if kind == "Constant" and outputs:
            ints = _numbers(fields, "ints") + [_signed(each) for each in fields.get("i", [])]
            sizes[outputs[0]] = values[0] if values else ints
    if kind == "Range" and all(name in sizes and len(sizes[name]) == 1 for name in inputs) and len(inputs) == 3:
        start, limit, step = (sizes[name][0] for name in inputs)
        count = (limit - start) / step if step else 0
    else:
        position = _SIZES.get(kind, len(inputs))
        count = (
            math.prod(max(1, abs(side)) for side in sizes.get(inputs[position], [])) if position < len(inputs) else 0
        )
    if not count <= MOST_VALUES:
        raise ValueError(f"its operator {kind} creates {count:,} values, allowed are {MOST_VALUES:,}")


def _tensor(data: memoryview) -> tuple[str, list[Any]]:
    """Return name and values of a tensor; the values are empty if it cannot be a size."""
    fields = _message(data, _TENSOR, "a tensor")
    name = _text(fields, "name")
    if fields.get("external_data") or any(fields.get("data_location", [])):
        raise ValueError(f"its tensor {name!r} is stored in another file")
    (kind,) = fields.get("data_type", [0])
    if kind not in _BYTES:
        raise ValueError(f"its tensor {name!r} has the type {kind}, expected numbers")
    sides, raw = _numbers(fields, "dims"), fields.get("raw_data", [b""])[0]
    count = len(raw) / _BYTES[kind] if "raw_data" in fields else _count(fields)
    if any(side < 0 for side in sides) or count != math.prod(sides):
        raise ValueError(f"its tensor {name!r} has the sides {sides}, but {count:,} values")
    if kind not in _SIZE_TYPES or not 0 < count <= _LONGEST_SIZE:
        return name, []
    packed = raw or b"".join(fields.get("float_data", []))
    if packed:
        return name, np.frombuffer(packed, _SIZE_TYPES[kind]).tolist()
    return name, _numbers(fields, "int32_data") + _numbers(fields, "int64_data")


def _count(fields: Message) -> int:
    """Count the numbers in the typed data fields."""
    count = 0
    for field, size in (("float_data", 4), ("double_data", 8)):
        count += sum(len(each) for each in fields.get(field, [])) // size
    for field in ("int32_data", "int64_data", "uint64_data"):
        for each in fields.get(field, []):
            count += 1 if isinstance(each, int) else int((np.frombuffer(each, np.uint8) < 0x80).sum())
    return count


def _numbers(fields: Message, field: str) -> list[int]:
    """Return integers that are stored repeated or packed."""
    numbers = []
    for each in fields.get(field, []):
        if isinstance(each, int):
            numbers.append(_signed(each))
            continue
        at = 0
        while at < len(each):
            value, at = _varint(each, at)
            numbers.append(_signed(value))
    return numbers


def _text(fields: Message, field: str) -> str:
    return bytes(fields.get(field, [b""])[0]).decode()


def _message(data: memoryview, known: Mapping[int, str], where: str) -> Message:
    """Return the fields of a message by name. Raises ValueError for an unknown or wrongly repeated field."""
    fields: Message = {}
    for number, value in _fields(data):
        if number not in known:
            raise ValueError(f"{where} has the field {number} of onnx.proto, which no export writes")
        field = known[number]
        if field not in _PACKED and isinstance(value, int) != (field in _INTEGERS):
            raise ValueError(f"{where} has a field {field} of another type")
        values = fields.setdefault(field, [])
        if values and field not in _REPEATED:
            raise ValueError(f"{where} has the field {field} twice")
        values.append(value)
    return fields


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protocol buffer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if not 0 <= size <= len(data) - at:
            raise ValueError("it is truncated or not ONNX")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return an integer of up to 64 bits and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("it is truncated or not ONNX")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
