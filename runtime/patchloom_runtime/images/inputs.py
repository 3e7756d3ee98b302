"""What Python hands over → pictures, RGB and upright, the same to the bit as `decode` reads the file.

One picture is any of

    a path, bytes, an open file    a file, by the rules of `decode`
    a PIL image                    by the same rules: its EXIF turns it, its alpha is laid over white
    a numpy array                  (H, W) or (H, W, channels)
    a torch tensor                 (H, W) or (channels, H, W)

Of arrays and tensors the type of the numbers states the range: uint8 0…255, uint16 0…65535, floats 0…1, bool black and
white. Channels are grey, grey and alpha, RGB, or RGBA. What is outside its range, or could be read in two ways, is
refused. Many pictures are a folder, an `ImageCollection`, a batch with one more axis in front, or anything that can be
iterated over; they are read one at a time.
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
    Tensor = Any  # whose module is not imported for the sake of a name


@runtime_checkable
class ImageCollection(Protocol):
    """Images read by position, such as a dataset of patchloom."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """Return one image."""
        ...

    def where(self, index: int) -> str:
        """Return where the image came from, for messages."""
        ...


ImageLike: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image | np.ndarray | Tensor
)
ImagesLike: TypeAlias = ImageLike | ImageCollection | Iterable[ImageLike]

ACCEPTED = "a path, bytes, a file opened with 'rb', a PIL image, a numpy array or a torch tensor"
CHANNELS = (1, 2, 3, 4)  # grey, grey and alpha, RGB, RGBA
_NUMBERS = "uint8 (0…255), uint16 (0…65535), float (0…1) or bool"
_CHANNELS_FIRST = {3: "permute(2, 0, 1)", 4: "permute(0, 3, 1, 2)"}
_CHANNELS_LAST = {3: "transpose(1, 2, 0)", 4: "transpose(0, 2, 3, 1)"}
_TYPES = {"uint8", "uint16", "float16", "bfloat16", "float32", "float64", "bool"}


class ImageInput(NamedTuple):
    """A picture, not yet read. What is iterated over may change its mind: read it before the next is asked for."""

    name: str  # for messages: its path, or the how-many-eth it is
    read: Callable[[], Image.Image]  # a DataError or UsageError, which names it, where it cannot be read


def is_single_image(given: ImagesLike) -> bool:
    """Whether it is one picture rather than many: a folder, an `ImageCollection`, a batch, an iterable."""
    if isinstance(given, str | os.PathLike):
        return not os.path.isdir(given)
    if _has_numbers(given):
        return given.ndim != 4 and not _holds_objects(given)
    if isinstance(given, ImageCollection):
        return False
    return not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | memoryview) or _is_file(given)


def items_of(given: ImagesLike) -> Iterable[Any]:
    """What to go through: pictures, folders, batches and sets, which `pictures_in` opens."""
    if isinstance(given, Mapping):
        raise UsageError(f"a {type(given).__name__} is neither a picture nor a list of them; give its values")
    if _has_numbers(given):
        return given.tolist() if _holds_objects(given) else [given]
    if is_single_image(given) or isinstance(given, str | os.PathLike | ImageCollection):
        return [given]
    assert isinstance(given, Iterable)
    return given


def iterate_images(given: ImagesLike) -> Iterator[ImageInput]:
    """Every picture of what was given, in order; folders, batches and sets inside an iterable are opened too."""
    one, count = is_single_image(given), 0
    for item in items_of(given):
        for picture in _opened(item, "the picture" if one else f"picture {count}", count):
            yield picture
            count += 1


def read_image(given: ImageLike, name: str = "the picture") -> Image.Image:
    """One picture, RGB and upright; `name` is what errors call one that has no name of its own."""
    return _named(given, name).read()


def thumbnail_of(path: str, side: int, roots: Sequence[str] | None = None) -> Image.Image:
    """The picture of a file with at most `side` pixels per side; a large JPEG is decoded smaller.

    Give `roots` for a path that an index names, which may be a stranger's: a file outside these folders is a DataError.
    """

    def reduction(size: tuple[int, int]) -> int:
        return next(factor for factor in (8, 4, 2, 1) if min(size) >= 2 * side * factor or factor == 1)

    real = path if roots is None else path_within(path, roots)
    if real is None:
        raise DataError(f"{path}: outside the folders that images may be read from; name its folder with --images")
    picture, _ = decode_shrunk(read_file(Path(real), path, links=roots is None), path, reduction)
    picture.thumbnail((side, side))
    return picture


def read_image_within(data: bytes, name: str, pixels: int) -> Image.Image:
    """The picture in a file's bytes, refused by its header where it has more pixels than the caller takes."""
    height, width = upright_size(data, name)
    if height * width > pixels:
        raise DataError(f"{name}: {width}×{height} pixels, more than the limit of {pixels:,}; shrink the image")
    check_size(width, height, name)
    return decode(data, name)


