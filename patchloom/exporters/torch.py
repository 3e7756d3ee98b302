"""Programs of torch.export, which run without the code they were made from; for CPUs."""

import io
import warnings
from collections import Counter
from pathlib import Path

import torch

from patchloom.disk import write_new
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import GraphPart
from patchloom_runtime.engines.engine import MODEL
from patchloom_runtime.engines.torch_program import TorchProgramGraph


class TorchFormat(GraphFormat):
    """One .pt2 file. The program keeps the names of the module's outputs."""

    name = "torch"

    def write(self, part: GraphPart, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = tuple(part.inputs.values())
            program = torch.export.export(part.module, inputs, dynamic_shapes=part.dynamic_shapes())
            program.example_inputs = None  # torch would pickle them, and they are the user's images
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # contains paths of this machine
            archive = io.BytesIO()  # if the disk is full, torch's own writer ends the process
            torch.export.save(program, archive)
        write_new(self.engine.path(folder, part.name), archive.getvalue())

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Count the operators of torch.export's graph."""
        return TorchProgramGraph(self.engine.path(folder, part)).operators()
