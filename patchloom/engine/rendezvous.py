"""How the ranks of a run connect, and which of them are missing if they do not.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; the variables of srun are translated here. Each
rank registers at a store, so a missing one is named within seconds, where the process group alone would wait for
minutes and name none.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep

import torch
import torch.distributed as dist

from patchloom_runtime.errors import ResourceError, UsageError

ANSWER_WITHIN_S = 20.0
# For one operation after the start: longer than the slowest step, evaluation or checkpoint.
RUN_TIMEOUT, RUN_TIMEOUT_S = "PATCHLOOM_RANK_TIMEOUT_S", 600.0
# After one rank has lost its connection: until the others have noticed too.
LOST_WITHIN_S = 5.0
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProcessPlace:
    """Rank and address of this process."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def place_from(env: Mapping[str, str]) -> ProcessPlace:
    """Read torchrun's variables, else those of a Slurm step with several tasks, else return a single process."""
    host, port = env.get("MASTER_ADDR"), int(env.get("MASTER_PORT", DEFAULT_PORT))
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        if not 0 <= rank < world:
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {world}; ranks go from 0 to WORLD_SIZE − 1.")
        return ProcessPlace(rank, world, int(env.get("LOCAL_RANK", 0)), host or ProcessPlace.host, port)
    # An interactive shell inside an allocation has SLURM_NTASKS too, but only a task started by srun has a step.
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
        if "MASTER_PORT" not in env:
            # Jobs that share a node need different ports.
            port = 15000 + int(env.get("SLURM_JOB_ID", 0)) % 20000
        rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        return ProcessPlace(rank, world, int(env.get("SLURM_LOCALID", 0)), host or first_host(nodes), port)
    return ProcessPlace()


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: 'gpu[07-09,12],cpu1' → 'gpu07'."""
    if not nodes:
        raise UsageError("SLURM_NODELIST is empty, so rank 0's host is unknown. Set MASTER_ADDR to it.")
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def meet(place: ProcessPlace, backend: str, answer_within_s: float = ANSWER_WITHIN_S) -> dist.Store:
    """Start the process group once every rank has registered. Raise ResourceError naming the missing ranks."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
    )
    store = _open_store(place, answer_within_s)
    _register(store, place, answer_within_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=_run_timeout())
    _exchange_once(place, backend, answer_within_s)
    return store


def _run_timeout() -> timedelta:
    text = os.environ.get(RUN_TIMEOUT, "")
    try:
        seconds = float(text or RUN_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise UsageError(f"{RUN_TIMEOUT} is {text!r}; expected a number of seconds above 0")
    return timedelta(seconds=seconds)


def lost_ranks(store: dist.Store, place: ProcessPlace) -> list[int]:
    """Return the ranks that do not report a broken connection too, hence are gone. Rank 0 holds the store."""
    silent: list[int] = []
    # In a thread: over a link that is cut, the store would wait for minutes.
    asking = Thread(target=lambda: silent.extend(_silent_ranks(store, place)), daemon=True)
    asking.start()
    asking.join(2 * LOST_WITHIN_S)
    return [0] if asking.is_alive() else silent


def _silent_ranks(store: dist.Store, place: ProcessPlace) -> list[int]:
    keys = [f"noticed/{rank}" for rank in range(place.world)]
    until = monotonic() + LOST_WITHIN_S
    try:
        store.set(keys[place.rank], "yes")
        # Polling, because torch's own wait prints when it times out.
        while (silent := [rank for rank, key in enumerate(keys) if not store.check([key])]) and monotonic() < until:
            sleep(0.1)
        return silent
    except RuntimeError:
        return [0]


def _open_store(place: ProcessPlace, within_s: float) -> dist.Store:
    # torchrun's agent already serves a store at this address; a restarted attempt must not read the previous one's
    # keys.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            place.world,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=within_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, dist.DistError) as error:
        if place.rank == 0 and not agent:
            raise ResourceError(
                f"rank 0 cannot listen on port {place.port} of {place.host}. Set MASTER_PORT to a free port."
            ) from error
        raise ResourceError(
            f"rank 0 of {place.world} did not answer at {place.host}:{place.port} within {within_s:g} s. "
            "Check whether it started and whether that host can be reached from here."
        ) from error
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _register(store: dist.Store, place: ProcessPlace, within_s: float) -> None:
    store.set(f"here/{place.rank}", "yes")
    keys = {rank: f"here/{rank}" for rank in range(place.world)}
    try:
        store.wait(list(keys.values()), timedelta(seconds=within_s))
    except (RuntimeError, dist.DistError) as error:
        missing = [str(rank) for rank, key in keys.items() if not store.check([key])]
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {place.world}"
        raise ResourceError(
            f"{who} did not answer within {within_s:g} s at {place.host}:{place.port}. "
            "Check the output of that process, and start all of them with the same MASTER_ADDR and MASTER_PORT."
        ) from error


def _exchange_once(place: ProcessPlace, backend: str, within_s: float) -> None:
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
    here = torch.ones(1, device=device)
    try:
        work = dist.all_reduce(here, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=within_s))
        answered = int(here.item())
    except (RuntimeError, dist.DistError) as error:
        raise ResourceError(
            f"all {place.world} ranks started, but rank {place.rank} could not exchange a number with the others "
            f"within {within_s:g} s over {backend}. Set {backend.upper()}_SOCKET_IFNAME to the network between them."
        ) from error
    if answered != place.world:
        raise ResourceError(f"{answered} of {place.world} ranks answered. Start the run again.")
