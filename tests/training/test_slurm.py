"""deploy/slurm.sh, the job of docs/gpus.md, on a Slurm of this machine: requeued, with the weights of one go."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patchloom import cli
from tests.forked import forked_ranks, free_port
from tests.reliability.commands import OPTIONS, ROOT, class_folders

DAEMONS = ("munged", "slurmctld", "slurmd")
SLURM = all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SLURM, reason="Slurm is not installed (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's daemons need root"),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that runs a command of a Slurm of one node, which ends with the test."""
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    ports = {"controller": free_port(), "node": free_port()}
    (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    paths = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    paths |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in paths.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "localhost"],
    ]

    def run(*arguments: object) -> str:
        done = subprocess.run(
            [*map(str, arguments)], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            if command[0] == "munged":
                wait_until(lambda: paths["socket"].exists())
        wait_until(
            lambda: (
                "idle"
                in subprocess.run(
                    ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False
                ).stdout
            )
        )
        yield run
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            daemon.wait(30)


def wait_until(holds: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_requeued_job_ends_with_the_weights_of_one_go(slurm: Callable[..., str], tmp_path: Path) -> None:
    data = class_folders(tmp_path / "images", pictures=20)
    options = [*OPTIONS, "--epochs", "120"]
    whole, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"

    def alone() -> None:
        sys.argv = ["patchloom", "train", str(data), "--out", str(whole), *options]
        cli.main()

    for process in forked_ranks(alone, 2):
        output, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors + output

    path, packages = f"{Path(sys.executable).parent}:{os.environ['PATH']}", f"{ROOT}:{ROOT / 'runtime'}"
    exported = f"ALL,PATH={path},PYTHONPATH={packages},OMP_NUM_THREADS=1"
    sbatch = ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--gres=none", "--cpus-per-task=1"]
    sbatch += ["--time=10", f"--output={log}", f"--chdir={ROOT}", f"--export={exported}"]
    job = slurm(*sbatch, ROOT / "deploy" / "slurm.sh", data, "--out", out, *options).strip()

    def said(pattern: str) -> int:
        return len(re.findall(pattern, log.read_text())) if log.exists() else 0

    def lines() -> int:
        metrics = out / "metrics.jsonl"
        return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0

    wait_until(lambda: lines() > 2)
    slurm("scancel", "--signal=TERM", job)  # as --signal does before the limit: the script queues the job again
    wait_until(lambda: said(r"SIGTERM after step") >= 2)
    stopped = lines()
    wait_until(lambda: lines() > stopped + 2)
    slurm("scontrol", "requeue", job)  # as a preemption does
    wait_until(lambda: said(r"resuming .* at step [1-9]") == 2)
    wait_until(lambda: "COMPLETED" in slurm("scontrol", "show", "job", job), 180)
    assert re.search(r"Restarts=2\b", slurm("scontrol", "show", "job", job))
    assert (out / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
