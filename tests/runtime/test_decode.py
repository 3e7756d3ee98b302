"""Each odd image has one exact answer or one plain error; nothing hangs and nothing warns."""

import io
import os
import struct
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images import decode as decoding
from patchloom_runtime.images.decode import (
    LIMIT,
    MAX_PIXELS,
    WHOLE,
    decode,
    decode_ids,
    decode_shrunk,
    decode_with_facts,
)
from tests.data.facts import facts


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(height: int = 40, width: int = 60) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 4, y * 6, (x + y) * 2], axis=2).astype(np.uint8))


def pixel(data: bytes, x: int = 0, y: int = 0) -> tuple[int, ...]:
    picture = decode(data, "test")
    assert picture.mode == "RGB"
    return picture.getpixel((x, y))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_every_pixel(kind):
    assert np.array_equal(decode(encoded(gradient(), kind), "test"), gradient())
    assert np.array_equal(decode(encoded(gradient(), "WEBP", lossless=True), "test"), gradient())


def test_jpeg_is_what_pillow_decodes():
    data = encoded(gradient(), "JPEG")
    assert np.array_equal(decode(data, "test"), Image.open(io.BytesIO(data)))


def test_sixteen_bit_grey_is_scaled_and_not_saturated():
    values = np.zeros((8, 8), dtype=np.uint16)
    values[0, :4] = [0, 257, 32768, 65535]
    for kind in ("PNG", "TIFF", "PPM"):
        data = encoded(Image.fromarray(values), kind)
        assert [pixel(data, x)[0] for x in range(4)] == [0, 1, 128, 255], kind


def test_thirty_two_bit_integers_use_their_own_range_when_they_exceed_sixteen_bits():
    small = np.full((8, 8), 32768, dtype=np.int32)
    assert pixel(encoded(Image.fromarray(small), "TIFF")) == (128, 128, 128)
    large = np.zeros((8, 8), dtype=np.int32)
    large[0, :3] = [-100_000, 100_000, 0]
    data = encoded(Image.fromarray(large), "TIFF")
    assert [pixel(data, x)[0] for x in range(3)] == [0, 255, 128]


def test_floats_are_scaled_or_refused():
    unit = np.full((8, 8), 0.5, dtype=np.float32)
    assert pixel(encoded(Image.fromarray(unit), "TIFF")) == (128, 128, 128)
    wide = np.linspace(-10, 10, 64, dtype=np.float32).reshape(8, 8)
    data = encoded(Image.fromarray(wide), "TIFF")
    assert (pixel(data, 0, 0)[0], pixel(data, 7, 7)[0]) == (0, 255)
    for bad in (np.nan, np.inf):
        wide[3, 3] = bad
        with pytest.raises(DataError, match=r"x\.tif"):
            decode(encoded(Image.fromarray(wide), "TIFF"), "x.tif")


@pytest.mark.parametrize(
    ("mode", "color", "kind", "expected"),
    [
        ("L", 77, "PNG", (77, 77, 77)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "TIFF", (255, 0, 0)),
        ("RGBA", (200, 0, 0, 0), "PNG", (255, 255, 255)),
        ("RGBA", (200, 0, 0, 255), "PNG", (200, 0, 0)),
        ("RGBA", (0, 0, 0, 51), "PNG", (204, 204, 204)),
        ("LA", (0, 51), "PNG", (204, 204, 204)),
        pytest.param(
            *("YCbCr", (128, 128, 128), "TIFF", (128, 128, 128)),
            marks=pytest.mark.skipif(
                PIL.__version__ < "13", reason="Pillow 12 cannot read these, and they are refused"
            ),
        ),
    ],
)
def test_modes_become_rgb_by_the_stated_rule(mode, color, kind, expected):
    assert pixel(encoded(Image.new(mode, (8, 8), color), kind)) == expected


def test_cmyk_jpeg_is_not_inverted():
    red = pixel(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert np.allclose(red, (255, 0, 0), atol=3)


def test_palette_with_a_transparent_color_is_laid_over_white():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30] + [0] * 762)
    assert pixel(encoded(image, "PNG")) == (10, 200, 30)
    assert pixel(encoded(image, "PNG", transparency=1)) == (255, 255, 255)
    assert pixel(encoded(image, "PNG", transparency=bytes([255, 0]))) == (255, 255, 255)


