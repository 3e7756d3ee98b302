"""Runs in repositories of the Hugging Face hub, which is asked only where a user says so."""

import os
from pathlib import Path

from patchloom.errors import UsageError

PREFIX = "hub:"


def is_on_hub(source: str | os.PathLike[str]) -> bool:
    """Whether a user names a repository of the hub: hub:user/name."""
    return os.fspath(source).startswith(PREFIX)


def fetched(source: str | os.PathLike[str]) -> Path:
    """The folder of 'hub:user/name', fetched where it is not here yet."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository = os.fspath(source).removeprefix(PREFIX)
    try:
        return Path(snapshot_download(repository))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"{repository} cannot be fetched from the Hugging Face hub: {reason}") from error
