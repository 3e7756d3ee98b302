"""OpenVINO's intermediate representation, converted from torch.export's program."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.deployment.export.formats import Graph, GraphFormat
from patchloom.errors import CheckpointError

MODEL, WEIGHTS = "model.xml", "model.bin"


class OpenVino(GraphFormat):
    """A file of operators and one of weights; for Intel's CPUs."""

    name = "openvino"
    files = (MODEL, WEIGHTS)
    to_write = ("torch", "openvino")
    to_open = ("openvino",)
    install = "pip install openvino"

    def write(self, module: Any, pixels: Any, folder: Path, outputs: Sequence[str]) -> None:
        """Weights stay in the precision of the module."""
        import openvino
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (pixels,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            model = openvino.convert_model(program)
        for port, name in zip(model.outputs, outputs, strict=True):
            port.get_tensor().set_names({name})
        openvino.save_model(model, folder / MODEL, compress_to_fp16=False)

    def open(self, folder: Path, threads: int | None = None) -> Graph:
        """Compiled for the CPU, with float32 sums: OpenVINO's own choice may be bfloat16."""
        self.refuse_missing(self.to_open)
        import openvino

        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        try:
            compiled = openvino.Core().compile_model(folder / MODEL, "CPU", settings)
        except RuntimeError as error:
            raise CheckpointError(f"{folder / MODEL} cannot be opened: {str(error).splitlines()[0]}") from error
        names = [port.get_any_name() for port in compiled.outputs]

        def answer(pixels: np.ndarray) -> dict[str, np.ndarray]:
            found = compiled([np.ascontiguousarray(pixels)])
            return {name: np.array(found[name]) for name in names}

        return answer

    def operators(self, folder: Path) -> Counter[str]:
        """Of the graph before it is compiled."""
        import openvino

        return Counter(node.get_type_name() for node in openvino.Core().read_model(folder / MODEL).get_ops())