def test_rgb_with_a_transparent_color_is_laid_over_white():
    assert pixel(encoded(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", transparency=(1, 2, 3))) == (255,) * 3


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert pixel(data) == (255, 0, 0)
        assert decode_with_facts(data, "test")[1].animated


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_once(kind, orientation):
    stored = Image.new("L", (16, 32))
    stored.paste(255, (0, 0, 8, 8))  # white corner, top left as stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = decode(encoded(stored.convert("RGB"), kind, exif=exif), "test")
    corners = {1: "tl", 2: "tr", 3: "br", 4: "bl", 5: "tl", 6: "tr", 7: "br", 8: "bl"}
    x = 2 if corners[orientation][1] == "l" else picture.width - 3
    y = 2 if corners[orientation][0] == "t" else picture.height - 3
    assert picture.size == ((16, 32) if orientation < 5 else (32, 16))
    assert picture.getpixel((x, y))[0] > 200
    assert np.asarray(picture.convert("L")).mean() < 60
    assert picture.getexif().get(0x0112, 1) == 1  # so that nobody turns it a second time


def test_damaged_exif_is_ignored():
    damaged = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"
    assert decode(encoded(gradient(), "JPEG", exif=damaged), "test").size == (60, 40)


CUT = {"JPEG": 300, "PNG": 100, "WEBP": 60, "BMP": 300, "GIF": 900, "TIFF": 300, "PPM": 300}


@pytest.mark.parametrize("kind", CUT)
def test_cut_off_file_says_where_it_ends(kind):
    data = encoded(gradient(), kind)[: CUT[kind]]
    with pytest.raises(DataError, match=facts("a/b.img", CUT[kind])):
        decode(data, "a/b.img")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", ""),
        (b"just a note\n" * 9, ".*text"),
        (b"<!DOCTYPE html><html><body>404</body></html>", ".*HTML"),
        (bytes(4000), ""),
        (bytes(range(128, 256)) * 4, ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", ".*EPS"),
        (b"\0\0\0\x18ftypheic" + bytes(90), r".*HEIC.*heic"),
        (b"RIFF\x24\0\0\0WAVEfmt " + bytes(30), ""),
    ],
)
def test_what_is_not_an_image_is_named_for_what_it_is(data, reason):
    with pytest.raises(DataError, match=rf"^cat\.jpg: {reason}"):
        decode(data, "cat.jpg")


def test_bad_checksum_in_png_is_an_error():
    data = bytearray(encoded(gradient(), "PNG"))
    at = data.index(b"IDAT") + 10
    data[at] ^= 0xFF
    with pytest.raises(DataError, match=r"x\.png.*PNG"):
        decode(bytes(data), "x.png")


def test_libtiff_does_not_print_beside_us(capfd):
    data = bytearray(encoded(gradient(), "TIFF", compression="tiff_lzw"))
    data[200:260] = b"\xff" * 60
    with pytest.raises(DataError, match=r"x\.tif.*TIFF"):
        decode(bytes(data), "x.tif")
    assert capfd.readouterr() == ("", "")


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    idat = b"IDAT" + zlib.compress(b"\0")
    chunks = [struct.pack(">L", len(c) - 4) + c + struct.pack(">L", zlib.crc32(c)) for c in (body, idat)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("side", [5_001, 10_000, 60_000])  # beyond ours, Pillow's warning, Pillow's error
def test_too_many_pixels_are_refused_from_the_header(side):
    assert side * side > MAX_PIXELS
    with pytest.raises(DataError, match=facts("big.png", f"{side}×{side}", "25,000,000")):
        decode(png_header(side, side), "big.png")


def test_text_bomb_is_refused():
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * 3_000_000, zip=True)
    with pytest.raises(DataError, match=r"bomb\.png"):
        decode(encoded(gradient(), "PNG", pnginfo=info), "bomb.png")


def test_smallest_side():
    assert decode(encoded(Image.new("RGB", (8000, 4)), "PNG"), "ok").size == (8000, 4)
    with pytest.raises(DataError, match=facts("strip.png", "3000×2", 4)):
        decode(encoded(Image.new("RGB", (3000, 2)), "PNG"), "strip.png")


def test_special_files_are_refused_without_being_opened(tmp_path):
    pipe, link = tmp_path / "pipe.jpg", tmp_path / "link.jpg"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "gone.jpg")
    refused = [pipe, link, tmp_path, Path("/dev/zero"), tmp_path / "none.jpg"]
    said: dict[Path, str] = {}

    def try_all() -> None:
        for path in refused:
            with pytest.raises(DataError) as caught:
                decode(path, path.name)
            said[path] = str(caught.value)

    thread = threading.Thread(target=try_all, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert list(said) == refused
    assert all(message.startswith(f"{path.name}: ") for path, message in said.items())
    assert len({message.partition(": ")[2] for message in said.values()}) == 5


def test_ids_are_not_touched():
    ids = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(decode_ids(encoded(Image.fromarray(ids), "PNG"), "mask"), ids)
    with pytest.raises(DataError, match=facts("mask", "RGB", 8)):
        decode_ids(encoded(gradient(), "PNG"), "mask")


def test_facts_come_from_the_header():
    _, found = decode_with_facts(encoded(Image.new("CMYK", (20, 10)), "JPEG"), "test")
    assert (found.format, found.mode, found.width, found.height) == ("JPEG", "CMYK", 20, 10)
    assert not found.rotated
    assert not found.animated


SEEDS = {name: encoded(gradient(12, 10), name) for name in CUT}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SEEDS)), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8))
def test_any_damage_gives_a_picture_or_a_named_error(name, changes):
    data = bytearray(SEEDS[name])
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        picture, _ = decode_with_facts(bytes(data), "hurt.img")
    except DataError as error:
        assert str(error).startswith("hurt.img: ")  # noqa: PT017 (either is right)
    else:
        assert picture.mode == "RGB"


