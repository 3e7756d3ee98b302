"""ONNX files, written by torch.onnx.export; int8 by onnxruntime's quantizers."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.disk import temporary_folder
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import GraphPart
from patchloom_runtime.engines.engine import MODEL
from patchloom_runtime.engines.onnx import MOST_BYTES, checked_session
from patchloom_runtime.errors import UsageError

OPSET = 20
PRODUCTS = ("MatMul", "Gemm", "Conv")
DYNAMIC_RANGES, EVERY_OPERATOR, PRODUCTS_ONLY = "int8, own ranges", "int8, every operator", "int8, products alone"


class OnnxFormat(GraphFormat):
    """One file, opset 20."""

    name = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")
    install = "pip install 'patchloom[export]'"
    int8_modes = (DYNAMIC_RANGES, EVERY_OPERATOR, PRODUCTS_ONLY)

    def write(self, part: GraphPart, folder: Path) -> None:
        """Trace with torch.export, decompose into ONNX operators and fold with onnxscript's optimizer."""
        if part.bytes > MOST_BYTES:
            raise UsageError(
                f"the weights have {part.bytes:,} bytes, an ONNX file at most {MOST_BYTES:,}; use --half, or --to torch"
            )
        with quiet():
            program = torch.onnx.export(
                part.module,
                tuple(part.inputs.values()),
                input_names=list(part.inputs),
                output_names=list(part.outputs),
                dynamic_shapes=part.dynamic_shapes(),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, which contain paths of this machine
        program.save(str(self.engine.path(folder, part.name)), external_data=False)

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Count operators after onnxruntime's fusions, so that a quantizer without effect is noticed."""
        import onnx
        import onnxruntime

        with temporary_folder() as temporary:
            options = onnxruntime.SessionOptions()
            options.optimized_model_filepath = str(temporary / "optimized.onnx")
            checked_session(self.engine.path(folder, part), options)
            return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)

    def quantize(self, folder: Path, out: Path, mode: str, batches: Iterable[np.ndarray]) -> None:
        """Quantize to uint8 activations, int8 weights per channel and int32 sums.

        With `DYNAMIC_RANGES` each product computes the range of its input when it runs and returns float32. This rounds
        least. It is also the fastest mode, since rounding, product and bias are one operator of onnxruntime
        (benchmarks/LOG.md). The other modes use the ranges observed on `batches`.

        A product whose left factor is the weight, such as ResMLP's matrix over patches, stays float32: onnxruntime has
        no integer kernel for it and would only round its input.
        """
        import onnx
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class BatchReader(quantization.CalibrationDataReader):
            """Calibration batches, as onnxruntime's quantizer reads them."""

            def get_next(self) -> dict[str, np.ndarray] | None:
                pixels = next(left, None)
                return None if pixels is None else {"pixels": pixels}

        left = iter(batches)
        shared: dict[str, Any] = {"per_channel": True, "weight_type": quantization.QuantType.QInt8}
        with quiet(), temporary_folder() as temporary:
            prepared, target = temporary / "prepared.onnx", str(self.engine.path(out))
            quant_pre_process(str(self.engine.path(folder)), str(prepared), skip_symbolic_shape=True)
            model = onnx.load(str(prepared))
            graph = model.graph
            weights = {value.name for value in graph.initializer}
            from_left = [n.name for n in graph.node if n.op_type == "MatMul" and n.input[0] in weights]
            shared["nodes_to_exclude"] = from_left
            if mode == DYNAMIC_RANGES:
                del graph.value_info[:]  # shapes of weights that the quantizer replaces
                onnx.save(model, str(prepared))
                quantization.quantize_dynamic(str(prepared), target, op_types_to_quantize=["MatMul"], **shared)
                return
            if mode == PRODUCTS_ONLY:
                shared["op_types_to_quantize"] = list(PRODUCTS)
            quantization.quantize_static(
                str(prepared),
                target,
                BatchReader(),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                **shared,
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of exporter and quantizer that are meant for their developers."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
