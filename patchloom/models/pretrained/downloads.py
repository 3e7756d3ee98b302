"""Published files on this machine: found in the caches of torch.hub and huggingface_hub, or fetched into them.

Nothing is fetched that was not asked for by name. A plain URL goes to `$TORCH_HOME/hub/checkpoints`, as torch.hub does
it, by way of a hidden file that a later command goes on with; a repository of the hub goes where huggingface_hub keeps
it, by that library. `PATCHLOOM_MIRROR` stands before plain URLs (MIRROR/dl.fbaipublicfiles.com/deit/…), `HF_ENDPOINT`
for the hub; with `HF_HUB_OFFLINE` nothing is asked of any network.
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

from patchloom.disk import atomic_write, one_at_a_time, sync_folder
from patchloom.models.pretrained.table import Weights
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError
from patchloom_runtime.untrusted import parse_json, read_plain

MIRROR = "PATCHLOOM_MIRROR"
HUB_FILE = "model.safetensors"
TIMEOUT_S = 30.0  # without a byte
ATTEMPTS = 3  # of a transfer that breaks off, where some of it came; each goes on where the last one ended
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch_weights(weights: Weights) -> Path:
    """The file of published weights: the user's own copy where there is one, else fetched now."""
    if (here := in_cache(weights)) is not None:
        return here
    if is_offline():
        raise ResourceError(f"{weights.name} is not here, and HF_HUB_OFFLINE is set. {by_hand(weights)}")
    terms = f"licence {weights.licence}" if weights.licence else "its publisher states no licence"
    said = f"fetching {weights.name}: {weights.hub or weights.url}, about {weights.size}, {terms}"
    print(said, file=sys.stderr, flush=True)
    reasons = []
    for source, fetch in ((weights.hub, _from_hub), (weights.url, _from_url)):
        if source:
            try:
                return fetch(weights)
            except _UnreachableError as error:
                reasons.append(f"{source}: {error}")
    raise ResourceError(f"{weights.name} cannot be fetched ({'; '.join(reasons)}). {by_hand(weights)}")


def in_cache(weights: Weights) -> Path | None:
    """The file where torch.hub or huggingface_hub has it; None where neither has."""
    if weights.url and (path := url_path(weights.url)).is_file():
        _check_digits(path, weights, "Remove it, and it is fetched anew")
        return path
    if weights.hub:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(weights.hub, HUB_FILE)
        if isinstance(found, str):
            return Path(found)
    return None


def is_offline() -> bool:
    """Whether the user wants no network to be asked, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def url_path(url: str) -> Path:
    """Where torch.hub keeps the file of a URL."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.path.expanduser(os.environ.get("TORCH_HOME") or os.path.join(cache, "torch"))
    return Path(home, "hub", "checkpoints", cache_name(url))


def cache_name(url: str) -> str:
    """The name of the file; one that says nothing, as Google's, with the folder it lies in: sam-Mixer-B_16.npz."""
    folder, name = url.split("/")[-2:]
    return name if name.endswith(".pth") else f"{folder}-{name}"


def by_hand(weights: Weights) -> str:
    """What to do where nothing can be fetched: which file to put where."""
    if weights.url:
        return f"Fetch {weights.url} elsewhere and put it at {url_path(weights.url)}"
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE, f"models--{weights.hub.replace('/', '--')}")
    return f"Fetch it elsewhere with `hf download {weights.hub} {HUB_FILE}` and copy the folder to {cache}"


class _UnreachableError(Exception):
    """A place that does not give the file; another may."""


# From the hub, by its library, which resumes and locks by itself. ---------------------------------------------------


def _from_hub(weights: Weights) -> Path:
    from huggingface_hub import constants, hf_hub_download

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    _reach(endpoint)
    try:
        with _full_disk(weights):
            found = hf_hub_download(weights.hub, HUB_FILE, endpoint=endpoint)
    except PatchloomError:
        raise
    except Exception as error:  # the library, its client and the system raise kinds of their own
        raise _UnreachableError(_in_one_line(error)) from error
    path, blob = Path(found), Path(os.path.realpath(found))
    if re.fullmatch("[0-9a-f]{64}", blob.name) and (own := _sha256(blob)) != blob.name:
        with suppress(OSError):  # the library takes whatever lies there for whole
            blob.unlink()
        raise CheckpointError(
            f"{weights.name} came damaged from {weights.hub}: its SHA-256 begins with {own[:8]}, expected "
            f"{blob.name[:8]}. It was removed; fetch it again."
        )
    return path


