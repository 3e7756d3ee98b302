"""What the disk refuses, in one line a user can act on."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchloom.errors import ResourceError, UsageError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Writing `path`: a full disk is a ResourceError, anything else the system refuses a UsageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"There is no space left to write {path}. What was saved before is intact: free some space and "
                "run again."
            ) from error
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give a folder that can.") from error
