"""OpenVINO's intermediate representation: a file of operators (.xml) and one of weights (.bin).

A file is checked before OpenVINO sees it, as ONNX files are: only operators from OpenVINO's own sets and without
subgraphs (`Loop`, `TensorIterator`, `If`), constants that lie inside the weights file, bounded literal sizes. The
memory that a graph uses while it runs is not bounded: OpenVINO has no setting for it.
"""

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from patchloom_runtime.engines.engine import MOST_VALUES, Graph
from patchloom_runtime.errors import CheckpointError, first_line
from patchloom_runtime.untrusted import read_plain
from patchloom_runtime.untrusted_xml import parse_xml

_ELEMENTS = {"net", "layers", "layer", "data", "input", "output", "port", "dim", "edges", "edge", "rt_info"}
_SIZED_BY_INPUT = {"Broadcast", "Tile", "Range"}  # by their second input
_BYTES = {"boolean": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4,
          "i64": 8, "u64": 8, "f64": 8}  # fmt: skip
_WHOLE = {"i32": "<i4", "i64": "<i8"}


def open_openvino(path: Path, threads: int | None = None) -> Graph:
    """Compile a checked graph for the CPU. Sums are float32: OpenVINO's default may be bfloat16."""
    import openvino

    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    try:
        check_openvino(path)
        compiled = openvino.Core().compile_model(path, "CPU", settings)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be opened: {first_line(error)}. Export it again.") from error
    names = [port.get_any_name() for port in compiled.outputs]

    def run(*arrays: np.ndarray) -> dict[str, np.ndarray]:
        results = compiled([np.ascontiguousarray(array) for array in arrays])
        return {name: np.array(results[name]) for name in names}

    return run


def check_openvino(path: Path) -> None:
    """Raise ValueError if the graph holds what no export writes, or constants outside its weights file."""
    text, weights = read_plain(path), path.with_suffix(".bin")
    if b"<!" in text:
        raise ValueError("it declares a document type or has comments, which no export writes")
    net = parse_xml(text)
    for info in net.findall("rt_info"):  # notes of the converter, in any form
        net.remove(info)
    if unknown := {each.tag for each in net.iter()} - _ELEMENTS:
        raise ValueError(f"it has the element {min(unknown)!r}, which no export writes")
    layers = {layer.get("id"): layer for layer in net.iter("layer")}
    sizes: dict[str | None, list[int]] = {}  # small integer constants
    with weights.open("rb") as file:
        total = file.seek(0, 2)
        for number, layer in layers.items():
            if not re.fullmatch(r"opset\d+", layer.get("version", "")):
                raise ValueError(f"its operator {layer.get('type')!r} is not one of OpenVINO's own")
            if layer.get("type") == "Const":
                kind, offset, size = _constant(layer, weights.name, total)
                if kind in _WHOLE and 0 < size <= 512:
                    file.seek(offset)
                    sizes[number] = np.frombuffer(file.read(size), _WHOLE[kind]).tolist()
    for edge in net.iter("edge"):
        target = layers.get(edge.get("to-layer"))
        kind = "" if target is None else target.get("type", "")
        count = math.prod(max(1, abs(side)) for side in sizes.get(edge.get("from-layer"), []))
        if kind in _SIZED_BY_INPUT and edge.get("to-port") == "1" and count > MOST_VALUES:
            raise ValueError(f"its operator {kind} creates {count:,} values, allowed are {MOST_VALUES:,}")


def _constant(layer: ElementTree.Element, file: str, total: int) -> tuple[str, int, int]:
    """Return type, offset and bytes of a constant that lies inside a weights file of `total` bytes."""
    data, name = layer.find("data"), layer.get("name")
    values = {} if data is None else data.attrib
    if not {"element_type", "shape", "offset", "size"} <= values.keys() or values["element_type"] not in _BYTES:
        raise ValueError(f"its constant {name!r} does not hold numbers")
    sides = [int(side) for side in values["shape"].split(",") if side.strip()]
    kind, offset, size = values["element_type"], int(values["offset"]), int(values["size"])
    if size != math.prod(sides) * _BYTES[kind] or min([offset, size, *sides]) < 0 or offset + size > total:
        raise ValueError(
            f"its constant {name!r} with sides {sides} has {size:,} bytes at {offset:,}, {file} has {total:,}"
        )
    return kind, offset, size
