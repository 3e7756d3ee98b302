"""Every kind of odd or damaged picture we know of, one file each, with what must come of it.

`KINDS` is the corpus. A kind is read (its pixels are stated), refused (its reason is stated), or not even listed by a
folder. `write_corpus` makes a folder of all of them.
"""

import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

HEIGHT, WIDTH = 24, 32
_Y, _X = np.mgrid[:HEIGHT, :WIDTH]
# Smooth, so that a lossy format stays near it; no row, column or corner like another, so that a turn would show.
PIXELS = np.stack([_X * 7, _Y * 10, 255 - _X * 3 - _Y * 5], axis=2).astype(np.uint8)
GREY = PIXELS[..., 0]
PICTURE = Image.fromarray(PIXELS)
WHITE = np.full_like(PIXELS, 255)


@dataclass(frozen=True)
class Kind:
    """One file of the corpus."""

    file: str
    write: Callable[[Path], object]
    pixels: np.ndarray | None = None  # what it must be read as
    within: int = 0  # of 255, on average over the pixels: what a lossy format may differ by
    refused: str = ""  # a fact in the reason
    unlisted: bool = False  # left out by a folder before it is opened


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.copy().save(buffer, kind, **options)  # Pillow leaves an encoder's settings on what it saved
    return buffer.getvalue()


def data(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


def over_white(pixels: np.ndarray, alpha: int) -> np.ndarray:
    return np.round((pixels.astype(float) * alpha + 255 * (255 - alpha)) / 255).astype(np.uint8)


def with_alpha(image: Image.Image, alpha: int) -> Image.Image:
    copy = image.copy()
    copy.putalpha(alpha)
    return copy


def chunk(kind: bytes, content: bytes, wrong: int = 0) -> bytes:
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", zlib.crc32(kind + content) ^ wrong)


def png(width: int, height: int, *chunks: bytes, wrong: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0), wrong)
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def changed(content: bytes, place: int, new: bytes) -> bytes:
    return content[:place] + new + content[place + len(new) :]


def turned(orientation: int, kind: str, **options: object) -> bytes:
    """PICTURE as a camera stores it when it was held that way."""
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(PICTURE.transpose(back), kind, exif=exif, **options)


