"""OpenVINO's intermediate representation, converted from torch.export's program.

One from anyone is checked before OpenVINO sees it, as ONNX files are: operators of OpenVINO's own sets without bodies
(`Loop`, `TensorIterator`, `If`), constants that lie inside the file of weights, sizes that are numbers bounded. What a
graph computes has no bound on memory here: OpenVINO has no setting for it.
"""

import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from patchloom_runtime.engines.formats import MODEL, Graph, GraphFormat
from patchloom_runtime.engines.onnx_check import MOST_VALUES
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import read_plain

if TYPE_CHECKING:
    from patchloom.exporters.graph import Traced

ENDING, WEIGHTS = ".xml", ".bin"
_ELEMENTS = {"net", "layers", "layer", "data", "input", "output", "port", "dim", "edges", "edge", "rt_info"}
_SIZED_BY_INPUT = {"Broadcast", "Tile", "Range"}  # by the second
_BYTES = {"boolean": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4,
          "i64": 8, "u64": 8, "f64": 8}  # fmt: skip
_WHOLE = {"i32": "<i4", "i64": "<i8"}


class OpenVino(GraphFormat):
    """A file of operators and one of weights; for Intel's CPUs."""

    name = "openvino"
    endings = (ENDING, WEIGHTS)
    to_write = ("torch", "openvino")
    to_open = ("openvino",)
    install = "pip install openvino"

    def write(self, traced: "Traced", folder: Path) -> None:
        """Weights stay in the precision of the module."""
        import openvino
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = tuple(traced.inputs.values())
            program = torch.export.export(traced.module, inputs, dynamic_shapes=traced.dynamic_shapes())
            model = openvino.convert_model(program)
        for port, name in zip(model.outputs, traced.outputs, strict=True):
            port.get_tensor().set_names({name})
        openvino.save_model(model, folder / f"{traced.part}{ENDING}", compress_to_fp16=False)

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """Compiled for the CPU, with float32 sums: OpenVINO's own choice may be bfloat16."""
        self.refuse_missing(self.to_open)
        import openvino

        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        path = folder / f"{part}{ENDING}"
        try:
            check_openvino(path)
            compiled = openvino.Core().compile_model(path, "CPU", settings)
        except (RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be opened: {str(error).splitlines()[0]}. Export it again.") from error
        names = [port.get_any_name() for port in compiled.outputs]

        def answer(*arrays: np.ndarray) -> dict[str, np.ndarray]:
            found = compiled([np.ascontiguousarray(array) for array in arrays])
            return {name: np.array(found[name]) for name in names}

        return answer

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Of the graph before it is compiled."""
        import openvino

        return Counter(
            node.get_type_name() for node in openvino.Core().read_model(folder / f"{part}{ENDING}").get_ops()
        )


def check_openvino(path: Path) -> None:
    """Raise ValueError if the graph holds what no export writes, or constants that are not in its file of weights."""
    text, weights = read_plain(path), path.with_suffix(WEIGHTS)
    if b"<!" in text:
        raise ValueError("it declares a document type or has comments, which no export writes")
    try:
        net = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    for info in net.findall("rt_info"):  # notes of the converter, of any form
        net.remove(info)
    if strange := {each.tag for each in net.iter()} - _ELEMENTS:
        raise ValueError(f"it has the element {min(strange)!r}, which no export writes")
    layers = {layer.get("id"): layer for layer in net.iter("layer")}
    sizes: dict[str | None, list[int]] = {}  # small constants of whole numbers
    with weights.open("rb") as file:
        held = file.seek(0, 2)
        for number, layer in layers.items():
            if not re.fullmatch(r"opset\d+", layer.get("version", "")):
                raise ValueError(f"its operator {layer.get('type')!r} is not one of OpenVINO's own")
            if layer.get("type") != "Const":
                continue
            told = layer.find("data")
            values = {} if told is None else told.attrib
            if not {"element_type", "shape", "offset", "size"} <= values.keys() or values["element_type"] not in _BYTES:
                raise ValueError(f"its constant {layer.get('name')!r} is not of numbers")
            sides = [int(side) for side in values["shape"].split(",") if side.strip()]
            offset, size = int(values["offset"]), int(values["size"])
            fits = size == math.prod(sides) * _BYTES[values["element_type"]]
            if not fits or min([offset, size, *sides]) < 0 or offset + size > held:
                raise ValueError(
                    f"its constant {layer.get('name')!r} of sides {sides} has {size:,} bytes at {offset:,}, "
                    f"{weights.name} has {held:,}"
                )
            if values["element_type"] in _WHOLE and 0 < size <= 512:
                file.seek(offset)
                sizes[number] = np.frombuffer(file.read(size), _WHOLE[values["element_type"]]).tolist()
    for edge in net.iter("edge"):
        target = layers.get(edge.get("to-layer"))
        kind = None if target is None else target.get("type")
        made = math.prod(max(1, abs(side)) for side in sizes.get(edge.get("from-layer"), []))
        if kind in _SIZED_BY_INPUT and edge.get("to-port") == "1" and made > MOST_VALUES:
            raise ValueError(f"its operator {kind} makes {made:,} values, allowed are {MOST_VALUES:,}")
