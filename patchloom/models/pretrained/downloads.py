"""Download published weights into the caches of torch.hub and huggingface_hub.

Repositories of the Hugging Face hub are downloaded by huggingface_hub. Plain URLs go to `$TORCH_HOME/hub/checkpoints`,
the cache of torch.hub, but are downloaded here: torch.hub neither resumes a transfer, nor locks against other
processes, nor supports mirrors, nor reports a full disk in one line.

    PATCHLOOM_MIRROR    prefix of plain URLs: MIRROR/dl.fbaipublicfiles.com/deit/…
    HF_ENDPOINT         address of the hub
    HF_HUB_OFFLINE      no network access
"""

import errno
import hashlib
import http.client
import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from patchloom.disk import atomic_write, one_at_a_time, rename, sync_file, sync_folder
from patchloom.models.pretrained.table import Weights
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError
from patchloom_runtime.printable import for_rich
from patchloom_runtime.untrusted import open_no_link, parse_json, read_plain

MIRROR = "PATCHLOOM_MIRROR"
HUB_FILE = "model.safetensors"
TIMEOUT_S = 30.0  # without data
ATTEMPTS = 3  # for an interrupted transfer that made progress; each resumes where the last one ended
_CHUNK = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch_weights(weights: Weights) -> Path:
    """Return the file of published weights, downloading it unless it is in a cache."""
    if (cached := in_cache(weights)) is not None:
        return cached
    if is_offline():
        raise ResourceError(f"{weights.name} is not downloaded, and HF_HUB_OFFLINE is set. {manual_download(weights)}")
    terms = f"license {weights.licence}" if weights.licence else "its publisher states no license"
    line = f"downloading {weights.name}: {weights.hub or weights.url}, about {weights.size}, {terms}"
    print(line, file=sys.stderr, flush=True)
    reasons = []
    for source, download in ((weights.hub, _from_hub), (weights.url, _from_url)):
        if source:
            try:
                return download(weights)
            except _UnreachableError as error:
                reasons.append(f"{source}: {error}")
    raise ResourceError(f"{weights.name} cannot be downloaded ({'; '.join(reasons)}). {manual_download(weights)}")


def in_cache(weights: Weights) -> Path | None:
    """Return the file in the cache of torch.hub or huggingface_hub, or None."""
    if weights.url and (path := url_path(weights.url)).is_file():
        _check_digest(path, weights, "Remove it to download it again")
        return path
    if weights.hub:
        cached = huggingface_hub.try_to_load_from_cache(weights.hub, HUB_FILE)
        if isinstance(cached, str):
            return Path(cached)
    return None


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE disables network access, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def url_path(url: str) -> Path:
    """Return the path of a URL in the cache of torch.hub."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.path.expanduser(os.environ.get("TORCH_HOME") or os.path.join(cache, "torch"))
    return Path(home, "hub", "checkpoints", cache_name(url))


def cache_name(url: str) -> str:
    """Return the file name of a URL. Google's, which are not unique, include the folder: sam-Mixer-B_16.npz."""
    folder, name = url.split("/")[-2:]
    return name if name.endswith(".pth") else f"{folder}-{name}"


def manual_download(weights: Weights) -> str:
    """Return a sentence on how to install the file without network access."""
    if weights.url:
        return f"Download {weights.url} on another machine and copy it to {url_path(weights.url)}"
    cache = Path(constants.HF_HUB_CACHE, f"models--{weights.hub.replace('/', '--')}")
    return f"Run `hf download {weights.hub} {HUB_FILE}` on another machine and copy the folder to {cache}"


class _UnreachableError(Exception):
    """A server that does not provide the file; another may."""


# From the hub, by huggingface_hub, which resumes and locks itself ---------------------------------------------------


def _from_hub(weights: Weights) -> Path:
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    _reach(endpoint)
    try:
        with _full_disk(weights):
            file = huggingface_hub.hf_hub_download(weights.hub, HUB_FILE, endpoint=endpoint)
    except PatchloomError:
        raise
    except Exception as error:  # the library, its HTTP client and the system raise various types
        raise _UnreachableError(_in_one_line(error)) from error
    path, blob = Path(file), Path(os.path.realpath(file))
    if re.fullmatch("[0-9a-f]{64}", blob.name) and (own := _sha256(blob)) != blob.name:
        with suppress(OSError):  # the library would consider it complete
            blob.unlink()
        raise CheckpointError(
            f"{weights.name} from {weights.hub} is damaged: its SHA-256 starts with {own[:8]}, expected "
            f"{blob.name[:8]}. The file was removed; run the command again."
        )
    return path


