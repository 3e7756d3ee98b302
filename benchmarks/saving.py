"""Peak memory of saving sharded weights: what each of two processes takes beyond its own parts.

    python benchmarks/saving.py              # 32 matrices of 4 MiB: weights, EMA, two moments of Adam

Prints, per process, the bytes of its parts, the growth of its peak memory (VmHWM) while a checkpoint and
`weights.safetensors` are written, and the largest tensor. Linux only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from patchloom.engine.distribution import Processes
from patchloom.engine.state import Snapshot
from patchloom.models.sharding import local
from patchloom.runs.checkpoints import CheckpointFolder

MIB = 1 << 20


def memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def work(folder: Path, blocks: int, size: int) -> None:
    """Save once as one process of several, and print what it took."""
    processes = Processes("fp32", device="cpu", answer_within_s=120)
    model = nn.Sequential(nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(blocks)))
    processes.shard(model)
    weights = model.state_dict()
    parts = {
        "weights": weights,
        "ema": {name: value.detach().clone() for name, value in weights.items()},
        "optimizer": {f"{n}.{k}": v.detach().clone() for n, v in weights.items() for k in ("exp_avg", "exp_avg_sq")},
    }
    own = sum(local(tensor).nbytes for named in parts.values() for tensor in named.values())
    saver = CheckpointFolder(folder)
    progress = {"step": 1, "epoch": 0, "best_weights": "", "ended": ""}
    for what, save in (
        ("checkpoint", lambda: saver.save(Snapshot(parts, {"progress": progress}), processes)),
        ("weights", lambda: saver.save_weights(weights, {}, processes)),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        save()
        grown = memory("VmHWM") - before
        print(
            f"rank {processes.rank} of {processes.world}, {what}: own parts {own / MIB:.0f} MiB, "
            f"peak +{grown / MIB:.0f} MiB, largest tensor {size * size * 4 / MIB:.0f} MiB",
            flush=True,
        )
        processes.barrier()
    processes.close()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder:
        torch.set_num_threads(1)
        work(options.folder, options.blocks, options.size)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = {"WORLD_SIZE": str(options.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
        line = [sys.executable, __file__, "--folder", folder]
        line += ["--blocks", str(options.blocks), "--size", str(options.size)]
        ranks = [
            subprocess.Popen(line, env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(options.processes)
        ]
        for rank in ranks:
            rank.wait()


if __name__ == "__main__":
    main()
