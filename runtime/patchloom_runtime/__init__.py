"""Models exported by patchloom, run with numpy, Pillow and an inference engine: `load(ARTIFACT).predict(images)`.

    artifacts/   artifact.json, `load`, and the predictors of each task
    engines/     ONNX, OpenVINO and torch graphs: checked, opened, run
    images/      decoding of untrusted files, inputs from Python, preprocessing, geometry, masks
    text/        subword vocabulary, translation line by line

patchloom depends on this package; this package imports nothing of patchloom. Importing it loads nothing else: `load`
imports what an artifact needs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchloom_runtime.artifacts.artifact import Artifact as Artifact
    from patchloom_runtime.artifacts.artifact import load as load

__version__ = "0.2.0"
__all__ = ["Artifact", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'patchloom_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module("patchloom_runtime.artifacts.artifact"), name)
