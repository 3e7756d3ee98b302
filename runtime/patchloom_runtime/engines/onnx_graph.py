"""ONNX, opened by onnxruntime; int8 by onnxruntime's own static quantiser."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom_runtime.engines.formats import MODEL, RUN_SECONDS, Graph, GraphFormat, run_memory, size_class
from patchloom_runtime.engines.onnx_check import check_onnx
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import read_plain

if TYPE_CHECKING:
    from patchloom.exporters.graph import Traced

ENDING = ".onnx"
# A protocol buffer ends at 2 GiB.
MOST_BYTES = (1 << 31) - (1 << 20)
PRODUCTS = ("MatMul", "Gemm", "Conv")
OWN_RANGES, EVERY_OPERATOR, PRODUCTS_ALONE = "int8, own ranges", "int8, every operator", "int8, products alone"


class Onnx(GraphFormat):
    """One file of opset 20."""

    name = "onnx"
    endings = (ENDING,)
    to_write = ("onnx", "onnxscript", "onnxruntime")
    to_open = ("onnxruntime",)
    install = "pip install 'patchloom[export]'; to open artefacts alone, pip install onnxruntime"
    int8_ways = (OWN_RANGES, EVERY_OPERATOR, PRODUCTS_ALONE)

    def write(self, traced: "Traced", folder: Path) -> None:
        """By torch.export, decomposed into ONNX's operators and folded by onnxscript's optimiser."""
        import torch

        if traced.bytes > MOST_BYTES:
            raise UsageError(
                f"the weights have {traced.bytes:,} bytes, an ONNX file at most {MOST_BYTES:,}; "
                "use --half, or --to torch"
            )
        with _quiet():
            program = torch.onnx.export(
                traced.module,
                tuple(traced.inputs.values()),
                input_names=list(traced.inputs),
                output_names=list(traced.outputs),
                dynamic_shapes=traced.dynamic_shapes(),
                opset_version=20,
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with paths of this machine
        program.save(str(folder / f"{traced.part}{ENDING}"), external_data=False)

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """A session on the CPU; all cores where `threads` is None."""
        self.refuse_missing(self.to_open)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # Threads that spin between calls take the cores from whatever else the process does, measured beside it too.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        path = folder / f"{part}{ENDING}"
        try:
            session = _session(path, options)
        except Exception as error:  # onnxruntime has an exception per status, none with a public base
            raise CheckpointError(f"{path} cannot be opened: {_first_line(error)}. Export it again.") from error
        given, names = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
        tried = set()

        def answer(*arrays: np.ndarray) -> dict[str, np.ndarray]:
            run, size = onnxruntime.RunOptions(), size_class(arrays)
            late = Timer(RUN_SECONDS, setattr, (run, "terminate", True))
            late.daemon = True
            if size not in tried:  # a thread per run would cost 0.1 ms
                late.start()
            try:
                found = session.run(None, dict(zip(given, arrays, strict=False)), run)
            except Exception as error:
                raise CheckpointError(f"{path} does not fit its artefact: {_first_line(error)}.") from error
            finally:
                late.cancel()
            tried.add(size)
            return dict(zip(names, found, strict=True))

        return answer

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Of the graph as onnxruntime runs it, after its own fusions: a quantiser that did nothing shows there."""
        import onnx
        import onnxruntime

        from patchloom.disk import temporary_folder  # which the light runtime does without

        with temporary_folder() as temporary:
            options = onnxruntime.SessionOptions()
            options.optimized_model_filepath = str(temporary / f"optimised{ENDING}")
            _session(folder / f"{part}{ENDING}", options)
            return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)

    def quantize(self, folder: Path, out: Path, way: str, batches: Iterable[np.ndarray]) -> None:
        """uint8 activations, int8 weights per channel, int32 sums.

        With `OWN_RANGES` a product takes the range of its input from that input and gives float32 again: that rounds
        least and, since rounding, product and bias are one operator of onnxruntime, it is the fastest of the ways
        (benchmarks/LOG.md). The others have ranges that were seen on the batches.

        A product whose left factor is the weight, as of ResMLP's matrix over patches, stays float32: onnxruntime has no
        integer kernel for it and would only round its input.
        """
        import onnx
        from onnxruntime.quantization import (
            CalibrationDataReader,
            QuantFormat,
            QuantType,
            quantize_dynamic,
            quantize_static,
        )
        from onnxruntime.quantization.shape_inference import quant_pre_process

        from patchloom.disk import temporary_folder

        class Reader(CalibrationDataReader):
            """The batches, one after the other."""

            def __init__(self) -> None:
                self._left = iter(batches)

            def get_next(self) -> dict[str, np.ndarray] | None:
                """The next, None after the last."""
                pixels = next(self._left, None)
                return None if pixels is None else {"pixels": pixels}

        with _quiet(), temporary_folder() as temporary:
            prepared = temporary / f"prepared{ENDING}"
            quant_pre_process(str(folder / f"{MODEL}{ENDING}"), str(prepared), skip_symbolic_shape=True)
            model = onnx.load(str(prepared))
            graph = model.graph
            weights = {value.name for value in graph.initializer}
            from_left = [n.name for n in graph.node if n.op_type == "MatMul" and n.input[0] in weights]
            if way == OWN_RANGES:
                del graph.value_info[:]  # shapes of weights that the quantiser is going to replace
                onnx.save(model, str(prepared))
                quantize_dynamic(
                    str(prepared),
                    str(out / f"{MODEL}{ENDING}"),
                    op_types_to_quantize=["MatMul"],
                    per_channel=True,
                    weight_type=QuantType.QInt8,
                    nodes_to_exclude=from_left,
                )
                return
            only = {"op_types_to_quantize": list(PRODUCTS)} if way == PRODUCTS_ALONE else {}
            quantize_static(
                str(prepared),
                str(out / f"{MODEL}{ENDING}"),
                Reader(),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                nodes_to_exclude=from_left,
                **only,
            )


def _session(path: Path, options: Any) -> Any:
    """onnxruntime's session of a file that was checked; onnxruntime has exceptions of its own."""
    import onnxruntime

    _register_memory()
    options.log_severity_level = 4  # its errors are exceptions too
    for name, value in {
        "session.use_env_allocators": "1",
        "session.load_model_format": "ONNX",  # a file may look like onnxruntime's own format too
    }.items():
        options.add_session_config_entry(name, value)
    data = read_plain(path, MOST_BYTES)
    check_onnx(data)
    # The exporter folds constants. onnxruntime would do so in memory without a bound.
    providers, left_out = ["CPUExecutionProvider"], ["ConstantFolding"]
    return onnxruntime.InferenceSession(data, options, providers=providers, disabled_optimizers=left_out)


@cache
def _register_memory() -> None:
    """Bound what all graphs of this process take: onnxruntime refuses an operator that would need more."""
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    place = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg({"max_mem": run_memory()}))


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
