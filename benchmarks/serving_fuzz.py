"""10,000 requests that schemathesis makes of the server's own OpenAPI schema, valid and not.

    python benchmarks/serving_fuzz.py                    # a tiny random classifier
    python benchmarks/serving_fuzz.py --served runs/photos --requests 2000 --seed 1

Where a valid request would hold a random string for a picture, two of three get a real one, half of those damaged, so
that the model is reached. Each answer must be as the schema says, never a 5xx, and a request that the schema forbids is
refused; no process may die; memory is told before and after. The exit code is 1 where something was found. Needs
`pip install schemathesis 'patchloom[serve]'`.
"""

import argparse
import base64
import io
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks as of_schema
from schemathesis.transport.serialization import Binary

CHECKS = [
    not_a_server_error,
    of_schema.status_code_conformance,
    of_schema.content_type_conformance,
    of_schema.response_schema_conformance,
]
ROUND = 250  # requests of one route in one way, at most, before the next


def make_run(folder: Path) -> None:
    """An untrained classifier that answers at once."""
    import patchloom
    from patchloom.inference.classifier import Classifier
    from patchloom.runs.config import Preprocessing, RunFiles

    options = {"depth": 1, "dim": 16, "patch_size": 8, "num_classes": 3}
    network = patchloom.create_model("resmlp_s12", image_size=32, **options)
    shown = Preprocessing(image_size=(32, 32), crop_ratio=1.0, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
    files = RunFiles("resmlp_s12", options, shown, None, ("a", "b", "c"), task="classification")
    Classifier(network.eval(), files).save_pretrained(folder)


def pictures() -> list[bytes]:
    """The same small picture in several formats."""
    from PIL import Image

    found = []
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        buffer = io.BytesIO()
        Image.linear_gradient("L").resize((24, 20)).convert("RGB").save(buffer, form)
        found.append(buffer.getvalue())
    return found


def picture(rng: random.Random, known: list[bytes]) -> bytes:
    """One of them, every second one with bytes changed or missing."""
    data = bytearray(rng.choice(known))
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 4, 16))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[rng.randrange(len(data) // 2, 2 * len(data)) :]
    return bytes(data)


class Server:
    """A started one."""

    def __init__(self, served: str) -> None:
        line = [sys.executable, "-m", "patchloom.cli", "serve", served, "--port", "0", "--json", "-q"]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            more = self.process.stdout.readline()
            if not more:
                raise SystemExit(f"{served} cannot be served")
            text += more
        self.url: str = json.loads(text)["url"]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as told:
            return told.read().decode()

    def mebibytes(self) -> tuple[float, float]:
        """Of the front process and of the model's."""
        found = dict(re.findall(r'^patchloom_memory_bytes\{process="(\w+)"\} (\S+)$', self.metrics(), re.MULTILINE))
        return float(found["front"]) / 2**20, float(found["model"]) / 2**20

    def restarts(self) -> int:
        return int(float(re.findall(r"^patchloom_model_restarts_total (\S+)$", self.metrics(), re.MULTILINE)[0]))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


class Fuzzing:
    """Requests so far, what was answered, what is wrong."""

    def __init__(self, url: str) -> None:
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: Counter[str] = Counter()
        self._session = requests.Session()
        self._pictures, self._random = pictures(), random.Random(0)

    def round(self, most: int, seed: int) -> None:
        """Every route, in both ways."""
        for found in self.schema.get_all_operations():
            operation = found.ok()
            modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.method == "post" else (None,)
            for mode in modes:
                left = min(ROUND if mode else 3, most - self.statuses.total())
                if left > 0:
                    self._ask(operation, mode or GenerationMode.POSITIVE, left, seed)

    def _ask(self, operation: schemathesis.APIOperation, mode: GenerationMode, examples: int, seed: int) -> None:
        @seeded(seed)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: schemathesis.Case) -> None:
            where = f"{case.method} {operation.path}"
            if mode == GenerationMode.POSITIVE and self._random.random() < 0.67:
                self._with_pictures(case)
            try:
                response = case.call(session=self._session, timeout=40)
            except requests.RequestException as error:
                self.wrong[f"{where}: {type(error).__name__}"] += 1
                return
            self.statuses[mode.value, response.status_code] += 1
            try:
                rejected = [of_schema.negative_data_rejection] if mode == GenerationMode.NEGATIVE else []
                case.validate_response(response, checks=CHECKS + rejected)
            except FailureGroup as group:
                for fault in group.exceptions:
                    told = f"{where} {response.status_code}: {type(fault).__name__}"
                    if not self.wrong[told]:
                        print(f"{told}\n{str(fault)[:600]}\n{case.as_curl_command()[:600]}\n", flush=True)
                    self.wrong[told] += 1

        one()

    def _with_pictures(self, case: schemathesis.Case) -> None:
        def drawn() -> bytes:
            return picture(self._random, self._pictures)

        body = case.body
        if isinstance(body, bytes | str):
            case.body = Binary(drawn())
        elif isinstance(body, dict) and isinstance(body.get("images"), list):
            body["images"] = [base64.b64encode(drawn()).decode() for _ in body["images"]]
        elif isinstance(body, dict) and isinstance(body.get("inputs"), list):
            for tensor in body["inputs"]:
                count = self._random.randint(1, 4)
                data = [base64.b64encode(drawn()).decode() for _ in range(count)]
                tensor |= {"datatype": "BYTES", "shape": [count], "data": data}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--served", help="a run, an artifact or an index; by default a tiny run is made")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        served = asked.served or f"{root}/tiny"
        if not asked.served:
            make_run(Path(served))
        server = Server(served)
        try:
            clean = _fuzz(server, asked.requests, asked.seed)
            restarts = server.restarts()
        finally:
            code = server.end()
    print(f"model processes that ended: {restarts}; exit code of the server {code}")
    sys.exit(0 if clean and not restarts and code == 0 else 1)


def _fuzz(server: Server, count: int, seed: int) -> bool:
    fuzzing, began, before = Fuzzing(server.url), time.perf_counter(), None
    while fuzzing.statuses.total() + fuzzing.wrong.total() < count:
        fuzzing.round(count if before else min(count, count // 4), seed)
        seed += 1
        if before is None and fuzzing.statuses.total() >= count // 4:
            before = fuzzing.statuses.total(), server.mebibytes()  # what libraries keep, they have by now
    front, model = server.mebibytes()
    print(f"{fuzzing.statuses.total():,} requests in {time.perf_counter() - began:.0f} s")
    for mode in ("positive", "negative"):
        counts = sorted((status, n) for (way, status), n in fuzzing.statuses.items() if way == mode)
        print(f"  {mode}: " + ", ".join(f"{n:,} × {status}" for status, n in counts))
    if before:
        number, (first_front, first_model) = before
        print(
            f"memory after {number:,} and after all: front {first_front:.1f} and {front:.1f} MiB, "
            f"model {first_model:.1f} and {model:.1f} MiB"
        )
    for told, times in fuzzing.wrong.most_common():
        print(f"WRONG {times} × {told}")
    return not fuzzing.wrong


if __name__ == "__main__":
    main()
