"""A picture handed over in Python is the picture read from its file; what is not clear is refused in one line."""

import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from patchloom.data.sources.builtin import open_shapes
from patchloom.data.splits import make_splits
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import decode
from patchloom_runtime.images.inputs import is_single_image, iterate_images, read_image
from tests.data.all_modes import FILES, ways_of, write_files
from tests.data.bad_images import PICTURE, PIXELS, encoded
from tests.data.facts import facts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("modes"))


def opened_from(path: Path) -> Image.Image:
    """Without a file that stays open."""
    return Image.open(io.BytesIO(path.read_bytes()))


def read_all(given) -> list[np.ndarray]:
    return [np.asarray(one.read()) for one in iterate_images(given)]


@pytest.mark.parametrize("mode", FILES)
def test_every_way_in_gives_the_pixels_of_the_file(mode: str, files: dict[str, Path]) -> None:
    expected = np.asarray(decode(files[mode], mode))
    for name, given in ways_of(mode, files[mode]):
        picture = read_image(given)
        assert (picture.mode, picture.info) == ("RGB", {}), name
        assert np.array_equal(picture, expected), name
        assert is_single_image(given), name


def test_the_modes_are_those_they_are_called(files: dict[str, Path]) -> None:
    opened = {mode: opened_from(path) for mode, path in files.items()}
    plain = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "I;16", "F", "I")
    assert [opened[mode].mode for mode in plain] == list(plain)
    assert opened["P-transparent"].info["transparency"] == 3
    assert opened["exif-jpeg-6"].getexif()[0x0112] == 6


def test_sixteen_bits_with_a_transparent_value_are_scaled_and_not_saturated() -> None:
    values = np.full((8, 8), 32768, np.uint16)
    values[0, :2] = [5000, 0]
    picture = decode(encoded(Image.fromarray(values), "PNG", transparency=5000), "x")
    assert [picture.getpixel((x, 0))[0] for x in range(3)] == [255, 0, 128]


def test_what_is_handed_over_is_left_as_it_was(files: dict[str, Path]) -> None:
    image = Image.open(files["exif-jpeg-6"])
    before = dict(image.info)
    read_image(image).putpixel((0, 0), (1, 2, 3))
    upright = PICTURE.copy()
    upright.info["mine"] = 1
    read_image(upright).paste("red", (0, 0, 9, 9))
    assert image.info == before
    assert upright.info == {"mine": 1}
    assert np.array_equal(upright, PIXELS)


def test_premultiplied_alpha() -> None:
    rgba, la = Image.new("RGBA", (8, 8), (0, 0, 0, 51)), Image.new("LA", (8, 8), (0, 51))
    for image in (rgba.convert("RGBa"), la.convert("La")):
        assert read_image(image).getpixel((0, 0)) == (204, 204, 204)


def test_the_type_of_numbers_states_their_range() -> None:
    grey = np.zeros((8, 8))
    grey[0, :3] = [1, 0.5, 51 / 255]
    for values in (grey, grey.astype(np.float32), torch.tensor(grey), torch.tensor(grey).float()):
        assert [read_image(values).getpixel((x, 0))[0] for x in range(4)] == [255, 128, 51, 0]
    for short in (torch.float16, torch.bfloat16):
        assert [read_image(torch.tensor(grey).to(short)).getpixel((x, 0))[0] for x in (0, 3)] == [255, 0]
    assert np.array_equal(read_image(PIXELS.astype(np.uint16) * 257), PIXELS)
    assert np.array_equal(read_image(PIXELS.astype(np.float32) / 255), PIXELS)
    assert np.array_equal(read_image(torch.tensor(PIXELS).permute(2, 0, 1) / 255), PIXELS)
    assert read_image(np.ones((8, 8), bool)).getpixel((0, 0)) == (255, 255, 255)


