"""Two machines, which are network namespaces of this one: a link that is cut in the middle of a run."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from patchloom.engine.loop import train
from patchloom.runs.checkpoints import find_checkpoint
from tests.engine.toys import make_run, network

ROOT = Path(__file__).parents[2]
MACHINES = tuple(f"patchloom-{os.getpid()}-{number}" for number in range(2))
ADDRESSES = ("198.51.100.1", "198.51.100.2")  # of the block for documentation
LINKS = tuple(f"pl{os.getpid() % 100_000}-{number}" for number in range(2))
HAS_NAMESPACES = os.name == "posix" and os.getuid() == 0 and shutil.which("ip") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="network namespaces need root and iproute2"),
]
TIMEOUT_S = 8


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cut() -> Iterator[Callable[[bool], None]]:
    """Connect two namespaces; yield a function that cuts the link or mends it."""
    try:
        for machine in MACHINES:
            ip("netns", "add", machine)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode()}")
    ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
    for machine, link, address in zip(MACHINES, LINKS, ADDRESSES, strict=True):
        ip("link", "set", link, "netns", machine)
        ip("-n", machine, "addr", "add", f"{address}/24", "dev", link)
        for name in (link, "lo"):
            ip("-n", machine, "link", "set", name, "up")
    yield lambda is_cut: ip("-n", MACHINES[1], "link", "set", LINKS[1], "down" if is_cut else "up")
    for machine in MACHINES:
        subprocess.run(["ip", "netns", "del", machine], check=False)


def start(mode: str, folder: Path) -> list[subprocess.Popen[str]]:
    code = "import sys, pathlib, tests.engine.worker as w; sys.exit(w.work(sys.argv[1], pathlib.Path(sys.argv[2])))"
    ranks = []
    for rank, machine in enumerate(MACHINES):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
        own = {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINKS[rank], "PATCHLOOM_RANK_TIMEOUT_S": str(TIMEOUT_S)}
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine, sys.executable, "-c", code, mode, str(folder)],
                env=os.environ | place | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
        )
    return ranks


def ends(ranks: list[subprocess.Popen[str]], within_s: float) -> list[tuple[int, str]]:
    results = []
    for rank in ranks:
        printed = rank.communicate(timeout=within_s)[0]
        results.append((rank.returncode, printed))
    return results


def test_a_cut_link_ends_both_machines_and_the_run_continues(cut, tmp_path) -> None:
    whole = make_run(tmp_path / "whole", model=network(drop_path=0.0), accumulate=2, ema_decay=0.9)
    train(whole)
    folder = tmp_path / "two"
    ranks = start("waits after a checkpoint", folder)
    try:
        until = time.monotonic() + 120
        while find_checkpoint(folder) is None:
            assert time.monotonic() < until
            assert all(rank.poll() is None for rank in ranks), [rank.communicate()[0] for rank in ranks]
            time.sleep(0.1)
        cut(True)
        (folder / "cut").write_text("")
        for code, printed in ends(ranks, within_s=120):
            assert code == 6, printed
            assert re.search(r"\brank\b.*\bof 2\b", printed)
    finally:
        for rank in ranks:
            rank.kill()
    cut(False)
    for code, printed in ends(start("goes on", folder), within_s=180):
        assert code == 0, printed
    result = find_checkpoint(folder)
    assert result is not None
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(result.snapshot.tensors["weights"][name], value, rtol=1e-4, atol=1e-5, msg=name)
