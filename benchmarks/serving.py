"""`patchloom serve` under open-loop load, compared with a plain FastAPI app and LitServe, all with the same network.

    python benchmarks/serving.py                      # all servers present, a random ResMLP of 64 px and 160 px JPEGs
    python benchmarks/serving.py --seconds 8 --servers patchloom,artifact
    python benchmarks/serving.py --cold 5 --servers patchloom,artifact --times ''   # cold starts alone
    python benchmarks/serving.py --share-cores --workers 2 --servers patchloom,artifact --times 0.5
    python benchmarks/serving.py --noise 4 --deadline 2 --seconds 8 --cold 1 --servers patchloom --times 1,2,4

The client runs on the last core and the servers on the others, so that neither disturbs the other; cold starts use all
cores. The steps:

1. The raw loop: `predict` on the same JPEG bytes in one process, with as many threads as every server's model.
2. One client, then 16 clients (closed loop: the capacity).
3. 0.5, 1, 2 and 4 times the capacity, whatever the responses are (open loop). A good response is a 200 before the
   client gives up after 10 s; those within one second are listed too.
4. 50 sockets that send a header byte by byte.
5. SIGTERM under load.

The last table compares the results with the goals.

`artifact` is `patchloom serve` of the same network exported to ONNX. FastAPI, uvicorn and LitServe are measured if they
are installed. `--noise N` runs N busy processes on the servers' cores, two of every four seconds, like work of other
people: a model on one core is then N + 1 times slower in turns.
"""

import argparse
import base64
import http.client
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from serving_clients import (
    Ended,
    Load,
    Target,
    closed_loop,
    end_under_load,
    members,
    open_loop,
    percentile,
    slow_headers,
)

SIZE, QUEUE, BATCH, CLIENTS = 64, 64, 8, 16
CORES = sorted(os.sched_getaffinity(0))
SHARED = "--share-cores" in sys.argv or len(CORES) == 1
SERVERS_CORES, CLIENT_CORES = (CORES, CORES) if SHARED else (CORES[:-1], CORES[-1:])
THREADS = len(SERVERS_CORES)  # of every model, as `patchloom serve` with one process has
OURS = ("patchloom", "artifact")
WORKERS = [1]  # model processes of ours
DEADLINE = [30.0]  # seconds, of ours