HUGE = np.broadcast_to(np.uint8(0), (5001, 5001))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (np.zeros((8, 8), np.int64), ("int64", "uint8")),
        (torch.zeros(8, 8).long(), ("int64",)),
        (np.zeros((8, 8), complex), ("complex128",)),
        (np.full((8, 8), 255.0), (255, "0…1")),
        (torch.randn(3, 8, 8) * 2 - 9, ("0…1",)),
        (np.zeros((3, 8, 9)), ("(3, 8, 9)", "(H, W, channels)", ".transpose(1, 2, 0)")),
        (torch.zeros(8, 9, 3), ("(8, 9, 3)", "(channels, H, W)", ".permute(2, 0, 1)")),
        (np.zeros((7, 3, 8, 9)), (".transpose(0, 2, 3, 1)",)),
        (torch.zeros(7, 8, 9, 3), (".permute(0, 3, 1, 2)",)),
        (np.zeros((60, 28, 28)), ("(N, H, W, 1)",)),
        (torch.zeros(60, 28, 28), ("(N, 1, H, W)",)),
        (np.zeros(9), ("(9,)", "(H, W)", "(H, W, channels)", "(N, H, W, channels)")),
        (np.float32(3), ("float32", "'rb'")),
        (torch.zeros(2, 2, 3, 8, 8), ("(2, 2, 3, 8, 8)", "(H, W)", "(channels, H, W)")),
        (torch.zeros(8, 8).to_sparse(), ("tensor",)),
        (torch.zeros(8, 8, device="meta"), ("tensor",)),
        (None, ("NoneType",)),
        (7, ("int",)),
        ([PIXELS, [PIXELS]], (1, "list")),
        ([PIXELS, (PIXELS, 3)], (1, "tuple")),
        ({"a": PIXELS}, ("dict",)),
        (io.StringIO("text"), ("'rb'",)),
    ],
)  # fmt: skip
def test_a_wrong_thing_is_one_clear_line(given, parts: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match=facts(*parts)) as caught:
        read_all(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", facts()),
        ([PIXELS, b"no"], facts(1, "text")),
        (["gone.png"], r"gone\.png"),
        ("a\0b.png", "null"),
        (np.full((8, 8), np.nan), facts()),
        (np.zeros((8, 3), np.uint8), facts("3×8", 4)),
        (torch.zeros(0, 8), facts("8×0", 4)),
        (HUGE, facts("5001×5001", "25,000,000")),
        (Image.new("1", (5001, 5001)), facts("5001×5001", "25,000,000")),
    ],
)
def test_what_cannot_be_read_is_named(given, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_all(given)


def test_an_image_whose_file_is_damaged_is_named_when_it_is_read(tmp_path: Path) -> None:
    cut, gone = tmp_path / "cut.jpg", tmp_path / "closed.png"
    cut.write_bytes(encoded(PICTURE, "JPEG")[:-60])
    gone.write_bytes(encoded(PICTURE, "PNG"))
    closed = Image.open(gone)
    closed.close()
    with Image.open(cut) as lazy:
        for image, path in ((lazy, cut), (closed, gone)):
            with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: "):
                read_image(image)
    with cut.open("rb") as file, pytest.raises(DataError, match=rf"^{re.escape(str(cut))}: .*{cut.stat().st_size}"):
        read_image(file)


def test_many_pictures(files: dict[str, Path], tmp_path: Path) -> None:
    one, batch = np.asarray(PICTURE), np.stack([PIXELS, PIXELS // 2, PIXELS // 3])
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    for place in ("a.png", "deeper/b.png"):
        PICTURE.save(folder / place)
    (folder / "note.txt").write_text("no picture")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert [one.name for one in iterate_images(folder)] == [str(folder / "a.png"), str(folder / "deeper" / "b.png")]
    for given, count in (
        ([files["RGB"], PIXELS, encoded(PICTURE, "PNG")], 3),
        ((str(files["RGB"]),), 1),
        ((PICTURE for _ in range(5)), 5),
        (map(str, [files["RGB"]] * 2), 2),
        (folder, 2),
        ([str(folder), PIXELS], 3),
        (np.array([str(files["RGB"])] * 2), 2),
        (np.array([files["RGB"], PICTURE], dtype=object), 2),
        ([], 0),
    ):
        assert not is_single_image(given)
        found = read_all(given)
        assert len(found) == count
        assert all(np.array_equal(picture, one) for picture in found)
    for given in (batch, torch.tensor(batch).permute(0, 3, 1, 2), [batch[:1], batch[1:]], iter(torch.tensor(batch)
                  .permute(0, 3, 1, 2).split(2))):  # fmt: skip
        assert all(np.array_equal(*pair) for pair in zip(read_all(given), batch, strict=True))
    assert [one.name for one in iterate_images([PIXELS, batch, str(files["RGB"]), PICTURE])] == [
        "image 0", "image 1", "image 2", "image 3", str(files["RGB"]), "image 5",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=facts(empty)):
        read_all(empty)


def test_frames_of_an_animation_are_read_as_they_come(files: dict[str, Path]) -> None:
    frames = read_all(ImageSequence.Iterator(opened_from(files["gif-frames"])))
    assert len(frames) == 2
    assert np.array_equal(frames[0], decode(files["gif-frames"], "x"))
    assert not np.array_equal(frames[0], frames[1])


def test_an_image_set_is_many_pictures() -> None:
    val = make_splits(open_shapes("count=20,size=16")).val
    found = list(iterate_images(val))
    assert [one.name for one in found] == [val.where(i) for i in range(len(val))]
    assert np.array_equal(found[0].read(), val.read(0))


def test_nothing_is_read_before_its_turn() -> None:
    asked = []

    def endless():
        while True:
            asked.append(len(asked))
            yield PIXELS

    pictures = iterate_images(endless())
    next(pictures).read()
    next(pictures).read()
    assert asked == [0, 1]


def test_reading_warns_of_nothing(files: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, given in ways_of("exif-tiff-6", files["exif-tiff-6"]):
            read_image(given)


def test_nobody_else_opens_pictures() -> None:
    package = Path(__file__).parents[2] / "patchloom"
    others = [path for path in package.rglob("*.py") if package / "data" not in path.parents]
    assert [
        path.name
        for path in others
        if "Image.open(" in (text := path.read_text()) or re.search(r"decode import .*\bdecode", text)
    ] == []
