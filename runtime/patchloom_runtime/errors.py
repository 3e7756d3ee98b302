"""Errors with one-line messages that a user can act on. Each class has an exit code for the command line."""

import re
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST_CHARACTERS = 2_000  # of a message; a name or value from a file may have millions


def shortened(text: str) -> str:
    """Remove the middle of a text that is too long to read. The end of a message says what to do."""
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


class PatchloomError(Exception):
    """Base of all errors that are not bugs. The message says what was found, what was expected and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        # Names from files may contain line breaks; the message stays one line.
        return shortened(super().__str__().replace("\n", "\\n"))


class UsageError(PatchloomError, ValueError):
    """Wrong name, option, path or recipe field.

    Correct the word that the message names; it suggests the nearest valid ones. `patchloom help COMMAND` lists the
    options.
    """

    exit_code = 2


class DataError(PatchloomError):
    """Images, labels or folders that cannot be used.

    Run `patchloom check DATA`, which names every file and line at fault, and see docs/data.md for the accepted
    layouts.
    """

    exit_code = 3


class CheckpointError(PatchloomError):
    """A weights file that is damaged, foreign or for another network.

    Copy the run or download the file again; `patchloom verify RUN` names what changed. For another network, pass its
    name.
    """

    exit_code = 4


class NumericalError(PatchloomError):
    """A loss or weight that is not finite.

    Lower the learning rate (`--set optim.lr=…`) or train with `--set precision=fp32`; the last good checkpoint is
    kept.
    """

    exit_code = 5


class ResourceError(PatchloomError):
    """Not enough memory or disk.

    Use a smaller `--batch` or `--size`, free disk space, or pass another `--out`. The same command resumes a
    training.
    """

    exit_code = 6


class DeviceError(ResourceError):
    """A device that failed. This process can no longer read anything on it.

    Run the same command again: training resumes. If it fails again, check the machine, or pass `--device cpu`.
    """


class BucketError(ResourceError):
    """A bucket that cannot be reached or read, or an object in it that changed.

    Check network, credentials and clock, then run the same command again: training resumes.
    """


# torch has classes for some of these; the libraries below it, and a CPU without memory, only have messages.
_NO_MEMORY = re.compile(r"CUDA out of memory|error: out of memory|_STATUS_ALLOC_FAILED|DefaultCPUAllocator")
_FAILED = re.compile(
    r"(CUDA|HIP) error|_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|device-side assert|"
    r"ECC error|GPU is lost|fallen off the bus"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or torch on the CPU, ran out of memory. A retry with less may work."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )


def is_device_failure(error: BaseException) -> bool:
    """Return whether a device failed for good. NCCL errors do not count: they report failures of other ranks."""
    if isinstance(error, DeviceError):
        return True
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or "NCCL" in str(error):
        return False
    return type(error).__name__ == "AcceleratorError" or bool(_FAILED.search(str(error)))


def not_finite(what: str) -> NumericalError:
    """Return the error for predictions that are not finite. Weights are checked when they are loaded."""
    return NumericalError(
        f"the network's prediction for {what} is not finite, though its weights are: the device or its precision is at "
        "fault. Try --device cpu."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without a full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(name: str, known: list[str] | tuple[str, ...], *, limit: int = 3) -> str:
    """Return ' Did you mean a, b?' with the known names closest to `name`, or '' if none is close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=limit, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def with_near_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UsageError with the nearest known names, not TypeError, for an unknown option."""
    known = list(signature(function).parameters)

    @wraps(function)
    def checked(*values: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in known:
                raise UsageError(f"{function.__name__} has no option {name!r}.{nearest(name, known)}")
        return function(*values, **options)

    return checked


def at_least(name: str, value: float, least: int) -> None:
    """Raise UsageError if a count is too small."""
    if value < least:
        raise UsageError(f"{name} is {value}, expected a whole number of at least {least}")


def attempted(read: Callable[[], R], notes: list[str]) -> R | None:
    """Return the result of `read`. If it fails, add the error to `notes` and return None."""
    try:
        return read()
    except PatchloomError as error:
        notes.append(str(error))
        return None
