"""What survives: kills while saving, flipped bits, a full disk, kills at any moment of a run, damaged pictures.

    python benchmarks/reliability.py [saving] [flips] [full] [runs] [seeds] [images] [bombs] [--folders . /dev/shm]

Prints one line a trial with its count; the exit code is 1 where a trial lost anything. See docs/reliability.md.
"""

import argparse
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peak import peak_mib
from PIL import Image

from patchloom.engine.state import Snapshot
from patchloom.runs.checkpoints import find_checkpoint, save_checkpoint
from patchloom.tasks.plan import TrainingSettings
from patchloom.training import run as training
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.decode import decode

MB_24 = 2_000_000  # values of 4 bytes in each of weights, ema and optimizer
DATA = "shapes:count=80,size=32"
# AutoAugment has no version for whole batches, so worker processes prepare the pictures.
TINY = {"model.options.depth": 2, "model.options.dim": 16, "augment.policy": "autoaugment", "augment.erasing": 0.25}


def snapshot(step: int, values: int = MB_24) -> Snapshot:
    """A checkpoint in which every value is its step, so that a mixture of two would show."""
    parts = ("weights", "ema", "optimizer")
    return Snapshot({p: {"a": torch.full((values,), float(step))} for p in parts}, {"progress": {"step": step}})


def forked(work: Callable[[], Any]) -> int:
    """The process id of a copy of this process that does `work` and says nothing."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def killed_while_saving(folder: Path, times: int = 200) -> tuple[int, int]:
    """SIGKILL at a random moment of a process that saves and saves; the newest checkpoint is whole and not older."""

    def save_on(step: int, ready: int) -> None:
        os.write(ready, b"!")
        while True:
            step += 1
            save_checkpoint(folder, snapshot(step))

    started = time.perf_counter()
    save_checkpoint(folder, snapshot(1))
    longest = 3 * (time.perf_counter() - started)  # a copy of this process is slower
    rng, step, good, torn = random.Random(0), 1, 0, 0
    for _ in range(times):
        reader, writer = os.pipe()
        child = forked(lambda at=step, ready=writer: save_on(at, ready))
        os.read(reader, 1)
        time.sleep(rng.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        torn += any((folder / "checkpoints").glob(".*.tmp"))
        found = find_checkpoint(folder)
        if found is None or found.notes or found.snapshot.step < step:
            continue
        step = found.snapshot.step
        good += all(part["a"].eq(step).all() for part in found.snapshot.tensors.values())
    print(f"  killed in the middle of a write: {torn} of {times}; checkpoints completed: {step}")
    return good, times


def flipped_bits(folder: Path, times: int = 300) -> tuple[int, int]:
    """One bit of the newest checkpoint flipped: the file is named and the one before is used."""
    save_checkpoint(folder, snapshot(1, 200_000))
    newest = save_checkpoint(folder, snapshot(2, 200_000))
    files = sorted(newest.iterdir())
    rng, noticed = random.Random(0), 0
    for number in range(times):
        # Every second one in the small files, which a choice by size would never hit.
        sizes = [file.stat().st_size if number % 2 else 1 for file in files]
        file = rng.choices(files, sizes)[0]
        place, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        _flip(file, place, bit)
        found = find_checkpoint(folder)
        noticed += found is not None and found.snapshot.step == 1 and file.name in found.notes[0]
        _flip(file, place, bit)
    found = find_checkpoint(folder)
    assert found is not None
    assert found.snapshot.step == 2
    return noticed, times


def _flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        old = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([old ^ bit]))


def full_disk(folder: Path) -> tuple[int, int]:
    """24 MB after 24 MB on a disk of 40 MB: the first stays, no litter, the path and the space are named."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], check=True)
    save_checkpoint(folder, snapshot(1))
    try:
        save_checkpoint(folder, snapshot(2))
    except ResourceError as error:
        said = f"no space left to write {folder}" in str(error)
        print(f"  {error}")
        found = find_checkpoint(folder)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        kept = found is not None and found.snapshot.step == 1 and names == ["step-00000001"]
        return int(said and kept), 1
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    return 0, 1


