"""`weights.safetensors`: the best weights so far with their checksum, and the network that they belong to."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from patchloom.disk import atomic_write
from patchloom.models.from_config import load_weights, make_for
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.runs.config import CONFIG, RunFiles, read_run_files
from patchloom.runs.files import read_whole
from patchloom_runtime.errors import CheckpointError, NumericalError, UsageError
from patchloom_runtime.untrusted import parse_json

WEIGHTS = "weights.safetensors"
BACKBONE = "backbone."  # prefix of the backbone's weights in a dense network
MOST_WEIGHTS = 1 << 40  # bytes
_MOST_DIMENSIONS = 64  # torch's limit

M = TypeVar("M", bound=nn.Module)


def save_weights(folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `weights.safetensors`. Its header holds a checksum of the tensors and the facts `about`."""
    refuse_bad(weights, "weights")
    # A single key, because safetensors writes several in an order that differs from file to file.
    header = {"patchloom": json.dumps({"sha256": weights_digest(weights), **about})}
    atomic_write(folder / WEIGHTS, packed(weights, header))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. A checksum by `save_weights`, if present, must match."""
    data = read_whole(path, MOST_WEIGHTS)
    weights = unpacked(data, path)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    if "patchloom" in metadata and weights_digest(weights) != _stored_digest(metadata["patchloom"]):
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its weights. Train or copy it again.")
    refuse_bad(weights, str(path), CheckpointError)
    return weights


def _stored_digest(header: str) -> Any:
    try:
        values = parse_json(header)
    except ValueError:
        return None
    return values.get("sha256") if isinstance(values, dict) else None


def load_trained(folder: Path, make: Callable[[], M], options: Mapping[str, Any], *, prefix: str = "") -> M:
    """Build a network with `make` and load the checked weights of a run folder into it. Returns it in eval mode.

    `options` are those that `make` builds the network with; they are compared with the weights before any memory is
    allocated. With `prefix`, only the weights whose names start with it are loaded, without the prefix.
    """
    path = folder / WEIGHTS
    weights = read_weights(path)
    if prefix:
        weights = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
    network = make_for(weights, make, options, config=str(folder / CONFIG))
    load_weights(network, weights, str(path))
    return network.eval()


def load_network(folder: Path) -> tuple[Network, RunFiles]:
    """Return the network of a run without dense heads, in eval mode, and the other files of the run."""
    files = read_run_files(folder)
    if isinstance(files.options.get("backbone"), dict):
        raise UsageError(
            f"{folder} predicts a map or boxes rather than one class per image; use it with `patchloom predict`, "
            "`evaluate` or `train --init`"
        )
    return _load_image_network(folder, files, files.options), files


def load_backbone(folder: Path) -> tuple[Network, RunFiles]:
    """Return the network of a run and its other files. Of a dense network (`models.dense`), return the backbone."""
    files = read_run_files(folder)
    options = files.options.get("backbone")
    if isinstance(options, dict):
        return _load_image_network(folder, files, options, BACKBONE), files
    return _load_image_network(folder, files, files.options), files


def _load_image_network(folder: Path, files: RunFiles, options: Mapping[str, Any], prefix: str = "") -> Network:
    network = load_trained(folder, lambda: build_model(files.network, **options), options, prefix=prefix)
    network.pixel_mean, network.pixel_std = files.preprocessing.mean, files.preprocessing.std
    return network


def packed(tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> bytes:
    """Return tensors in the safetensors format."""
    on_host: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # A weight that is used twice is stored twice: safetensors refuses tensors that share memory.
        shared = tensor.numel() > 0 and tensor.data_ptr() in addresses
        on_host[name] = tensor.clone() if shared else tensor
        addresses.add(tensor.data_ptr())
    return save(on_host, header)


def unpacked(data: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raise CheckpointError if it is truncated or damaged."""
    try:
        tensors = load(data)
        if any(tensor.dim() > _MOST_DIMENSIONS for tensor in tensors.values()):
            raise ValueError(f"it has a tensor of more than {_MOST_DIMENSIONS} dimensions")
        return tensors
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:  # the last: torch
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a whole safetensors file: {reason}.") from error


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, independent of the order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_bad(tensors: dict[str, Tensor], where: str, error: type[Exception] = NumericalError) -> None:
    """Raise `error`, naming the first tensor with NaN or infinity, if there is one."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    if not names:
        return
    # torch has no isfinite for 8-bit floats.
    wide = [tensors[name].float() if tensors[name].itemsize == 1 else tensors[name] for name in names]
    # A finite sum has finite terms and takes a quarter of the time. An infinite sum may be an overflow: look closer.
    sums = torch.stack([tensor.sum().float().cpu() for tensor in wide]).isfinite().tolist()
    finite = [good or bool(tensor.isfinite().all()) for good, tensor in zip(sums, wide, strict=True)]
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        raise error(f"{where}: {bad[0]} and {len(bad) - 1} other tensors hold NaN or infinity.")
