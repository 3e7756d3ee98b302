"""The errors that patchloom raises. Each has the exit code that the command line ends with."""

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
