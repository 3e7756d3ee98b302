"""Devices by name."""

import torch

from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural


def kind_of(device: str | torch.device | None) -> str:
    """'cpu' or 'cuda', which must be here."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"No device is called {str(device)!r}. Give cpu, cuda or cuda:1.") from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"Training on {found} is not supported. Give cpu, cuda or cuda:1.")
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    others = f" or cuda:0 … cuda:{count - 1}" if count else ""
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UsageError(f"{found} is not available: torch finds {plural(count, 'CUDA device')} here. Use cpu{others}.")
    return found.type
