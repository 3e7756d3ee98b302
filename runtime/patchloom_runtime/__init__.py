"""Exported patchloom models with numpy, Pillow and onnxruntime alone: `load(ARTEFACT).predict(images)`."""

from patchloom_runtime.deployment.artefact import Artefact, load

__version__ = "0.1.0"
__all__ = ["Artefact", "load"]
