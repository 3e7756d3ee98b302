"""`patchloom serve` under open-loop load, beside a plain FastAPI app and LitServe, all with the same run.

    python benchmarks/serving.py                      # all servers present, a random ResMLP of 64 px and 160 px JPEGs
    python benchmarks/serving.py --seconds 8 --servers patchloom

First the raw loop is timed: `predict` on the same JPEG bytes in one process, with the threads that every server's model
has. Then each server is offered 0.5, 1, 2 and 4 times that rate, whatever it answers (open loop), with a client timeout
of 10 s. Good is a 200 within a second. FastAPI, uvicorn and LitServe are measured where they are installed.
"""

import argparse
import asyncio
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
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import quantiles

SIZE, TIMEOUT, GOOD_SECONDS = 64, 10.0, 1.0
THREADS = len(os.sched_getaffinity(0))  # of every model, as `patchloom serve` with one process has

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
    """An untrained classifier whose answer takes some milliseconds."""
    import patchloom
    from patchloom.deployment.classifier import Classifier
    from patchloom.runs.config import Preprocessing, RunFiles

    network = patchloom.create_model("resmlp_s12", image_size=SIZE, patch_size=8, num_classes=100)
    shown = Preprocessing(
        image_size=(SIZE, SIZE), crop_ratio=1.0, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    files = RunFiles(
        "resmlp_s12", {"num_classes": 100}, shown, None, tuple(map(str, range(100))), task="classification"
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


def raw_loop(folder: Path, picture: bytes, seconds: float) -> float:
    """Pictures per second, one at a time, in a process of its own with one thread."""
    code = (
        f"import sys, time, torch, patchloom; torch.set_num_threads({THREADS})\n"
        "model = patchloom.load(sys.argv[1], device='cpu'); data = sys.stdin.buffer.read()\n"
        "for _ in range(20): model.predict(data)\n"
        "began, count = time.perf_counter(), 0\n"
        f"while time.perf_counter() - began < {seconds}: model.predict(data); count += 1\n"
        "print(count / (time.perf_counter() - began))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], input=picture, capture_output=True, check=True)
    return float(done.stdout)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """One that is measured; on its own until the block ends."""

    def __init__(self, name: str, folder: Path, picture: bytes) -> None:
        self.name, self.port = name, free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        lines = {
            "patchloom": [sys.executable, "-m", "patchloom.cli", "serve", str(folder), "--port", str(self.port), "-q"],
            "fastapi": [sys.executable, "-c", FASTAPI.replace("THREADS", str(THREADS)), str(folder), str(self.port)],
            "litserve": [sys.executable, str(folder / "lit.py"), str(folder), str(self.port)],
        }
        (folder / "lit.py").write_text(LITSERVE.replace("THREADS", str(THREADS)))
        began = time.perf_counter()
        self.process = subprocess.Popen(
            lines[name], env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.body, self.kind = picture, "application/octet-stream"
        if name == "litserve":
            import base64

            self.body, self.kind = (
                json.dumps({"image": base64.b64encode(picture).decode()}).encode(),
                "application/json",
            )
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - began > 90:
                raise RuntimeError(f"{name} does not start")
            time.sleep(0.01)
        self.cold_seconds = time.perf_counter() - began

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            connection.request("POST", "/predict", self.body, {"Content-Type": self.kind})
            return connection.getresponse().status == 200
        except OSError:
            return False

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left behind

    def load(self, rate: float, seconds: float) -> dict[str, object]:
        return asyncio.run(_load(self, rate, seconds))


async def _load(server: Server, rate: float, seconds: float) -> dict[str, object]:
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: {server.kind}\r\n"
    message = f"{head}Content-Length: {len(server.body)}\r\n\r\n".encode() + server.body
    answers: list[tuple[str, float]] = []

    async def ask() -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(message)
                status = (await reader.read(65536))[9:12].decode()
                writer.close()
        except TimeoutError:
            status = "timeout"
        except OSError:
            status = "reset"
        answers.append((status, time.perf_counter() - began))

    tasks, began = [], time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask()))
    sent = time.perf_counter() - began
    await asyncio.gather(*tasks)
    good = [took for status, took in answers if status == "200" and took <= GOOD_SECONDS]
    refused = [took for status, took in answers if status in ("503", "429")]
    return {
        "offered/s": round(len(tasks) / sent, 1),
        "answered/s": round(sum(status == "200" for status, _ in answers) / sent, 1),
        "good/s": round(len(good) / sent, 1),
        "good p99 ms": _p99(good),
        "refused p99 ms": _p99(refused),
        "answers": dict(Counter(status for status, _ in answers)),
    }


def _p99(values: list[float]) -> float | None:
    return round(1000 * quantiles(values, n=100)[98], 1) if len(values) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--servers", default="patchloom,fastapi,litserve")
    parser.add_argument("--times", default="0.5,1,2,4", help="of the raw loop's rate")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, picture = Path(root) / "run", jpeg()
        make_run(folder)
        print(f"load before {os.getloadavg()[0]:.1f}")
        for name in given.servers.split(","):
            if name != "patchloom" and importlib.util.find_spec(name) is None:
                print(f"{name} is not installed")
                continue
            raw = raw_loop(folder, picture, 4)
            server = Server(name, folder, picture)
            print(f"\n{name}: raw loop {raw:.1f}/s; cold start to first answer {server.cold_seconds:.2f} s", flush=True)
            try:
                for times in map(float, given.times.split(",")):
                    print(f"  {times:g}x {json.dumps(server.load(times * raw, given.seconds))}", flush=True)
            finally:
                server.end()


if __name__ == "__main__":
    main()
