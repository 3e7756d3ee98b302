"""Exact search among 100 million vectors on a GPU: `evaluation.device_search`, its floors, and a comparison.

The vectors are 10,000 random clusters; each is computed from its number when it is read, on the device, so that no file
of 154 GB is needed. Candidates are ranked by their float32 vectors as in a search of an index, which reads them from
disk. Times are medians after a first round, with the device synchronized. A part of the queries is compared with a
float64 product with all vectors.

    python benchmarks/gpu_search.py                                     # 100 million × 384 on a GPU of 100 GB
    python benchmarks/gpu_search.py --device cpu --count 200000 --queries 64 --repeats 2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from patchloom.evaluation.device_search import DeviceVectors, bytes_needed

PART = 1 << 18  # vectors computed at once
CLUSTERS, SPREAD = 10_000, 0.5
VECTOR_SEED, CENTER_SEED, CLUSTER_SEED, CHANNEL_SEED = 1, 2, 3, 4


def mixed(x: Tensor) -> Tensor:
    """Return a hash of int32 numbers, the same on every device."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


def seeded(numbers: Tensor, seed: int) -> Tensor:
    return mixed(mixed(numbers.int()) + seed * 0x1234567)


class RandomVectors:
    """Unit vectors that are functions of their number: the same on every device and in every part."""

    def __init__(self, count: int, dimension: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.channels = seeded(torch.arange(dimension, device=device), CHANNEL_SEED)
        self.centers = self._noise(torch.arange(CLUSTERS, device=device), CENTER_SEED)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, self.count, PART):
            yield self.at(torch.arange(start, min(start + PART, self.count), device=self.device))

    def rows(self, positions: Tensor) -> Tensor:
        return torch.cat([self.at(some.to(self.device)).cpu() for some in positions.split(PART)])

    def at(self, numbers: Tensor) -> Tensor:
        """Return the vectors (n, C) with these numbers. Sums of integers are exact, so devices and parts agree."""
        cluster = seeded(numbers, CLUSTER_SEED).long() % CLUSTERS
        drawn = self.centers[cluster] + self._noise(numbers, VECTOR_SEED) * SPREAD  # multiples of 1/2 below 2¹⁹
        norms = drawn.double().square().sum(dim=1, keepdim=True).sqrt()
        return drawn.div_(norms.float())

    def _noise(self, numbers: Tensor, seed: int) -> Tensor:
        """Return integers (n, C) as float32, symmetric about 0: sums of two of 16 bits."""
        drawn = mixed(seeded(numbers, seed)[:, None] ^ self.channels)
        low, high = (drawn & 0xFFFF) - 0x8000, drawn >> 16
        return (low + high).float()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of `call` after a first one."""
    taken = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        taken.append(1000 * (time.perf_counter() - begin))
    return statistics.median(taken[1:])


def brute_force(vectors: RandomVectors, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the k best by float64 products with every vector."""
    on_device = queries.to(vectors.device).double()
    scores = torch.empty(len(queries), 0, device=vectors.device)
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=vectors.device)
    start = 0
    for part in vectors:
        now = torch.cat([(on_device @ some.double().T).float() for some in part.split(PART // 8)], dim=1)
        best = now.topk(min(k, now.shape[1]), dim=1)
        scores = torch.cat([scores, best.values], dim=1)
        positions = torch.cat([positions, best.indices + start], dim=1)
        # Equal scores in the order of their positions.
        order = positions.argsort(dim=1)
        scores, positions = scores.gather(1, order), positions.gather(1, order)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        scores, positions = scores.gather(1, order), positions.gather(1, order)
        start += len(part)
    return scores.cpu(), positions.cpu()


def floors(copy: Tensor, halves: Tensor, repeats: int) -> dict[str, float]:
    """Return the times of reading the copy once, and of nothing but the products with 1/64 of it, times 64."""
    device = copy.device
    few = copy[: max(len(copy) // 64 // 4096, 1) * 4096]
    times = {"products_ms": median_ms(lambda: halves @ few.T, repeats, device) * len(copy) / len(few)}
    if device.type == "cuda":
        words = few.view(torch.float64).flatten()
        target = torch.empty_like(words)
        once = median_ms(lambda: target.copy_(words), repeats, device) / 2 * len(copy) / len(few)  # reads and writes
        times["read_ms"] = once
        times["read_gb_per_s"] = copy.numel() * 2 / once / 1e6
    times["products_tflops"] = 2 * len(halves) * copy.numel() / times["products_ms"] / 1e9
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compared", type=int, default=32, help="queries that are compared with every vector")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    vectors = RandomVectors(options.count, options.dim, device)
    queries = vectors.rows(torch.arange(options.count, options.count + options.queries))
    begin = time.perf_counter()
    on_device = DeviceVectors(vectors, device)
    synchronize(device)
    built = time.perf_counter() - begin
    copy, halves = on_device._copy, on_device.halves(queries)
    one, few = queries[:1], halves[:1]
    numbers: dict[str, object] = {
        "count": options.count,
        "dimension": options.dim,
        "top": options.top,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "copied_s": built,  # computing the vectors included
        "copy_gib": copy.numel() * 2 / 2**30,
        "needed_gib": bytes_needed(options.count, options.dim) / 2**30,
        "floors_1": floors(copy, few, options.repeats),
        f"floors_{options.queries}": floors(copy, halves, options.repeats),
        "maxima_1_ms": median_ms(lambda: on_device.maxima(few), options.repeats, device),
        f"maxima_{options.queries}_ms": median_ms(lambda: on_device.maxima(halves), options.repeats, device),
        "search_1_ms": median_ms(lambda: on_device.nearest(one, options.top), options.repeats, device),
        f"search_{options.queries}_ms": median_ms(
            lambda: on_device.nearest(queries, options.top), options.repeats, device
        ),
    }
    scores, positions = on_device.nearest(queries[: options.compared], options.top)
    begin = time.perf_counter()
    expected_scores, expected = brute_force(vectors, queries[: options.compared], options.top)
    numbers["compared"] = len(expected)
    numbers["compared_s"] = time.perf_counter() - begin
    numbers["same_positions"] = float((positions == expected).double().mean())
    numbers["largest_difference_of_scores"] = float((scores - expected_scores).abs().max())
    if device.type == "cuda":
        numbers["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
