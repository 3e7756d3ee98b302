"""Cost against image size, tokens, depth, batch and classes: does any part grow faster than its arithmetic?

    python benchmarks/cost_curves.py                     # every family, one thread, processor time
    python benchmarks/cost_curves.py resmlp cait --rounds 9 --out curves.json

Of every network one thing is multiplied at a time. Beside each step stand how much the operations grew (multiply-adds
and all other scalar operations, `patchloom.cost`), how much the processor time of a forward pass grew, and how much the
memory grew that is alive at once beside weights and images. `time / arithmetic` above 1.3 at a step of more than 5 ms
is marked: there something grows faster than what it computes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import patchloom
from patchloom.models.network import Network
from patchloom.models.peak_memory import peak_mem_mib

# Small networks of every family: published widths and few blocks.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resmlp": ("resmlp_s12", {"depth": 4}),
    "mixer": ("mixer_s16", {"depth": 4}),
    "deit": ("deit_s", {"depth": 4}),
    "cait": ("cait_xxs24", {"depth": 4}),
    "smlpnet": ("smlpnet_t", {"depths": (1, 2, 4, 1)}),
    "patchconvnet": ("patchconvnet_s20", {"depth": 4}),
}
SIZES, PATCHES, DEPTHS, BATCHES = (96, 192, 384), (32, 16, 8), (2, 4, 8), (1, 2, 4, 8)
CLASSES = (1_000, 10_000, 100_000)
STAGES = {2: (1, 1, 2, 1), 4: (1, 2, 4, 1), 8: (2, 4, 8, 2)}  # depths of a network of stages
MARKED, TOLD_APART_MS = 1.3, 5.0


def curves(family: str) -> Iterator[tuple[str, list[tuple[str, Network, int]]]]:
    """(what is doubled, [(its value, network, batch)])."""
    name, options = FAMILIES[family]

    def make(**changed: Any) -> Network:
        torch.manual_seed(0)
        return patchloom.create_model(name, **options | changed).eval()

    yield "image size", [(f"{size} px", make(image_size=size), 1) for size in SIZES]
    if family not in ("smlpnet", "patchconvnet"):  # their stems have one patch size
        yield "tokens", [(f"{(224 // patch) ** 2} tokens", make(patch_size=patch), 1) for patch in PATCHES]
    depth = "depths" if family == "smlpnet" else "depth"
    blocks: dict[int, Any] = STAGES if family == "smlpnet" else {count: count for count in DEPTHS}
    yield "depth", [(f"{count} blocks", make(**{depth: value}), 1) for count, value in blocks.items()]
    yield "batch", [(f"{batch} images", make(), batch) for batch in BATCHES]
    yield "classes", [(f"{classes:,} classes", make(num_classes=classes), 1) for classes in CLASSES]


@torch.inference_mode()
def milliseconds(networks: list[tuple[str, Network, int]], rounds: int) -> list[float]:
    """Median processor time of a forward pass of each; they take turns."""
    given = [torch.randn(batch, 3, *network.config.image_size) for _, network, batch in networks]
    taken: list[list[float]] = [[] for _ in networks]
    for number in range(rounds + 1):
        for place, (_, network, _) in enumerate(networks):
            begun = time.process_time()
            network(given[place])
            if number:
                taken[place].append(1000 * (time.process_time() - begun))
    return [statistics.median(one) for one in taken]


def rows_of(family: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One row per point of each curve."""
    for varied, networks in curves(family):
        before: dict[str, float] | None = None
        for (value, network, batch), ms in zip(networks, milliseconds(networks, rounds), strict=True):
            counted = patchloom.cost(network)
            images = torch.zeros(batch, 3, *network.config.image_size)
            weights = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers(), images)) / 2**20
            now = {
                "gmac": counted.multiply_adds * batch / 1e9,
                "operations": counted.operations * batch,
                "ms": ms,
                "mib": peak_mem_mib(network, images) - weights,
            }
            row: dict[str, Any] = {"network": family, "varied": varied, "value": value} | now
            if before:
                row |= {f"{key}_grew": now[key] / before[key] for key in ("operations", "ms", "mib")}
                row["time_over_arithmetic"] = row["ms_grew"] / row["operations_grew"]
                row["marked"] = row["time_over_arithmetic"] > MARKED and ms > TOLD_APART_MS
            before = now
            yield row


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="all numbers as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, processor time; grew: over the row above")
    heads = ("network", "", "G multiply-adds", "ms", "MiB", "operations grew", "time grew", "memory grew")
    print("| " + " | ".join([*heads, "time / arithmetic"]) + " |\n" + "|---" * 9 + "|", flush=True)
    rows = []
    for family in given.families:
        for row in rows_of(family, given.rounds):
            rows.append(row)
            cells = [row["network"], row["value"], f"{row['gmac']:.2f}", f"{row['ms']:.1f}", f"{row['mib']:.1f}"]
            if "marked" in row:
                cells += [f"{row[key]:.2f}" for key in ("operations_grew", "ms_grew", "mib_grew")]
                cells.append(f"{row['time_over_arithmetic']:.2f}" + " !" * row["marked"])
            print("| " + " | ".join(cells + [""] * (9 - len(cells))) + " |", flush=True)
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
