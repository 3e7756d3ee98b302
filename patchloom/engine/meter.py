"""Throughput, share of time spent waiting for data, and time remaining."""

from collections import deque
from time import perf_counter

import torch

from patchloom.engine.batches import Feed

SECONDS_BETWEEN_TICKS = 1.0
WINDOW_S = 10.0  # the speed is measured over about the last ten seconds


class Meter:
    """Counter of images, steps and seconds since the start of this call."""

    def __init__(self, feed: Feed, device: torch.device) -> None:
        self._feed, self._device = feed, device
        self._start = self._ticked_at = perf_counter()
        self._images = self._steps = 0
        # (time, images so far, seconds waited so far), the oldest at most about WINDOW_S old
        self._marks: deque[tuple[float, int, float]] = deque([(self._start, 0, 0.0)])

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of this call."""
        return perf_counter() - self._start

    def add(self, images: int) -> None:
        """Count a step of `images` images over all ranks."""
        self._images += images
        self._steps += 1

    def tick_due(self) -> bool:
        """Return True once per second: reading numbers more often would make the device wait."""
        now = perf_counter()
        if now - self._ticked_at < SECONDS_BETWEEN_TICKS:
            return False
        self._ticked_at = now
        return True

    def speed(self) -> dict[str, float]:
        """Return images per second, the share of time spent waiting for data, and peak memory."""
        now = perf_counter()
        while len(self._marks) > 1 and now - self._marks[1][0] > WINDOW_S:
            self._marks.popleft()
        then, images, waited_s = self._marks[0]
        if now - self._marks[-1][0] >= SECONDS_BETWEEN_TICKS:
            self._marks.append((now, self._images, self._feed.waited_s))
        span = max(now - then, 1e-9)
        return {
            "elapsed_s": round(now - self._start, 3),
            "images_per_s": round((self._images - images) / span, 1),
            "data_share": round(min(1.0, (self._feed.waited_s - waited_s) / span), 4),
            "memory_mib": self._memory_mib(),
        }

    def left_s(self, steps_left: int) -> float | None:
        """Return the estimated seconds to the end at the mean speed of this call, evaluations included."""
        return self.elapsed_s / self._steps * steps_left if self._steps else None

    def _memory_mib(self) -> float:
        if self._device.type != "cuda":
            return 0.0
        return round(torch.cuda.max_memory_allocated(self._device) / 2**20, 1)