def killed_runs(folder: Path, kills: int = 10) -> tuple[int, int]:
    """A whole small run killed at random moments goes on to the same bytes; EMA, distillation, 2 parts, 0–3 workers."""
    teacher = TrainingSettings(
        data=DATA, recipe="small_images", out=str(folder / "teacher"), epochs=1, batch=8, workers=0, device="cpu",
        changes=TINY,
    )  # fmt: skip
    os.waitpid(forked(lambda: training.run_training(teacher)), 0)
    child = _started(folder / "whole", 0, folder / "teacher")
    started = time.perf_counter()
    _wait(child)
    length = time.perf_counter() - started
    whole = _left_by(folder / "whole")
    rng, good, resumed = random.Random(0), 0, []
    for number in range(kills):
        out = folder / str(number)
        child = _started(out, number % 4, folder / "teacher")
        time.sleep(rng.uniform(0, length))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = find_checkpoint(out)
        resumed.append(found.snapshot.step if found else 0)
        _wait(forked(lambda out=out, n=number: _train(out, (n + 1) % 4, folder / "teacher")))
        good += _left_by(out) == whole
        shutil.rmtree(out)
    print(f"  {length:.1f} s of training; the killed runs went on from steps {resumed}")
    return good, kills


def _train(out: Path, workers: int, teacher: Path) -> None:
    make_run = training.make_run
    random.seed(0)  # Python gives each copy of a process another seed

    def saving_often(*arguments: Any) -> Any:
        run, *rest = make_run(*arguments)
        run.save_every_s, run.accumulate = 0.1, 2
        return run, *rest

    training.make_run = saving_often
    changes = TINY | {"optim.ema_decay": 0.9, "augment.mixup": 0.8, "model.drop_path": 0.1}
    training.run_training(
        TrainingSettings(
            data=DATA, recipe="small_images", out=str(out), teacher=str(teacher), epochs=6, batch=8,
            workers=workers, device="cpu", changes=changes,
        )
    )  # fmt: skip


def _started(out: Path, workers: int, teacher: Path) -> int:
    """The process of a run that has begun to save."""
    child = forked(lambda: _train(out, workers, teacher))
    while not (out / "checkpoints").exists():
        time.sleep(0.01)
    return child


def _wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"a run failed: {os.waitstatus_to_exitcode(status)}")


def _left_by(out: Path) -> dict[str, Any]:
    """Best weights, last checkpoint and metrics; without what the clock decides."""
    found = find_checkpoint(out)
    assert found is not None
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "best": (out / "weights.safetensors").read_bytes(),
        "last": {p: {n: t.numpy().tobytes() for n, t in named.items()} for p, named in found.snapshot.tensors.items()},
        "metrics": [{key: value for key, value in record.items() if key != "time"} for record in records],
    }


def equal_seeds(folder: Path) -> tuple[int, int]:
    """The same seed twice, with one thread and with two: the same bytes; between the two, a difference below 1e-5."""

    def train(out: Path, threads: int) -> None:
        random.seed(0)  # Python gives each copy of a process another seed
        torch.set_num_threads(threads)
        training.run_training(
            TrainingSettings(
                data=DATA, recipe="small_images", out=str(out), epochs=6, batch=32, workers=0, device="cpu",
                changes={"model.options.depth": 4, "model.options.dim": 96},
            )
        )  # fmt: skip

    left = {}
    for threads in (1, 2):
        for number in range(2):
            _wait(forked(lambda n=number, t=threads: train(folder / f"{t}-{n}", t)))
        left[threads] = [_left_by(folder / f"{threads}-{number}") for number in range(2)]
    equal = sum(first == second for first, second in left.values())
    one, two = ([v for r in left[t][0]["metrics"] for v in r["values"].values()] for t in (1, 2))
    apart = max(abs(a - b) for a, b in zip(one, two, strict=True))
    print(f"  largest difference of any number between one and two threads: {apart:.1e}")
    return equal + (apart <= 1e-5), 3


