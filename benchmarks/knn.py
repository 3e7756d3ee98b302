"""k-NN evaluation beside a plain matrix product and top-k of the same numbers, taking turns; time and peak memory.

Processor seconds are printed beside the clock's: other work on the machine changes them less.

python benchmarks/knn.py                                # 50,000 × 10,000 embeddings of 384, 100 classes
python benchmarks/knn.py --device cuda
"""

import argparse
import time

import torch
from peak import peak_mib

from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import knn

parser = argparse.ArgumentParser()
parser.add_argument("--train", type=int, default=50_000)
parser.add_argument("--test", type=int, default=10_000)
parser.add_argument("--dim", type=int, default=384)
parser.add_argument("--classes", type=int, default=100)
parser.add_argument("--part", type=int, default=1000, help="test images at a time of the plain version")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--device", default="cpu")
parser.add_argument("--only", choices=("plain", "knn"), help="for the peak memory of one of them")
options = parser.parse_args()


def embeddings(count: int, seed: int) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, options.dim, generator=generator).to(options.device)
    labels = torch.randint(options.classes, (count,), generator=generator).to(options.device)
    return Embeddings(vectors, labels, torch.arange(count, device=options.device))


train, test = embeddings(options.train, 0), embeddings(options.test, 1)


def plain() -> None:
    known = torch.nn.functional.normalize(train.vectors).T
    for part in torch.nn.functional.normalize(test.vectors).split(options.part):
        (part @ known).topk(20, dim=1)
    if options.device != "cpu":
        torch.cuda.synchronize()


def weighted() -> None:
    knn(train, test, classes=options.classes, k=(20,))


versions = {"plain": plain, "knn": weighted}
if options.only:
    versions = {options.only: versions[options.only]}
clocks = {"clock": time.perf_counter, "processor": time.process_time}
seconds: dict[tuple[str, str], list[float]] = {(clock, name): [] for clock in clocks for name in versions}
for _ in range(options.rounds):
    for name, version in versions.items():
        before = {clock: now() for clock, now in clocks.items()}
        version()
        for clock, now in clocks.items():
            seconds[clock, name].append(now() - before[clock])
for (clock, name), taken in seconds.items():
    print(f"{clock:9} {name:5} best {min(taken):6.2f} s   all {', '.join(f'{s:.2f}' for s in taken)}")
if not options.only:
    for clock in clocks:
        print(f"{clock:9} ratio {min(seconds[clock, 'knn']) / min(seconds[clock, 'plain']):.2f}")
print(f"peak   {peak_mib():,.0f} MiB, torch included")
