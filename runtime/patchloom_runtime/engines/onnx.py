"""ONNX graphs, run by onnxruntime on the CPU."""

from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from patchloom_runtime.engines.engine import RUN_SECONDS, Graph, run_memory, size_class
from patchloom_runtime.engines.onnx_check import check_onnx
from patchloom_runtime.errors import CheckpointError, first_line
from patchloom_runtime.untrusted import read_plain

MOST_BYTES = (1 << 31) - (1 << 20)  # protocol buffers end at 2 GiB


def open_onnx(path: Path, threads: int | None = None) -> Graph:
    """Open a checked session on the CPU. `threads` defaults to all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Threads that spin between calls would take cores from the rest of the process, and from what it measures.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = checked_session(path, options)
    except Exception as error:  # onnxruntime has one exception per status, without a public base class
        raise CheckpointError(f"{path} cannot be opened: {first_line(error)}. Export it again.") from error
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    timed = set()  # size classes that ran within the time limit

    def run(*arrays: np.ndarray) -> dict[str, np.ndarray]:
        run_options, size = onnxruntime.RunOptions(), size_class(arrays)
        timeout = Timer(RUN_SECONDS, setattr, (run_options, "terminate", True))
        timeout.daemon = True
        if size not in timed:  # a thread per run would cost 0.1 ms
            timeout.start()
        try:
            results = session.run(None, dict(zip(inputs, arrays, strict=False)), run_options)
        except Exception as error:
            raise CheckpointError(f"{path} does not fit its artifact: {first_line(error)}.") from error
        finally:
            timeout.cancel()
        timed.add(size)
        return dict(zip(outputs, results, strict=True))

    return run


def checked_session(path: Path, options: Any) -> Any:
    """Return an onnxruntime session for a file that passed `check_onnx`. Errors are onnxruntime's own exceptions."""
    import onnxruntime

    _limit_memory()
    options.log_severity_level = 4  # errors are raised as exceptions too
    for name, value in {
        "session.use_env_allocators": "1",
        "session.load_model_format": "ONNX",  # a file can also look like onnxruntime's own format
    }.items():
        options.add_session_config_entry(name, value)
    data = read_plain(path, MOST_BYTES)
    check_onnx(data)
    # The exporter folds constants already. onnxruntime would do it without a bound on memory.
    return onnxruntime.InferenceSession(
        data, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
    )


@cache
def _limit_memory() -> None:
    """Bound the memory of all graphs in this process: onnxruntime refuses operators that need more."""
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({"max_mem": run_memory()}))
