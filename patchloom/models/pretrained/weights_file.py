"""Read untrusted weight files. They are inspected first, so that they can neither run code nor fill the memory."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from patchloom.models.pretrained.torch_file import ForeignObjectError, read_torch_file
from patchloom_runtime.errors import CheckpointError, UsageError

# torch does not compress tensors, and numpy's compression gains little on weights: a higher ratio is an attack.
MAX_EXPANSION = 4
HARMLESS_BYTES = 64 << 20


def read_weights_file(path: Path) -> Mapping[str, Any]:
    """Return the contents of a .safetensors, .npz, .pth or .pt file after checking that it is harmless."""
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file; pass the path of a .safetensors, .pth or .npz file")
    if path.suffix == ".safetensors":  # contains no code and is never compressed
        try:
            return load_file(path)
        except Exception as error:  # safetensors raises many types for damaged files
            raise _unreadable(path, error) from error
    _check_size(path)
    loaded = _read_pickle(path) if path.suffix != ".npz" else _read_arrays(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, expected named tensors")
    tensors = _tensors(loaded)
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{path} contains a {kind} tensor, expected dense ones: save it with dense weights")
    _refuse_expansion(path, sum(map(_copied_bytes, tensors)))
    return loaded


def check_weights_file(path: Path) -> None:
    """Raise CheckpointError for a file that contains more than weights, or that unpacks to far more than its size."""
    if path.suffix == ".safetensors":
        return
    _check_size(path)
    if path.suffix != ".npz":
        _read_pickle(path)


def _read_arrays(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:  # numpy and torch raise many types for damaged files
        raise _unreadable(path, error) from error


def _read_pickle(path: Path) -> Any:
    try:
        return read_torch_file(path)
    except ForeignObjectError as error:
        raise CheckpointError(
            f"{path} contains more than weights: {error}. Refused; ask for a .safetensors file."
        ) from error
    except Exception as error:  # damaged files raise many types
        raise _unreadable(path, error) from error


def _check_size(path: Path) -> None:
    # Only zip files can be compressed.
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # zipfile raises several types for damaged files
        raise _unreadable(path, error) from error
    _refuse_expansion(path, unpacked)


def _refuse_expansion(path: Path, unpacked: int) -> None:
    size = path.stat().st_size
    if unpacked > max(HARMLESS_BYTES, MAX_EXPANSION * size):
        raise CheckpointError(
            f"{path} has {size:,} bytes that unpack to {unpacked:,}, which weights never do. Refused."
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested mappings and lists, of any depth and even if they contain themselves."""
    tensors, rest, visited = [], [value], set()
    while rest:
        one = rest.pop()
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, Mapping | list | tuple) and id(one) not in visited:
            visited.add(id(one))
            rest += one.values() if isinstance(one, Mapping) else one
    return tensors


def _copied_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a copy: a tensor of stride 0 stores one number for millions."""
    return tensor.numel() * tensor.element_size()


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"
    return CheckpointError(
        f"{path} ({path.stat().st_size:,} bytes) is not a readable checkpoint: {reason}; "
        "it may be truncated or of another format: download it again, or pass a .safetensors, .pth or .npz file"
    )
