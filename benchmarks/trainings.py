"""What the benchmarks that train have in common: their options, and `patchloom train` for every run asked for."""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def options_of(about: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """DATA, --out, --only some of the runs' `names`, and --table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(names))
    parser.add_argument("--table", action="store_true")
    return parser


def read(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those behind `--`, which go to every `patchloom train`."""
    own, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    return parser.parse_args(own.split()), further.split()


def train(data: Path, folder: Path, options: Iterable[str]) -> None:
    """One run; {out} among its options is the folder of all runs."""
    filled = [option.format(out=folder.parent) for option in options]
    command = [sys.executable, "-m", "patchloom.cli", "train", str(data), "--out", str(folder)]
    subprocess.run([*command, *filled], check=True)
