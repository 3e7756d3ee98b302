"""ONNX, opened by onnxruntime; int8 by onnxruntime's own static quantiser."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from patchloom.deployment.export.formats import Graph, GraphFormat
from patchloom.errors import CheckpointError, UsageError

MODEL = "model.onnx"
# A protocol buffer ends at 2 GiB.
MOST_BYTES = (1 << 31) - (1 << 20)
PRODUCTS = ("MatMul", "Gemm", "Conv")
EVERY_OPERATOR, PRODUCTS_ALONE = "int8, every operator", "int8, products alone"


class Onnx(GraphFormat):
    """One file of opset 20."""

    name = "onnx"
    files = (MODEL,)
    to_write = ("onnx", "onnxscript", "onnxruntime")
    to_open = ("onnxruntime",)
    install = "pip install 'patchloom[export]', or without torch pip install patchloom-runtime"
    int8_ways = (EVERY_OPERATOR, PRODUCTS_ALONE)

    def write(self, module: Any, pixels: Any, folder: Path, outputs: Sequence[str]) -> None:
        """By torch.export, decomposed into ONNX's operators and folded by onnxscript's optimiser."""
        import torch

        size = sum(value.numel() * value.element_size() for value in module.state_dict().values())
        if size > MOST_BYTES:
            raise UsageError(
                f"the weights have {size:,} bytes, an ONNX file at most {MOST_BYTES:,}; use --half, or --to torch"
            )
        batch = {0: torch.export.Dim.DYNAMIC}
        with _quiet():
            program = torch.onnx.export(
                module,
                (pixels,),
                input_names=["pixels"],
                output_names=list(outputs),
                dynamic_shapes=(batch,),
                opset_version=20,
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        program.save(str(folder / MODEL), external_data=False)

    def open(self, folder: Path, threads: int | None = None) -> Graph:
        """A session on the CPU; all cores where `threads` is None."""
        self.refuse_missing(self.to_open)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors alone
        # Threads that spin between calls take the cores from whatever else the process does, measured beside it too.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            session = onnxruntime.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has an exception per status, none with a public base
            raise CheckpointError(f"{folder / MODEL} cannot be opened: {_first_line(error)}.") from error
        names = [output.name for output in session.get_outputs()]

        def answer(pixels: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(names, session.run(None, {"pixels": pixels}), strict=True))

        return answer

    def operators(self, folder: Path) -> Counter[str]:
        """Of the graph as onnxruntime runs it, after its own fusions: a quantiser that did nothing shows there."""
        import onnx
        import onnxruntime

        with TemporaryDirectory() as temporary:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.optimized_model_filepath = str(Path(temporary, MODEL))
            onnxruntime.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])
            return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)

    def quantise(self, folder: Path, out: Path, way: str, batches: Iterable[np.ndarray]) -> None:
        """Static: uint8 activations with ranges seen on the batches, int8 weights per channel, int32 sums.

        A product whose left factor is the weight, as of ResMLP's matrix over patches, stays float32: onnxruntime has no
        integer kernel for it and would only round its input.
        """
        import onnx
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Reader(CalibrationDataReader):
            """The batches, one after the other."""

            def __init__(self) -> None:
                self._left = iter(batches)

            def get_next(self) -> dict[str, np.ndarray] | None:
                """The next, None after the last."""
                pixels = next(self._left, None)
                return None if pixels is None else {"pixels": pixels}

        with _quiet(), TemporaryDirectory() as temporary:
            prepared = Path(temporary, MODEL)
            quant_pre_process(str(folder / MODEL), str(prepared), skip_symbolic_shape=True)
            graph = onnx.load(str(prepared)).graph
            weights = {value.name for value in graph.initializer}
            from_left = [n.name for n in graph.node if n.op_type == "MatMul" and n.input[0] in weights]
            only = {"op_types_to_quantize": list(PRODUCTS)} if way == PRODUCTS_ALONE else {}
            quantize_static(
                str(prepared),
                str(out / MODEL),
                Reader(),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                nodes_to_exclude=from_left,
                **only,
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporter and quantiser tell those who write them."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
