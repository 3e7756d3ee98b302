"""Limits on the time and memory that decoding a small file may take.

Pillow bounds the pixels of an image, but not what surrounds them: comments, passes over the same pixels, tiles larger
than the image, numbers written as text. Each limit here corresponds to a few seconds.
"""

import re
from typing import Literal

from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER

HEADER_BYTES = 1 << 16  # PPM header, read byte by byte
BLOCKS = 100_000  # JPEG segments before the pixels, PNG chunks: 200 MB in chunks of 8 kB are 25,000
COMMENT_BYTES = 1 << 20  # GIF, before the first frame
SCANNED_PIXELS = 2_500_000_000  # JPEG: 100 passes over the largest image
TEXT_SAMPLES = 6_000_000  # PPM with numbers as text, or in a range that Pillow converts in Python
_WHOLE = (b"255", b"65535")  # ranges that Pillow does not convert, the second only for gray
TILE_PIXELS = 25_000_000  # TIFF
TIFF_PIECES = 250_000  # 25 megapixels in tiles of 16×16 are 100,000
RUN_BYTES, RUN_WIDTH = 8 << 20, 1 << 16  # run-length encoded BMP; a run may skip 255 rows
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF 6.0, section 15
_OFFSETS = (273, 324)  # TIFF tags of strip and tile offsets


def slow_header(name: str, data: bytes) -> str:
    """Return why the header of a file would take long to read, or ''."""
    if name == "GIF" and _bytes_before_first_frame(data) > COMMENT_BYTES:
        return f"a GIF with more than {COMMENT_BYTES:,} bytes of comments before its first frame"
    if name == "PPM":
        return _slow_ppm(data)
    if (name == "JPEG" and _jpeg_steps(data) > BLOCKS) or (name == "PNG" and _png_chunks(data) > BLOCKS):
        return f"a {name} of more than {BLOCKS:,} parts"
    if name == "TIFF" and _tiff_pieces(data) > TIFF_PIECES:
        return f"a TIFF in more than {TIFF_PIECES:,} strips or tiles"
    if name == "BMP" and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):  # runs, which Pillow decodes in Python
        width = abs(int.from_bytes(data[18:22], "little", signed=True))
        if len(data) > RUN_BYTES or width > RUN_WIDTH:
            return f"a BMP of {len(data):,} bytes of runs, {width:,} pixels wide"
    return ""


def slow_pixels(name: str, image: ImageFile, data: bytes) -> str:
    """Return why the pixels of an opened file would take much time or memory to decode, or ''."""
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


def _jpeg_steps(data: bytes) -> int:
    """Count the markers and fill bytes that Pillow reads one by one before the first pass. Stops above BLOCKS."""
    at, count = 2, 0
    while count <= BLOCKS and at + 1 < len(data):
        count += 1
        code = data[at + 1] if data[at] == 0xFF else None
        if code is None or code == 0xFF:
            at += 1
        elif code == 0xDA or (code and 0xFF00 | code not in MARKER):
            break
        elif code and MARKER[0xFF00 | code][2]:  # with a length
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
        else:
            at += 2
    return count


def _tiff_pieces(data: bytes) -> int:
    """Return the number of strips or tiles of the first page. Pillow creates an object for each."""
    order: Literal["little", "big"] = "big" if data[:2] == b"MM" else "little"
    start = int.from_bytes(data[4:8], order)
    entries = [data[at : at + 12] for at in range(start + 2, start + 2 + 12 * 4096, 12)]
    entries = entries[: int.from_bytes(data[start : start + 2], order)]
    counts = [int.from_bytes(e[4:8], order) for e in entries if int.from_bytes(e[:2], order) in _OFFSETS]
    return max(counts, default=0)


def _png_chunks(data: bytes) -> int:
    """Count the chunks. Stops above BLOCKS."""
    at, count = 8, 0
    while count <= BLOCKS and at < len(data):
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        count += 1
    return count


def _bytes_before_first_frame(data: bytes) -> int:
    """Return the bytes of a GIF's extensions before the first frame. Stops above COMMENT_BYTES."""
    if len(data) < 13:
        return 0
    at = start = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)  # after the color table
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
    text = kind in (b"P1", b"P2", b"P3")
    if (
        kind in (b"P4", b"Pf")
        or (kind == b"P5" and numbers[2] in _WHOLE)
        or (kind == b"P6" and numbers[2] == _WHOLE[0])
    ):
        return ""
    if text and b"#" in data[HEADER_BYTES:]:
        return "a PPM with comments between its pixels"
    try:
        samples = int(numbers[0]) * int(numbers[1]) * (3 if kind in (b"P3", b"P6") else 1)
    except ValueError:
        return ""  # Pillow reports it
    how = "as text" if text else "of a range other than 0…255"
    return f"a PPM of {samples:,} numbers {how}" if samples > TEXT_SAMPLES else ""
