"""How many cores a server has: those it may run on, and no more than its container is allowed."""

import math
import os
from pathlib import Path


def cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """At least one; a container with a limit of two on a machine of 64 has two, or 64 threads would fight for them."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = _of_version_2(cgroups) or _of_version_1(cgroups)
    return own if allowed is None else max(1, min(own, math.ceil(allowed)))


def _of_version_2(cgroups: Path) -> float | None:
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no file, or "max"
        return None


def _of_version_1(cgroups: Path) -> float | None:
    try:
        quota = int((cgroups / "cpu" / "cpu.cfs_quota_us").read_text())
        return quota / int((cgroups / "cpu" / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
