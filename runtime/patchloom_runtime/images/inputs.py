"""Images as Python code passes them, decoded to RGB and upright, bit for bit as `decode` reads the file.

One image is any of

    a path, bytes, an open file    decoded by the rules of `decode`
    a PIL image                    by the same rules: EXIF orientation is applied, alpha composited over white
    a numpy array                  (H, W) or (H, W, channels)
    a torch tensor                 (H, W) or (channels, H, W)

The dtype of an array or tensor states its range: uint8 0…255, uint16 0…65535, floats 0…1, bool black and white.
Channels are gray, gray and alpha, RGB, or RGBA. Values out of range and ambiguous shapes are refused. Several images
are a folder, an `ImageCollection`, a batch with one more axis in front, or any iterable; they are read one at a time.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.folders import files_below
from patchloom_runtime.images.decode import (
    EXTENSIONS,
    MAX_FILE_BYTES,
    check_size,
    decode,
    decode_shrunk,
    read_file,
    short_of_memory,
    to_8_bit,
    upright_rgb,
    upright_size,
)
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import path_within

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # torch is optional here


@runtime_checkable
class ImageCollection(Protocol):
    """Images read by position, such as a dataset of patchloom."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image: ...

    def where(self, index: int) -> str:
        """Return where the image came from, for messages."""
        ...


ImageLike: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image | np.ndarray | Tensor
)
ImagesLike: TypeAlias = ImageLike | ImageCollection | Iterable[ImageLike]

ACCEPTED = "a path, bytes, a file opened with 'rb', a PIL image, a numpy array or a torch tensor"
CHANNELS = (1, 2, 3, 4)  # gray, gray and alpha, RGB, RGBA
_NUMBERS = "uint8 (0…255), uint16 (0…65535), float (0…1) or bool"
_CHANNELS_FIRST = {3: "permute(2, 0, 1)", 4: "permute(0, 3, 1, 2)"}
_CHANNELS_LAST = {3: "transpose(1, 2, 0)", 4: "transpose(0, 2, 3, 1)"}
_TYPES = {"uint8", "uint16", "float16", "bfloat16", "float32", "float64", "bool"}


class ImageInput(NamedTuple):
    """An image that is not read yet. Read it before requesting the next: an iterable may reuse its buffers."""

    name: str  # for messages: path, or position in the input
    read: Callable[[], Image.Image]  # raises DataError or UsageError with the name


def is_single_image(images: ImagesLike) -> bool:
    """Return whether this is one image rather than a folder, an `ImageCollection`, a batch or an iterable."""
    if isinstance(images, str | os.PathLike):
        return not os.path.isdir(images)
    if _has_numbers(images):
        return images.ndim != 4 and not _holds_objects(images)
    if isinstance(images, ImageCollection):
        return False
    return not isinstance(images, Iterable) or isinstance(images, bytes | bytearray | memoryview) or _is_file(images)


def items_of(images: ImagesLike) -> Iterable[Any]:
    """Return the items to iterate over: images, folders, batches and collections."""
    if isinstance(images, Mapping):
        raise UsageError(f"a {type(images).__name__} is neither an image nor a list of images; pass its values")
    if _has_numbers(images):
        return images.tolist() if _holds_objects(images) else [images]
    if is_single_image(images) or isinstance(images, str | os.PathLike | ImageCollection):
        return [images]
    assert isinstance(images, Iterable)
    return images


def iterate_images(images: ImagesLike) -> Iterator[ImageInput]:
    """Yield every image in order, including those of folders, batches and collections inside an iterable."""
    single, count = is_single_image(images), 0
    for item in items_of(images):
        for image in _opened(item, "the image" if single else f"image {count}", count):
            yield image
            count += 1


def read_image(image: ImageLike, name: str = "the image") -> Image.Image:
    """Read one image as RGB and upright. `name` is used in errors if it has no name of its own."""
    return _named(image, name).read()


def thumbnail_of(path: str, side: int, roots: Sequence[str] | None = None) -> Image.Image:
    """Return the image of a file with at most `side` pixels per side. A large JPEG is decoded at reduced size.

    Pass `roots` for a path from an untrusted index: raises DataError for a file outside these folders.
    """

    def reduction(size: tuple[int, int]) -> int:
        return next(factor for factor in (8, 4, 2, 1) if min(size) >= 2 * side * factor or factor == 1)

    real = path if roots is None else path_within(path, roots)
    if real is None:
        raise DataError(f"{path}: outside the folders that images may be read from; add its folder with --images")
    image, _ = decode_shrunk(read_file(Path(real), path, links=roots is None), path, reduction)
    image.thumbnail((side, side))
    return image


def read_image_within(data: bytes, name: str, pixels: int) -> Image.Image:
    """Decode a file's bytes. Raises DataError, before decoding, if it has more than `pixels` pixels."""
    height, width = upright_size(data, name)
    if height * width > pixels:
        raise DataError(f"{name}: {width}×{height} pixels, more than the limit of {pixels:,}; shrink the image")
    check_size(width, height, name)
    return decode(data, name)


