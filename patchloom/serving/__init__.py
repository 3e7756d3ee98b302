"""Trained models behind HTTP: one front process that talks to clients, and one or more that hold the model."""

from importlib.util import find_spec

from patchloom_runtime.errors import UsageError

for _package in ("starlette", "prometheus_client"):
    if find_spec(_package) is None:
        raise UsageError(f"serving needs {_package}, which is not installed: pip install 'patchloom[serve]'")