def bomb(side: int) -> bytes:
    """A whole PNG of one bit a pixel: 400 megapixels are 49 kB."""
    header = chunk(b"IHDR", struct.pack(">LLBBBBB", side, side, 1, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes(side * (1 + -(-side // 8))), 9))
    return b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * 3_000_000, zip=True)
    return encoded(PICTURE, "PNG", pnginfo=info)


def tiff_that_loops() -> bytes:
    """One directory that names itself as the next, and has nothing in it."""
    return b"II*\0" + struct.pack("<L", 8) + struct.pack("<H", 0) + struct.pack("<L", 8)


def tiff_of_one_tile(side: int) -> bytes:
    """8×8 pixels in a tile of side × side, all 0; only its header is ever looked at."""
    entries = [
        (256, 8),
        (257, 8),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, side),
        (323, side),
        (324, 134),
        (325, 99),
    ]
    fields = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<LH", 8, len(entries)) + fields + struct.pack("<L", 0) + bytes(99)


def tiff_of_strips(number: int) -> bytes:
    """Only its header is ever looked at."""
    entries = [(256, 1, 8), (257, 1, 8), (258, 1, 8), (259, 1, 1), (262, 1, 1), (273, number, 8), (279, number, 8)]
    fields = b"".join(struct.pack("<HHLL", tag, 4, count, value) for tag, count, value in entries)
    return b"II*\0" + struct.pack("<LH", 8, len(entries)) + fields + bytes(68)


def bmp_of_runs(width: int) -> bytes:
    header = struct.pack("<LllHHLLllLL", 40, width, 8, 1, 8, 1, 0, 0, 0, 2, 0)
    return b"BM" + struct.pack("<LHHL", 63, 0, 0, 62) + header + bytes(8) + b"\0"


def gif_of_comments(number: int) -> bytes:
    frame = GIF.index(b"\x2c")
    return GIF[:frame] + (b"\x21\xfe\xff" + b"a" * 255 + b"\0") * number + GIF[frame:]


def jpeg_of_scans(number: int) -> bytes:
    """A progressive JPEG of 24 megapixels whose last pass is repeated."""
    whole = encoded(Image.new("L", (4900, 4900)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * number + whole[-2:]


def bmp_of(width: int, height: int) -> bytes:
    return changed(encoded(PICTURE, "BMP"), 18, struct.pack("<ll", width, height))


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def link_to_picture(path: Path) -> None:
    (path.parent / ".picture").write_bytes(PNG)
    path.symlink_to(".picture")


def bound_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # its name may have about 100 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(JPEG)
        file.truncate((1 << 28) + 1)


def locked(path: Path) -> None:
    path.write_bytes(PNG)
    path.chmod(0)


PNG, JPEG, WEBP = encoded(PICTURE, "PNG"), encoded(PICTURE, "JPEG", quality=95), encoded(PICTURE, "WEBP", quality=95)
GIF, TIFF, BMP = encoded(PICTURE.convert("L"), "GIF"), encoded(PICTURE, "TIFF"), encoded(PICTURE, "BMP")
OTHER = Image.fromarray(255 - PIXELS)
LZW = encoded(PICTURE, "TIFF", compression="tiff_lzw")
PALETTE = PICTURE.quantize(64)
DEEP = GREY.astype(np.uint16) * 257
IDAT = PNG.index(b"IDAT")
LOSSY = 3  # measured: 2.1 at most

READ = {
    "plain PNG": Kind("plain.png", data(PNG), PIXELS),
    "BMP": Kind("plain.bmp", data(BMP), PIXELS),
    "PPM": Kind("plain.ppm", data(encoded(PICTURE, "PPM")), PIXELS),
    "progressive JPEG": Kind("progressive.jpg", data(encoded(PICTURE, "JPEG", progressive=True)), PIXELS, LOSSY),
    "upper-case extension": Kind("LOUD.JPG", data(JPEG), PIXELS, LOSSY),
    "JPEG named .png": Kind("jpeg.png", data(JPEG), PIXELS, LOSSY),
    "PNG named .jpg": Kind("png.jpg", data(PNG), PIXELS),
    "JPEG with bytes after its end": Kind("trailing.jpg", data(JPEG + bytes(range(256)) * 3), PIXELS, LOSSY),
    "JPEG of several pictures": Kind(
        "several.jpg", data(encoded(PICTURE, "MPO", save_all=True, append_images=[OTHER.copy()])), PIXELS, LOSSY
    ),
    "JPEG with damaged EXIF": Kind(
        "exif.jpg", data(encoded(PICTURE, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12")), PIXELS, LOSSY
    ),
    "lossless WebP": Kind("lossless.webp", data(encoded(PICTURE, "WEBP", lossless=True)), PIXELS),
    "lossy WebP": Kind("lossy.webp", data(WEBP), PIXELS, LOSSY),
    "compressed TIFF": Kind("lzw.tif", data(LZW), PIXELS),
    "multi-page TIFF": Kind(
        "pages.tif", data(encoded(PICTURE, "TIFF", save_all=True, append_images=[OTHER.copy()])), PIXELS
    ),
    "animated GIF": Kind(
        "moving.gif",
        data(encoded(PICTURE.convert("L"), "GIF", save_all=True, append_images=[OTHER.convert("L")])),
        grey(np.asarray(PICTURE.convert("L"))),
    ),
    "animated WebP": Kind(
        "moving.webp",
        data(encoded(PICTURE, "WEBP", lossless=True, save_all=True, append_images=[OTHER.copy()])),
        PIXELS,
    ),
    "animated PNG": Kind(
        "moving.png", data(encoded(PICTURE, "PNG", save_all=True, append_images=[OTHER.copy()])), PIXELS
    ),
    "8-bit grey": Kind("grey.png", data(encoded(Image.fromarray(GREY), "PNG")), grey(GREY)),
    "1 bit": Kind("bit.png", data(encoded(Image.fromarray(GREY > 99), "PNG")), grey((GREY > 99) * np.uint8(255))),
    "grey with alpha": Kind(
        "la.png", data(encoded(with_alpha(Image.fromarray(GREY), 102), "PNG")), over_white(grey(GREY), 102), 1
    ),
    "alpha": Kind("rgba.png", data(encoded(with_alpha(PICTURE, 102), "PNG")), over_white(PIXELS, 102), 1),
    "all transparent": Kind("clear.png", data(encoded(with_alpha(PICTURE, 0), "PNG")), WHITE),
    "palette": Kind("palette.png", data(encoded(PALETTE, "PNG")), np.asarray(PALETTE.convert("RGB"))),
    "palette, all transparent": Kind("clear8.png", data(encoded(PALETTE, "PNG", transparency=bytes(64))), WHITE),
    "16-bit grey PNG": Kind("deep.png", data(encoded(Image.fromarray(DEEP), "PNG")), grey(GREY)),
    "16-bit grey PGM": Kind("deep.pgm", data(encoded(Image.fromarray(DEEP), "PPM")), grey(GREY)),
    "16-bit grey TIFF": Kind("deep.tif", data(encoded(Image.fromarray(DEEP), "TIFF")), grey(GREY)),
    "16-bit grey TIFF, big-endian": Kind(
        "deep_b.tif",
        data(encoded(Image.frombytes("I;16B", (WIDTH, HEIGHT), DEEP.astype(">u2").tobytes()), "TIFF")),
        grey(GREY),
    ),
    "32-bit TIFF": Kind("int.tif", data(encoded(Image.fromarray(DEEP.astype(np.int32)), "TIFF")), grey(GREY)),
    "float TIFF": Kind(
        "float.tif", data(encoded(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF")), grey(GREY)
    ),
    "CMYK TIFF": Kind("cmyk.tif", data(encoded(PICTURE.convert("CMYK"), "TIFF")), PIXELS),
    "CMYK JPEG": Kind("cmyk.jpg", data(encoded(PICTURE.convert("CMYK"), "JPEG", quality=95)), PIXELS, LOSSY),
    "YCbCr TIFF": Kind("ycbcr.tif", data(encoded(PICTURE.convert("YCbCr"), "TIFF")), PIXELS, 2),
    **{
        f"EXIF orientation {n}": Kind(f"turned{n}.jpg", data(turned(n, "JPEG", quality=95)), PIXELS, LOSSY)
        for n in range(2, 9)
    },
    "EXIF orientation in PNG": Kind("turned.png", data(turned(6, "PNG")), PIXELS),
    "EXIF orientation in WebP": Kind("turned.webp", data(turned(8, "WEBP", lossless=True)), PIXELS),
    "EXIF orientation in TIFF": Kind("turned.tif", data(turned(5, "TIFF")), PIXELS),
    "a strip": Kind("strip.png", data(encoded(Image.new("RGB", (4, 8000), "red"), "PNG")), None),
    "a link to a picture": Kind("link.png", link_to_picture, PIXELS),
    "a name that is not UTF-8": Kind(os.fsdecode(b"caf\xe9.png"), data(PNG), PIXELS),
    # A JPEG has no checksum: nobody can tell these from the camera's, so they are read as they are.
    "flipped bytes in a JPEG's scan": Kind("flipped.jpg", data(changed(JPEG, len(JPEG) - 90, b"\x5a\xa5")), None),
}
WORDS = " "  # stands for a reason that holds no fact
REFUSED = {
    "zero bytes": Kind("zero.jpg", data(b""), refused=WORDS),
    "truncated JPEG": Kind("cut.jpg", data(JPEG[:-200]), refused="JPEG"),
    "truncated PNG": Kind("cut.png", data(PNG[: IDAT + 40]), refused="PNG"),
    "truncated WebP": Kind("cut.webp", data(WEBP[:60]), refused="WebP"),
    "truncated GIF": Kind("cut.gif", data(GIF[:-300]), refused="GIF"),
    "truncated BMP": Kind("cut.bmp", data(BMP[:-300]), refused="BMP"),
    "truncated TIFF": Kind("cut.tif", data(TIFF[:-300]), refused="TIFF"),
    "JPEG of three bytes": Kind("start.jpg", data(JPEG[:3]), refused="JPEG"),
    "PNG signature alone": Kind("start.png", data(PNG[:8]), refused="PNG"),
    "bad checksum of PNG data": Kind("crc.png", data(changed(PNG, IDAT + 20, b"\xff\x00")), refused="PNG"),
    "bad checksum of a PNG header": Kind("ihdr.png", data(png(32, 24, wrong=1)), refused="PNG"),
    "PNG without data": Kind("nodata.png", data(png(32, 24)), refused="PNG"),
    "PNG of zero width": Kind("width0.png", data(png(0, 24)), refused="PNG"),
    "damaged TIFF data": Kind("damaged.tif", data(changed(LZW, 200, b"\xff" * 60)), refused="TIFF"),
    "TIFF that loops": Kind("loop.tif", data(tiff_that_loops()), refused="TIFF"),
    "BMP with a size that is not its own": Kind("size.bmp", data(bmp_of(3000, 3000)), refused="BMP"),
    "HTML": Kind("page.jpg", data(b"<!DOCTYPE html><html><body>404</body></html>"), refused="HTML"),
    "text": Kind("text.jpg", data(b"just a note\n" * 9), refused="text"),
    "SVG": Kind("drawing.png", data(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), refused="text"),
    "random bytes": Kind("noise.jpg", data(bytes(range(128, 256)) * 4), refused=WORDS),
    "zeros": Kind("zeros.jpg", data(bytes(4000)), refused=WORDS),
    "EPS": Kind("eps.png", data(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), refused="EPS"),
    "PDF": Kind("pdf.jpg", data(b"%PDF-1.4\n" + bytes(90)), refused="PDF"),
    "zip archive": Kind("zip.png", data(b"PK\x03\x04" + bytes(90)), refused="zip"),
    "HEIC": Kind("heic.jpg", data(b"\0\0\0\x18ftypheic" + bytes(90)), refused="HEIC"),
    "sound": Kind("sound.webp", data(b"RIFF\x24\0\0\0WAVEfmt " + bytes(30)), refused=WORDS),
    "more than 25 megapixels": Kind("big.png", data(png(5001, 5000)), refused="5001×5000"),
    "400 megapixels": Kind("bomb.png", lambda path: path.write_bytes(bomb(20_000)), refused="20000×20000"),
    "3,600 megapixels": Kind("bomb2.png", data(png(60_000, 60_000)), refused="60000×60000"),
    "BMP of many pixels": Kind("bomb.bmp", data(bmp_of(60_000, 60_000)), refused="60000×60000"),
    "text-chunk bomb": Kind("textbomb.png", data(text_bomb()), refused=WORDS),
    "TIFF with a tile of 2,025 megapixels": Kind("tile.tif", data(tiff_of_one_tile(45_000)), refused="45000"),
    "GIF of comments": Kind("comments.gif", data(gif_of_comments(5_000)), refused=WORDS),
    "JPEG of 300 passes": Kind("passes.jpg", lambda path: path.write_bytes(jpeg_of_scans(300)), refused="4900×4900"),
    "JPEG of fill bytes": Kind("fill.jpg", data(JPEG[:2] + b"\xff" * 100_001 + JPEG[2:]), refused="100,000"),
    "JPEG of comments": Kind("comments.jpg", data(JPEG[:2] + b"\xff\xfe\0\2" * 100_001 + JPEG[2:]), refused="100,000"),
    "PNG of empty chunks": Kind(
        "chunks.png", data(PNG[:33] + chunk(b"abCd", b"") * 100_001 + PNG[33:]), refused="100,000"
    ),
    "TIFF of a million strips": Kind("strips.tif", data(tiff_of_strips(1_000_000)), refused="250,000"),
    "BMP of runs": Kind("runs.bmp", data(bmp_of_runs(1 << 17)), refused="131,072"),
    "PPM of 16 bits": Kind("deep.ppm", data(b"P6 4000 4000 65535\n"), refused="48,000,000"),
    "PPM of comments": Kind("comments.ppm", data(b"P6\n#" + b"a" * 99_999 + b"\n8 8 255\n"), refused=WORDS),
    "text PPM with comments": Kind(
        "between.ppm",
        data(b"P3 99 99 255\n" + b"1 " * 40_000 + b"# a comment\n1"),
        refused=WORDS,
    ),
    "text PPM of 27 million numbers": Kind("text.ppm", data(b"P3 3000 3000 255\n1 2 3"), refused=WORDS),
    "more than 256 MiB": Kind("huge.jpg", huge, refused="268,435,457"),
    "1×1": Kind("one.png", data(encoded(Image.new("RGB", (1, 1)), "PNG")), refused="1×1"),
    "1×8000": Kind("line.png", data(encoded(Image.new("RGB", (1, 8000)), "PNG")), refused="1×8000"),
    "float TIFF with NaN": Kind(
        "nan.tif",
        data(encoded(Image.fromarray(np.where(GREY > 9, np.nan, 0).astype(np.float32)), "TIFF")),
        refused=WORDS,
    ),
}
NOT_FILES = {
    "a pipe": Kind("pipe.jpg", os.mkfifo, refused="pipe", unlisted=True),
    "a socket": Kind("socket.jpg", bound_socket, refused="socket", unlisted=True),
    "a device": Kind("device.jpg", link("/dev/zero"), refused="device", unlisted=True),
    "a folder": Kind("folder.jpg", Path.mkdir, refused="folder", unlisted=True),
    "a broken link": Kind("gone.jpg", link("nothing"), refused="link", unlisted=True),
    "a link to itself": Kind("self.jpg", link("self.jpg"), refused="link", unlisted=True),
}
if os.geteuid() == 0:  # who may read everything
    READ["a file nobody may read"] = Kind("locked.png", locked, PIXELS)
else:
    REFUSED["a file nobody may read"] = Kind("locked.png", locked, refused=WORDS)
KINDS = READ | REFUSED | NOT_FILES
IGNORED = {"notes.txt": ".txt", "clip.mov": ".mov", "raw.cr2": ".cr2", "README": ""}


def write_corpus(folder: Path) -> Path:
    """One file of every kind, and some that are no pictures by their extension."""
    folder.mkdir(parents=True)
    for kind in KINDS.values():
        kind.write(folder / kind.file)
    for name in IGNORED:
        (folder / name).write_bytes(b"x")
    return folder
