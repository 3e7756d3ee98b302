"""`weights.safetensors`: the best weights so far, with their checksum; and the network they belong to."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from patchloom.disk import atomic_write
from patchloom.models.from_config import load_weights, make_for
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.runs.config import RunFiles, read_run_files
from patchloom.runs.files import read_whole
from patchloom_runtime.errors import CheckpointError, NumericalError, UsageError

WEIGHTS = "weights.safetensors"
BACKBONE = "backbone."  # how the weights of a network under heads are called
MOST_WEIGHTS = 1 << 40  # bytes
_MOST_DIMENSIONS = 64  # that torch computes with


def save_weights(folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `weights.safetensors`, with a checksum of the weights and what is known of them in its header."""
    refuse_bad(weights, "weights")
    # One key: safetensors writes several in an order that changes from file to file.
    header = {"patchloom": json.dumps({"sha256": weights_digest(weights), **about})}
    atomic_write(folder / WEIGHTS, packed(weights, header))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a safetensors file; one that `save_weights` wrote is compared with its checksum."""
    data = read_whole(path, MOST_WEIGHTS)
    weights = unpacked(data, path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    ours = header.get("patchloom")
    if ours is not None and weights_digest(weights) not in ours:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its weights. Train or copy it again.")
    refuse_bad(weights, str(path), CheckpointError)
    return weights


def load_network(folder: Path) -> tuple[Network, RunFiles]:
    """The trained network of a run folder, in eval mode, and what belongs to it."""
    files = read_run_files(folder)
    if isinstance(files.options.get("backbone"), dict):
        raise UsageError(
            f"{folder} answers at every place of an image and names no class of it; use it with `patchloom predict`, "
            "`evaluate` or `train --init`"
        )
    weights, options = read_weights(folder / WEIGHTS), files.options
    network = make_for(
        weights, lambda: build_model(files.network, **options), options, config=str(folder / "config.json")
    )
    load_weights(network, weights, str(folder / WEIGHTS))
    network.pixel_mean, network.pixel_std = files.preprocessing.mean, files.preprocessing.std
    return network.eval(), files


def load_backbone(folder: Path) -> tuple[Network, RunFiles]:
    """The network of a run; of one with heads of its task on it (see `models.dense`), the network under them."""
    files = read_run_files(folder)
    options = files.options.get("backbone")
    if not isinstance(options, dict):
        return load_network(folder)
    every = read_weights(folder / WEIGHTS)
    weights = {name.removeprefix(BACKBONE): tensor for name, tensor in every.items() if name.startswith(BACKBONE)}
    network = make_for(
        weights, lambda: build_model(files.network, **options), options, config=str(folder / "config.json")
    )
    load_weights(network, weights, str(folder / WEIGHTS))
    network.pixel_mean, network.pixel_std = files.preprocessing.mean, files.preprocessing.std
    return network.eval(), files


def packed(tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> bytes:
    """A safetensors file."""
    on_host: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # A weight used in two places is stored twice: safetensors refuses to guess which one owns it.
        shared = tensor.numel() > 0 and tensor.data_ptr() in seen
        on_host[name] = tensor.clone() if shared else tensor
        seen.add(tensor.data_ptr())
    return save(on_host, header)


def unpacked(data: bytes, path: Path) -> dict[str, Tensor]:
    """What `packed` made; a CheckpointError where it is not whole."""
    try:
        tensors = load(data)
        if any(tensor.dim() > _MOST_DIMENSIONS for tensor in tensors.values()):
            raise ValueError(f"it has a tensor of more than {_MOST_DIMENSIONS} dimensions")
        return tensors
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:  # the last: torch
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a whole safetensors file: {reason}.") from error


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, kinds, shapes and values, whatever the order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_bad(tensors: dict[str, Tensor], where: str, error: type[Exception] = NumericalError) -> None:
    """An error that names the first tensor with NaN or infinity in it."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    if not names:
        return
    # Of numbers of 8 bits torch cannot tell.
    wide = [tensors[name].float() if tensors[name].itemsize == 1 else tensors[name] for name in names]
    # A sum is finite only of finite numbers, and takes a quarter of the time; one that is not may be of large numbers.
    sums = torch.stack([tensor.sum().float().cpu() for tensor in wide]).isfinite().tolist()
    finite = [good or bool(tensor.isfinite().all()) for good, tensor in zip(sums, wide, strict=True)]
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        raise error(f"{where}: {bad[0]} and {len(bad) - 1} other tensors hold NaN or infinity.")
