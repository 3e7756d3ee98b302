"""The most memory a benchmark used; shared by them."""

from pathlib import Path


def peak_mib() -> float:
    """Of this process; getrusage would count what its parent had when it was started."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
