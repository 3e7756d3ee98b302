"""Files of sharded weights: each process writes its own parts, and the whole is written one tensor at a time.

Plain safetensors files instead of torch.distributed.checkpoint, whose metadata is a pickle: a checkpoint from a
stranger would run code.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.disk import atomic_file, open_new
from patchloom.engine.distribution import Processes, whole
from patchloom.models.from_config import is_sharded
from patchloom.models.sharding import local
from patchloom.runs.weights import WEIGHTS, refuse_bad
from patchloom_runtime.errors import CheckpointError, PatchloomError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """A new safetensors file, written tensor by tensor: no more than one of them is copied to the host."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any] | None = None) -> None:
        self._path, self._facts = path, facts
        self._places: dict[str, dict[str, Any]] = {}
        end = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
            tensor, start = tensors[name], end
            end += tensor.numel() * tensor.itemsize
            self._places[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        self._data = len(self._header("0" * 64))
        self._file = open_new(path)

    def write(self, name: str, tensor: Tensor) -> memoryview:
        """Write a tensor in its place and return its bytes."""
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        self._write_at(self._data + self._places[name]["data_offsets"][0], data)
        return data

    def close(self, sha256: str = "") -> str:
        """Write the header, which holds the checksum of the tensors if there are `facts`. Returns that of the file."""
        self._write_at(0, memoryview(self._header(sha256)))
        os.fsync(self._file.fileno())
        self._file.close()
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _write_at(self, place: int, rest: memoryview) -> None:
        while rest:
            done = os.pwrite(self._file.fileno(), rest, place)
            rest, place = rest[done:], place + done

    def _header(self, sha256: str) -> bytes:
        facts = None if self._facts is None else {"patchloom": json.dumps({"sha256": sha256, **self._facts})}
        text = json.dumps(({"__metadata__": facts} if facts else {}) | self._places, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def save_gathered_weights(
    folder: Path, weights: dict[str, Tensor], about: dict[str, Any], processes: Processes
) -> None:
    """Write `weights.safetensors` as `save_weights` does, gathering one tensor at a time. All processes call this."""
    _refuse_bad_together(weights, "weights", processes)
    if not processes.is_main:
        for name in sorted(weights):
            whole(weights[name])
        return
    with atomic_file(folder / WEIGHTS) as temporary:
        file, digest = TensorFile(temporary, weights, about), hashlib.sha256()
        for name in sorted(weights):
            tensor = whole(weights[name])
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(file.write(name, tensor))
        file.close(digest.hexdigest())


def shards_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sharded tensors of a snapshot by 'part/name'."""
    return {
        f"{part}/{name}": tensor
        for part, named in tensors.items()
        for name, tensor in named.items()
        if is_sharded(tensor)
    }


def shard_file(rank: int) -> str:
    """Return the name of the file with the parts of one process."""
    return f"shard-{rank:05d}.safetensors"


def write_shards(folder: Path, shards: Mapping[str, Tensor], processes: Processes) -> dict[str, str]:
    """Write this process's parts. Returns the checksums of the files of all processes, which call this together."""
    result: str | PatchloomError | OSError
    try:
        parts = {name: local(tensor) for name, tensor in shards.items()}
        refuse_bad(parts, "a checkpoint")
        file = TensorFile(folder / shard_file(processes.rank), parts)
        for name, tensor in parts.items():
            file.write(name, tensor)
        result = file.close()
    except (PatchloomError, OSError) as error:
        result = error
    digests = {}
    for rank, each in enumerate(processes.gather(result)):
        if isinstance(each, Exception):
            raise each
        digests[shard_file(rank)] = each
    return digests


def join_shards(tensors: dict[str, dict[str, Tensor]], shapes: Mapping[str, Any], world: int, path: Path) -> None:
    """Move the tensors of the files of all processes into their parts, whole, whatever number of processes reads it."""
    files = [tensors.pop(Path(shard_file(rank)).stem, {}) for rank in range(world)]
    for key, shape in shapes.items():
        part, _, name = key.partition("/")
        try:
            tensor = torch.cat([file.pop(key) for file in files])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged: not all files have their part of {key}.") from error
        if list(tensor.shape) != shape:
            raise CheckpointError(f"{path} is damaged: {key} is {tuple(tensor.shape)}, expected {tuple(shape)}.")
        tensors.setdefault(part, {})[name] = tensor


def _refuse_bad_together(weights: dict[str, Tensor], where: str, processes: Processes) -> None:
    """Raise NumericalError on all processes if the part of any holds NaN or infinity."""
    error = None
    try:
        refuse_bad({name: local(tensor) for name, tensor in weights.items()}, where)
    except PatchloomError as bad:
        error = bad
    for each in processes.gather(error):
        if each is not None:
            raise each
