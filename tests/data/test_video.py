"""Frames of videos, animations and pages."""

import sys

import numpy as np
import pytest
from PIL import Image

from patchloom.data.images.video import frames_of, frames_or_error
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts

COLORS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (100, 100, 100)]


def animation(path, **options):
    first, *rest = [Image.new("RGB", (16, 16), color) for color in COLORS]
    first.save(path, save_all=True, append_images=rest, **options)
    return str(path)


def seen(path, every=None):
    return {name.removeprefix(path): image.getpixel((4, 4)) for name, image in frames_of(path, every)}


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp"])
def test_frames_of_animations_have_their_times(tmp_path, name):
    path = animation(tmp_path / name, duration=500, **({"lossless": True} if name == "a.webp" else {}))
    result = seen(path)
    assert list(result) == [f"#frame={i} (t={i / 2:.2f} s)" for i in range(4)]
    for pixel, color in zip(result.values(), COLORS, strict=True):
        assert np.allclose(pixel, color, atol=2)
    assert list(seen(path, 3)) == ["#frame=0 (t=0.00 s)", "#frame=3 (t=1.50 s)"]


def test_pages_have_numbers_and_an_image_its_own_name(tmp_path):
    result = seen(animation(tmp_path / "a.tif"))
    assert list(result) == ["#frame=0", "#frame=1", "#frame=2", "#frame=3"]
    assert list(result.values()) == COLORS
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    assert list(seen(str(tmp_path / "b.png"))) == [""]


def test_what_cannot_be_read_and_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    [(name, reason)] = frames_or_error(str(tmp_path / "a.gif"))
    assert name.endswith("a.gif")
    assert "GIF" in reason
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match=facts("clip.mp4", "PyAV", "pip install 'patchloom[video]'")):
        list(frames_of("clip.mp4"))
    with pytest.raises(UsageError, match=facts("every", 0)):
        list(frames_of("clip.mp4", 0))


def test_frames_of_a_video(tmp_path):
    av = pytest.importorskip("av")
    path = str(tmp_path / "clip.mp4")
    with av.open(path, "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(30):
            image = Image.new("RGB", (64, 64), COLORS[i // 10])
            video.mux(stream.encode(av.VideoFrame.from_image(image)))
        video.mux(stream.encode())
    assert list(seen(path)) == ["#frame=0 (t=0.00 s)", "#frame=10 (t=1.00 s)", "#frame=20 (t=2.00 s)"]
    result = seen(path, 5)
    assert list(result)[-1] == "#frame=25 (t=2.50 s)"
    for pixel, i in zip(result.values(), (0, 0, 1, 1, 2, 2), strict=True):
        assert np.allclose(pixel, COLORS[i], atol=20)
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"bad\.mp4"):
        list(frames_of(str(tmp_path / "bad.mp4")))
