"""torch's own: a program of torch.export, which runs without the code it was made from; `torch_program.py` opens it."""

import io
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchloom_runtime.engines.formats import MODEL, RUN_SECONDS, Graph, GraphFormat, run_memory

if TYPE_CHECKING:
    from patchloom.exporters.graph import Traced

ENDING = ".pt2"


class TorchProgram(GraphFormat):
    """One file; for CPUs."""

    name = "torch"
    endings = (ENDING,)
    to_write = ("torch",)
    to_open = ("torch",)
    install = "pip install torch"

    def write(self, traced: "Traced", folder: Path) -> None:
        """The module gives a dict of outputs, whose names the program keeps."""
        import torch

        from patchloom.disk import write_new  # which the light runtime does without

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = tuple(traced.inputs.values())
            program = torch.export.export(traced.module, inputs, dynamic_shapes=traced.dynamic_shapes())
            program.example_inputs = None  # torch would pickle them, and they are images of the user
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # with paths of this machine
            packed = io.BytesIO()  # onto a full disk torch's own writer ends the process
            torch.export.save(program, packed)
        write_new(folder / f"{traced.part}{ENDING}", packed.getvalue())

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """The checked program; the number of threads is torch's, which all of the process shares."""
        self.refuse_missing(self.to_open)
        import torch

        from patchloom_runtime.engines.torch_program import TorchProgramGraph

        del threads
        program = TorchProgramGraph(folder / f"{part}{ENDING}", run_memory(), RUN_SECONDS)

        def answer(*arrays: np.ndarray) -> dict[str, np.ndarray]:
            with torch.inference_mode():
                outputs = program(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
            return {name: value.numpy() for name, value in outputs.items()}

        return answer

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Of torch.export's graph."""
        from patchloom_runtime.engines.torch_program import TorchProgramGraph

        return TorchProgramGraph(folder / f"{part}{ENDING}", run_memory(), RUN_SECONDS).operators()
