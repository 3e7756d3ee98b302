"""Slow and good clients of `patchloom serve` at the same time: how long do the good ones wait?

    python benchmarks/serving_slow.py --clients 1500 --slow body
    python benchmarks/serving_slow.py --clients 600 --slow header --open-files 256

Slow clients send one byte of a body or a header per second, or keep a connection without a request, and connect again
when they are cut off. After 3 s a good request is sent every 0.25 s, for 20 s. Needs as many open files as clients.
"""

import argparse
import asyncio
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

from serving import jpeg, make_run
from serving_clients import Answer, Target, ask

BEGINNINGS = {
    "body": b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n",
    "header": b"POST /predict HTTP/1.1\r\nX: ",
    "idle": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
}
GOOD, PAUSE = 80, 0.25  # requests, and seconds between them


async def slow_client(port: int, kind: str, statuses: Counter[str]) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(BEGINNINGS[kind])
                is_open = True
                while is_open:
                    writer.write(b"" if kind == "idle" else b"x")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            answer = await reader.read(1000)
                            statuses[answer[9:12].decode() or "closed"] += 1
                            is_open = bool(answer)
            finally:
                writer.close()
        await asyncio.sleep(0.2)


async def attack(target: Target, clients: int, kind: str) -> tuple[list[Answer], Counter[str]]:
    statuses: Counter[str] = Counter()
    slow = [asyncio.create_task(slow_client(target.port, kind, statuses)) for _ in range(clients)]
    await asyncio.sleep(3)
    good = []
    for _ in range(GOOD):
        good.append(asyncio.create_task(ask(target)))
        await asyncio.sleep(PAUSE)
    answers = await asyncio.gather(*good)
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    return answers, statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1500)
    parser.add_argument("--slow", choices=list(BEGINNINGS), default="body")
    parser.add_argument("--open-files", type=int, help="limit of open files of the server")
    args = parser.parse_args()

    def limit() -> None:
        if args.open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (args.open_files, args.open_files))

    with tempfile.TemporaryDirectory() as root:
        make_run(Path(root) / "run")
        line = [sys.executable, "-m", "patchloom.cli", "serve", f"{root}/run", "--port", "0", "--json"]
        server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, preexec_fn=limit)
        text = ""
        while not text.rstrip().endswith("}"):
            text += server.stdout.readline()
        port = int(json.loads(text)["url"].rsplit(":", 1)[1])
        answers, statuses = asyncio.run(attack(Target(port, jpeg(), "image/jpeg"), args.clients, args.slow))
        began = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    seconds = [one.seconds for one in answers]
    print(
        f"good: {dict(Counter(one.status for one in answers))}, median {median(seconds):.3f} s, {max(seconds):.2f} most"
    )
    print(f"slow: {dict(statuses)}; SIGTERM took {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
