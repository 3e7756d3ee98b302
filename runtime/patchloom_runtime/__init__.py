"""Exported patchloom models with numpy, Pillow and an inference engine alone: `load(ARTIFACT).predict(images)`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchloom_runtime.artifacts.artifact import Artifact as Artifact
    from patchloom_runtime.artifacts.artifact import load as load

__version__ = "0.1.0"
__all__ = ["Artifact", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'patchloom_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module("patchloom_runtime.artifacts.artifact"), name)
