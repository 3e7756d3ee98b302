"""Pictures that can be read, but perhaps not as their owner thinks; `decode` has the rules they are read by."""

from collections.abc import Iterator

from patchloom.data.checking.scan_cache import ImageScan

LONG_SIDES = 8  # times the short side, from where a picture is odd
TINY_SHARE = 0.25  # of the median short side, below which a picture is odd
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


def oddities(sight: ImageScan, usual_side: float) -> Iterator[tuple[str, str]]:
    """(kind, how it is read) of each; `usual_side` is the median short side of the data set, in pixels."""
    if sight.mode in _MODES:
        yield _MODES[sight.mode]
    if sight.mode.startswith("I;"):
        yield "16-bit", "0…65535 becomes 0…255"
    if sight.rotated:
        yield "EXIF rotation", "turned upright"
    if sight.animated:
        yield "animated", "the first frame"
    short, long = sorted((sight.width, sight.height))
    size = f"{sight.width}×{sight.height}"
    if long >= LONG_SIDES * short:
        yield "strip", f"{size}, of which a square crop shows {short / long:.0%}"
    elif short < TINY_SHARE * usual_side:
        yield "tiny", f"{size}, enlarged; the median short side is {usual_side:g}"
