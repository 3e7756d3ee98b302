"""One file of every mode and orientation, and every way to hand its picture over in Python."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.bad_images import GREY, PICTURE, PIXELS, encoded, with_alpha

_SHADES = np.linspace(0, 255, GREY.size).round().reshape(GREY.shape).astype(np.uint8)
_RGBA = np.dstack([PIXELS, _SHADES])
_LA = np.dstack([GREY, _SHADES])
_16_BIT = (GREY.astype(np.uint16) * 251 + _SHADES).astype(np.uint16)
_FLOATS = (GREY / 255).astype(np.float32) ** 2


def _turned(orientation: int, kind: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(PICTURE, kind, exif=exif, **options)


# Mode → the file. PNG and TIFF keep every value, so that an array of it is the same picture.
FILES: dict[str, bytes] = {
    "RGB": encoded(PICTURE, "PNG"),
    "RGB-jpeg": encoded(PICTURE, "JPEG"),
    "RGB-transparent-colour": encoded(PICTURE, "PNG", transparency=tuple(int(v) for v in PIXELS[3, 5])),
    "RGBA": encoded(Image.fromarray(_RGBA), "PNG"),
    "L": encoded(Image.fromarray(GREY), "PNG"),
    "LA": encoded(Image.fromarray(_LA), "PNG"),
    "P": encoded(PICTURE.quantize(16), "PNG"),
    "P-transparent": encoded(PICTURE.quantize(16), "PNG", transparency=3),
    "P-alphas": encoded(PICTURE.quantize(16), "PNG", transparency=bytes(range(0, 256, 16))),
    "1": encoded(Image.fromarray(GREY > 100), "PNG"),
    "CMYK": encoded(PICTURE.convert("CMYK"), "TIFF"),
    "CMYK-jpeg": encoded(PICTURE.convert("CMYK"), "JPEG"),
    "YCbCr": encoded(PICTURE.convert("YCbCr"), "TIFF"),
    "I;16": encoded(Image.fromarray(_16_BIT), "PNG"),
    "I;16-transparent": encoded(Image.fromarray(_16_BIT), "PNG", transparency=int(_16_BIT[0, 0])),
    "I;16B": encoded(Image.fromarray(_16_BIT.astype(">u2")), "TIFF"),
    "I": encoded(Image.fromarray(_16_BIT.astype(np.int32) * 9 - 70_000), "TIFF"),
    "F": encoded(Image.fromarray(_FLOATS), "TIFF"),
    "F-wide": encoded(Image.fromarray(_FLOATS * 40 - 3), "TIFF"),
    "webp-alpha": encoded(with_alpha(PICTURE, 90), "WEBP", lossless=True),
    "gif-frames": encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(180)]),
    **{f"exif-{kind}-{turn}".lower(): _turned(turn, kind) for kind in ("JPEG", "TIFF") for turn in range(1, 9)},
    **{f"exif-{kind}-6".lower(): _turned(6, kind) for kind in ("PNG", "WEBP")},
}
# Where an array of Pillow's image says all that the file says: no palette, no EXIF, no CMYK, a known range.
SAME_AS_ARRAY = ("RGB", "RGBA", "L", "LA", "1", "I;16", "I;16B", "F")
# Where Pillow's own conversion to RGB loses nothing, so that EXIF alone is left to be heeded.
SAME_CONVERTED = ("RGB", "RGB-jpeg", "L", "P", "1", "CMYK", "CMYK-jpeg", "YCbCr")


def write_files(folder: Path) -> dict[str, Path]:
    """Every file; the extension says nothing, since the format is told from the content."""
    paths = {mode: folder / f"{mode.replace(';', '_')}.png" for mode in FILES}
    for mode, path in paths.items():
        path.write_bytes(FILES[mode])
    return paths


def _at_its_end(data: bytes) -> io.BytesIO:
    file = io.BytesIO()
    file.write(data)
    return file


def _loaded(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


def _made(path: Path, make: Callable[[Image.Image], Any]) -> Any:
    with Image.open(path) as image:
        return make(image)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Channels first; in the machine's own byte order, which torch wants."""
    native = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(native if native.ndim == 2 else np.ascontiguousarray(native.transpose(2, 0, 1)))


WAYS: dict[str, Callable[[Path], Any]] = {
    "str": str,
    "Path": Path,
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "memoryview": lambda path: memoryview(path.read_bytes()),
    "file": lambda path: path.open("rb"),
    "BytesIO written to": lambda path: _at_its_end(path.read_bytes()),
    "PIL, lazy": Image.open,
    "PIL, from bytes": lambda path: Image.open(io.BytesIO(path.read_bytes())),
    "PIL, loaded": _loaded,
    "PIL, copied": lambda path: _made(path, Image.Image.copy),
}
OF_NUMBERS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda array: array,
    "array, not contiguous": lambda array: np.repeat(array, 2, axis=0)[::2],
    "array with an axis for grey": lambda array: array[..., None] if array.ndim == 2 else array,
    "tensor": tensor_of,
    "tensor with an axis for grey": lambda array: tensor_of(array[..., None] if array.ndim == 2 else array),
    "tensor, needing gradients": lambda array: (
        tensor_of(array).requires_grad_() if array.dtype.kind == "f" else tensor_of(array)
    ),
}


def ways_of(mode: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Every way to hand the file's picture over, as one picture."""
    for name, way in WAYS.items():
        given = way(path)
        yield name, given
        if hasattr(given, "close"):
            given.close()
    if mode in SAME_CONVERTED or mode.startswith("exif"):
        yield "PIL, converted", _made(path, lambda image: image.convert("RGB"))
    if mode in SAME_AS_ARRAY:
        for name, make in OF_NUMBERS.items():
            yield name, make(_made(path, np.asarray))