def image_bombs(folder: Path) -> tuple[int, int]:
    """A PNG of 400 megapixels in 49 kB: refused from its header; the memory of a process that tries."""
    side = 20_000
    header = _chunk(b"IHDR", struct.pack(">LLBBBBB", side, side, 1, 0, 0, 0, 0))
    rows = _chunk(b"IDAT", zlib.compress(bytes(side * (1 + side // 8)), 9))
    bomb, whole = folder / "bomb.png", folder / "whole.png"
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + header + rows + _chunk(b"IEND", b""))
    Image.new("RGB", (32, 32)).save(whole)
    reader, writer = os.pipe()

    def read() -> None:
        decode(whole, "whole")
        before = peak_mib()
        try:
            decode(bomb, "bomb")
        except DataError as error:
            os.write(writer, f"{peak_mib() - before} {error}".encode())

    _wait(forked(read))
    more_mib, _, said = os.read(reader, 1000).decode().partition(" ")
    print(f"  {bomb.stat().st_size:,} bytes; {float(more_mib):.2f} MiB more than before; {said}")
    return int(float(more_mib) < 48), 1


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", zlib.crc32(kind + content))


def damaged_images(times: int = 20_000) -> tuple[int, int]:
    """Random damage to every format: a picture or an error that names the file, never a signal or a hang."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    pictures = [Image.fromarray(noise), Image.fromarray(noise).convert("P"), Image.fromarray(noise[..., 0])]
    seeds = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        for picture in pictures if kind not in ("JPEG", "PPM") else pictures[::2]:
            buffer = io.BytesIO()
            picture.save(buffer, kind)
            seeds.append(buffer.getvalue())

    def read_some(first: int, count: int) -> None:
        signal.alarm(300)
        for number in range(first, first + count):
            rng = random.Random(number)
            try:
                decode(_damaged(rng.choice(seeds), rng), "the-file")
            except DataError as error:
                if "the-file" not in str(error):
                    raise

    good, each = 0, 1000
    for first in range(0, times, each):
        _, status = os.waitpid(forked(lambda first=first: read_some(first, each)), 0)
        good += each if status == 0 else 0
    return good, times


def _damaged(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 12)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    if rng.random() < 0.1:
        place = rng.randrange(len(changed) + 1)
        changed[place:place] = rng.randbytes(rng.randrange(64))
    return bytes(changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["saving", "flips", "full", "runs", "seeds", "images", "bombs"]
    parser.add_argument("trials", nargs="*", choices=[*known, known], default=known, metavar="TRIAL")
    parser.add_argument("--folders", nargs="+", default=[".", "/dev/shm"], help="one on each file system to try")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lost = 0
    for trial in given.trials:
        everywhere = trial in ("saving", "flips", "runs")
        for place in given.folders if everywhere else given.folders[:1]:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=place) as scratch:
                good, of = _tried(trial, Path(scratch))
            lost += of - good
            where = f" in {place}" if everywhere else ""
            print(f"{trial}{where}: {good} of {of} ({time.perf_counter() - started:.0f} s)", flush=True)
    print(f"peak memory {peak_mib():,.0f} MiB")
    return int(lost > 0)


def _tried(trial: str, folder: Path) -> tuple[int, int]:
    if trial == "saving":
        return killed_while_saving(folder)
    if trial == "flips":
        return flipped_bits(folder)
    if trial == "runs":
        return killed_runs(folder)
    if trial == "seeds":
        return equal_seeds(folder)
    if trial == "images":
        return damaged_images()
    if trial == "bombs":
        return image_bombs(folder)
    if "PATCHLOOM_OWN_MOUNTS" not in os.environ:
        # A mount of its own, which nobody else sees and which ends with the process.
        command = ["unshare", "-rm", sys.executable, __file__, "full", "--folders", str(folder)]
        done = subprocess.run(command, env=os.environ | {"PATCHLOOM_OWN_MOUNTS": "1"}, capture_output=True, text=True)
        print("  " + (done.stdout.splitlines() or done.stderr.splitlines()[-1:])[0].strip())
        return int(done.returncode == 0), 1
    return full_disk(folder)


if __name__ == "__main__":
    sys.exit(main())
