"""Coverage-guided fuzzing of every reader by atheris, one target after the other:

    python benchmarks/fuzz.py [--seconds 600] [--target NAME …]

Inputs are mutated by libFuzzer and by the mutations that know the formats (`tests/reliability/mutations.py`). A
failure is an error that is not patchloom's own, more than 10 s of CPU time for one input, or more than 2 GiB of
memory. Its input is stored in .fuzz/crashes/TARGET, once per place in the code, and the exit code is 1. Inputs that
reached new code are stored in .fuzz/corpus/TARGET, where the next run starts. Prints one row per target: executions,
coverage (edges of patchloom's code), stored inputs, peak memory, memory growth, failures.

`python benchmarks/fuzz.py --input FILE --target NAME` gives one file to a target and shows the traceback.
"""

import argparse
import hashlib
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
KEPT = ROOT / ".fuzz"
MOST_BYTES = 16 << 10  # of an input
HANG_S = 10  # CPU seconds per input; a busy machine must not look like a hang
BLOCKED_S = 120  # wall-clock seconds per input
MOST_MIB = 2048
SPARE_BYTES = 6 << 30  # of address space: more is refused by the system
ROW = "{:<12}{:>8}{:>12}{:>10}{:>8}{:>7}{:>7}{:>10}"
BY_FORMAT = 0.5  # share of the mutations that know the format


def main() -> int:
    """Fuzz the targets, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="per target")
    parser.add_argument("--target", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--input", type=Path, help="give this file to the target, once")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.inside, options.seconds)
    from tests.fuzz.targets import TARGETS, feed

    if unknown := [name for name in options.target if name not in TARGETS]:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    if options.input:
        with tempfile.TemporaryDirectory() as folder:
            for name in options.target:
                print(f"{name}: read as {feed(TARGETS[name], Path(folder), options.input.read_bytes()) or 'nothing'}")
        return 0
    print(ROW.format("target", "seconds", "executions", "coverage", "inputs", "MiB", "grown", "failures"), flush=True)
    failures = [run(name, options.seconds) for name in options.target or TARGETS]
    return int(any(failures))


def run(name: str, seconds: int) -> int:
    """Fuzz one target; print its row and return the number of failures."""
    for place in (KEPT / "corpus" / name, KEPT / "crashes" / name):
        place.mkdir(parents=True, exist_ok=True)
    before = set((KEPT / "crashes" / name).iterdir())
    command = [sys.executable, __file__, "--inside", name, "--seconds", str(seconds)]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, open(KEPT / f"{name}.log", "w+b") as log:
        environment = os.environ | {"TMPDIR": folder}
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    stats = {key: int(value) for key, value in re.findall(r"stat::(\w+): +(\d+)", text)}
    coverage = [int(value) for value in re.findall(r"cov: (\d+)", text)]
    resident = [int(value) for value in re.findall(r"rss: (\d+)Mb", text)] or [0]
    took = re.findall(r"Done \d+ runs in (\d+) second", text)
    new = sorted(set((KEPT / "crashes" / name).iterdir()) - before)
    counts = [stats.get("number_of_executed_units", 0), max(coverage, default=0), stats.get("new_units_added", 0)]
    counts += [stats.get("peak_rss_mb", 0), resident[-1] - resident[0], len(new)]
    print(ROW.format(name, took[-1] if took else "-", *(f"{count:,}" for count in counts)), flush=True)
    if code and not new:
        print(f"{name} ended with code {code}; see {KEPT / f'{name}.log'}", flush=True)
    for path in new:
        print(f"  {path.relative_to(ROOT)}", flush=True)
    return len(new) + bool(code)


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris
    import torch
    from atheris.import_hook import HookManager

    torch.set_num_threads(1)
    # Without its tracing of comparisons, in which atheris 3.0 leaks every array that a comparison gives.
    with HookManager({"patchloom", "patchloom_runtime"}, set(), True, trace_dataflow=False):
        from tests.fuzz.targets import HERE, TARGETS, feed
    from tests.reliability import mutations

    mutations.VALUES = tuple(value for value in mutations.VALUES if len(str(value)) < MOST_BYTES // 4)
    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp())
    places: set[str] = set()

    def one_input(data: bytes) -> None:
        began = time.process_time()
        try:
            feed(target, folder, data)
            if (taken := time.process_time() - began) > HANG_S:
                raise TimeoutError(f"{taken:.0f} s for one input")
        except Exception as error:
            place = _place(error)
            if place not in places:
                places.add(place)
                digest = hashlib.sha256(data).hexdigest()[:12]
                path = KEPT / "crashes" / name / f"{type(error).__name__}-{digest}"
                path.write_bytes(data)
                print(f"\n{path.name}, {place}\n{traceback.format_exc()}", file=sys.stderr, flush=True)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < BY_FORMAT:
            try:
                changed = mutations.KINDS[rng.choice(target.kinds)](data, rng).data
            except Exception:  # no longer of the format
                changed = b""
            if 0 < len(changed) <= most:
                return changed
        return atheris.Mutate(data, most)

    feed(target, folder, b"")
    _bound_memory()
    for kept in (HERE / "corpus" / name, HERE / "regressions" / name, KEPT / "corpus" / name):
        kept.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-max_total_time={seconds}", f"-timeout={BLOCKED_S}", f"-report_slow_units={BLOCKED_S}",
        f"-rss_limit_mb={MOST_MIB}", f"-max_len={MOST_BYTES}",
        "-print_final_stats=1", f"-artifact_prefix={KEPT / 'crashes' / name}/",
        *(str(place) for place in (KEPT / "corpus" / name, HERE / "corpus" / name, HERE / "regressions" / name)),
    ]  # fmt: skip
    atheris.Setup([name, *arguments], one_input, custom_mutator=mutated, internal_libfuzzer=True)
    atheris.Fuzz()


def _place(error: Exception) -> str:
    """The kind of an error and the innermost line of patchloom that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{one.filename}:{one.lineno}" for one in frames if f"{os.sep}patchloom" in one.filename]
    return f"{type(error).__name__} at {ours[-1] if ours else '?'}"


def _bound_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES,) * 2)


if __name__ == "__main__":
    sys.exit(main())
