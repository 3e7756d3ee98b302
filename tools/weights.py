"""Attach the weights and logs of small trained networks to a release on GitHub.

    python tools/weights.py collect runs/digits_0 runs/cifar100 --out release-weights
    python tools/weights.py upload release-weights --tag v0.2.0

`collect` writes one archive per run and SHA256SUMS. Only a run whose log is that of a network on the leaderboard
(benchmarks/results/networks) is taken, so that every archive has its recipe, data, seeds and command there. `upload`
compares the checksums and calls GitHub's own command line. The archives are not part of the repository.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import patchloom
from patchloom_runtime.errors import PatchloomError

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = ROOT / "benchmarks" / "results" / "networks"
SUMS = "SHA256SUMS"
MOST_BYTES = 100 * 2**20  # of a run; larger weights belong on a hub
# Without checkpoints, and without pictures and predictions: they show the data, which may have other terms.
LEFT_OUT = {"report.html", "predictions.safetensors"}


def main() -> None:
    """Collect archives, or upload them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("runs", nargs="+", type=Path)
    collecting.add_argument("--out", type=Path, required=True)
    uploading = commands.add_parser("upload")
    uploading.add_argument("folder", type=Path)
    uploading.add_argument("--tag", required=True)
    given = parser.parse_args()
    try:
        print(collect(given.runs, given.out) if given.command == "collect" else upload(given.folder, given.tag))
    except (PatchloomError, ValueError) as error:
        sys.exit(f"error: {error}")


def collect(runs: list[Path], out: Path) -> str:
    """Write an archive per run, named as its network on the leaderboard, and SHA256SUMS of all archives in `out`."""
    named = {run: network_of(run) for run in runs}
    out.mkdir(parents=True, exist_ok=True)
    for run, name in named.items():
        patchloom.verify(run)
        files = sorted(file for file in run.iterdir() if is_attached(file))
        if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
            raise ValueError(f"{run} has {size / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}; put it on a hub")
        partial = out / f".{name}.tar"
        with tarfile.open(partial, "w") as archive:
            for file in files:
                archive.add(file, f"{name}/{file.name}", filter=without_owner)
        partial.replace(out / f"{name}.tar")
    archives = sorted(out.glob("*.tar"))
    (out / SUMS).write_text("".join(f"{sha256(archive)}  {archive.name}\n" for archive in archives))
    return (out / SUMS).read_text().rstrip()


def network_of(run: Path) -> str:
    """Return the name of the network on the leaderboard that has this run's log."""
    log = sha256(run / "metrics.jsonl")
    for file in sorted(NETWORKS.glob("*.json")):
        if json.loads(file.read_text())["log_sha256"] == log:
            return file.stem
    raise ValueError(f"no network in {NETWORKS.relative_to(ROOT)} has the log of {run} ({log}); add it first")


def is_attached(file: Path) -> bool:
    """Return whether a file of a run folder belongs into its archive."""
    return file.is_file() and not file.name.startswith(".") and file.name not in LEFT_OUT


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove what differs from machine to machine, so that equal runs are equal archives."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def upload(folder: Path, tag: str) -> str:
    """Attach all archives and SHA256SUMS to the release `tag`, which must exist."""
    listed = dict(reversed(line.split("  ", 1)) for line in (folder / SUMS).read_text().splitlines())
    for name, expected in listed.items():
        if (actual := sha256(folder / name)) != expected:
            raise ValueError(f"{folder / name} has the SHA-256 {actual}, expected {expected}; collect it again")
    files = [str(folder / name) for name in (*listed, SUMS)]
    subprocess.run(["gh", "release", "upload", tag, *files, "--clobber"], check=True)
    return f"{len(listed)} archives attached to {tag}"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    main()
