"""OpenVINO's intermediate representation, converted from torch.export's program; for Intel CPUs."""

import warnings
from collections import Counter
from pathlib import Path

import torch

from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import GraphPart
from patchloom_runtime.engines.engine import MODEL


class OpenVinoFormat(GraphFormat):
    """A file of operators and a file of weights, in the precision of the module."""

    name = "openvino"
    packages = ("openvino",)
    install = "pip install openvino"

    def write(self, part: GraphPart, folder: Path) -> None:
        import openvino

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = tuple(part.inputs.values())
            program = torch.export.export(part.module, inputs, dynamic_shapes=part.dynamic_shapes())
            model = openvino.convert_model(program)
        for port, name in zip(model.outputs, part.outputs, strict=True):
            port.get_tensor().set_names({name})
        openvino.save_model(model, self.engine.path(folder, part.name), compress_to_fp16=False)

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Count operators before compilation."""
        import openvino

        model = openvino.Core().read_model(self.engine.path(folder, part))
        return Counter(node.get_type_name() for node in model.get_ops())
