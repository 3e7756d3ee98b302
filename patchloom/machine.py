"""What the machine, or the container on it, offers to this process."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the number of CPU cores this process may use, at least 1.

    It respects the process's CPU affinity and the CPU limits of its control groups (cgroup v1 and v2): a container that
    is limited to two CPUs on a machine of 64 has two. Fractions are rounded up.

    Args:
        cgroups: Mount point of the control groups.
        own: File that lists the control groups of this process.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [limit for group in _groups(cgroups, own) if (limit := _limit_v2(group) or _limit_v1(group)) is not None]
    return max(1, min([available, *map(math.ceil, limits)]))


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process: its groups, their ancestors, and the roots."""
    roots = [cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct"]
    yield from roots
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:  # 0::/path in version 2, 4:cpu,cpuacct:/path in version 1
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = PurePosixPath(path).parts[1:]
        if (controllers and "cpu" not in controllers.split(",")) or ".." in parts:
            continue
        for root in roots:
            yield from (root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _limit_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None


def _limit_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return quota / int((group / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
