"""Errors that patchloom raises. Each class has the exit code of the command line."""

from patchloom_runtime.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    NumericalError,
    PatchloomError,
    ResourceError,
    UsageError,
)

__all__ = [
    "CheckpointError",
    "DataError",
    "DeviceError",
    "NumericalError",
    "PatchloomError",
    "ResourceError",
    "UsageError",
]
