"""Where a run is done."""

import torch

from patchloom.engine.distribution import Processes


def machine_of(processes: Processes) -> str:
    """In words."""
    device = processes.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{processes.world} × {name}, {processes.precision}"
