"""The work of one process of a test; what it returns is the command line's exit code."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.distribution import Processes
from patchloom.engine.ema import Ema
from patchloom.engine.loop import train
from patchloom.runs.checkpoints import CheckpointFolder, find_checkpoint
from patchloom_runtime.errors import PatchloomError
from tests.engine.toys import classify, make_run, network


def objective_of(mode: str, rank: int, folder: Path) -> Any:
    """`classify`, and what goes wrong in the middle of epoch 1, step 2."""

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        values = classify(model, batch, epoch=epoch, step=step)
        if (epoch, step) == (1, 2):
            if mode in ("one rank is told to stop", "sharded, stopped") and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if mode == "one rank has a bad loss" and rank == 1:
                values["loss"] = values["loss"] + math.nan
            if mode == "hang":
                print("hanging", flush=True)
                time.sleep(600)
        if mode == "waits after a checkpoint" and epoch == 1:
            while not (folder / "cut").exists():
                time.sleep(0.05)
        if mode == "long":
            print("step", flush=True)
        return values

    return objective


def work(mode: str, folder: Path) -> int:
    try:
        processes = Processes("fp32", device="cpu")
        model = network(drop_path=0.0)
        average = Ema(model, 0.9)
        sharded = mode.startswith("sharded")
        if sharded:
            processes.shard(model, average.model)
        checkpoint = find_checkpoint(folder)
        run = make_run(
            folder,
            processes=processes,
            model=model,
            objective=objective_of(mode, processes.rank, folder),
            epochs=100_000 if mode == "long" else 3,
            accumulate=2,
            average=average,
            saver=CheckpointFolder(folder) if sharded or processes.is_main else None,
            optim="lamb" if "lamb" in mode else "adamw",
            clip_norm=0.5 if "clipped" in mode else None,
            clip_each=0.1 if "each" in mode else None,
            save_every_s=0.0 if mode == "waits after a checkpoint" else 1e6,
        )
        with processes.ranks_watched():
            train(run, checkpoint and checkpoint.snapshot)
    except PatchloomError as error:
        print(error, flush=True)
        return error.exit_code
    return 0