def list_image_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Image files, and those inside folders."""
    for path in map(os.fsdecode, paths):
        if not os.path.isdir(path):
            yield path
            continue
        below = (file for file in files_below(path) if os.path.splitext(file)[1].lower() in EXTENSIONS)
        found = sorted(os.path.join(path, file) for file in below)
        if not found:
            raise UsageError(f"{path} holds no images")
        yield from found


def _opened(item: Any, name: str, count: int) -> Iterator[ImageInput]:
    """A picture, or what is in it; `count` came before."""
    if isinstance(item, str | os.PathLike):
        yield from (_named(file, file) for file in list_image_files([item]))
    elif isinstance(item, ImageCollection):
        yield from (ImageInput(item.where(row), partial(item.read, row)) for row in range(len(item)))
    elif _has_numbers(item) and item.ndim == 4:
        _channels_of(item, f"{len(item)} pictures")  # once for all
        yield from (_named(one, f"picture {place}") for place, one in enumerate(item, start=count))
    else:
        yield _named(item, name)


def _named(given: Any, name: str) -> ImageInput:
    if isinstance(given, str | os.PathLike):
        path = os.fsdecode(given)
        return ImageInput(path, partial(decode, Path(path), printable(path)))
    if isinstance(given, bytes | bytearray | memoryview):
        return ImageInput(name, partial(decode, bytes(given), name))
    if isinstance(given, Image.Image):
        own = getattr(given, "filename", "")  # '' unless Pillow opened it by its path
        name = printable(own) if isinstance(own, str) and own else name
        return ImageInput(name, partial(_from_pillow, given, name))
    if _has_numbers(given):
        return ImageInput(name, partial(_from_numbers, given, name))
    if _is_file(given):
        own = getattr(given, "name", "")
        name = printable(own) if isinstance(own, str) and own else name
        return ImageInput(name, partial(_from_file, given, name))
    raise UsageError(f"{name} is of type {type(given).__name__}; expected {ACCEPTED}")


def _from_file(file: IO[bytes], where: str) -> Image.Image:
    """From its beginning, as Pillow does: what was just written into it is at its end."""
    try:
        if file.seekable():
            file.seek(0)
        data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: closed, or not UTF-8 where it was opened as text
        raise DataError(f"{where}: cannot be read ({error})") from error
    if not isinstance(data, bytes):
        raise UsageError(f"{where} was opened as text; open it with 'rb'")
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{where}: more bytes than the limit of {MAX_FILE_BYTES:,}")
    return decode(data, where)


def _from_pillow(image: Image.Image, where: str) -> Image.Image:
    check_size(*image.size, where)
    try:
        picture = upright_rgb(image, where)
    except DataError:
        raise
    except MemoryError as error:
        raise short_of_memory(where) from error
    except Exception as error:  # of a file that is only read now Pillow raises nearly anything
        raise DataError(f"{where}: cannot be read ({error or type(error).__name__})") from error
    if picture is image:
        picture = image.copy()  # the caller's stays as it is, whatever becomes of ours
    picture.info.clear()
    return picture


def _from_numbers(values: np.ndarray | Tensor, where: str) -> Image.Image:
    """(H, W), (H, W, channels) of an array or (channels, H, W) of a tensor."""
    kind = values.dtype.name if isinstance(values, np.ndarray) else str(values.dtype).removeprefix("torch.")
    if kind not in _TYPES:
        raise UsageError(f"{where}: {_kind(values)} of {kind}, whose range is not known; give {_NUMBERS}")
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
    """How many there are, None without such an axis; a UsageError with the way out where the shape says no picture."""
    shape, tensor = tuple(values.shape), _is_tensor(values)
    given = f"{where}: {_kind(values)} of shape {shape}"
    expected = "(channels, H, W)" if tensor else "(H, W, channels)"
    if len(shape) not in (2, 3, 4):
        raise UsageError(f"{given}; expected (H, W), {expected}, or a batch (N, {expected[1:]}")
    if len(shape) == 2:
        return None
    channels, other = (shape[-3], shape[-1]) if tensor else (shape[-1], shape[-3])
    if channels in CHANNELS:
        return channels
    way_out = ""
    if other in CHANNELS:
        way_out = f"; use .{(_CHANNELS_FIRST if tensor else _CHANNELS_LAST)[len(shape)]}"
    elif len(shape) == 3:
        way_out = f"; a batch of grey pictures is {'(N, 1, H, W)' if tensor else '(N, H, W, 1)'}"
    raise UsageError(f"{given}; expected {expected} with 1, 2, 3 or 4 channels{way_out}")


def _bytes_of(values: np.ndarray, where: str) -> np.ndarray:
    """Numbers whose type says their range → uint8."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" and np.isfinite(low) and np.isfinite(high) and (low < 0 or high > 1):
        raise UsageError(
            f"{where}: floats from {low:g} to {high:g}; expected 0…1. Divide by the largest value pixels can have; "
            "patchloom normalises by mean and deviation itself."
        )
    return to_8_bit(values, where)


def _is_tensor(given: Any) -> TypeGuard[Tensor]:
    """Of torch, which whoever has a tensor has imported: artefacts are answered and served without it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def _array_of(values: Tensor, where: str) -> np.ndarray:
    """The numbers of a dense tensor, of any device; half precision as float32."""
    import torch

    if values.layout is not torch.strided or values.is_meta:
        raise UsageError(f"{where}: a sparse or meta tensor; give a dense one")
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()


def _has_numbers(given: Any) -> TypeGuard[np.ndarray | Tensor]:
    return isinstance(given, np.ndarray) or _is_tensor(given)


def _holds_objects(given: np.ndarray | Tensor) -> bool:
    """Whether an array is a list of other things, such as paths."""
    return isinstance(given, np.ndarray) and given.dtype.kind in "OUT" and given.ndim == 1


def _is_file(given: Any) -> bool:
    return hasattr(given, "read") and hasattr(given, "seekable")


def _kind(values: np.ndarray | Tensor) -> str:
    return "a tensor" if _is_tensor(values) else "an array"
