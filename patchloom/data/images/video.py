"""Frames of videos, animations and multi-page files, for `predict`.

    clip.mp4 …                         decoded by PyAV (pip install 'patchloom[video]')
    GIF, WebP, PNG, TIFF               decoded by Pillow; with one frame they are ordinary images

The name of a frame has its file, number and time: clip.mp4#frame=120 (t=4.00 s).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom_runtime.errors import DataError, UsageError, at_least
from patchloom_runtime.images.decode import MAX_PIXELS, decode, decode_frames, read_file, refuse_special

VIDEOS = frozenset(
    {".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ogv", ".flv", ".ts", ".mts", ".3gp"}
)
_ANIMATIONS = frozenset({".gif", ".webp", ".png", ".apng", ".tif", ".tiff"})


def frames_of(path: str, every: int | None = None) -> Iterator[tuple[str, Image.Image]]:
    """Yield name and image of every `every`-th frame. An ordinary image is one frame.

    The default is about one frame per second of a video, and every frame of an animation.
    """
    if every is not None:
        at_least("every", every, 1)
    suffix = Path(path).suffix.lower()
    if suffix in VIDEOS:
        yield from _video_frames(path, every)
    elif suffix in _ANIMATIONS:
        yield from _animation_frames(path, every or 1)
    else:
        yield path, decode(Path(path), path)


def frames_or_error(path: str, every: int | None = None) -> Iterator[tuple[str, Image.Image | str]]:
    """Yield frames as `frames_of` does. If the file cannot be read to its end, the last item is the error message."""
    try:
        yield from frames_of(path, every)
    except DataError as error:
        yield path, str(error)


def _animation_frames(path: str, every: int) -> Iterator[tuple[str, Image.Image]]:
    for frame in decode_frames(read_file(Path(path), path), path, every):
        yield path if frame.total == 1 else _name(path, frame.number, frame.seconds), frame.image


def _video_frames(path: str, every: int | None) -> Iterator[tuple[str, Image.Image]]:
    av = _pyav(path)
    try:
        refuse_special(path, path, "a video")
        with av.open(path) as video:
            if not video.streams.video:
                raise DataError(f"{path}: no video in this file")
            stream = video.streams.video[0]
            step = every or max(1, round(float(stream.average_rate or 1)))
            if stream.width * stream.height > MAX_PIXELS:
                size = f"{stream.width}×{stream.height} pixels"
                raise DataError(f"{path}: {size}, more than the limit of {MAX_PIXELS:,}; shrink the video")
            for number, frame in enumerate(video.decode(stream)):
                if number % step == 0:
                    image = frame.to_image().rotate(getattr(frame, "rotation", 0), expand=True)
                    yield _name(path, number, frame.time), image
    except (av.error.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read as a video ({reason})") from error


def _name(path: str, number: int, seconds: float | None) -> str:
    return f"{path}#frame={number}" + (f" (t={seconds:.2f} s)" if seconds is not None else "")


def _pyav(path: str) -> Any:
    try:
        import av
    except ImportError:
        raise UsageError(f"{path}: videos are read with PyAV: pip install 'patchloom[video]'") from None
    return av