def _reach(endpoint: str) -> None:
    """Raise _UnreachableError if there is no connection: the library would retry for half a minute."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # the server answers
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        # The library handles other errors, such as those of certificates.
        if isinstance(reason, socket.gaierror | ConnectionError | TimeoutError):
            raise _UnreachableError(_in_one_line(error)) from error


# From a plain URL ---------------------------------------------------------------------------------------------------


def _from_url(weights: Weights) -> Path:
    path = url_path(weights.url)
    with _full_disk(weights), one_at_a_time(path.with_name(f".{path.name}.lock"), f"downloads {weights.name}"):
        if path.is_file():  # another process has downloaded it
            return path
        partial = path.with_name(f".{path.name}.partial")
        _transfer(_mirrored(weights.url), partial)
        _check_digest(partial, weights, "The download was removed", remove=True)
        sync_file(partial)
        rename(partial, path)
        partial.with_suffix(".json").unlink(missing_ok=True)
        sync_folder(path.parent)
    return path


def _mirrored(url: str) -> str:
    mirror = os.environ.get(MIRROR, "").rstrip("/")
    if not mirror:
        return url
    if not mirror.startswith(("http://", "https://")):
        raise UsageError(f"{MIRROR} is {mirror}, expected a URL that starts with http:// or https://")
    return f"{mirror}/{url.partition('://')[2]}"


def _transfer(url: str, partial: Path) -> None:
    """Download `url` to `partial`. An interrupted transfer is kept, for the next attempt or command to resume."""
    for attempt in range(ATTEMPTS):
        before = _size(partial)
        try:
            _append(url, partial)
            return
        except urllib.error.HTTPError as error:
            raise _UnreachableError(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise
            if attempt == ATTEMPTS - 1 or _size(partial) <= before:
                raise _UnreachableError(_in_one_line(error)) from error


def _append(url: str, partial: Path) -> None:
    """Resume `partial` if the server still has the same file, else start again."""
    about = partial.with_suffix(".json")
    version = _state_of(about, url)
    done = _size(partial) if version else 0
    headers = {"User-Agent": "patchloom", "Accept-Encoding": "identity"}
    if done:
        headers |= {"Range": f"bytes={done}-", "If-Range": version}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        partial.unlink()  # longer than the file on the server
        return _append(url, partial)
    with reply:
        resumes = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {done}-")
        done = done if resumes else 0
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length and length.isdecimal() else None
        if not resumes:
            partial.unlink(missing_ok=True)
            mark = reply.headers.get("ETag", "")
            mark = mark if mark and not mark.startswith("W/") else reply.headers.get("Last-Modified", "")
            atomic_write(about, json.dumps({"url": url, "mark": mark}).encode())
        descriptor = open_no_link(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(descriptor, "ab", buffering=0) as file, _bar(total) as progress:
            done = _copy(reply, file, done, progress)
    if total is not None and done < total:
        raise http.client.IncompleteRead(b"", total - done)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _copy(reply: Any, file: FileIO, done: int, progress: Callable[[int], None]) -> int:
    while chunk := reply.read(_CHUNK):
        rest = memoryview(chunk)
        while rest:
            rest = rest[file.write(rest) :]
        done += len(chunk)
        progress(done)
    return done


def _state_of(about: Path, url: str) -> str:
    """Return the ETag or modification time of a partial download, or '' if it is not known."""
    try:
        values = parse_json(read_plain(about, 1 << 16))
    except (OSError, ValueError):
        return ""
    is_valid = isinstance(values, dict) and values.get("url") == url and isinstance(values.get("mark"), str)
    return str(values["mark"]) if is_valid else ""


def _check_digest(path: Path, weights: Weights, advice: str, *, remove: bool = False) -> None:
    """Raise CheckpointError if the SHA-256 of a file does not start with the digits in its name."""
    if not weights.digits or (own := _sha256(path)).startswith(weights.digits):
        return
    if remove:
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
    raise CheckpointError(
        f"{path if not remove else _mirrored(weights.url)} is not the published file of {weights.name}: its SHA-256 "
        f"starts with {own[: len(weights.digits)]}, expected {weights.digits}. {advice}."
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal. Yields a function that takes the number of bytes done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=for_rich(sys.stderr)), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _full_disk(weights: Weights) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise ResourceError(
                f"There is not enough space to download {weights.name} (about {weights.size}). Free some space and run "
                f"the command again, which resumes the download. {manual_download(weights)}"
            ) from error
        if isinstance(error, urllib.error.URLError) or error.filename is None:
            raise
        raise UsageError(
            f"{error.filename} cannot be written: {error.strerror}. Set TORCH_HOME to a writable folder."
        ) from error


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"it stopped {error.expected or 0:,} bytes before the end; the same command resumes it"
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:300]
