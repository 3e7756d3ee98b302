"""Sharded weights learn as whole ones, for methods with averages, teachers and memories."""

import sys
from pathlib import Path

import pytest
import torch

from patchloom import cli
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.runs.weights import read_weights
from tests.forked import forked_ranks
from tests.reliability.commands import TINY, class_folders

COMMON = ("--epochs", "1", "--size", "16", "--workers", "0", *TINY, "--set", "model.drop_path=0")
SMALL = ("--set", "model.options.patch_size=8", "--batch", "8")
TASKS = {
    "classification with EMA": ("--recipe", "small_images", *SMALL, "--set", "optim.ema_decay=0.9"),
    # Batch norm in its head has the statistics of each process, sharded or not.
    "dino": ("--recipe", "dino_small_images", *SMALL, "--set", "dino.outputs=32", "--set", "dino.batch_norm=false"),
    "grafit": ("--recipe", "grafit_small_images", "--model", "resmlp_s12", *SMALL),
}

PARTS = {"classification with EMA": ["ema"], "dino": ["objective"], "grafit": ["objective"]}  # of a checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("sharding") / "images", pictures=20)


def train(world: int, *arguments: object) -> None:
    def work() -> None:
        sys.argv = ["patchloom", "train", *map(str, arguments)]
        cli.main()

    for process in forked_ranks(work, world):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors + output


@pytest.mark.parametrize("task", TASKS)
def test_sharded_weights_learn_as_whole_ones(data: Path, tmp_path: Path, task: str) -> None:
    # The batch norms of Grafit's heads have the statistics of each process, so one process differs from two.
    world = 2 if task == "grafit" else 1
    train(world, data, *COMMON, *TASKS[task], "--out", tmp_path / "whole")
    train(2, data, *COMMON, *TASKS[task], "--out", tmp_path / "sharded", "--shard")
    one, two = (find_checkpoint(tmp_path / name) for name in ("whole", "sharded"))
    assert one is not None
    assert two is not None
    assert (two.path / "shard-00001.safetensors").is_file()
    assert {"weights", *PARTS[task]} <= one.snapshot.tensors.keys()
    for part in ("weights", *PARTS[task]):
        assert one.snapshot.tensors[part].keys() == two.snapshot.tensors[part].keys()
        for name, value in one.snapshot.tensors[part].items():
            torch.testing.assert_close(two.snapshot.tensors[part][name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert read_weights(tmp_path / "sharded" / "weights.safetensors").keys() == one.snapshot.tensors["weights"].keys()
