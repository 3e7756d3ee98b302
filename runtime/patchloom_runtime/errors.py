"""What went wrong, in one line a user can act on. Each kind has the exit code of the command line."""

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


MOST_SHOWN = 2_000  # characters of a message; a name or value from a file may have millions


def shortened(text: str) -> str:
    """The text, without its middle where it is too long to be read: its end says what to do."""
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} […] {text[-half:]}"


class PatchloomError(Exception):
    """A mistake that is not a bug: the message says what was given, what was expected, what to do."""

    exit_code = 1

    def __str__(self) -> str:
        # Names from outside may have line breaks; the message stays one line.
        return shortened(super().__str__().replace("\n", "\\n"))


class UsageError(PatchloomError, ValueError):
    """A wrong name, option, path or recipe field."""

    exit_code = 2


class DataError(PatchloomError):
    """Images, labels or folders that cannot be used."""

    exit_code = 3


class CheckpointError(PatchloomError):
    """A file of weights that is damaged, foreign or of another network."""

    exit_code = 4


class NumericalError(PatchloomError):
    """A loss or weight that is not finite."""

    exit_code = 5


class ResourceError(PatchloomError):
    """Not enough memory or disk."""

    exit_code = 6


class DeviceError(ResourceError):
    """A device that failed: nothing on it can be read any more, by this process."""


# torch has classes for some of these; the libraries below it and a CPU without memory have sentences alone.
_NO_MEMORY = re.compile(r"CUDA out of memory|error: out of memory|_STATUS_ALLOC_FAILED|DefaultCPUAllocator")
_FAILED = re.compile(
    r"(CUDA|HIP) error|_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|device-side assert|"
    r"ECC error|GPU is lost|fallen off the bus"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or torch on a CPU, had too little memory; others may go on with less."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )


def is_device_failure(error: BaseException) -> bool:
    """Whether a device failed, so that this process cannot use it any more; NCCL speaks of those of other ranks."""
    if isinstance(error, DeviceError):
        return True
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or "NCCL" in str(error):
        return False
    return type(error).__name__ == "AcceleratorError" or bool(_FAILED.search(str(error)))


def not_finite(what: str) -> NumericalError:
    """The error for answers of a network whose weights are finite, as those of every loaded one are."""
    return NumericalError(
        f"the network's answer about {what} is not finite, though its weights are: the device or its precision is at "
        "fault. Try --device cpu."
    )


def first_line(error: BaseException) -> str:
    """What a library says first, without a full stop; the rest is for those who write it."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(given: str, known: list[str] | tuple[str, ...], *, limit: int = 3) -> str:
    """A phrase with the known names closest to `given`: ' Did you mean a, b?', or '' when nothing is close."""
    import difflib

    close = difflib.get_close_matches(given, known, n=limit, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def with_near_options(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which answers an option that it does not have by the nearest names rather than by a TypeError."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def checked(*values: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in known:
                raise UsageError(f"{function.__name__} has no option {name!r}.{nearest(name, known)}")
        return function(*values, **options)

    return checked


def at_least(name: str, value: float, least: int) -> None:
    """Refuse a count that is too small."""
    if value < least:
        raise UsageError(f"{name} is {value}, expected a whole number of at least {least}")


def attempted(read: Callable[[], R], notes: list[str]) -> R | None:
    """What `read` gives; where it cannot, its reason becomes one of the notes."""
    try:
        return read()
    except PatchloomError as error:
        notes.append(str(error))
        return None
