"""Decoding of one image file to RGB and upright, or a `DataError` that names the file and its fault.

Files are untrusted. The format is detected from the first bytes, whatever the file is called, and only formats in
`FORMATS`, AVIF and HEIC reach Pillow. Size limits are checked from the header, before pixels are decoded.

A JPEG of 25 to 150 megapixels is decoded at reduced size; other formats of that size are refused.

Conversion of other modes to 8-bit RGB:
    gray, black and white, palette, CMYK, YCbCr   converted
    alpha or a transparent color                  composited over white
    16-bit gray                                   0…65535 → 0…255
    32-bit integers                               the same if all values fit, else smallest…largest → 0…255
    floats                                        0…1 → 0…255 if all values fit, else smallest…largest → 0…255;
                                                  refused unless finite
    several frames                                the first

Images that Python code passes (`inputs.py`) follow the same rules: both use `upright_rgb`.
"""

import ctypes
import io
import logging
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from patchloom_runtime.errors import DataError, ResourceError, UsageError
from patchloom_runtime.images.decode_limits import slow_header, slow_pixels
from patchloom_runtime.untrusted import SCARCE, read_plain

MAX_PIXELS = 25_000_000
# Larger JPEGs, such as a phone's, are decoded at 1/2, 1/4 or 1/8 of their sides, row by row. The decoder holds all
# coefficients of a progressive JPEG in memory: 300 MB at this size.
LARGE_JPEG_PIXELS, LARGE_PROGRESSIVE_PIXELS = 150_000_000, 50_000_000
LARGE_HEIC_PIXELS = 50_000_000  # HEIC and AVIF cannot be decoded at reduced size: 200 MB
LIMIT = "PATCHLOOM_MAX_MEGAPIXELS"  # environment variable that replaces LARGE_JPEG_PIXELS
WHOLE = "whole_size"  # key of `info`: original (width, height) of an image that was decoded smaller
MIN_SIDE_PIXELS = 4  # smaller images do not hold one patch
MAX_FILE_BYTES = 1 << 28  # 256 MiB: 25 MP of 16-bit RGBA fit
_LARGEST_BYTES = 2 * 4 * MAX_PIXELS  # RGBA, decoded and converted