def jpeg(width: int, height: int, **options) -> bytes:
    file = io.BytesIO()
    image = Image.new("RGB", (width, height), (10, 200, 30))
    image.paste((200, 10, 30), (0, 0, width // 2, height))
    image.save(file, "JPEG", **options)
    return file.getvalue()


def test_a_jpeg_of_a_phone_with_more_than_25_megapixels_is_decoded_smaller():
    data = jpeg(8000, 6000)
    picture = decode(data, "phone.jpg")
    assert picture.size == (4000, 3000)
    assert picture.info[WHOLE] == (8000, 6000)
    red, green = picture.getpixel((1000, 1500)), picture.getpixel((3000, 1500))
    assert red[0] > 190
    assert green[1] > 190
    shrunk, whole = decode_shrunk(data, "phone.jpg", lambda _: 8)
    assert whole == (8000, 6000)
    assert shrunk.size[0] <= 4000
    assert decode_with_facts(data, "phone.jpg")[1].width == 8000


@pytest.mark.skipif(decoding._opener("AVIF") is None, reason="Pillow without AVIF")
def test_a_large_avif_is_halved(monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (80, 60), (10, 200, 30)).save(file, "AVIF", speed=10)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 4000)
    monkeypatch.setattr(decoding, "LARGE_HEIC_PIXELS", 5000)
    picture = decode(file.getvalue(), "phone.avif")
    assert (picture.size, picture.info[WHOLE]) == ((40, 30), (80, 60))
    assert decode_with_facts(file.getvalue(), "phone.avif")[1].width == 80
    monkeypatch.setattr(decoding, "LARGE_HEIC_PIXELS", 4500)
    with pytest.raises(DataError, match="80×60"):
        decode(file.getvalue(), "bomb.avif")


def test_a_turned_large_jpeg_tells_its_upright_size():
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = decode(jpeg(6400, 4000, exif=exif.tobytes()), "turned.jpg")
    assert (picture.size, picture.info[WHOLE]) == ((2000, 3200), (4000, 6400))


def test_the_limit_of_a_large_jpeg_can_be_changed(monkeypatch):
    data = jpeg(6400, 4000)
    monkeypatch.setenv(LIMIT, "25")
    with pytest.raises(DataError, match=facts("big.jpg", "6400×4000")):
        decode(data, "big.jpg")
    monkeypatch.setenv(LIMIT, "many")
    with pytest.raises(UsageError, match=facts(LIMIT, "'many'")):
        decode(data, "big.jpg")


def test_a_large_progressive_jpeg_is_refused():
    with pytest.raises(DataError, match=facts("big.jpg", "7500×7000")):
        decode(jpeg(7500, 7000, progressive=True), "big.jpg")


def test_an_avif_is_read_like_any_other():
    if decoding._opener("AVIF") is None:
        pytest.skip("Pillow was built without AVIF")
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (10, 200, 30)).save(file, "AVIF", quality=95)
    picture = decode(file.getvalue(), "a.avif")
    assert (picture.mode, picture.size) == ("RGB", (64, 48))
    assert picture.getpixel((20, 20))[1] > 180
    with pytest.raises(DataError, match="AVIF"):
        decode(file.getvalue()[:100], "a.avif")


def test_a_heic_is_read_where_the_extra_is_installed(monkeypatch):
    heic = b"\0\0\0\x18ftypheic" + bytes(90)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"patchloom\[heic\]"):
        decode(heic, "a.heic")
    opened = SimpleNamespace(HeifImageFile=lambda _: Image.new("RGB", (8, 6), "red"))
    monkeypatch.setitem(sys.modules, "pillow_heif", opened)
    assert decode(heic, "a.heic").size == (8, 6)
