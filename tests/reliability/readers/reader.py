"""What a reader is, and what readers of every kind are made with."""

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Files = dict[str, str]  # pattern below the reader's folder → kind of mutation


@dataclass(frozen=True)
class Reader:
    """A way in."""

    make: Callable[[Path, Path], None]  # seeds, folder: fills the folder
    read: Callable[[Path, Path], Any]  # seeds, folder → answer
    files: Files
    repair: Callable[[Path, Path], None] | None = None  # folder, the file that was changed
    ours: bool = False  # patchloom wrote the files: a changed byte must not change the answer
    notices: bool = False  # any changed byte is to be noticed
    writes: bool = False  # into the folder
    share: float = 1.0  # of the cases, beside those of others
    command: Callable[[Path, Path], tuple[Any, ...]] | None = None  # seeds, folder → what a user would type


CLASSES = ("blue", "red")


def pixels(number: int, side: int = 16) -> np.ndarray:
    """A picture of noise."""
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(pixels(number)).save(packed, "PNG")
    return packed.getvalue()


def copy(name: str, seeds: Path, folder: Path) -> None:
    shutil.copytree(seeds / name, folder / name, copy_function=shutil.copyfile)


def made(name: str) -> Callable[[Path, Path], None]:
    return partial(copy, name)


def queries(seeds: Path) -> list[str]:
    return [str(seeds / "data" / "blue" / "0.png"), str(seeds / "data" / "red" / "1.png")]


def checked(name: str) -> Callable[[Path, Path], tuple[Any, ...]]:
    return lambda _, folder: ("check", folder / name, "--json", "--workers", 1)
