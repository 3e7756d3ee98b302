"""`patchloom …` as a user types it: inside this process, in a copy of it, or as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from patchloom import cli
from tests.forked import Forked

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--recipe", "small_images", "--epochs", "2", "--batch", "4", "--size", "16", "--workers", "0")
TINY = ("--device", "cpu", "--set", "model.options.depth=1", "--set", "model.options.dim=16")
OPTIONS = (*SMALL, *TINY, "--set", "model.options.patch_size=8")
# AutoAugment has no version for whole batches, so worker processes prepare the pictures.
WORKERS = ("--set", "augment.policy=autoaugment", "--set", "augment.erasing=0.25", "--workers", "2")


class Done(NamedTuple):
    """How a command ended and what it said."""

    code: Any
    errors: str
    output: str


def command(arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Done:
    """Run the command line here: a process of its own would cost seconds."""
    monkeypatch.setattr(sys, "argv", ["patchloom", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return Done(ended.value.code, said.err, said.out)


def forked(*arguments: Any, env: Mapping[str, str] | None = None, terminal: int = -1) -> Forked:
    """The command in a copy of this process, in a session of its own: signals, ranks, terminals, for little."""

    def work() -> None:
        sys.argv = ["patchloom", *map(str, arguments)]
        cli.main()

    return Forked(work, env, terminal)


def started(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """The command as a process in a session of its own."""
    line = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-m", "patchloom.cli"]
    return subprocess.Popen(
        [*line, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def class_folders(root: Path, classes: tuple[str, ...] = ("red", "blue"), pictures: int = 10) -> Path:
    """A folder of small pictures."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(pictures):
            pixels = np.random.default_rng(100 * number + i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root
