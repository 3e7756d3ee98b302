"""Shards embedded by the workers of a Ray cluster, one of which is killed."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import patchloom
from patchloom.inference import ray_engine
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import refused


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Any]:
    """A Ray cluster of three machines with one core each."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", os.getcwd(), os.path.join(os.getcwd(), "runtime")]))
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        started.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", started.address)
    yield started
    started.shutdown()


def test_three_workers_of_which_one_is_killed_make_the_index_of_one(cluster, trained, shards, tmp_path) -> None:
    import ray

    options: dict[str, Any] = {"device": "cpu", "batch": 8}
    alone = patchloom.index(str(trained / "a"), shards, out=tmp_path / "alone", **options)
    assert len(alone.index.about.parts) > 6
    killed: list[int] = []

    def kill_one(done: int, _: int) -> None:
        if done == 1 and not killed:
            victim = cluster.list_all_nodes()[-1]
            killed.append(victim.all_processes["raylet"][0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    built = patchloom.index(
        str(trained / "a"), shards, out=tmp_path / "index", engine="ray", progress=kill_one, **options
    )
    assert killed
    assert not ray.is_initialized()
    assert built.embedded == len(alone.index)
    digests = [
        [(part.name, part.vectors_sha256, part.rows_sha256) for part in one.index.about.parts] for one in (alone, built)
    ]
    assert digests[0] == digests[1]
    again = patchloom.index(str(trained / "a"), shards, out=tmp_path / "index", engine="ray", **options)
    assert again.embedded == 0


def test_errors_of_workers_are_those_of_the_command(cluster, trained, shards, tmp_path) -> None:
    file = sorted(shards.glob("*.tar"))[2]
    (shards / "shards.json").unlink()
    for index in shards.glob("*.index.json"):
        index.unlink()
    file.write_bytes(b"no tar" * 2000)
    with refused(DataError, file.name):
        patchloom.index(str(trained / "a"), shards, out=tmp_path / "index", engine="ray", device="cpu")


def test_ray_is_an_extra(trained, shards, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(UsageError, "patchloom[ray]"):
        ray_engine.embed_on_ray(None, [])  # type: ignore[arg-type]
    with refused(UsageError, "--part"):
        patchloom.index(str(trained / "a"), trained / "data", out=tmp_path / "index", engine="ray")
