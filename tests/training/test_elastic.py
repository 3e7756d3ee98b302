"""A run stopped in mid-epoch continues with other numbers of processes and other batch sizes."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from patchloom.data.batches.sampler import SamplingPlan, rank_positions
from patchloom.engine import loop
from patchloom.runs.checkpoints import find_checkpoint
from patchloom_runtime.errors import UsageError
from tests.forked import forked_ranks
from tests.reliability.commands import OPTIONS, WORKERS, class_folders, command, forked

CHANGES = ("--set", "augment.flip=0", "--epochs", "2")
MIXED = ("--set", "augment.mixup=0.2", "--set", "augment.cutmix=0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("elastic") / "images", pictures=30)


def work(arguments: tuple[Any, ...], log: Path, stop_at: int | None) -> None:
    """Train, and log the images that this rank sees in each step; SIGTERM in the middle of update `stop_at`."""
    from patchloom import cli

    update, rank = loop._Loop.update, int(os.environ["RANK"])
    steps = iter(range(10_000))

    def logged(self: Any, batch: Any, requests: Any) -> Any:
        if next(steps) == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        with log.with_suffix(f".{rank}").open("a") as file:
            file.write(json.dumps([self.progress.epoch, batch.index.tolist()]) + "\n")
        return update(self, batch, requests)

    loop._Loop.update = logged  # type: ignore[method-assign]
    sys.argv = ["patchloom", *map(str, arguments)]
    cli.main()


def train(data: Path, out: Path, batch: int, world: int, stop_at: int | None, *options: Any) -> list[tuple[int, int]]:
    """Train a segment of a run and return its (epoch, image) in the order of its batches."""
    log = out.with_name(f"{out.name}-{batch}-{world}")
    arguments = ("train", data, "--out", out, *OPTIONS, *CHANGES, "--batch", batch, *options)
    ranks = forked_ranks(lambda: work(arguments, log, stop_at), world)
    for process in ranks:
        output, errors = process.communicate(timeout=180)
        assert process.returncode == (0 if stop_at is None else 143), errors + output
    by_rank = [[json.loads(line) for line in log.with_suffix(f".{r}").read_text().splitlines()] for r in range(world)]
    used: list[tuple[int, int]] = []
    for shares in zip(*by_rank, strict=True):
        images = [-1] * batch
        for rank, (_, indices) in enumerate(shares):
            for place, index in zip(rank_positions(batch, rank, world), indices, strict=True):
                images[place] = index
        used += [(shares[0][0], image) for image in images]
    return used


@pytest.mark.parametrize("options", [(), WORKERS], ids=["decoded", "workers"])
def test_four_processes_are_continued_by_three_two_and_one(
    data: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    used = train(data, out, 8, 4, 1, *options)
    assert len(used) == 16
    found = find_checkpoint(out)
    assert found is not None
    assert found.snapshot.values["progress"]["samples"] == 16
    used += train(data, out, 9, 3, 0, *options)
    used += train(data, out, 4, 2, 1, *options)
    assert len(used) == 16 + 9 + 8
    used += train(data, out, 7, 1, None, *options)
    images = found.snapshot.values["samples_per_epoch"]
    assert images == 48
    plan = SamplingPlan(images, 7)
    first, second = ([image for epoch, image in used if epoch == number] for number in (0, 1))
    # Nothing twice, nothing lost but the tail of the epoch that makes no whole batch of the size in use at its end.
    assert first == plan.order(0)[: 33 + (images - 33) // 7 * 7].tolist()
    assert second == plan.order(1)[: images // 7 * 7].tolist()


def test_another_batch_needs_out_and_a_run_that_has_not_ended(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    default = ("train", data, *OPTIONS, *CHANGES)
    assert command(default, monkeypatch, capsys).code == 0
    done = command((*default, "--batch", 6, "--out", "runs/images"), monkeypatch, capsys)
    assert done.code == UsageError.exit_code
    assert re.search(r"optim\.batch_size 4 → 6", done.errors)
    done = command((*default, "--batch", 6, "--dry-run"), monkeypatch, capsys)
    assert (tmp_path / "runs" / "images").is_dir()
    assert "runs/images-2" in done.output


def test_the_same_processes_continue_bit_for_bit(data: Path, tmp_path: Path) -> None:
    # Two processes with Mixup, stopped in mid-epoch: the weights are those of the run that was not.
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    used = train(data, whole, 8, 2, None, *MIXED)
    before = train(data, cut, 8, 2, 2, *MIXED)
    rest = train(data, cut, 8, 2, None, *MIXED)
    assert used == rest  # the log goes on where it stopped
    assert used[: len(before)] == before
    assert (whole / "weights.safetensors").read_bytes() == (cut / "weights.safetensors").read_bytes()


def test_a_note_names_the_samples(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(data, out, 8, 1, 2)
    process = forked("train", data, "--out", out, *OPTIONS, *CHANGES, "--batch", 6)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (note,) = [line for line in output.splitlines() if " of its " in line]
    assert {"1", "24"} <= set(re.findall(r"\d+", note))