FASTAPI = """
import sys, torch, uvicorn, patchloom
from fastapi import Body, FastAPI
torch.set_num_threads(THREADS)
model = patchloom.load(sys.argv[1], device="cpu")
app = FastAPI()
@app.post("/predict")
def predict(body: bytes = Body(media_type="application/octet-stream")):
    return model.predict(body)
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
LITSERVE = """
import base64, sys, torch, litserve, patchloom
class Api(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(THREADS)
        self.model = patchloom.load(sys.argv[1], device="cpu")
    def decode_request(self, request):
        return base64.b64decode(request["image"])
    def predict(self, x):
        return self.model.predict(x)
    def encode_response(self, output):
        return {"answers": output}
if __name__ == "__main__":
    litserve.LitServer(Api(), accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
"""


def make_run(folder: Path) -> None:
    """Write an untrained classifier whose predictions take some milliseconds."""
    import patchloom
    from patchloom.inference.classifier import Classifier
    from patchloom.runs.config import Preprocessing, RunFiles

    network = patchloom.create_model("resmlp_s12", image_size=SIZE, patch_size=8, num_classes=100)
    preprocessing = Preprocessing(
        image_size=(SIZE, SIZE), crop_ratio=1.0, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    files = RunFiles(
        "resmlp_s12", {"num_classes": 100}, preprocessing, None, tuple(map(str, range(100))), task="classification"
    )
    Classifier(network.eval(), files).save_pretrained(folder)


def jpeg() -> bytes:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    small = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((160, 160)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


RAW = """
import json, sys, time
THREADS = int(sys.argv[2])
if sys.argv[3] == "artifact":
    from patchloom_runtime.artifacts.artifact import load
    model = load(sys.argv[1], threads=THREADS)
else:
    import torch, patchloom
    torch.set_num_threads(THREADS)
    model = patchloom.load(sys.argv[1], device="cpu")
data = sys.stdin.buffer.read()
for _ in range(10): model.predict(data)
took, ends = [], time.perf_counter() + float(sys.argv[4])
while (began := time.perf_counter()) < ends:
    model.predict(data)
    took.append(time.perf_counter() - began)
print(json.dumps(took))
"""


def make_artifact(run: Path, folder: Path, image: bytes) -> None:
    """Export the run, with its parity checked on a few images."""
    import patchloom

    data = folder.parent / "data"
    for number in range(100):
        (data / str(number)).mkdir(parents=True)
        (data / str(number) / "a.jpg").write_bytes(image)
    patchloom.export(str(run), str(folder), data=str(data), images=4)


def environment() -> dict[str, str]:
    return {"GOMP_SPINCOUNT": "10000", **os.environ, "OMP_NUM_THREADS": str(THREADS)}


def raw_loop(name: str, folder: Path, image: bytes, seconds: float) -> list[float]:
    """Return the seconds per `predict` of one image after another, in a process of its own."""
    line = [sys.executable, "-c", RAW, str(folder), str(THREADS), name, str(seconds)]
    place = {"env": environment(), "preexec_fn": lambda: os.sched_setaffinity(0, SERVERS_CORES)}
    done = subprocess.run(line, input=image, capture_output=True, check=True, **place)
    return json.loads(done.stdout)


NOISE = """
import time
while True:
    ends = 4 * (time.time() // 4) + 2
    while time.time() < ends: pass
    time.sleep(ends + 2 - time.time())
"""


@contextmanager
def noise(count: int) -> Iterator[None]:
    """Run busy processes on the servers' cores, all during the same two of every four seconds."""
    place = {"preexec_fn": lambda: os.sched_setaffinity(0, SERVERS_CORES)}
    busy = [subprocess.Popen([sys.executable, "-c", NOISE], **place) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A started server to measure; no other one runs meanwhile."""

    def __init__(self, name: str, folder: Path, image: bytes, cores: Sequence[int]) -> None:
        port = free_port()
        ours = [sys.executable, "-m", "patchloom.cli", "serve", str(folder), "--port", str(port), "-q"]
        ours += ["--processes", str(WORKERS[0]), "--deadline", str(DEADLINE[0])]
        lines = {
            "patchloom": ours,
            "artifact": ours,
            "fastapi": [sys.executable, "-c", FASTAPI.replace("THREADS", str(THREADS)), str(folder), str(port)],
            "litserve": [sys.executable, str(folder / "lit.py"), str(folder), str(port)],
        }
        if name == "litserve":
            (folder / "lit.py").write_text(LITSERVE.replace("THREADS", str(THREADS)))
            packed = json.dumps({"image": base64.b64encode(image).decode()}).encode()
            self.target = Target(port, packed, "application/json")
        else:
            self.target = Target(port, image, "application/octet-stream")
        began = time.perf_counter()
        self.process = subprocess.Popen(
            lines[name],
            env=environment(),
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - began > 90:
                raise RuntimeError(f"{name} does not start")
            time.sleep(0.01)
        self.cold_seconds = time.perf_counter() - began

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=30)
            connection.request("POST", "/predict", self.target.body, {"Content-Type": self.target.kind})
            return connection.getresponse().status == 200
        except OSError:
            return False

    def memory(self) -> float:
        """Return the MiB of all its processes (proportional set size)."""
        kib = 0
        for pid in members(self.process.pid):
            with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
                kib += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        return kib / 1024

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for pid in list(members(self.process.pid)):  # processes it left behind
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Measured:
    """All measurements of one server."""

    raw: list[float]
    cold: list[float]
    memory: float
    alone: list[float] = field(default_factory=list)
    capacity: float = 0.0
    loads: dict[float, Load] = field(default_factory=dict)
    slow: list[float] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def raw_rate(self) -> float:
        return len(self.raw) / sum(self.raw)

    @property
    def peak(self) -> float:
        return max(self.capacity, *(load.per_second() for load in self.loads.values()))


def measure(name: str, folder: Path, image: bytes, seconds: float, times: Sequence[float], cold: int) -> Measured:
    raw, colds, memory = raw_loop(name, folder, image, 4), [], 0.0
    for _ in range(cold):
        server = Server(name, folder, image, CORES)
        colds.append(server.cold_seconds)
        memory = server.memory()
        server.end()
    measured = Measured(raw, colds, memory)
    print(
        f"\n{name}: raw loop {measured.raw_rate:.1f}/s, p99 {percentile(raw, 0.99):.0f} ms; cold start to first answer "
        f"{min(measured.cold):.2f} s (median of {cold}: {median(measured.cold):.2f}); {measured.memory:.0f} MiB; "
        f"load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if times:
        server = Server(name, folder, image, SERVERS_CORES)
        try:
            _under_load(server, measured, seconds, times)
        finally:
            server.end()
    return measured


def _under_load(server: Server, measured: Measured, seconds: float, times: Sequence[float]) -> None:
    measured.alone = closed_loop(server.target, 1, seconds / 2).of("200")
    measured.capacity = closed_loop(server.target, CLIENTS, seconds).per_second()
    print(
        f"  one client: p50 {percentile(measured.alone, 0.5):.0f} ms, p99 {percentile(measured.alone, 0.99):.0f}; "
        f"{CLIENTS} clients: {measured.capacity:.1f}/s"
    )
    for each in times:
        load = measured.loads[each] = open_loop(server.target, each * measured.capacity, seconds)
        good = load.of("200")
        print(
            f"  {each:g} ×: offered {load.offered:6.1f}/s  good {load.per_second():6.1f}/s  within 1 s "
            f"{load.per_second(1.0):6.1f}/s  p50 {percentile(good, 0.5):5.0f} ms  p99 {percentile(good, 0.99):5.0f}  "
            f"refused p99 {percentile(load.refused, 0.99):3.0f}  {load.summary()}",
            flush=True,
        )
    measured.slow = slow_headers(server.target)
    measured.ended = end_under_load(server.target, server.process.pid, measured.capacity)


def goals(all_measured: dict[str, Measured]) -> None:
    """Print one table with a row per goal; our servers get a verdict, the others are for comparison."""
    rows: list[tuple[str, str, list[tuple[str, bool]]]] = []

    def row(goal: str, wanted: str, value: object, met: object) -> None:
        rows.append((goal, wanted, [(value(measured), bool(met(measured))) for measured in all_measured.values()]))

    row("cold start to first answer, median s", "< 3", lambda f: f"{median(f.cold):.2f}", lambda f: median(f.cold) < 3)
    if all(measured.loads for measured in all_measured.values()):
        row("most good answers per second, % of the raw loop", "≥ 85", lambda f: f"{100 * f.peak / f.raw_rate:.0f}",
            lambda f: f.peak >= 0.85 * f.raw_rate)  # fmt: skip
        for each in sorted({each for measured in all_measured.values() for each in measured.loads if each >= 2}):
            row(f"good at {each:g} ×, % of the most", "≥ 90",
                lambda f, each=each: f"{100 * f.loads[each].per_second() / f.peak:.0f}",
                lambda f, each=each: f.loads[each].per_second() >= 0.9 * f.peak)  # fmt: skip
        last = max(max(measured.loads) for measured in all_measured.values())
        row(f"p99 of good ones at {last:g} ×, ms, of at most (queue + 2 batches) / rate + 20 %", "≤",
            lambda f: f"{percentile(f.loads[last].of('200'), 0.99):.0f} of {1000 * _longest(f):.0f}",
            lambda f: percentile(f.loads[last].of("200"), 0.99) <= 1000 * _longest(f))  # fmt: skip
        row(f"p99 of refused ones at {last:g} ×, ms", "< 50",
            lambda f: f"{percentile(f.loads[last].refused, 0.99):.0f}" if f.loads[last].refused else "none refused",
            lambda f: f.loads[last].refused and percentile(f.loads[last].refused, 0.99) < 50)  # fmt: skip
        row("p99 of one client beyond the raw loop's, ms", "≤ 15",
            lambda f: f"{percentile(f.alone, 0.99) - percentile(f.raw, 0.99):.0f}",
            lambda f: percentile(f.alone, 0.99) <= percentile(f.raw, 0.99) + 15)  # fmt: skip
        row("of 50 slow headers, closed within 10 s", "50", lambda f: f"{sum(t <= 10 for t in f.slow)}",
            lambda f: max(f.slow) <= 10)  # fmt: skip
        row("SIGTERM under load: lost, processes left, port open, s", "0, 0, no, < 30",
            lambda f: f"{f.ended.lost}, {f.ended.left}, {'yes' if f.ended.port_open else 'no'}, {f.ended.seconds:.1f}",
            lambda f: not f.ended.lost and not f.ended.left and not f.ended.port_open
            and f.ended.seconds < 30)  # fmt: skip
    names = list(all_measured)
    print(f"\n| goal | wanted | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for goal, wanted, cells in rows:
        texts = [
            f"{value} {'✓' if met else '✗'}" if name in OURS else value
            for name, (value, met) in zip(names, cells, strict=True)
        ]
        print(f"| {goal} | {wanted} | {' | '.join(texts)} |")


def _longest(measured: Measured) -> float:
    """Return the seconds that a request behind a full queue may wait."""
    return 1.2 * (QUEUE + 2 * BATCH) / measured.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per load")
    parser.add_argument("--servers", default="patchloom,artifact,fastapi,litserve")
    parser.add_argument("--times", default="0.5,1,2,4", help="multiples of the capacity; '' measures cold starts only")
    parser.add_argument("--cold", type=int, default=3, help="starts per server")
    parser.add_argument("--workers", type=int, default=1, help="model processes of patchloom's servers")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds until patchloom's servers give up")
    parser.add_argument("--share-cores", action="store_true", help="let the client share the cores of the servers")
    parser.add_argument("--noise", type=int, default=0, help="busy processes on the cores of the servers")
    args = parser.parse_args()
    WORKERS[0], DEADLINE[0] = args.workers, args.deadline
    names = [name for name in args.servers.split(",") if name in OURS or importlib.util.find_spec(name)]
    times = [float(each) for each in args.times.split(",") if each]
    print(f"cores {CORES}: {SERVERS_CORES} of the servers, {CLIENT_CORES} of the client; {THREADS} threads of a model")
    with tempfile.TemporaryDirectory() as root:
        run, artifact, image = Path(root) / "run", Path(root) / "artifact", jpeg()
        make_run(run)
        if "artifact" in names:
            make_artifact(run, artifact, image)
        os.sched_setaffinity(0, CLIENT_CORES)
        with noise(args.noise):
            measured = {
                name: measure(name, artifact if name == "artifact" else run, image, args.seconds, times, args.cold)
                for name in names
            }
    goals(measured)


if __name__ == "__main__":
    main()