def _reach(endpoint: str) -> None:
    """Notice at once where there is no way to the hub: its library tries for half a minute, and says so each time."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # somebody answers
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(
            reason, socket.gaierror | ConnectionError | TimeoutError
        ):  # certificates are the library's matter
            raise _UnreachableError(_in_one_line(error)) from error


# From a plain URL ---------------------------------------------------------------------------------------------------


def _from_url(weights: Weights) -> Path:
    path = url_path(weights.url)
    with _full_disk(weights), one_at_a_time(path.with_name(f".{path.name}.lock"), f"fetches {weights.name}"):
        if path.is_file():  # another process has fetched it meanwhile
            return path
        partial = path.with_name(f".{path.name}.partial")
        _transfer(_mirrored(weights.url), partial)
        _check_digits(partial, weights, "It was not kept", remove=True)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        partial.with_suffix(".json").unlink(missing_ok=True)
        sync_folder(path.parent)
    return path


def _mirrored(url: str) -> str:
    mirror = os.environ.get(MIRROR, "").rstrip("/")
    if not mirror:
        return url
    if not mirror.startswith(("http://", "https://")):
        raise UsageError(f"{MIRROR} is {mirror}, expected an address that begins with http:// or https://")
    return f"{mirror}/{url.partition('://')[2]}"


def _transfer(url: str, partial: Path) -> None:
    """The file of `url` as `partial`, whole; where it breaks off, what has come is kept for the next time."""
    for attempt in range(ATTEMPTS):
        before = _size(partial)
        try:
            _append(url, partial)
            return
        except urllib.error.HTTPError as error:
            raise _UnreachableError(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            if attempt == ATTEMPTS - 1 or _size(partial) <= before:
                raise _UnreachableError(_in_one_line(error)) from error


def _append(url: str, partial: Path) -> None:
    """Go on with `partial` where the server still has the same file, else begin again."""
    about = partial.with_suffix(".json")
    known = _state_of(about, url)
    have = _size(partial) if known else 0
    headers = {"User-Agent": "patchloom", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": known}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        partial.unlink()  # longer than the file there
        return _append(url, partial)
    with reply:
        goes_on = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length and length.isdecimal() else None
        if not goes_on:
            partial.unlink(missing_ok=True)
            mark = reply.headers.get("ETag", "")
            mark = mark if mark and not mark.startswith("W/") else reply.headers.get("Last-Modified", "")
            atomic_write(about, json.dumps({"url": url, "mark": mark}).encode())
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o666), "ab", buffering=0) as file, _bar(total) as progress:
            done = _copy(reply, file, have, progress)
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
    """By what the server is asked whether its file is still the one that was begun; '' where that is not known."""
    try:
        values = parse_json(read_plain(about, 1 << 16))
    except (OSError, ValueError):
        return ""
    known = isinstance(values, dict) and values.get("url") == url and isinstance(values.get("mark"), str)
    return str(values["mark"]) if known else ""


def _check_digits(path: Path, weights: Weights, advice: str, *, remove: bool = False) -> None:
    """A CheckpointError where a file is not the one whose name carries the first digits of its SHA-256."""
    if not weights.digits or (own := _sha256(path)).startswith(weights.digits):
        return
    if remove:
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
    raise CheckpointError(
        f"{path if not remove else _mirrored(weights.url)} is not the published file of {weights.name}: its SHA-256 "
        f"begins with {own[: len(weights.digits)]}, expected {weights.digits}. {advice}."
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """How far a transfer is, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from patchloom_runtime.printable import for_rich

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=for_rich(sys.stderr)), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _full_disk(weights: Weights) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(
                f"There is no space left to fetch {weights.name} (about {weights.size}). What has come is kept: free "
                f"some space and run again. {by_hand(weights)}"
            ) from error
        if isinstance(error, urllib.error.URLError) or error.filename is None:
            raise
        raise UsageError(
            f"{error.filename} cannot be written: {error.strerror}. Set TORCH_HOME to a folder that can."
        ) from error


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"it broke off {error.expected or 0:,} bytes before its end; the same command goes on from there"
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:300]
