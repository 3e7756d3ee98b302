"""Errors that patchloom raises. Each class has the exit code of the command line."""

from patchloom_runtime.errors import (
    BucketError,
    CheckpointError,
    DataError,
    DeviceError,
    NumericalError,
    PatchloomError,
    ResourceError,
    UsageError,
)

__all__ = [
    "BucketError",
    "CheckpointError",
    "DataError",
    "DeviceError",
    "NumericalError",
    "PatchloomError",
    "ResourceError",
    "UsageError",
]