class _Jpeg(JpegImagePlugin.JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Do nothing: the resolution is not needed, and Pillow warns if EXIF is damaged."""


# Pillow's classes instead of `Image.open`: no search through formats, nothing read beyond the first frame, and no
# warning about large images (for us they are errors).
FORMATS: dict[str, tuple[type[ImageFile], tuple[bytes, ...]]] = {
    "JPEG": (_Jpeg, (b"\xff\xd8\xff",)),
    "PNG": (PngImagePlugin.PngImageFile, (b"\x89PNG\r\n\x1a\n",)),
    "WebP": (WebPImagePlugin.WebPImageFile, (b"RIFF",)),
    "GIF": (GifImagePlugin.GifImageFile, (b"GIF87a", b"GIF89a")),
    "BMP": (BmpImagePlugin.BmpImageFile, (b"BM",)),
    "TIFF": (TiffImagePlugin.TiffImageFile, (b"II*\0", b"MM\0*")),
    "PPM": (PpmImagePlugin.PpmImageFile, (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"Pf")),
}
# ISO media files, recognized by their brand: AVIF needs Pillow's decoder, HEIC needs pillow-heif.
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"
)
_SAVE_AGAIN = {
    "AVIF": "this Pillow was built without it: update Pillow, or save the image as JPEG",
    "HEIC": "pip install 'patchloom[heic]', or save the image as JPEG",
}
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".avif", ".heic", ".heif"}
)
_REFUSED = {b"%!PS": "EPS", b"\xc5\xd0\xd3\xc6": "EPS", b"%PDF": "PDF", b"PK\x03\x04": "a zip archive"}

# EXIF orientation 2…8 → the operation that turns the image upright (EXIF 2.32, tag 0x0112).
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that exchange height and width


@dataclass(frozen=True)
class ImageFacts:
    """Facts from the header of a file, for data checks."""

    format: str
    mode: str
    width: int  # as stored, before EXIF rotation
    height: int
    rotated: bool
    animated: bool


class Frame(NamedTuple):
    """One frame of an animation, or one page of a file."""

    number: int
    total: int  # in the file
    seconds: float | None  # start time; None for pages
    image: Image.Image


def decode(data: bytes | Path, where: str) -> Image.Image:
    """Decode a file, passed as its bytes or path, to RGB and upright. `where` names it in errors."""
    if isinstance(data, Path):
        data = read_file(data, where)
    return _decoded(*_open(data, where), data, where)


def decode_shrunk(
    data: bytes, where: str, reduction: Callable[[tuple[int, int]], int]
) -> tuple[Image.Image, tuple[int, int]]:
    """Decode at reduced size. Returns the image and its original (width, height).

    `reduction` maps the original size to the largest allowed factor: 1, 2, 4 or 8. A JPEG's blocks of 8×8 pixels can be
    decoded as 4×4, 2×2 or 1; other formats are decoded in full.
    """
    name, image = _open(data, where)
    with _reading(name, data, where):
        width, height = _stored_size(image)
        whole = (height, width) if _orientation(image) in _ON_ITS_SIDE else (width, height)
        factor = reduction(whole) if name == "JPEG" else 1
        if factor > 1:
            image.draft(image.mode, (width // factor, height // factor))  # no effect if it is reduced already
    return _decoded(name, image, data, where), whole


def decode_with_facts(data: bytes, where: str) -> tuple[Image.Image, ImageFacts]:
    """Decode an image and return the facts of its header."""
    name, image = _open(data, where)
    known = _facts(name, image, data, where)
    return _decoded(name, image, data, where), known


def stored_mode(data: bytes, where: str) -> str:
    """Return Pillow's mode of an image, from its header."""
    return _open(data, where)[1].mode


def upright_size(data: bytes, where: str) -> tuple[int, int]:
    """Return the height and width of the decoded image, from its header."""
    name, image = _open(data, where)
    with _reading(name, data, where):
        width, height = image.size
        return (width, height) if _orientation(image) in _ON_ITS_SIDE else (height, width)


def _decoded(name: str, image: ImageFile, data: bytes, where: str) -> Image.Image:
    with _reading(name, data, where):
        whole, on_its_side = image.info.get(WHOLE), _orientation(image) in _ON_ITS_SIDE
        rgb = upright_rgb(image, where)
    rgb.info.clear()  # orientation and transparency of the file no longer apply
    if whole:
        rgb.info[WHOLE] = whole[::-1] if on_its_side else whole
    return rgb


def upright_rgb(image: Image.Image, where: str) -> Image.Image:
    """Convert a Pillow image by the rules above. Returns the same object if it is RGB and upright."""
    image.load()
    rgb = _to_rgb(image, where)
    orientation = _orientation(image)
    return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def decode_frames(data: bytes, where: str, every: int = 1) -> Iterator[Frame]:
    """Yield every `every`-th frame of an animation, or page of a file, starting with the first."""
    name, image = _open(data, where)
    with _reading(name, data, where):
        count = int(getattr(image, "n_frames", 1))
    seconds = 0.0
    for number in range(count):
        with _reading(name, data, where):
            image.seek(number)
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{where}, frame {number}: {image.width}×{image.height} pixels, more than the limit")
            _refuse(slow_pixels(name, image, data), where)
            image.load()
        if number % every == 0:
            with _reading(name, data, where):
                rgb = upright_rgb(image.copy(), where)
            rgb.info.clear()
            yield Frame(number, count, None if name == "TIFF" else seconds, rgb)
        seconds += float(image.info.get("duration") or 0) / 1000


def decode_ids(data: bytes, where: str) -> np.ndarray:
    """Return class or instance ids (H, W) uint8 from a gray or palette image, without conversion."""
    name, image = _open(data, where)
    with _reading(name, data, where):
        ids = np.asarray(image)
    if ids.ndim != 2 or ids.dtype != np.uint8:
        raise DataError(f"{where}: a mask of mode {image.mode}, expected one channel of 8 bits")
    return ids


def _facts(name: str, image: ImageFile, data: bytes, where: str) -> ImageFacts:
    with _reading(name, data, where):
        return ImageFacts(
            format=name,
            mode=image.mode,
            width=_stored_size(image)[0],
            height=_stored_size(image)[1],
            rotated=_orientation(image) in _UPRIGHT,
            animated=bool(getattr(image, "is_animated", False)),
        )


def read_file(path: Path, where: str, *, links: bool = True) -> bytes:
    """Read a regular file. Raises DataError for anything else without opening it, since a pipe could block forever.

    `links` is passed to `untrusted.open_plain`.
    """
    try:
        size = refuse_special(path, where, "an image file")
        if size > MAX_FILE_BYTES:
            raise DataError(f"{where}: {size:,} bytes, more than the limit of {MAX_FILE_BYTES:,}")
        return read_plain(path, MAX_FILE_BYTES, links=links)
    except FileNotFoundError:
        reason = "a link to a file that does not exist" if path.is_symlink() else "no such file"
        raise DataError(f"{where}: {reason}") from None
    except MemoryError as error:
        raise short_of_memory(where) from error
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in SCARCE:
            raise ResourceError(
                f"{where}: cannot be read now ({reason}); free memory or close files and run the command again"
            ) from error
        raise DataError(f"{where}: cannot be read ({reason})") from error
    except ValueError as error:  # a null character
        raise DataError(f"{where!r}: not the path of a file ({error})") from error


def refuse_special(path: str | os.PathLike[str], where: str, expected: str) -> int:
    """Return the size of a regular file. Raises DataError for anything else: opening it could block forever."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{where}: {_kind_of(status.st_mode)}, not {expected}")
    return status.st_size


def short_of_memory(where: str) -> ResourceError:
    """Return the error for a lack of memory. It ends the command; the file is not marked as damaged."""
    return ResourceError(f"{where}: not enough memory to decode it; free some, or use fewer workers")


def _open(data: bytes, where: str) -> tuple[str, ImageFile]:
    """Open a file and return its format name and image. Pixels are not decoded yet."""
    name = format_of(data)
    if name is None:
        raise DataError(f"{where}: {_what_instead(data)}")
    _refuse(slow_header(name, data), where)
    opener = FORMATS[name][0] if name in FORMATS else _opener(name)
    if opener is None:
        raise DataError(f"{where}: not a supported image ({name}): {_SAVE_AGAIN[name]}")
    with _reading(name, data, where):
        image = opener(io.BytesIO(data))
    if name == "JPEG":
        _reduce_large(image, data, where)
    elif name not in FORMATS:
        image = _reduced_heic(name, image, data, where)
    check_size(*image.size, where)
    _refuse(slow_pixels(name, image, data), where)
    return name, image


def _opener(name: str) -> type[ImageFile] | None:
    """Return Pillow's file class for AVIF or HEIC, or None if this installation cannot read it."""
    try:
        if name == "AVIF":
            from PIL import AvifImagePlugin

            return AvifImagePlugin.AvifImageFile if AvifImagePlugin.SUPPORTED else None
        from pillow_heif import HeifImageFile  # type: ignore[import-not-found]
    except ImportError:
        return None
    opener: type[ImageFile] = HeifImageFile
    return opener


def _reduce_large(image: ImageFile, data: bytes, where: str) -> None:
    """Set a large JPEG to be decoded at reduced size. One above the limit is unchanged, for `check_size` to refuse."""
    (width, height), most = image.size, _large_pixels()
    pixels = width * height
    if "progressive" in image.info:
        most = min(most, LARGE_PROGRESSIVE_PIXELS)
    factor = next((factor for factor in (2, 4, 8) if pixels <= MAX_PIXELS * factor**2), 0)
    if MAX_PIXELS < pixels <= most and factor:
        _refuse(slow_pixels("JPEG", image, data), where)
        image.info[WHOLE] = image.size
        image.draft(image.mode, (width // factor, height // factor))


def _reduced_heic(name: str, image: ImageFile, data: bytes, where: str) -> Any:
    """Return a large HEIC or AVIF image at half its sides, and an image of any other size unchanged."""
    if not MAX_PIXELS < image.width * image.height <= min(LARGE_HEIC_PIXELS, _large_pixels()):
        return image
    with _reading(name, data, where):
        reduced = image.reduce(2)
    reduced.info[WHOLE] = image.size
    return reduced


def _large_pixels() -> int:
    value = os.environ.get(LIMIT)
    if value is None:
        return LARGE_JPEG_PIXELS
    if not value.isdecimal() or len(value) > 6:
        raise UsageError(f"{LIMIT} is {value!r}, expected a whole number of megapixels such as 150")
    return int(value) * 1_000_000


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the original (width, height), also if the image is decoded smaller."""
    width, height = image.info.get(WHOLE, image.size)
    return width, height


def check_size(width: int, height: int, where: str) -> None:
    """Raise DataError if an image is too large or too small."""
    if width * height > MAX_PIXELS:
        raise DataError(f"{where}: {width}×{height} pixels, more than the limit of {MAX_PIXELS:,}; shrink the image")
    if min(width, height) < MIN_SIDE_PIXELS:
        raise DataError(f"{where}: {width}×{height} pixels, less than {MIN_SIDE_PIXELS} per side")


def _refuse(slow: str, where: str) -> None:
    if slow:
        raise DataError(f"{where}: {slow}, which takes too long or too much memory; save it again as PNG or JPEG")


def format_of(data: bytes) -> str | None:
    """Return the format that the first bytes of a file announce, such as "JPEG"; None if it is unknown."""
    for name, (_, signatures) in FORMATS.items():
        if data.startswith(signatures):
            return name if name != "WebP" or data[8:12] in (b"WEBP", b"") else None
    return _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else None


@contextmanager
def _reading(name: str, data: bytes, where: str) -> Iterator[None]:
    """Turn whatever Pillow raises into a `DataError`, and silence its warnings and those of libtiff."""
    try:
        # The other decoders do not warn.
        if name != "TIFF" and not (name == "PNG" and b"acTL" in data):
            yield
        else:
            _silence_tiff()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"PIL\.")
                yield
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise nearly anything
        if isinstance(error, MemoryError) or not _memory_is_left():
            raise short_of_memory(where) from error
        raise DataError(f"{where}: {_what_broke(name, data, error)}") from error


def _memory_is_left() -> bool:
    """Return whether the largest image would fit. Decoders written in C report a lack of memory as a damaged file."""
    try:
        np.empty(_LARGEST_BYTES, np.uint8)
    except MemoryError:
        return False
    return True


@lru_cache(maxsize=1)
def _silence_tiff() -> None:
    """Silence what libtiff and Pillow's reader print, without a file name, about damaged files; the error says it too.

    This affects only Pillow's own copy of libtiff, whose file name depends on the build.
    """
    logging.getLogger("PIL.TiffImagePlugin").addHandler(logging.NullHandler())
    home = Path(PIL.__file__).parent
    copies = [*(home.parent / "pillow.libs").glob("libtiff*.so*"), *home.glob(".dylibs/libtiff*.dylib")]
    for copy in copies[:1]:
        library = ctypes.CDLL(str(copy))
        for setter in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
            setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
            setter(None)


def _to_rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        values = np.asarray(image)
        gray = to_8_bit(values, where)
        if "transparency" in image.info:  # Pillow would clip the values at 255
            gray = np.where(values == image.info["transparency"], np.uint8(255), gray)
        return Image.fromarray(gray).convert("RGB")
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, "white")
        layers.alpha_composite((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))
        return layers.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def to_8_bit(values: np.ndarray, where: str) -> np.ndarray:
    """Convert values of any shape and dtype to uint8 by the rules above, without clipping."""
    low, high = values.min(), values.max()
    if values.dtype.kind == "f":
        if not (np.isfinite(low) and np.isfinite(high)):
            raise DataError(f"{where}: has pixels that are not finite numbers (NaN or infinity)")
        full = 1
    else:
        full = 65535
    start, stop = (0, full) if low >= 0 and high <= full else (low, high)
    scaled = (values.astype(np.float64) - start) * (255.0 / (float(stop) - float(start) or 1.0))
    return np.round(scaled).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1…8; 1 if there is none. Parsed here because Pillow warns about damaged EXIF."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow's `load` turns the image and removes the tag
        return int(image.tag_v2.get(0x0112, 1))
    exif = image.info.get("exif")
    if not isinstance(exif, bytes):
        return 1
    tiff = exif.removeprefix(b"Exif\0\0")
    order = ">" if tiff[:2] == b"MM" else "<"
    try:
        (directory,) = struct.unpack_from(f"{order}L", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(f"{order}HHLH", tiff, directory + 2 + 12 * entry)
            if tag == 0x0112 and kind == 3:  # 3: unsigned 16 bit
                return int(value)
    except struct.error:
        pass
    return 1


def _kind_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode), "a device")


def _what_instead(data: bytes) -> str:
    """Return why bytes without a known signature are not an image."""
    if not data:
        return "empty file"
    for signature, kind in _REFUSED.items():
        if data.startswith(signature):
            return f"not a supported image ({kind}); save it as PNG or JPEG"
    if data[4:8] == b"ftyp":
        return "not a supported image (a video, or of an unknown kind); save it as JPEG"
    if not any(data[:512]):
        return "not an image (zeros)"
    text = data[:512].decode("utf-8", errors="ignore")
    if text and sum(letter.isprintable() or letter.isspace() for letter in text) >= 0.95 * min(len(data), 512):
        return (
            "not an image (HTML)" if "<html" in text.lower() or "<!doctype" in text.lower() else "not an image (text)"
        )
    return "not an image (unknown format)"


def _what_broke(name: str, data: bytes, error: Exception) -> str:
    """Return why a file with the signature of `name` could not be read."""
    detail = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"{name} of more than the limit of {MAX_PIXELS:,} pixels; shrink the image"
    if "MAX_TEXT" in detail:
        return f"{name} with text blocks that unpack to more than the limit; save it again without metadata"
    unfinished = {
        "JPEG": b"\xff\xd9" not in data[-64:],
        "PNG": b"IEND" not in data[-64:],
        "WebP": len(data) < 12 or len(data) < 8 + int.from_bytes(data[4:8], "little"),
        "GIF": not data.endswith(b";"),
        "BMP": len(data) < 6 or len(data) < int.from_bytes(data[2:6], "little"),
    }
    if unfinished.get(name, "truncated" in detail.lower() or "EOF" in detail or len(data) < 64):
        return f"ends after {len(data)} bytes (unfinished {name})"
    return f"damaged {name} ({detail or type(error).__name__})"
