"""Shards embedded on a Ray cluster: `patchloom index --engine ray`.

One task per shard, so that a lost worker or machine costs one shard. The cluster is the one of RAY_ADDRESS, else the
one that runs on this machine, else one that is started for this command.
"""

from collections.abc import Sequence
from typing import Any

from patchloom.data.buckets.remote_file import AnyFile
from patchloom.data.datasets import Progress
from patchloom.inference.shard_parts import ShardEmbedder, ShardJob, ShardRecord
from patchloom_runtime.errors import ResourceError, UsageError

_RETRIES = 10  # of one shard, each after the loss of a worker


def embed_on_ray(job: ShardJob, shards: Sequence[AnyFile], progress: Progress | None = None) -> list[ShardRecord]:
    """Make the parts of shards, one task each, and return their records in the order of the shards."""
    ray = _import_ray()
    starts = not ray.is_initialized()
    if starts:
        ray.init(log_to_driver=False, logging_level="error")
    gpus = 1 if job.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)(_embed)
    records: dict[Any, ShardRecord] = {}
    try:
        tasks = [task.remote(job, shard) for shard in shards]
        waiting = list(tasks)
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            records[done] = ray.get(done)
            if progress:
                progress(len(records), len(shards))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"{len(records)} of {len(shards)} shards are embedded, then the Ray cluster failed: "
            f"{str(error).partition(chr(10))[0]}; the same command continues"
        ) from error
    finally:
        if starts:
            ray.shutdown()
    return [records[each] for each in tasks]


_open: ShardEmbedder | None = None  # in a worker, which embeds shard after shard


def _embed(job: ShardJob, shard: AnyFile) -> ShardRecord:
    global _open
    if _open is None or _open.job != job:
        _open = ShardEmbedder(job)
    return _open.embed(shard)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs Ray: pip install 'patchloom[ray]', or drop --engine") from error
    return ray
