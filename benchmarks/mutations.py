"""Every reader fed with files that somebody changed: 20,000 mutations that know the formats.

    python benchmarks/mutations.py [--cases 20000] [--seed 0] [--reader NAME …] [--case N]

Of each: no error but a PatchloomError, no more than 10 s and 2 GiB, nothing touched outside the folder, no changed
answer where a checksum tells of the change. Prints a table and each kind of failure with its shortest case, which
`--reader NAME --case N` repeats; the exit code is 1 where there was one. See docs/reliability.md.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))

from tests.reliability.feeding import Case, Feeder, Verdict, cases_of, tell
from tests.reliability.readers.seeds import make_seeds
from tests.reliability.readers.table import READERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", nargs="+", default=[], choices=list(READERS), metavar="NAME")
    parser.add_argument("--case", type=int, help="only this one of the reader's")
    parser.add_argument("--scratch", help="where the files are made; a temporary folder by default")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.scratch, ignore_cleanup_errors=True) as scratch:
        seeds = Path(scratch, "seeds")
        seeds.mkdir()
        make_seeds(seeds)
        cases = cases_of(given.cases, seed=given.seed, only=given.reader)
        if given.case is not None:
            cases = [Case(name, given.case, given.seed) for name in given.reader]
        verdicts: list[Verdict] = []
        started = time.perf_counter()
        for verdict in Feeder(Path(scratch), seeds).verdicts(cases):
            verdicts.append(verdict)
            if len(verdicts) % 500 == 0:
                speed = len(verdicts) / (time.perf_counter() - started)
                print(f"{len(verdicts):,} of {len(cases):,} ({speed:.0f}/s)", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - started
    failed = tell(verdicts, print)
    if given.case is not None:
        for verdict in verdicts:
            print(f"\n{verdict}")
    print(f"\n{len(verdicts):,} cases in {seconds:.0f} s ({len(verdicts) / seconds:.0f}/s): {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
