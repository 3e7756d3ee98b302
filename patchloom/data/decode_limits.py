"""What a small file may make a decoder do: bounds on time and memory that its pixels alone do not give.

Pillow bounds the pixels of a picture. It does not bound what lies around them: comments, passes over the same pixels,
tiles larger than the picture, numbers written as text. Each bound here is what takes a few seconds.
"""

import re

from PIL.ImageFile import ImageFile

HEADER_BYTES = 1 << 16  # of a PPM, read byte by byte
COMMENT_BYTES = 1 << 20  # of a GIF, before its first frame
SCANNED_PIXELS = 2_500_000_000  # of a JPEG: 100 passes over the largest picture
TEXT_SAMPLES = 6_000_000  # of a PPM whose numbers are text
TILE_PIXELS = 25_000_000  # of a TIFF
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF 6.0, section 15


def slow_header(name: str, data: bytes) -> str:
    """Why the header of a file would take long to read; '' where it will not."""
    if name == "GIF" and _bytes_before_first_frame(data) > COMMENT_BYTES:
        return f"a GIF with more than {COMMENT_BYTES:,} bytes of comments before its first frame"
    if name == "PPM":
        return _slow_ppm(data)
    return ""


def slow_pixels(name: str, image: ImageFile, data: bytes) -> str:
    """Why the pixels of an opened file would take much time or memory to decode; '' where they will not."""
    if name == "JPEG":
        scans = data.count(b"\xff\xda")  # never inside a scan, where 0xff is followed by 0
        if scans * image.width * image.height > SCANNED_PIXELS:
            return f"a JPEG of {scans:,} passes over {image.width}×{image.height} pixels"
    if name == "TIFF":
        width, length = (_number(image.tag_v2.get(tag, 0)) for tag in (_TILE_WIDTH, _TILE_LENGTH))  # type: ignore[attr-defined]
        if width * length > TILE_PIXELS:
            return f"a TIFF of {image.width}×{image.height} pixels in tiles of {width}×{length}"
    return ""


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _bytes_before_first_frame(data: bytes) -> int:
    """Of a GIF: what its extensions take, or a little more than is allowed."""
    if len(data) < 13:
        return 0
    at = start = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)  # behind the colours
    while at + 2 < len(data) and data[at] == 0x21 and at - start <= COMMENT_BYTES:
        at += 2
        while at < len(data) and data[at] and at - start <= COMMENT_BYTES:
            at += 1 + data[at]
        at += 1
    return at - start


def _slow_ppm(data: bytes) -> str:
    start = re.sub(rb"#[^\r\n]*", b"", data[:HEADER_BYTES]).split(maxsplit=4)
    kind, *numbers = start[: 3 if data[:2] in (b"P1", b"P4") else 4]
    if len(numbers) < (2 if kind in (b"P1", b"P4") else 3):
        return f"a PPM whose header is longer than {HEADER_BYTES:,} bytes" if len(data) > HEADER_BYTES else ""
    if kind not in (b"P1", b"P2", b"P3"):
        return ""
    if b"#" in data[HEADER_BYTES:]:
        return "a PPM with comments between its pixels"
    try:
        samples = int(numbers[0]) * int(numbers[1]) * (3 if kind == b"P3" else 1)
    except ValueError:
        return ""  # Pillow has words for it
    return f"a PPM of {samples:,} numbers as text" if samples > TEXT_SAMPLES else ""