def list_image_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield image files, including those inside folders."""
    for path in map(os.fsdecode, paths):
        if not os.path.isdir(path):
            yield path
            continue
        below = (file for file in files_below(path) if os.path.splitext(file)[1].lower() in EXTENSIONS)
        files = sorted(os.path.join(path, file) for file in below)
        if not files:
            raise UsageError(f"{path} contains no images")
        yield from files


def _opened(item: Any, name: str, count: int) -> Iterator[ImageInput]:
    """Yield the image, or the images it contains. `count` images came before."""
    if isinstance(item, str | os.PathLike):
        yield from (_named(file, file) for file in list_image_files([item]))
    elif isinstance(item, ImageCollection):
        yield from (ImageInput(item.where(row), partial(item.read, row)) for row in range(len(item)))
    elif _has_numbers(item) and item.ndim == 4:
        _channels_of(item, f"{len(item)} images")  # check once
        yield from (_named(one, f"image {number}") for number, one in enumerate(item, start=count))
    else:
        yield _named(item, name)


def _named(image: Any, name: str) -> ImageInput:
    if isinstance(image, str | os.PathLike):
        path = os.fsdecode(image)
        return ImageInput(path, partial(decode, Path(path), printable(path)))
    if isinstance(image, bytes | bytearray | memoryview):
        return ImageInput(name, partial(decode, bytes(image), name))
    if isinstance(image, Image.Image):
        own = getattr(image, "filename", "")  # '' unless Pillow opened it by its path
        name = printable(own) if isinstance(own, str) and own else name
        return ImageInput(name, partial(_from_pillow, image, name))
    if _has_numbers(image):
        return ImageInput(name, partial(_from_numbers, image, name))
    if _is_file(image):
        own = getattr(image, "name", "")
        name = printable(own) if isinstance(own, str) and own else name
        return ImageInput(name, partial(_from_file, image, name))
    raise UsageError(f"{name} is of type {type(image).__name__}; expected {ACCEPTED}")


def _from_file(file: IO[bytes], where: str) -> Image.Image:
    """Read a file from its beginning, as Pillow does, wherever its position is."""
    try:
        if file.seekable():
            file.seek(0)
        data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: closed, or opened as text and not UTF-8
        raise DataError(f"{where}: cannot be read ({error})") from error
    if not isinstance(data, bytes):
        raise UsageError(f"{where} was opened as text; open it with 'rb'")
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{where}: more bytes than the limit of {MAX_FILE_BYTES:,}")
    return decode(data, where)


def _from_pillow(image: Image.Image, where: str) -> Image.Image:
    check_size(*image.size, where)
    try:
        rgb = upright_rgb(image, where)
    except DataError:
        raise
    except MemoryError as error:
        raise short_of_memory(where) from error
    except Exception as error:  # Pillow reads the file only now and raises nearly anything
        raise DataError(f"{where}: cannot be read ({error or type(error).__name__})") from error
    if rgb is image:
        rgb = image.copy()  # do not change the caller's image
    rgb.info.clear()
    return rgb


def _from_numbers(values: np.ndarray | Tensor, where: str) -> Image.Image:
    """Convert an array (H, W) or (H, W, channels), or a tensor (H, W) or (channels, H, W)."""
    kind = values.dtype.name if isinstance(values, np.ndarray) else str(values.dtype).removeprefix("torch.")
    if kind not in _TYPES:
        raise UsageError(f"{where}: {_kind(values)} of {kind}, whose range is not known; use {_NUMBERS}")
    if _is_tensor(values):
        numbers = _array_of(values, where)
        pixels = numbers if _channels_of(values, where) is None else numbers.transpose(1, 2, 0)
    else:
        pixels = np.asarray(values)
    channels = _channels_of(values, where)
    check_size(pixels.shape[1], pixels.shape[0], where)
    if pixels.ndim == 3 and channels == 1:
        pixels = pixels[..., 0]
    return _from_pillow(Image.fromarray(np.ascontiguousarray(_bytes_of(pixels, where))), where)


def _channels_of(values: np.ndarray | Tensor, where: str) -> int | None:
    """Return the number of channels, or None without that axis. Raises UsageError if the shape is not an image's."""
    shape, tensor = tuple(values.shape), _is_tensor(values)
    described = f"{where}: {_kind(values)} of shape {shape}"
    expected = "(channels, H, W)" if tensor else "(H, W, channels)"
    if len(shape) not in (2, 3, 4):
        raise UsageError(f"{described}; expected (H, W), {expected}, or a batch (N, {expected[1:]}")
    if len(shape) == 2:
        return None
    channels, other = (shape[-3], shape[-1]) if tensor else (shape[-1], shape[-3])
    if channels in CHANNELS:
        return channels
    advice = ""
    if other in CHANNELS:
        advice = f"; use .{(_CHANNELS_FIRST if tensor else _CHANNELS_LAST)[len(shape)]}"
    elif len(shape) == 3:
        advice = f"; a batch of gray images is {'(N, 1, H, W)' if tensor else '(N, H, W, 1)'}"
    raise UsageError(f"{described}; expected {expected} with 1, 2, 3 or 4 channels{advice}")


def _bytes_of(values: np.ndarray, where: str) -> np.ndarray:
    """Convert values, whose dtype states their range, to uint8."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" and np.isfinite(low) and np.isfinite(high) and (low < 0 or high > 1):
        raise UsageError(
            f"{where}: floats from {low:g} to {high:g}; expected 0…1. Divide by the largest possible pixel value; "
            "patchloom subtracts the mean and divides by the deviation itself."
        )
    return to_8_bit(values, where)


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Return whether this is a torch tensor, without importing torch: whoever has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array_of(values: Tensor, where: str) -> np.ndarray:
    """Return the values of a dense tensor on any device; half precision becomes float32."""
    import torch

    if values.layout is not torch.strided or values.is_meta:
        raise UsageError(f"{where}: a sparse or meta tensor; pass a dense one")
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()


def _has_numbers(value: Any) -> TypeGuard[np.ndarray | Tensor]:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _holds_objects(value: np.ndarray | Tensor) -> bool:
    """Return whether an array holds objects, such as paths."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "OUT" and value.ndim == 1


def _is_file(value: Any) -> bool:
    return hasattr(value, "read") and hasattr(value, "seekable")


def _kind(values: np.ndarray | Tensor) -> str:
    return "a tensor" if _is_tensor(values) else "an array"
