"""Where a run is done."""

import torch

from patchloom.engine.distribution import Processes


def machine_of(processes: Processes) -> str:
    """In words."""
    device = processes.device
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads != 1 else ''}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{processes.world} × {name}, {processes.precision}"
