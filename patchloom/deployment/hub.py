"""Where a run lies: in a folder here, or in a repository of the Hugging Face hub, asked only where a user says so."""

import os
from pathlib import Path

from patchloom.errors import UsageError
from patchloom.runs.config import is_run

PREFIX = "hub:"


def is_on_hub(source: str | os.PathLike[str]) -> bool:
    """Whether a user names a repository of the hub: hub:user/name."""
    return os.fspath(source).startswith(PREFIX)


def run_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of a run; that of 'hub:user/name' is fetched. A UsageError where there is none."""
    given = os.fspath(source)
    if is_on_hub(given):
        return _fetched(given.removeprefix(PREFIX))
    if is_run(given):
        return Path(given)
    if given.count("/") == 1 and not given.startswith((".", "/", "~")) and not os.path.exists(given):
        raise UsageError(f"{given}: no such folder; for a repository of the Hugging Face hub write {PREFIX}{given}")
    raise UsageError(f"{given} is not the folder of a run: it has no config.json")


def _fetched(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"{repository} cannot be fetched from the Hugging Face hub: {reason}") from error
    if not is_run(str(folder)):
        raise UsageError(f"{PREFIX}{repository} is no model of patchloom: it has no config.json")
    return folder
