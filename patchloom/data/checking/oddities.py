"""Images that can be read, but perhaps not as their owner expects."""

from collections.abc import Iterator

from patchloom.data.checking.scan_cache import ImageScan

STRIP_RATIO = 8  # long side divided by the short side, from which an image is odd
TINY_SHARE = 0.25  # of the median short side, below which an image is odd
_MODES = {
    "CMYK": ("CMYK", "converted to RGB"),
    "YCbCr": ("YCbCr", "converted to RGB"),
    "LAB": ("Lab", "converted to RGB"),
    "P": ("palette", "converted to RGB, transparent parts laid over white"),
    "RGBA": ("alpha", "laid over white"),
    "LA": ("alpha", "laid over white"),
    "La": ("alpha", "laid over white"),
    "PA": ("alpha", "laid over white"),
    "I": ("32-bit", "0…65535 becomes 0…255 where all fit, else the smallest…largest"),
    "F": ("floats", "0…1 becomes 0…255 where all fit, else the smallest…largest"),
}


def is_odd_mode(mode: str) -> bool:
    """Return whether `decode` changes images of a mode of Pillow."""
    return mode in _MODES or mode.startswith("I;")


def odd_kinds(scan: ImageScan, usual_side: float) -> Iterator[tuple[str, str]]:
    """Yield (kind, how `decode` reads it). `usual_side` is the median short side of the dataset, in pixels."""
    if scan.mode in _MODES:
        yield _MODES[scan.mode]
    if scan.mode.startswith("I;"):
        yield "16-bit", "0…65535 becomes 0…255"
    if scan.rotated:
        yield "EXIF rotation", "turned upright"
    if scan.animated:
        yield "animated", "the first frame"
    short, long = sorted((scan.width, scan.height))
    size = f"{scan.width}×{scan.height}"
    if long >= STRIP_RATIO * short:
        yield "strip", f"{size}, of which a square crop shows {short / long:.0%}"
    elif short < TINY_SHARE * usual_side:
        yield "tiny", f"{size}, enlarged; the median short side is {usual_side:g}"
