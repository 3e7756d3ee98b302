"""Device names: resolving "auto" and checking that a device exists."""

import torch

from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural


def resolve_device(device: str) -> str:
    """Return `device`, with "auto" replaced by "cuda" if torch finds a GPU, else by "cpu"."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_kind(device: str | torch.device | None) -> str:
    """Return "cpu" or "cuda" (default: as for "auto"). Raise UsageError if the device is unknown or missing."""
    if device is None:
        return resolve_device("auto")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"Unknown device {str(device)!r}. Use cpu, cuda or cuda:1.") from error
    if parsed.type not in ("cpu", "cuda"):
        raise UsageError(f"Training on {parsed} is not supported. Use cpu, cuda or cuda:1.")
    count = torch.cuda.device_count() if parsed.type == "cuda" else 0
    others = f" or cuda:0 … cuda:{count - 1}" if count else ""
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        raise UsageError(f"{parsed} is not available: torch finds {plural(count, 'CUDA device')}. Use cpu{others}.")
    return parsed.type
