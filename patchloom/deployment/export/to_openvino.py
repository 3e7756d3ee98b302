"""OpenVINO's intermediate representation, converted from torch.export's program."""

import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom.deployment.export.formats import MODEL, Graph, GraphFormat
from patchloom.errors import CheckpointError

if TYPE_CHECKING:
    from patchloom.deployment.export.graph import Traced

ENDING, WEIGHTS = ".xml", ".bin"


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
            compiled = openvino.Core().compile_model(path, "CPU", settings)
        except RuntimeError as error:
            raise CheckpointError(f"{path} cannot be opened: {str(error).splitlines()[0]}") from error
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
