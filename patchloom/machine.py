"""What the machine, or the container on it, offers to this process."""

import ctypes
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural
from patchloom_runtime.untrusted import installed_bytes

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

# Signals that ask a process to stop, and the one that ends it at once. Windows lacks SIGHUP and SIGKILL.
STOP_SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
END_AT_ONCE: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OWN_SCHEDULE = Path("/proc/self/schedstat")  # nanoseconds on a core, nanoseconds of waiting for one, switches


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


def slowdown(schedule: Path = OWN_SCHEDULE) -> float:
    """Return how many times as long this process's main thread has taken as it would have alone on the machine.

    1.0 where the system does not count the time that a thread waits for a core (Linux does).
    """
    with suppress(OSError, ValueError):
        running, waiting, _ = (int(number) for number in schedule.read_text("ascii").split())
        return 1.0 + waiting / running if running else 1.0
    return 1.0


def resolve_device(device: str) -> str:
    """Return `device`, with "auto" replaced by "cuda" or "mps", Apple's GPU, if torch finds one, else by "cpu".

    Raises UsageError if the device is unknown or missing.
    """
    if device != "auto":
        device_kind(device)
        return device
    import torch  # serving counts cores without it

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def why_device(device: str) -> str:
    """Return why "auto" chose this device."""
    return {"cuda": "CUDA is available", "mps": "no CUDA, an Apple GPU"}.get(device, "neither CUDA nor an Apple GPU")


def device_kind(device: "str | torch.device | None") -> str:
    """Return "cpu", "cuda" or "mps" (default: as for "auto"). Raise UsageError if it is unknown or missing."""
    if device is None:
        return resolve_device("auto")
    import torch  # serving counts cores without it

    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"Unknown device {str(device)!r}. Use cpu, cuda, cuda:1 or mps.") from error
    if parsed.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"The device {parsed} is not supported. Use cpu, cuda, cuda:1 or mps.")
    if parsed.type == "mps" and ((parsed.index or 0) > 0 or not torch.backends.mps.is_available()):
        raise UsageError(f"{parsed} is not available: torch finds no such Apple GPU. Use cpu or auto.")
    count = torch.cuda.device_count() if parsed.type == "cuda" else 0
    others = f" or cuda:0 … cuda:{count - 1}" if count else ""
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        raise UsageError(f"{parsed} is not available: torch finds {plural(count, 'CUDA device')}. Use cpu{others}.")
    return parsed.type


def accelerator_name(device: "torch.device") -> str:
    """Return the name of a GPU, "" for a CPU."""
    import torch  # serving counts cores without it

    if device.type == "mps":
        return "Apple GPU (MPS)"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def widest_float(device: "torch.device | None") -> "torch.dtype":
    """Return float64, or float32 on Apple's GPUs, which lack float64."""
    import torch  # serving counts cores without it

    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process: its groups, their ancestors, and the roots."""
    roots = [cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct"]
    yield from roots
    try:
        lines = own.read_text("utf-8").splitlines()
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


# Processes and files --------------------------------------------------------------------------------------------------

_SYNCHRONIZE, _WAIT_TIMEOUT, _ACCESS_DENIED = 0x100000, 0x102, 5  # of Windows


def process_exists(process: int) -> bool:
    """Return whether there is a process of this number, which may be another user's or a zombie."""
    if sys.platform != "win32":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True
    kernel = ctypes.windll.kernel32  # os.kill would end the process
    handle = kernel.OpenProcess(_SYNCHRONIZE, False, process)
    if not handle:
        return bool(kernel.GetLastError() == _ACCESS_DENIED)
    try:
        return bool(kernel.WaitForSingleObject(handle, 0) == _WAIT_TIMEOUT)
    finally:
        kernel.CloseHandle(handle)


def allow_open_files(wanted: int) -> int:
    """Return how many files this process may open: `wanted`, or fewer if the system does not allow so many."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)


# Available memory -----------------------------------------------------------------------------------------------------


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory this process may still allocate, limited by machine, control groups and address space.

    Returns None if it is unknown.
    """
    limits = [_of_machine(proc), *_of_cgroups(proc, cgroups), _of_address_space(proc)]
    return min((max(0, value) for value in limits if value is not None), default=None)


def _of_machine(proc: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:  # not Linux
        return installed_bytes()
    except (OSError, ValueError):
        return None


# Files of the limit and the use, and the statistic of cached files, which count as used but can be dropped; by version.
_CGROUPS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _of_cgroups(proc: Path, root: Path) -> Iterator[int]:
    """Yield the memory left by the limits of this process's control groups and their parents."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        return
    for _, controllers, path in lines:
        version = 2 if not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        top = root if version == 2 else root / "memory"
        # In a container the path may be that of the host; then the top group applies.
        folder = top / path.strip("/")
        for level in [folder, *folder.parents]:
            if level != top and top not in level.parents:
                break
            if (left := _left_in(level, version)) is not None:
                yield left


def _left_in(folder: Path, version: int) -> int | None:
    limit_file, used_file, dropped = _CGROUPS[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    return int(limit) - used + int(statistics.get(dropped, 0))


def _of_address_space(proc: Path) -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((proc / "self" / "statm").read_text().split()[0])
    except (OSError, ValueError):
        return soft
    return soft - pages * resource.getpagesize()
