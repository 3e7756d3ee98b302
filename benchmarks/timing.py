"""Milliseconds of a piece of work; shared by benchmarks."""

import time
from typing import Any

import torch


def per_image_ms(work: Any, count: int, device: str) -> list[float]:
    """Median, least and most of 15, after five to warm up."""
    took = []
    for index in range(20):
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if index >= 5:
            took.append(1000 * (time.perf_counter() - begun) / count)
    took.sort()
    return [round(took[index], 3) for index in (7, 0, -1)]
