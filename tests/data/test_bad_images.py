"""The bad images: no crash, no hang, none silently wrong, every file named; alone, in a folder, in commands."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.sources.source import find_source
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import decode
from patchloom_runtime.printable import printable
from tests.data.bad_images import IGNORED, KINDS, NOT_FILES, READ, REFUSED, Kind, write_corpus
from tests.data.facts import any_has, has_facts
from tests.reliability.commands import OPTIONS, WORKERS, command


def answer(path: Path) -> Image.Image | DataError:
    """What reading gives, within ten seconds."""
    result: list[Image.Image | DataError] = []

    def read() -> None:
        try:
            result.append(decode(path, printable(path.name)))
        except DataError as error:
            result.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert result, "it hangs, or raised something else"
    return result[0]


def test_there_are_at_least_48_kinds() -> None:
    assert len(KINDS) >= 48
    assert len({kind.file for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_read_rightly_or_refused_by_name(name: str, tmp_path: Path, capfd) -> None:
    kind = KINDS[name]
    kind.write(tmp_path / kind.file)
    result = answer(tmp_path / kind.file)
    assert capfd.readouterr() == ("", "")
    if kind.refused:
        assert isinstance(result, DataError), "it was read"
        assert str(result).startswith(f"{printable(kind.file)}: ")
        assert kind.refused in str(result)
        assert "\n" not in str(result)
        return
    assert isinstance(result, Image.Image), result
    assert result.mode == "RGB"
    if kind.pixels is not None:
        assert result.size == kind.pixels.shape[1::-1]
        off = np.abs(np.asarray(result, np.int16) - kind.pixels)
        assert off.mean() <= kind.within
        assert off.max() <= 12 * kind.within


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes: one with every kind beside good pictures, one of good pictures."""
    root = tmp_path_factory.mktemp("data")
    write_corpus(root / "odd")
    for name, shade in (("odd", 40), ("plain", 200)):
        (root / name).mkdir(exist_ok=True)
        for i in range(40):
            Image.new("RGB", (32, 32), (shade, 5 * i, i)).save(root / name / f"good{i:02}.png")
    return root


def listed() -> dict[str, Kind]:
    return {kind.file: kind for kind in KINDS.values() if not kind.unlisted}


def test_a_folder_lists_what_can_be_opened_and_names_or_counts_the_rest(data: Path) -> None:
    source = find_source(str(data))
    keys = {source.train.images.key(int(row)) for row in source.train.rows}
    assert {key for key in keys if "good" not in key} == {f"odd/{name}" for name in listed()}
    notes = "\n".join(source.notes)
    for kind in NOT_FILES.values():
        assert f"odd/{kind.file}" in notes
    for extension, count in Counter(filter(None, IGNORED.values())).items():
        assert f"{count} {extension}" in notes


def before(data: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in data.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_check_names_every_refused_file_and_no_other(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    untouched = before(data)
    done = command(("check", data, "--json", "--workers", 1), monkeypatch, capsys)
    assert done.code == 3
    assert done.errors == ""
    report = json.loads(done.output)
    named = {Path(bad["place"]["where"]).name: bad["reason"] for bad in report["unreadable"]}
    assert named.keys() == {printable(kind.file) for kind in REFUSED.values()}
    for kind in REFUSED.values():
        assert kind.refused in named[printable(kind.file)]
    assert before(data) == untouched


@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_on_all_of_them_counts_and_names_what_it_left_out(
    workers: str, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    untouched = before(data)
    run = tmp_path / "run"
    options = (*OPTIONS, *WORKERS, "--epochs", 1, "--workers", workers, "--batch", 1)
    done = command(("train", data, "--out", run, *options), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert done.errors == ""
    text = (run / "left_out.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[0] for line in text] == sorted(printable(data / "odd" / k.file) for k in REFUSED.values())
    assert any_has(done.output.splitlines(), len(REFUSED), "left_out.tsv")
    done = command(("evaluate", run, data, "--split", "all", "--json"), monkeypatch, capsys)
    result = json.loads(done.output)
    assert result["images"] == len(READ) + 80  # no picture counts in place of one that cannot be read
    assert has_facts(result["notes"][-1], len(REFUSED))
    assert before(data) == untouched


def test_strict_training_stops_at_the_first_of_them(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    done = command(("train", data, "--out", tmp_path / "run", *OPTIONS, "--strict"), monkeypatch, capsys)
    assert done.code == 3
    assert done.errors.count("\n") == 1
    assert any(printable(kind.file) in done.errors for kind in REFUSED.values())


def test_no_reader_but_those_of_the_list_is_loaded(tmp_path: Path) -> None:
    # The one for EPS would start Ghostscript.
    write_corpus(tmp_path / "all")
    code = (
        "import sys, subprocess; from pathlib import Path\n"
        "from patchloom_runtime.images.decode import decode, DataError\n"
        "def refuse(*a, **k): raise SystemExit('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    try: decode(path, path.name)\n"
        "    except DataError: pass\n"
        "print(*sorted(m for m in sys.modules if m.startswith('PIL.') and m.endswith('ImagePlugin')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "all")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    allowed = {f"PIL.{kind}ImagePlugin" for kind in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "Ppm", "Tiff", "WebP")}
    assert set(done.stdout.split()) <= allowed
    assert "PIL.PngImagePlugin" in done.stdout


MEASURED = """
import sys
from pathlib import Path
from patchloom_runtime.images.decode import decode
from patchloom_runtime.errors import DataError

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

decode(Path(sys.argv[1]), "warm")  # what any picture needs
before = peak_kib()
try:
    decode(Path(sys.argv[2]), "bomb")
except DataError as error:
    print(peak_kib() - before, error)
"""
BOMBS = [
    "more than 25 megapixels",
    "400 megapixels",
    "3,600 megapixels",
    "BMP of many pixels",
    "text-chunk bomb",
    "more than 256 MiB",
]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_less_than_50_mb(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    kind.write(tmp_path / kind.file)
    READ["plain PNG"].write(tmp_path / "plain.png")
    line = [sys.executable, "-c", MEASURED, str(tmp_path / "plain.png"), str(tmp_path / kind.file)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    more_kib, _, reason = done.stdout.partition(" ")
    assert kind.refused in reason
    assert int(more_kib) < 50_000
