"""A run whose --out is in a bucket: written to a copy on this machine, which is uploaded after each checkpoint."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.sources.specs import is_url
from patchloom_runtime.errors import BucketError


def local_folder(source: str) -> Path:
    """Return a path, or that of the copy of a folder in a bucket."""
    return Mirror(source).folder if is_url(source) else Path(source)


def uploader_of(out: str | None) -> "Uploader | None":
    """Return what uploads a run to its bucket; None for a local folder."""
    return Uploader(Mirror(out)) if out is not None and is_url(out) else None


class Uploader:
    """Uploads a run folder in the background while training goes on."""

    def __init__(self, bucket: Mirror) -> None:
        self.bucket = bucket
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Begin to upload what changed, unless an upload is running, which the next one follows.

        A network that fails is a note: the next checkpoint tries again.
        """
        if self._running is not None:
            if not self._running.done():
                return
            try:
                self._running.result()
            except BucketError as error:
                print(f"note: not uploaded yet: {error}", file=sys.stderr)
        self._running = self._thread.submit(self._push)

    def finish(self) -> None:
        """Wait for the upload that is running, and upload the rest."""
        self._thread.shutdown()
        self._push()

    def _push(self) -> None:
        self.bucket.push(removable=lambda name: name.startswith("checkpoints/"))  # the newest is there before
