"""Where the host's time goes in a step of `patchloom train`: milliseconds of each part, without stopping the device.

    python benchmarks/step_parts.py cifar100/ -- --recipe small_images --compile

Options after `--` go to `patchloom train`. The parts add up to the whole where the host is what bounds the training;
where the device is, the host waits for it in `receive`. The run is ended after the measured steps and thrown away.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from trainings import read

from patchloom.cli import main as patchloom
from patchloom.engine.agreement import RankAgreement
from patchloom.engine.batches import Feed
from patchloom.engine.distribution import Processes
from patchloom.engine.ema import Ema
from patchloom.engine.loop import Step, _Loop
from patchloom.engine.reporter import Reporter

PARTS = {
    "data": (Feed, "_next"),
    "forward": (Step, "forward"),
    "send": (RankAgreement, "send"),
    "backward": (Processes, "backward"),
    "receive": (RankAgreement, "receive"),
    "update": (Processes, "update"),
    "average": (Ema, "update"),
    "report": (Reporter, "after_step"),
}


def main() -> None:
    """Put a clock around every part, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--after", type=int, default=70, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=150)
    given, further = read(parser)
    seconds: Counter[str] = Counter()
    for name, (cls, method) in PARTS.items():
        setattr(cls, method, timed(getattr(cls, method), seconds, name))
    whole = _Loop.update
    started = 0.0

    def update(loop: _Loop, *arguments: Any) -> Any:
        nonlocal started
        step = loop.progress.step
        if step == given.after:
            synchronise()
            seconds.clear()
            started = perf_counter()
        if step == given.after + given.steps:
            synchronise()
            tell(seconds, perf_counter() - started, given.steps)
            raise SystemExit
        return whole(loop, *arguments)

    _Loop.update = update  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["patchloom", "train", given.data, "--out", f"{folder}/run", *further]
        patchloom()


def timed(method: Callable[..., Any], seconds: Counter[str], name: str) -> Callable[..., Any]:
    """The method, and how long it takes."""

    def measured(*arguments: Any, **options: Any) -> Any:
        before = perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            seconds[name] += perf_counter() - before

    return measured


def tell(seconds: Counter[str], whole: float, steps: int) -> None:
    """A line a part."""
    for name in PARTS:
        print(f"{name:<10} {seconds[name] / steps * 1e3:7.2f} ms")
    memory = f", {torch.cuda.max_memory_allocated() >> 20:,} MiB" if torch.cuda.is_available() else ""
    print(f"{'step':<10} {whole / steps * 1e3:7.2f} ms{memory}")


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
